"""The lease contract over its backends, and who counts as gone on this machine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from evermark.cluster import liveness
from evermark.cluster.base import Holder, Lease, LeaseStore
from evermark.cluster.fence import alone, fenced
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.postgres import PostgresLeases
from evermark.cluster.together import RenewedTogether
from evermark.errors import BusyError, StaleError, UnreachableError
from evermark.state.connection import State
from evermark.testing.contracts import LeaseContract
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state


class _Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 11, 15, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class TestMemoryLeases(LeaseContract):
    @pytest.fixture
    def clock(self) -> _Clock:
        return _Clock()

    @pytest.fixture
    def leases(self, gone: set[Holder], clock: _Clock) -> LeaseStore:
        return MemoryLeases(clock=clock, is_gone=gone.__contains__)

    @pytest.fixture
    def let_expire(self, leases: LeaseStore, clock: _Clock) -> Callable[[str], None]:
        def run_out(name: str) -> None:
            clock.now += timedelta(hours=1)

        return run_out


class TestPostgresLeases(LeaseContract):
    @pytest.fixture
    def state(self, pg_server: PostgresServer) -> Iterator[State]:
        with fresh_state(pg_server.socket_dsn()) as state:
            yield state

    @pytest.fixture
    def leases(self, state: State, gone: set[Holder]) -> LeaseStore:
        return PostgresLeases(state, is_gone=gone.__contains__)

    @pytest.fixture
    def let_expire(self, leases: LeaseStore, state: State) -> Callable[[str], None]:
        def run_out(name: str) -> None:
            with state.connection() as conn:
                conn.execute(
                    "update leases set expires_at = clock_timestamp() - interval '1 ms' where name = %s", (name,)
                )

        return run_out

    def test_time_is_the_servers(self, leases: LeaseStore, state: State) -> None:
        """The expiry is written by the server's clock, so that a wrong clock here changes nothing."""
        leases.acquire("deliver", Holder("a", "h", "b", 1, "1"), 60)
        with state.connection() as conn:
            row = conn.execute("select expires_at - clock_timestamp() from leases").fetchone()
        assert row is not None
        assert timedelta(seconds=50) < row[0] <= timedelta(seconds=60)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], Holder]]:
    """A living process and what it would write into a lease."""
    program = (
        "import json, sys; from evermark.cluster.liveness import this_process; "
        "print(json.dumps(vars(this_process('child'))), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, Holder(**json.loads(process.stdout.readline()))
        process.kill()


def test_a_living_process_is_not_gone(child: tuple[subprocess.Popen[bytes], Holder]) -> None:
    """Neither while it runs nor while it is stopped."""
    process, holder = child
    assert not liveness.is_gone(holder)
    os.kill(process.pid, signal.SIGSTOP)
    assert not liveness.is_gone(holder)


def test_a_killed_process_is_gone_before_and_after_it_is_reaped(
    child: tuple[subprocess.Popen[bytes], Holder],
) -> None:
    """A zombie holds nothing any more."""
    process, holder = child
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert liveness.is_gone(holder)
    process.wait()
    assert liveness.is_gone(holder)


def test_a_pid_used_again_is_another_process(child: tuple[subprocess.Popen[bytes], Holder]) -> None:
    """The start time tells two uses of one pid apart."""
    _, holder = child
    assert liveness.is_gone(replace(holder, started="1"))


@pytest.mark.parametrize("elsewhere", [{"host": "other"}, {"boot": "other"}, {"started": ""}])
def test_about_processes_elsewhere_nothing_is_known(elsewhere: dict[str, Any]) -> None:
    """Another host, boot or pid namespace: we wait for the lease to run out."""
    nobody = replace(liveness.this_process("me"), pid=2**22 - 1)
    assert liveness.is_gone(nobody)
    assert not liveness.is_gone(replace(nobody, **elsewhere))


def test_an_owner_that_sleeps_in_a_transaction_holds_its_successor_up_for_seconds_alone(
    pg_server: PostgresServer,
) -> None:
    """GIVEN a fenced transaction whose process sleeps, or is cut off WHEN another takes the lease THEN it has it soon,
    and what the first had begun is undone."""
    with fresh_state(pg_server.socket_dsn()) as state:
        leases = PostgresLeases(state, is_gone=lambda _: True)
        old = leases.acquire("source:shop", Holder("a", "h", "b", 1, "1"), 60.0)
        assert old is not None
        began, taken = time.monotonic(), list[Lease | None]()

        def write_late() -> None:
            with fenced(_impatient(pg_server, state), old.name, old.epoch) as conn:
                conn.execute("update instances set host = 'late'")
                taken.append(leases.acquire("source:shop", Holder("b", "h", "b", 2, "2"), 60.0))
                conn.execute("select 1")

        with pytest.raises(BusyError):
            write_late()
        assert taken[0] is not None and time.monotonic() - began < 10.0
        assert leases.rows()["source:shop"].holder == Holder("b", "h", "b", 2, "2")


def test_who_sleeps_while_it_takes_a_lease_holds_others_up_for_seconds_alone(pg_server: PostgresServer) -> None:
    """GIVEN an instance that has locked a free lease WHEN it is stopped before it has taken it THEN another takes the
    lease soon, and the first does not have it."""
    with fresh_state(pg_server.socket_dsn()) as state:
        leases = PostgresLeases(state, is_gone=lambda _: True)
        assert leases.acquire("source:shop", Holder("a", "h", "b", 1, "1"), 60.0) is not None
        began, taken = time.monotonic(), list[Lease | None]()

        def sleep_meanwhile(_: Holder) -> bool:
            taken.append(leases.acquire("source:shop", Holder("b", "h", "b", 2, "2"), 60.0))
            return True

        asleep = PostgresLeases(_impatient(pg_server, state), is_gone=sleep_meanwhile)
        with pytest.raises(BusyError):
            asleep.acquire("source:shop", Holder("c", "h", "b", 3, "3"), 60.0)
        assert len(taken) == 1 and taken[0] is not None and time.monotonic() - began < 10.0
        assert leases.rows()["source:shop"].holder == Holder("b", "h", "b", 2, "2")


def test_every_transaction_of_state_is_ended_long_before_a_lease_would_be_missed(pg_server: PostgresServer) -> None:
    """GIVEN any transaction of State WHEN it sleeps THEN Postgres ends it after 5 s, and work outside after 30."""
    with fresh_state(pg_server.socket_dsn()) as state:
        default = State(pg_server.socket_dsn, state.schema)
        with default.transaction() as conn:
            assert conn.execute("show idle_in_transaction_session_timeout").fetchone() == ("5s",)
        with alone(default, "work outside of State") as conn:
            assert conn.execute("show idle_in_transaction_session_timeout").fetchone() == ("5s",)
        default.close()


def _impatient(server: PostgresServer, state: State) -> State:
    return State(server.socket_dsn, state.schema, idle_timeout_s=0.3)


def test_a_lease_is_not_renewed_through_a_state_that_was_closed(pg_server: PostgresServer) -> None:
    """GIVEN a lane that was given up WHEN a thread of it works on THEN its lease runs out, and another gets it."""
    with fresh_state(pg_server.socket_dsn()) as state:
        mine = State(pg_server.socket_dsn, state.schema)
        leases = PostgresLeases(mine)
        lease = leases.acquire("deliver", liveness.this_process("tests"), 60.0)
        assert lease is not None
        leases.renew([lease], 60.0)
        mine.close()
        with pytest.raises(UnreachableError, match="closed here"):
            leases.renew([lease], 60.0)


class TestRenewedTogether(TestPostgresLeases):
    @pytest.fixture
    def leases(self, state: State, gone: set[Holder]) -> LeaseStore:
        # Time that passes: a lease that was renewed a moment ago is not renewed again.
        return RenewedTogether(
            PostgresLeases(state, is_gone=gone.__contains__), itertools.count(0.0, 60.0 / 8).__next__
        )

    def test_many_are_renewed_by_one_statement_and_those_of_others_are_not(
        self, state: State, let_expire: Callable[[str], None]
    ) -> None:
        """GIVEN a hundred leases that ran out, one taken by another, WHEN one is renewed THEN all of ours are,
        and the other's is as it was."""
        mine, other = Holder("a", "h", "b", 1, "1"), Holder("b", "h", "b", 2, "2")
        leases = RenewedTogether(PostgresLeases(state))
        names = [f"source:{n:03d}" for n in range(100)]
        held = [leases.acquire(name, mine, 60) for name in names]
        for name in names:
            let_expire(name)
        assert PostgresLeases(state).acquire(names[7], other, 3600) is not None
        assert held[0] is not None and held[7] is not None
        leases.renew([held[0]], 60)
        with state.connection() as conn:
            rows = conn.execute("select name, instance, expires_at > clock_timestamp() from leases").fetchall()
        assert {name: instance for name, instance, _ in rows if name in names} == dict.fromkeys(names, "a") | {
            names[7]: "b"
        }
        assert all(is_good for _, _, is_good in rows)
        with pytest.raises(StaleError):
            leases.renew([held[7]], 60)
