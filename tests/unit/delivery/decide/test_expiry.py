"""D6: what could not be delivered for too long is given up and counted; nothing else is, and nothing in silence."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.expiry import expires_before, with_expired, without_expired
from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, Subscription, SubscriptionState
from evermark.delivery.run import parked_retries
from evermark.delivery.run.parked_retries import sweep
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.work import Result, both
from evermark.spark.posting import outcome_fields, outcome_of
from evermark.testing.contracts.scene import P0, T0, begin, done, event, spec

WEEK, DAY = timedelta(days=7), timedelta(days=1)


def subscribed(since: datetime | None, ttl_s: float = WEEK.total_seconds()) -> Subscription:
    return Subscription(spec("a", ttl_s=ttl_s), SubscriptionState.BEHIND, since=since)


def test_d6_a_week_by_default_and_never_when_off() -> None:
    """GIVEN a subscription of long ago THEN what was taken more than a week ago is given up; with 0, nothing is."""
    old = subscribed(T0 - 30 * DAY)
    assert spec("a").ttl_s == WEEK.total_seconds()
    assert expires_before(old, T0) == T0 - WEEK
    assert expires_before(replace(old, spec=replace(old.spec, ttl_s=0.0)), T0) is None


def test_d6_one_that_begins_with_the_past_is_owed_it_from_then_on() -> None:
    """GIVEN a subscription made yesterday WHEN it gets the log of a month THEN nothing of it is too old."""
    assert expires_before(subscribed(T0 - DAY), T0) is None
    assert expires_before(subscribed(None), T0) is None
    assert expires_before(subscribed(T0 - DAY), T0 + WEEK) == T0


@given(st.lists(st.tuples(st.integers(1, 4), st.one_of(st.none(), st.integers(-20, 20))), max_size=12))
def test_d6_each_row_is_sent_or_counted_once(rows: list[tuple[int, int | None]]) -> None:
    """GIVEN rows of any age WHEN the old ones are left out THEN kept and counted are all, and order holds."""
    columns = {
        "n": list(range(len(rows))),
        "batch": [batch for batch, _ in rows],
        "position": [f"{n:06}" for n in range(len(rows))],
        "ingested_at": pa.array([None if at is None else T0 + at * DAY for _, at in rows], pa.timestamp("us", "UTC")),
    }
    found = pa.RecordBatch.from_pydict(columns)
    kept, positions = without_expired(found, T0)
    counted = {batch: len(some) for batch, some in positions.items()}
    late = [n for n, (_, at) in enumerate(rows) if at is not None and at < 0]
    assert kept.column("n").to_pylist() == [n for n in range(len(rows)) if n not in late]
    assert counted == {batch: sum(rows[n][0] == batch for n in late) for batch in {rows[n][0] for n in late}}
    assert without_expired(found, T0, oldest=T0) == (found, {})


def test_d6_of_a_batch_that_failed_in_its_middle_those_count_that_it_got_past() -> None:
    """GIVEN old rows all over a batch WHEN it stops in its middle THEN those after it are not counted: they come again.

    One all of whose rows were too old is done.
    """
    late = {1: pa.array(["1", "3", "5"]), 2: pa.array(["7", "8"])}
    stopped = Result(P0, 1, Outcome("a", Fate.UNFINISHED), through="4")
    found = {result.batch: result for result in with_expired("a", P0, [stopped], late)}
    assert (found[1].outcome.expired, found[1].through) == (2, "4")
    assert (found[2].outcome.fate, found[2].outcome.expired, found[2].through) == (Fate.DONE, 2, "8")
    nowhere = with_expired("a", P0, [replace(stopped, through=None)], {1: late[1]})
    assert [(one.outcome.expired, one.through) for one in nowhere] == [(0, None)]
    done = with_expired("a", P0, [Result(P0, 1, Outcome("a", Fate.DONE), through="4")], {1: late[1]})
    assert [(one.outcome.expired, one.through) for one in done] == [(3, "5")]


def test_d6_the_count_survives_the_way_back_from_the_task() -> None:
    """GIVEN results of several chunks WHEN they travel as rows and are joined THEN what expired is added up."""
    one, other = Outcome("a", Fate.DONE, expired=3), Outcome("a", Fate.DONE, accepted=2, expired=4)
    assert both(outcome_of(outcome_fields(one)), outcome_of(outcome_fields(other))).expired == 7


@pytest.fixture
def store() -> tuple[MemoryDelivery, int]:
    leases = MemoryLeases(is_gone=lambda holder: True)
    lease = leases.acquire(DELIVER_LEASE, Holder("i", "h", "b", 1, "1"), 60)
    assert lease is not None
    return MemoryDelivery(leases, jitter=lambda: 0.0, clock=lambda: T0), lease.epoch


def test_d7_what_is_parked_for_too_long_is_removed_a_few_at_a_time_and_counted(
    store: tuple[MemoryDelivery, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN parked rows WHEN their time is over THEN they go, in small steps; those of others and with ttl 0 stay."""
    monkeypatch.setattr(parked_retries, "SWEEP_ROWS", 2)
    delivery, epoch = store
    begin(delivery, epoch, "a", "b")
    delivery.register([spec("a"), spec("b", ttl_s=0.0)], MadeBy.FILE, {}, epoch)
    members = delivery.group().members
    outcomes = [done(name, *(event(n) for n in range(1, 6))) for name in sorted(members)]
    delivery.settle_group(GroupWork(P0, Cursor(0), Cursor(1), members), outcomes, T0, epoch)
    assert sweep(delivery, T0 + WEEK - DAY, epoch) == 0
    assert sweep(delivery, T0 + WEEK + DAY, epoch) == 5
    assert {row.subscription for row in delivery.parked.rows(limit=100)} == {"b"}
    assert delivery.counted("expired") == {"a": 5}
    # WHEN told to stop THEN the rest waits for the next time
    delivery.settle_group(GroupWork(P0, Cursor(1), Cursor(2), members), [done("a", event(9)), done("b")], T0, epoch)
    assert sweep(delivery, T0 + 2 * WEEK, epoch, stopped=lambda: True) == 0


def test_d7_what_is_dead_for_too_long_goes_too(store: tuple[MemoryDelivery, int]) -> None:
    """GIVEN a subscription with nothing but a dead delivery WHEN its time is over THEN it is removed, and counted."""
    delivery, epoch = store
    begin(delivery, epoch, "a")
    delivery.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
    (row,) = delivery.parked.claim(T0 + timedelta(minutes=1), 1, 30, epoch)
    delivery.parked.reschedule(row, next_attempt_at=None, attempts=8, reason="no", status=400, epoch=epoch)
    assert sweep(delivery, T0 + WEEK + DAY, epoch) == 1
    assert delivery.counted("expired") == {"a": 1}
