"""Instances announce themselves in State, by its clock; a partition of a divided source is fenced by its own lease."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.app.member import Membership, leases_of, share_of
from evermark.cluster.base import Holder
from evermark.cluster.fence import alone, deliver_lease, source_lease
from evermark.cluster.liveness import this_process
from evermark.cluster.members import Members
from evermark.cluster.postgres import PostgresLeases
from evermark.errors import EngineError, NotFoundError, StaleError, UnreachableError
from evermark.log.head import Head, PostgresHeads
from evermark.state.connection import State
from evermark.testing.instances import InstancesStage
from evermark.testing.number_files import NumberFiles
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state
from evermark.testing.until import until

A, B = (Holder(f"host-{pid}", "host", "boot", pid, str(pid)) for pid in (1, 2))
LEASES = [source_lease("numbers", p) for p in range(3)]


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


def _members(state: State, gone: frozenset[Holder] = frozenset(), ttl_s: float = 60.0) -> Members:
    return Members(state, ttl_s=ttl_s, is_gone=lambda holder: holder.pid in {each.pid for each in gone})


def test_an_instance_lives_until_it_is_silent_for_a_lease_or_gone(state: State) -> None:
    """GIVEN two instances WHEN one is silent by the server's clock, or its process gone, THEN it does not live."""
    members = _members(state)
    members.beat(A, "1", LEASES)
    members.beat(B, "1", LEASES)
    assert {name: each.lives for name, each in members.all().items()} == {"host-1": True, "host-2": True}
    assert not any(each.lives for each in _members(state, ttl_s=0.0).all().values())
    assert not _members(state, frozenset([A])).all()["host-1"].lives
    members.leave(A)
    assert list(members.all()) == ["host-2"]


def test_a_drained_instance_stays_so_until_it_is_another_process(state: State) -> None:
    """GIVEN an instance to be drained WHEN it says that it lives THEN it is; a new process of its name is not."""
    members = _members(state)
    members.beat(A, "1", LEASES)
    members.drain(A.instance)
    members.beat(A, "1", LEASES)
    assert members.all()["host-1"].draining
    members.beat(replace(A, started="later"), "1", LEASES)
    assert not members.all()["host-1"].draining
    with pytest.raises(NotFoundError, match="instance list"):
        members.drain("nobody")


def test_instances_that_are_silent_for_long_are_forgotten(state: State) -> None:
    """GIVEN instances that ended without a word, each of another name WHEN another says that it lives THEN those that
    have been silent for many leases are gone; one that comes back is there again, drained as it was."""
    members = _members(state, ttl_s=2.0)
    away = Membership(state, PostgresLeases(state), A)
    away.able(frozenset(LEASES))
    members.drain(A.instance)
    assert away._look()
    for seconds, left in ((10, {A.instance, B.instance}), (100, {B.instance})):
        with state.connection() as conn:
            conn.execute("update instances set seen_at = seen_at - make_interval(secs => %s)", (seconds,))
        members.beat(B, "1", LEASES)
        assert members.all().keys() == left
    assert away._look()
    assert members.all()[A.instance].draining


def test_instances_share_by_what_they_hold_and_a_drained_one_has_nothing(state: State) -> None:
    """GIVEN one that holds all WHEN another joins THEN it hands over its surplus; drained, everything."""
    members, leases = _members(state), PostgresLeases(state, is_gone=lambda _: False)
    members.beat(A, "1", LEASES)
    lane = replace(A, instance=f"{A.instance}/lane-1", pid=7)
    leases.divide(LEASES[0], LEASES[1:], lane)
    leases.acquire_all(LEASES, lane, 60.0)

    def shares() -> list[set[str]]:
        rows = leases.rows().values()
        return [set(share_of(one.instance, members.all(), rows)) for one in (A, B)]

    assert shares() == [set(LEASES), set()]
    members.beat(B, "1", LEASES)
    mine, theirs = shares()
    assert (len(mine), len(theirs)) == (2, 1) and mine | theirs == set(LEASES)
    members.drain(A.instance)
    assert shares() == [set(), set(LEASES)]


def test_a_lease_that_was_let_go_of_stays_with_its_instance(state: State) -> None:
    """GIVEN two that share three leases WHEN a lane of the one with two is renewed, and lets go of both THEN neither
    moves; when that instance is gone, they do."""
    members, leases = _members(state), PostgresLeases(state, is_gone=lambda _: False)
    first, second = replace(A, instance="host-2/lane-1"), replace(B, instance="host-1/lane-1")
    for one in (A, B):
        members.beat(one, "1", LEASES)
    leases.divide(LEASES[0], LEASES[1:], first)
    mine = leases.acquire_all(LEASES[:2], first, 60.0)
    leases.acquire_all(LEASES[2:], second, 60.0)
    leases.release(*mine)

    def share(one: Holder) -> set[str]:
        return set(share_of(one.instance, members.all(), leases.rows().values()))

    assert (share(B), share(A)) == (set(LEASES[:2]), set(LEASES[2:]))
    members.leave(B)
    assert share(A) == set(LEASES)


def test_an_instance_that_cannot_reach_the_leases_is_left_nothing(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN leases that are not in State, and out of reach for one instance alone WHEN it looks THEN the others see
    that it can take none, though it lives; and when it reaches them again, that it can."""
    leases = PostgresLeases(state)
    membership, members = Membership(state, leases, A), _members(state)
    membership.able(frozenset(LEASES))
    assert members.all()[A.instance].leases == frozenset(LEASES)
    with monkeypatch.context() as away:
        away.setattr(leases, "rows", lambda: _unreachable(members))
        assert not membership._look()
        found = members.all()[A.instance]
        assert found.lives and found.leases == frozenset()
        assert membership._beat() and members.all()[A.instance].leases == frozenset()
    assert membership._look()
    assert members.all()[A.instance].leases == frozenset(LEASES)


def test_a_lease_of_a_program_of_before_counts_as_its_holders(state: State) -> None:
    """GIVEN a rolling upgrade: a holder whose program does not say who had a lease last WHEN the leases are shared out
    THEN it keeps what it holds."""
    members, leases = _members(state), PostgresLeases(state, is_gone=lambda _: False)
    for one in (A, B):
        members.beat(one, "1", LEASES)
    leases.divide(LEASES[0], LEASES[1:], B)
    leases.acquire_all(LEASES[:2], B, 60.0)
    leases.acquire_all(LEASES[2:], A, 60.0)
    for former in (None, A.instance):
        with state.connection() as conn:
            conn.execute("update leases set last_instance = %s", (former,))
        shares = [share_of(one.instance, members.all(), leases.rows().values()) for one in (B, A)]
        assert shares == [set(LEASES[:2]), set(LEASES[2:])]


def test_leases_that_answer_now_and_then_cost_an_instance_nothing(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a store of leases that is away at first, and then answers every other look WHEN the instance looks THEN its
    share is never less than all: what it said of itself while they were away is over."""
    leases, told = PostgresLeases(state), list[frozenset[str] | None]()
    membership = Membership(state, leases, A)
    with monkeypatch.context() as away:
        away.setattr(leases, "rows", lambda: _unreachable(_members(state)))
        membership.able(frozenset(LEASES))
    membership.tell(told.append)
    for _ in range(3):
        assert membership._look()
        with monkeypatch.context() as away:
            away.setattr(leases, "rows", lambda: _unreachable(_members(state)))
            assert not membership._look()
    assert told == [None, frozenset(LEASES)]


def test_that_leases_answer_again_is_said_until_the_others_can_hear_it(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an instance that says that it can take nothing WHEN its leases answer again, and State does not take that
    THEN it is said at the next look."""
    leases, members = PostgresLeases(state), _members(state)
    membership = Membership(state, leases, A)
    membership.able(frozenset(LEASES))
    with monkeypatch.context() as away:
        away.setattr(leases, "rows", lambda: _unreachable(members))
        assert not membership._look()
    with monkeypatch.context() as away:
        away.setattr(Members, "beat", lambda *_: _unreachable(members))
        assert not membership._look()
    assert members.all()[A.instance].leases == frozenset()
    assert membership._look()
    assert members.all()[A.instance].leases == frozenset(LEASES)


def test_leases_that_no_instance_is_to_take_are_told(state: State) -> None:
    """GIVEN an instance that is drained WHEN another can take its leases THEN none is left; without the other, all."""
    members, left = _members(state), list[frozenset[str]]()
    membership = Membership(state, PostgresLeases(state), A)
    membership.on_left = left.append
    membership.able(frozenset(LEASES))
    assert left == []
    members.beat(B, "1", LEASES[:2])
    members.drain(A.instance)
    membership._look()
    assert left == [frozenset(LEASES[2:])]
    members.leave(B)
    membership._look()
    assert left[-1] == frozenset(LEASES)


def test_two_processes_never_have_one_name() -> None:
    """GIVEN containers with one host name, whose processes are numbered from 1 THEN their names differ."""
    names = {this_process().instance for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith(f"{socket.gethostname()}-{os.getpid()}-") for name in names)


def test_a_stale_owner_of_one_partition_writes_nothing_to_it(state: State) -> None:
    """GIVEN an owner of two partitions WHEN one of them is another's THEN its writes to that one alone are refused."""
    leases, heads = PostgresLeases(state, is_gone=lambda _: False), PostgresHeads(state)
    leases.divide(LEASES[0], LEASES[1:], A)
    first, second = leases.acquire_all(LEASES[:2], A, 60.0)
    leases.release(second)
    (taken,) = leases.acquire_all([LEASES[1]], B, 60.0)
    heads.move("numbers", 0, Head(1, first.epoch, "1", 1))
    heads.move("numbers", 1, Head(1, taken.epoch, "1", 2))
    with pytest.raises(StaleError):
        heads.move("numbers", 1, Head(2, first.epoch, "2", 3))
    with pytest.raises(StaleError):
        heads.move("numbers", 2, Head(1, first.epoch, "1", 3))


def test_work_that_is_done_alone_is_done_by_one_process_at_a_time(state: State) -> None:
    """GIVEN some work under way WHEN another begins the same work THEN it waits; other work does not."""
    began, ended, order = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        with alone(state, "torn commits of shop"):
            began.set()
            ended.wait(30)
            order.append("first")

    def second() -> None:
        with alone(state, "torn commits of shop"):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert began.wait(30)
    threads[1].start()
    with alone(state, "torn commits of chat"):
        order.append("other")
    with state.connection() as conn:
        waiting = "select 1 from pg_locks where locktype = 'advisory' and not granted"
        until(lambda: conn.execute(waiting).fetchone(), "the second waits", timeout_s=30)
    ended.set()
    for thread in threads:
        thread.join()
    assert order == ["other", "first", "second"]


def test_a_share_that_cannot_be_looked_up_is_all(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a State that is away when the lanes are ready THEN all leases are asked for, and say why there are none:
    nobody is told that another instance has them. WHEN it is back THEN the share is known."""
    membership, told = Membership(state, PostgresLeases(state), A), list[frozenset[str] | None]()
    membership.tell(told.append)
    with monkeypatch.context() as away:
        away.setattr(Members, "all", _unreachable)
        membership.able(frozenset(LEASES))
        assert told == [None]
    membership.able(frozenset(LEASES[:2]))
    assert told[-1] == frozenset(LEASES[:2])
    with monkeypatch.context() as away:
        away.setattr(Members, "all", _unreachable)
        membership.able(frozenset(LEASES))
    assert told[-1] is None


def test_a_share_that_could_not_be_told_is_told_at_the_next_look(state: State) -> None:
    """GIVEN an instance whose lanes cannot be told their share WHEN it looks again, and nothing else has changed THEN
    they are told: they would take nothing until the instances change."""
    membership, told = Membership(state, PostgresLeases(state), A), list[frozenset[str] | None]()
    membership.able(frozenset(LEASES[:1]))

    def cannot(_: frozenset[str] | None) -> None:
        raise EngineError("the lane does not listen")

    membership._leases, membership._on_share = frozenset(LEASES), cannot
    assert not membership._look()
    membership._on_share = told.append
    assert membership._look()
    assert told == [frozenset(LEASES)]


def _unreachable(_: Members) -> None:
    raise UnreachableError("State does not answer")


def test_an_instance_that_cannot_say_that_it_lives_keeps_its_share(state: State) -> None:
    """GIVEN an instance whose row is old WHEN it looks THEN it lives: it looks."""
    _members(state).beat(A, "1", LEASES)
    silent = _members(state, ttl_s=0.0).all()
    assert share_of(A.instance, silent, []) == frozenset(LEASES)


def test_a_source_is_shared_by_partitions_only_if_it_says_so(tmp_path: object) -> None:
    """GIVEN a divisible source and another THEN the leases of the one are per partition, of the other one in all."""

    class Whole(NumberFiles):
        def divisible(self) -> bool:
            return False

    sources = {"numbers": NumberFiles(str(tmp_path), 3), "whole": Whole(str(tmp_path), 3)}
    assert leases_of(sources, range(2)) == {*LEASES, source_lease("whole"), deliver_lease(0), deliver_lease(1)}


def test_an_instance_with_the_pid_of_one_before_it_is_not_taken_for_it(
    tmp_path: Path, pg_server: PostgresServer
) -> None:
    """GIVEN a scene that has started many instances, and a machine that gives out their pids again WHEN a new instance
    has the pid of an earlier one THEN the scene knows each by its own name: it would wait for ever for the new one to
    own something under the name of the dead."""
    with fresh_state(pg_server.socket_dsn()) as state:
        stage = InstancesStage(tmp_path, "")
        stage.state = state
        new = this_process("new")
        dead = replace(new, instance="dead", started=f"{new.started}0")
        instances: list[Any] = [_Started(), _Started()]
        for one in (new, dead):
            _members(state).beat(one, "1", LEASES)
        assert stage.name_if_any(instances[0]) == "new"
        Members(state).leave(new)
        _members(state).beat(replace(new, instance="newer"), "1", LEASES)
        assert stage.name_if_any(instances[1]) == "newer"


class _Started:
    """An instance of a scene, as far as its process goes."""

    process = SimpleNamespace(pid=os.getpid())
