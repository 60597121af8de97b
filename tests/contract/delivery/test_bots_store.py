"""The contract of bots over its backends, and the race of publishing and parking on a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.limits import RELEASED_MAX
from evermark.delivery.model import BotSpec, MadeBy, ParkedEvent
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.run.parked_retries import release
from evermark.delivery.store import bot_queries, postgres, postgres_parked
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.store.postgres_bots import bot_inboxes, bot_users, bot_users_version
from evermark.state.connection import State
from evermark.testing.contracts import BotContract, SessionContract
from evermark.testing.contracts.bot_scene import WISH, claimed, settle, waiting
from evermark.testing.contracts.scene import P0, T0, TakeOver, begin, event, spec
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners
from evermark.testing.until import until


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


@pytest.fixture
def take_over(state: State) -> TakeOver:
    take = owners(PostgresLeases(state, is_gone=lambda holder: True))
    return lambda: take(DELIVER_LEASE)


class TestMemoryBots(BotContract, SessionContract):
    @pytest.fixture
    def leases(self) -> MemoryLeases:
        return MemoryLeases(is_gone=lambda holder: True)

    @pytest.fixture
    def store(self, leases: MemoryLeases) -> DeliveryStore:
        return MemoryDelivery(leases, clock=lambda: T0)

    @pytest.fixture
    def take_over(self, leases: MemoryLeases) -> TakeOver:
        take = owners(leases)
        return lambda: take(DELIVER_LEASE)


class TestPostgresBots(BotContract, SessionContract):
    @pytest.fixture
    def store(self, state: State) -> DeliveryStore:
        return PostgresDelivery(state, clock=lambda: T0)

    @pytest.fixture
    def take_over(self, state: State) -> TakeOver:
        take = owners(PostgresLeases(state, is_gone=lambda holder: True))
        return lambda: take(DELIVER_LEASE)


def _paused_after_the_decision(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Parking stops between its decision and its write until the second event is set; the first says it is there."""
    there, go_on = threading.Event(), threading.Event()
    decide: Callable[..., Any] = postgres_parked._waits

    def slowly(conn: Any, parked: dict[str, Sequence[ParkedEvent]]) -> Any:
        found = decide(conn, parked)
        there.set()
        assert go_on.wait(30)
        return found

    monkeypatch.setattr(postgres_parked, "_waits", slowly)
    return there, go_on


@pytest.mark.parametrize("locked", [True, False])
def test_d3_a_key_published_while_an_event_is_being_parked_is_not_missed(
    state: State, take_over: TakeOver, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """GIVEN an event about to be parked as waiting WHEN its key is published THEN it is released all the same; without
    the lock it would be stuck, until a sweep."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "bot", bot=WISH)
    if not locked:
        monkeypatch.setattr(postgres_parked, "lock_sessions", lambda *_: None)
        monkeypatch.setattr("evermark.delivery.store.postgres_bots.lock_sessions", lambda *_: None)
    there, go_on = _paused_after_the_decision(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        parking = pool.submit(settle, store, epoch, 0, waiting(1))
        assert there.wait(30)
        publishing = pool.submit(store.bots.publish, "phone", {"s1": "sealed"}, T0, epoch)
        until(lambda: publishing.done() or _is_blocked(state), "publishing is done, or waits")
        assert publishing.done() is not locked
        go_on.set()
        parking.result(30)
        assert publishing.result(30) == (1 if locked else 0)
    assert [row.waits for row in store.parked.rows()] == [not locked]
    assert store.bots.release_keyed(T0, epoch) == (0 if locked else 1)
    assert len(store.parked.claim(T0, 10, 60, epoch)) == 1


def _is_blocked(state: State) -> bool:
    with state.connection() as conn:
        found = conn.execute(
            "select count(*) from pg_stat_activity where datname = current_database() "
            "and cardinality(pg_blocking_pids(pid)) > 0"
        ).fetchone()
    return found != (0,)


def test_d3_an_event_parked_while_the_device_changes_waits_for_the_key_of_the_new_one(
    state: State, take_over: TakeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an event about to be parked as due WHEN its bot gets a device without that key THEN it waits."""
    store, epoch = PostgresDelivery(state), take_over()
    store.open_partition(P0, 0, epoch)
    store.add(spec("bot", bot=WISH), None, epoch)
    store.bots.publish("phone", {"s1": "sealed"}, T0, epoch)
    there, go_on = _paused_after_the_decision(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        parking = pool.submit(settle, store, epoch, 0, waiting(1))
        assert there.wait(30)
        changing = pool.submit(store.change, "bot", {"bot": {"device": "tablet"}}, epoch)
        until(lambda: changing.done() or _is_blocked(state), "the device is changed, or that waits")
        go_on.set()
        parking.result(30)
        changing.result(30)
    assert [row.waits for row in store.parked.rows()] == [True]


@pytest.mark.parametrize("locked", [True, False])
def test_d3_a_key_published_while_the_device_changes_is_not_missed(
    state: State, take_over: TakeOver, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """GIVEN a bot about to have another device WHEN a key of that one is published THEN what needs it is released;
    without the lock it would be stuck, until a sweep."""
    store, epoch = PostgresDelivery(state), take_over()
    store.open_partition(P0, 0, epoch)
    store.add(spec("bot", bot=WISH), None, epoch)
    settle(store, epoch, 0, waiting(1))
    if not locked:
        monkeypatch.setattr("evermark.delivery.store.postgres_bots.lock_every_session", lambda *_: None)
    there, go_on = threading.Event(), threading.Event()
    decide: Callable[..., Any] = postgres.decide_anew_who_waits

    def slowly(*given: Any) -> None:
        decide(*given)
        there.set()
        assert go_on.wait(30)

    monkeypatch.setattr(postgres, "decide_anew_who_waits", slowly)
    with ThreadPoolExecutor(2) as pool:
        changing = pool.submit(store.change, "bot", {"bot": {"device": "tablet"}}, epoch)
        assert there.wait(30)
        publishing = pool.submit(store.bots.publish, "tablet", {"s1": "sealed"}, T0, epoch)
        until(lambda: publishing.done() or _is_blocked(state), "publishing is done, or waits")
        assert publishing.done() is not locked
        go_on.set()
        changing.result(30)
        assert publishing.result(30) == (1 if locked else 0)
    assert [row.waits for row in store.parked.rows()] == [not locked]


def test_first_deliveries_and_a_replay_parked_at_once_never_wait_for_each_other(
    state: State, take_over: TakeOver
) -> None:
    """GIVEN a bot that a replay's settlement has locked WHEN first deliveries of it are being parked for the same
    session THEN the replay parks, and they do after it."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "bot", bot=WISH)
    with ThreadPoolExecutor(1) as pool:
        with state.transaction() as conn:
            postgres.lock_record(conn, "bot")
            parking = pool.submit(settle, store, epoch, 0, waiting(1))
            until(lambda: _is_blocked(state), "first deliveries wait for the bot")
            postgres_parked.park(conn, {"bot": [replace(waiting(2), replay_id="r1")]}, T0, lambda: 0.0)
        parking.result(30)
    assert [row.event.event_id for row in store.parked.rows()] == ["e2", "e1"]


def test_d3_publishing_and_parking_at_once_leave_nothing_stuck(state: State, take_over: TakeOver) -> None:
    """GIVEN many sessions WHEN each is published at the very moment an event of it is parked THEN none waits."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "bot", bot=WISH)
    for n in range(25):
        barrier = threading.Barrier(2)

        def at_once(call: Callable[[], Any], barrier: threading.Barrier = barrier) -> Any:
            barrier.wait(30)
            return call()

        with ThreadPoolExecutor(2) as pool:
            parking = pool.submit(at_once, lambda n=n: settle(store, epoch, n, waiting(n, f"s{n}")))
            publishing = pool.submit(at_once, lambda n=n: store.bots.publish("phone", {f"s{n}": "k"}, T0, epoch))
            parking.result(30)
            publishing.result(30)
    assert [row.event.event_id for row in store.parked.rows(limit=100) if row.waits] == []
    assert len(store.parked.claim(T0, 100, 60, epoch)) == 25


def test_d3_two_claims_at_once_never_split_a_session(state: State, take_over: TakeOver) -> None:
    """GIVEN due events of one session WHEN two threads claim at once THEN nobody gets one without those before it."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "bot", bot=WISH)
    store.bots.publish("phone", {"s1": "sealed"}, T0, epoch)
    settle(store, epoch, 0, *(waiting(n) for n in range(1, 41)))
    left = 40
    while left:
        with ThreadPoolExecutor(2) as pool:
            claims = list(pool.map(lambda _: store.parked.claim(T0, 7, 60, epoch), range(2)))
        got = sorted(row.id for rows in claims for row in rows)
        first = [row.id for row in store.parked.rows(limit=100)][: len(got)]
        assert got == first
        assert not (claims[0] and claims[1]), "those behind one that is under way wait for it"
        store.parked.delivered(got, epoch)
        left -= len(got)


def test_d6_which_streams_are_stopped_is_told_without_a_look_at_what_waits(state: State, take_over: TakeOver) -> None:
    """GIVEN thousands that wait for keys, and one that was refused WHEN asked which streams are stopped, as before each
    batch THEN an index finds the refused one alone."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "bot", bot=WISH, parked_max=1)
    settle(store, epoch, 0, *(waiting(n, stream=f"room{n % 3}") for n in range(5_000)), event(9_000, stream="den"))
    with state.connection() as conn:
        conn.execute("analyze enqueued_messages")
        plan = "\n".join(row[0] for row in conn.execute(f"explain (analyze) {bot_queries.STOPPED}", (["bot"],)))
    assert store.bots.stopped(["bot"]) == {"bot": {"den"}}
    assert "enqueued_messages_counted" in plan
    assert "Rows Removed by Filter" not in plan


def _park_many(state: State, sessions: int, rows: int) -> None:
    """So many events of each session wait."""
    with state.connection() as conn:
        conn.execute(
            "insert into enqueued_messages (subscription, event_id, source, partition, batch, position, stream, event,"
            " reason, session, waits, created_at) select 'bot', 'x' || s || '-' || n, 'shop', 0, n, n::text,"
            " 'room' || s, '{}', 'no key', 's' || s, true, now()"
            " from generate_series(1, %s) s, generate_series(1, %s) n on conflict do nothing",
            (sessions, rows),
        )


def _due_by_transaction(state: State) -> list[int]:
    """How many events are due, by the transactions that made them so."""
    with state.connection() as conn:
        found = conn.execute("select count(*) from enqueued_messages where not waits group by xmin::text").fetchall()
    return [row[0] for row in found]


@pytest.mark.parametrize("made_by", MadeBy)
def test_delivery_begins_at_once_when_very_many_wait_for_a_device_that_is_taken_away(
    state: State, take_over: TakeOver, made_by: MadeBy
) -> None:
    """GIVEN very many that wait WHEN the bot has no device any more THEN the change makes a part of them due, and the
    sweep, a part at a time, all others."""
    store, epoch = PostgresDelivery(state), take_over()
    store.open_partition(P0, 0, epoch)
    store.register([spec("bot", bot=WISH)], made_by, {}, epoch)
    _park_many(state, sessions=3, rows=9_000)
    if made_by is MadeBy.FILE:
        store.register([spec("bot", bot=replace(WISH, device=""))], made_by, {}, epoch)
    else:
        store.change("bot", {"bot": {"device": ""}}, epoch)
    assert _due_by_transaction(state) == [RELEASED_MAX]
    assert release(store.bots, T0, epoch) == 27_000 - RELEASED_MAX
    due = _due_by_transaction(state)
    assert (sum(due), max(due)) == (27_000, RELEASED_MAX)


def test_keys_of_many_sessions_are_published_in_one_call_however_much_waits(state: State, take_over: TakeOver) -> None:
    """GIVEN very many that wait WHEN the keys of all are published THEN all are due, a part at a time."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "bot", bot=WISH)
    _park_many(state, sessions=3, rows=9_000)
    assert store.bots.publish("phone", {f"s{n}": "sealed" for n in (1, 2, 3)}, T0, epoch) == 27_000
    due = _due_by_transaction(state)
    assert (sum(due), max(due)) == (27_000, RELEASED_MAX)


def test_d3_nothing_overtakes_what_is_not_released_yet(
    state: State, take_over: TakeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a bot of whose parked events a change of device made a part due WHEN these were delivered THEN their
    session is not clear, newer events queue, its key is not asked for, and all come in order after the sweep."""
    monkeypatch.setattr("evermark.delivery.store.postgres_bots.RELEASED_MAX", 2)
    store, epoch = PostgresDelivery(state, clock=lambda: T0), take_over()
    begin(store, epoch, "bot", bot=WISH)
    store.bots.publish("tablet", {"s1": "sealed", "s2": "sealed"}, T0, epoch)
    settle(store, epoch, 0, *map(waiting, range(1, 6)))
    store.register([spec("bot", bot=replace(WISH, device="tablet"))], MadeBy.FILE, {}, epoch)
    assert claimed(store, epoch) == ["e1", "e2"]
    store.parked.delivered([row.id for row in store.parked.rows()][:2], epoch)
    assert store.bots.sessions_clear(["bot"]) == {"bot": {"s2"}}
    settle(store, epoch, 1, waiting(6))
    assert (claimed(store, epoch), store.bots.keys_wanted(T0, 10, epoch)) == ([], [])
    assert [store.bots.release_keyed(T0, epoch, 2) for _ in range(3)] == [2, 1, 0]
    assert claimed(store, epoch) == ["e3", "e4", "e5", "e6"]


def test_which_sessions_are_clear_is_told_at_once_however_much_is_parked(state: State, take_over: TakeOver) -> None:
    """GIVEN thousands of keys, thousands of sessions that wait, and one of which very many are on their way out WHEN
    asked which are clear, as before each batch THEN an index finds what is parked, and it takes no time."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "bot", bot=WISH)
    _park_many(state, sessions=5_000, rows=1)
    _park_many(state, sessions=1, rows=20_000)
    store.bots.publish("phone", {"s1": "sealed"}, T0, epoch)
    with state.connection() as conn:
        conn.execute("insert into session_keys select 'phone', 'k' || n, 'x', now() from generate_series(1, 9999) n")
        conn.execute("analyze enqueued_messages")
        given = {"names": ["bot"], "replay_id": "", "most": 20_000}
        plan = "\n".join(row[0] for row in conn.execute(f"explain {bot_queries.CLEAR}", given))
    assert "Scan on enqueued_messages" not in plan
    begun = time.perf_counter()
    assert len(store.bots.sessions_clear(["bot"])["bot"]) == 9_999
    assert time.perf_counter() - begun < 2


def test_b13_users_of_bots_are_told_by_source_with_a_version(state: State, take_over: TakeOver) -> None:
    """GIVEN bots of two sources THEN each source is told its own, and a text that changes with them."""
    store, epoch = PostgresDelivery(state), take_over()
    assert (bot_users(state, "chat"), bot_users_version(state, "chat")) == (frozenset(), "")
    bots = [
        spec("a", bot=BotSpec("chat", "ann", inbox="mail")),
        spec("b", bot=BotSpec("chat", "ben")),
        spec("c", bot=BotSpec("other", "cid")),
        spec("d"),
    ]
    store.register(bots, MadeBy.FILE, {}, epoch)
    assert (bot_users(state, "chat"), bot_inboxes(state, "chat")) == ({"ann", "ben"}, {"mail"})
    version = bot_users_version(state, "chat")
    store.register(bots[1:], MadeBy.FILE, {}, epoch)
    assert bot_users_version(state, "chat") not in ("", version)
    store.register([*bots[1:], spec("e")], MadeBy.FILE, {}, epoch)
    store.register(bots, MadeBy.FILE, {}, epoch)
    assert bot_users_version(state, "chat") == version
