"""Delivery state when its process dies: at every statement of every step, nothing is there by halves (D1, D15).

kill -9 is the end of the connection at any moment. Here it ends after each statement in turn, which no timing of real
kills would meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.decide.group import is_due
from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, SubscriptionState
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.errors import EvermarkError
from evermark.state.connection import State
from evermark.testing.contracts.scene import P0, P1, T0, begin, done, event, failed, snapshot, spec
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners

SOON = T0 + timedelta(minutes=1)  # the first retry is due
STATEMENTS_MAX = 40


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


@pytest.fixture
def epoch(state: State) -> int:
    return owners(PostgresLeases(state, is_gone=lambda holder: True))(DELIVER_LEASE)


def steady(state: State) -> PostgresDelivery:
    return PostgresDelivery(state, jitter=lambda: 0.0, clock=lambda: T0)


@pytest.fixture
def store(state: State, epoch: int) -> PostgresDelivery:
    """Members a and b, one outside, three rows parked, one of them claimed."""
    store = steady(state)
    begin(store, epoch, "a", "b", ordered=True)
    store.register([spec("a"), spec("b"), spec("late")], MadeBy.FILE, {"late": {P0: Cursor(0), P1: Cursor(0)}}, epoch)
    store.settle_group(
        GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")),
        [done("a", event(1), event(2)), done("b", event(3))],
        T0,
        epoch,
    )
    store.parked.claim(SOON, 1, 60, epoch)
    return store


Step = Callable[[DeliveryStore, int], object]
STEPS: dict[str, Step] = {
    "park": lambda store, epoch: store.settle_group(
        GroupWork(P0, Cursor(1), Cursor(2), frozenset("ab")),
        [done("a", event(4), event(5), expired=2), failed("b")],
        SOON,
        epoch,
    ),
    "park_behind": lambda store, epoch: store.settle_subscription(
        "late", P0, Cursor(0), Cursor(1), done("late", event(6), expired=1), SOON, epoch
    ),
    "gone": lambda store, epoch: store.settle_group(
        GroupWork(P0, Cursor(1), Cursor(2), frozenset("ab")), [done("a"), Outcome("b", Fate.GONE)], SOON, epoch
    ),
    "claim": lambda store, epoch: store.parked.claim(SOON, 10, 60, epoch),
    "delete": lambda store, epoch: store.parked.delivered([row.id for row in store.parked.rows("a")], epoch),
    "drop": lambda store, epoch: store.parked.drop([row.id for row in store.parked.rows("b")], epoch),
    "expire": lambda store, epoch: store.parked.expire("a", SOON, SOON + timedelta(days=1), epoch),
    "pause": lambda store, epoch: store.suspend("a", "", epoch),
    "remove": lambda store, epoch: store.register([spec("a")], MadeBy.FILE, {}, epoch),
}


def books(state: State) -> tuple[object, ...]:
    """Everything delivery keeps, claims and counts too."""
    store = steady(state)
    with state.connection() as conn:
        claims = conn.execute("select id, claimed_until, claim_epoch, attempts from enqueued_messages order by id")
        return (*snapshot(store), claims.fetchall(), store.counted("expired"), store.counted("dropped"))


def cut_after(number: int, state: State, step: Callable[[], object], patch: pytest.MonkeyPatch) -> bool:
    """Run a step whose connection ends right after its nth statement; whether it got that far."""
    with state.connection() as conn:
        kind: Any = type(conn)
    real, left = kind.execute, [number]

    def executing(self: Any, query: Any, *args: Any, **options: Any) -> Any:
        found = real(self, query, *args, **options)
        if str(query).split()[0].lower() in ("insert", "update", "delete", "with", "select"):
            left[0] -= 1
            if left[0] == 0:
                self.close()
                raise psycopg.OperationalError("the connection was cut")
        return found

    with patch.context() as scope:
        scope.setattr(kind, "execute", executing)
        try:
            step()
        except (EvermarkError, psycopg.Error):
            return True
    return left[0] <= 0


@pytest.mark.parametrize("name", STEPS)
def test_d15_a_step_cut_after_any_statement_leaves_nothing_by_halves(
    state: State, store: PostgresDelivery, epoch: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a step WHEN its connection ends after each statement in turn THEN all is as before; then it can be done."""
    before = books(state)
    cuts = 0
    while cut_after(cuts + 1, state, lambda: STEPS[name](store, epoch), monkeypatch):
        cuts += 1
        assert books(state) == before, f"after statement {cuts}"
        assert cuts < STATEMENTS_MAX
    assert cuts >= 2
    assert books(state) != before, "the last time nothing was cut"


def test_d5_what_is_known_of_an_endpoint_is_in_state(state: State, epoch: int) -> None:
    """GIVEN nine failures WHEN another process looks THEN count, wait and reason are there; the tenth suspends."""
    store = steady(state)
    begin(store, epoch, "a")
    store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [failed("a")], T0, epoch)
    for _ in range(8):
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), failed("a"), T0, epoch)
    seen = steady(state).subscription("a")
    assert (seen.state, seen.failures, seen.reason) == (SubscriptionState.BEHIND, 9, "503")
    assert not is_due(seen, T0 + timedelta(seconds=299))
    assert is_due(seen, T0 + timedelta(seconds=301))
    steady(state).settle_subscription("a", P0, Cursor(0), Cursor(1), failed("a"), T0, epoch)
    assert steady(state).subscription("a").state is SubscriptionState.SUSPENDED


def test_d4_the_first_retry_waits_as_long_as_the_refusal_asked(state: State, epoch: int) -> None:
    """GIVEN events refused with and without Retry-After WHEN parked THEN each is due when it was told to be."""
    store = steady(state)
    begin(store, epoch, "a")
    patient = replace(event(2), retry_after_s=600.0)
    store.settle_group(
        GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")),
        [done("a", event(1), patient, event(3, status=None))],
        T0,
        epoch,
    )
    rows = {row.event.event_id: row for row in store.parked.rows()}
    waits = {name: (row.next_attempt_at - T0).total_seconds() for name, row in rows.items() if row.next_attempt_at}
    assert waits == {"e1": 5, "e2": 600, "e3": 5}
    assert {name: row.attempts for name, row in rows.items()} == {"e1": 1, "e2": 1, "e3": 0}


def test_d6_what_one_subscription_has_parked_uses_up_nobody_elses_room(state: State, epoch: int) -> None:
    """GIVEN one channel's subscription at its limit WHEN another's of the same receiver parks THEN it has its room."""
    store = steady(state)
    store.open_partition(P0, 0, epoch)
    same = "https://bot.example/hook"
    store.register([spec("a", parked_max=2, url=same), spec("b", parked_max=2, url=same)], MadeBy.FILE, {}, epoch)
    members = frozenset("ab")
    store.settle_group(
        GroupWork(P0, Cursor(0), Cursor(1), members), [done("a", event(1), event(2)), done("b")], T0, epoch
    )
    store.settle_group(
        GroupWork(P0, Cursor(1), Cursor(2), members), [done("a", event(3)), done("b", event(3), event(4))], T0, epoch
    )
    stopped, well = store.subscription("a"), store.subscription("b")
    assert (stopped.state, well.state) == (SubscriptionState.SUSPENDED, SubscriptionState.LIVE)
    assert store.group().members == {"b"}
    assert {name: counts["waiting"] for name, counts in store.parked.counts().items()} == {"a": 2, "b": 2}
