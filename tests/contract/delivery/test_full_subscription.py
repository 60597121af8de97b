"""A subscription with too much parked stops without a failure, drains, and comes back by itself (D5, D7, D10).

The store, the decisions, the group, the follower, the queue, the sink and its requests are the real ones; the log and
the clock are the test's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.retry import ENDPOINT_BACKOFF_S_MAX, LIMITS
from evermark.delivery.model import MadeBy, Outcome, SourcePartition, Subscription, SubscriptionState
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.run.parked_retries import ParkedQueue
from evermark.delivery.run.post import held_lines
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.webhook import dispatch
from evermark.delivery.webhook.base import Job, as_it_is
from evermark.delivery.webhook.sink import WebhookSink
from evermark.delivery.work import Assignment, DeliveryOptions, Result, Span, fold
from evermark.log.read import FileRange
from evermark.testing.at_once import AtOnce
from evermark.testing.contracts.scene import P0, T0
from tests.contract.webhook.webhook_receiver import Receiver, events, spec_for

BATCH_ROWS = 4
HELD_MAX = 5
TURNS_MAX = 300


class World:
    """One ordered subscription, and a log of batches of four events of one key."""

    def __init__(self, receiver: Receiver, sink: WebhookSink, **settings: object) -> None:
        self.now, self.head, self._sink = T0, 0, sink
        self._events = events(100, batch_rows=BATCH_ROWS, keys=1)
        leases = MemoryLeases(is_gone=lambda holder: True)
        lease = leases.acquire(DELIVER_LEASE, Holder("i", "h", "b", 1, "1"), 1e9)
        assert lease is not None
        self.store = MemoryDelivery(leases, jitter=lambda: 0.0, clock=self.clock)
        self.store.open_partition(P0, 0, lease.epoch)
        self.store.register([spec_for(receiver.url, ordered=True, **settings)], MadeBy.FILE, {}, lease.epoch)
        self.live = LiveGroup(self.store, self, lease.epoch, self.clock)
        self.follower = Follower(self.store, self, self.live, self, lease.epoch, self.clock)
        log: Any = None
        self.queue = ParkedQueue(self.store, sink, as_it_is, lease.epoch, AtOnce(self.clock), log)

    def clock(self) -> datetime:
        return self.now

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        return {P0: (self.head, self.now - timedelta(seconds=10))}

    def files(self, source: str) -> list[FileRange]:
        return [FileRange(f"b{n}", 0, 0, n, n, BATCH_ROWS, 100) for n in range(1, self.head + 1)]

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        (assignment,) = assignments
        rows = self._rows(assignment.span)
        held = held_lines(rows, options.held.get(assignment.spec.name, {}))
        results = self._sink.deliver([Job(assignment.spec, rows, held=held, parked_room=assignment.parked_room)], 5)
        return fold(assignments, [Result(P0, r.batch, r.outcome, r.through) for r in results])

    def _rows(self, span: Span) -> pa.RecordBatch:
        rows = self._events.slice(span.after * BATCH_ROWS, (span.to - span.after) * BATCH_ROWS)
        new = pc.or_(pc.greater(rows["batch"], span.after + 1), pc.greater(rows["position"], span.begun.through))
        return rows.filter(new).combine_chunks().to_batches()[0]

    def turn(self, seconds: float = 1.0, *, batches: int = 0) -> None:
        self.head += batches
        self.now += timedelta(seconds=seconds)
        self.follower.catch_up_group()
        for one in self.follower.due():
            self.follower.catch_up(one)
        self.queue.run()

    @property
    def found(self) -> Subscription:
        return self.store.subscription("billing")

    @property
    def standing(self) -> tuple[SubscriptionState, int]:
        return self.found.state, self.found.failures


@pytest.mark.parametrize("settings", [{}, {"parked_max": 6}], ids=["of one key", "of all"])
def test_one_that_is_full_stops_without_a_failure_and_comes_back_once_its_rows_are_taken(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    """GIVEN a key that is refused WHEN no more may be parked THEN suspended; WHEN accepted THEN all of it, in order."""
    if not settings:
        monkeypatch.setattr(dispatch, "HELD_PER_LINE_MAX", HELD_MAX)
    world = World(receiver, sink, **settings)
    receiver.answer = lambda got: 422 if got.ids == ["e0"] else 200
    world.turn(batches=1)
    assert world.standing == (SubscriptionState.LIVE, 0)
    world.turn(batches=1)
    assert world.standing == (SubscriptionState.SUSPENDED, 0), "at once, and not for a failure"
    assert world.store.parked.counts() == {"billing": {"waiting": 4, "dead": 0}}

    # WHEN it is tried again more often than an endpoint may fail
    for _ in range(2 * LIMITS.suspend_after):
        world.turn(2 * ENDPOINT_BACKOFF_S_MAX)
        assert world.standing == (SubscriptionState.SUSPENDED, 0)
    assert world.store.cursors("billing")[P0].batch == 1
    assert set(receiver.ids) == {"e0"}

    # WHEN the receiver changes its mind
    receiver.answer = lambda got: 200
    receiver.got.clear()
    world.store.parked.release([row.id for row in world.store.parked.rows()], world.now, world.queue.epoch)
    for _ in range(TURNS_MAX):
        world.turn(30)
        if world.found.state is SubscriptionState.LIVE:
            break
    assert world.standing == (SubscriptionState.LIVE, 0)
    assert receiver.ids == [f"e{n}" for n in range(2 * BATCH_ROWS)]
    assert world.store.parked.rows() == []


def test_one_that_is_full_and_then_fails_comes_back_too(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a full one WHEN its receiver is down for an hour, then well THEN it drains and comes back."""
    monkeypatch.setattr(dispatch, "HELD_PER_LINE_MAX", HELD_MAX)
    world = World(receiver, sink)
    receiver.answer = lambda got: 422
    world.turn(batches=1)
    world.turn(batches=1)
    receiver.answer = lambda got: 408  # as a receiver that is down: a failure that is no hiccup
    for _ in range(20):
        world.turn(30)
    receiver.got.clear()
    for _ in range(100):
        world.turn(30)
    assert world.found.state is SubscriptionState.SUSPENDED
    assert 5 <= len(receiver.got) <= 15, "every five minutes or so, as any that is down: being full makes it no more"
    receiver.answer = lambda got: 200
    receiver.got.clear()
    for _ in range(TURNS_MAX):
        world.turn(60)
        if world.found.state is SubscriptionState.LIVE:
            break
    assert world.standing == (SubscriptionState.LIVE, 0)
    assert receiver.ids == [f"e{n}" for n in range(2 * BATCH_ROWS)]


def test_a_batch_with_more_refusals_than_may_be_parked_passes_once_they_are_taken(
    receiver: Receiver, sink: WebhookSink
) -> None:
    """GIVEN room for three WHEN four of a batch are refused THEN three are parked; then back by itself."""
    world = World(receiver, sink, parked_max=BATCH_ROWS - 1)
    receiver.answer = lambda got: 422
    for _ in range(LIMITS.suspend_after + 2):
        world.turn(2 * ENDPOINT_BACKOFF_S_MAX, batches=1)
        assert world.standing == (SubscriptionState.SUSPENDED, 0)
    assert world.store.parked.counts()["billing"] == {"waiting": 3, "dead": 0}
    receiver.answer = lambda got: 200
    receiver.got.clear()
    world.store.parked.release([row.id for row in world.store.parked.rows()], world.now, world.queue.epoch)
    for _ in range(TURNS_MAX):
        world.turn(30)
        if world.found.state is SubscriptionState.LIVE:
            break
    assert world.standing == (SubscriptionState.LIVE, 0)
    assert receiver.ids == [f"e{n}" for n in range(world.head * BATCH_ROWS)]
