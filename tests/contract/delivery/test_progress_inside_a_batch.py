"""A batch that fails in its middle goes on near where it stopped: over restarts, in order, and nothing is lost.

The store is a real Postgres; the decisions, the group, the follower, the sink and its requests are the real ones; the
log and the clock are the test's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.model import Cursor, GroupWork, MadeBy, Outcome, SourcePartition
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.webhook.base import Job
from evermark.delivery.webhook.sink import WebhookSink
from evermark.delivery.work import Assignment, DeliveryOptions, Result, Span, fold
from evermark.log.read import FileRange
from evermark.state.connection import State
from evermark.testing.contracts.scene import P0, T0
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners
from tests.contract.webhook.webhook_receiver import Got, Receiver, events, spec_for

ROWS = 200
KEYS = 7
CONCURRENCY = 4


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


class World:
    """One subscription, and a log of one large batch. `start` is what a new process would do."""

    def __init__(self, state: State, sink: WebhookSink) -> None:
        self.now, self._sink = T0, sink
        self._rows = events(ROWS, batch_rows=ROWS, keys=KEYS).combine_chunks().to_batches()[0]
        self.store = PostgresDelivery(state, jitter=lambda: 0.0, clock=self.clock)
        self._take_over = owners(PostgresLeases(state, is_gone=lambda holder: True))
        self.start()
        self.store.open_partition(P0, 0, self.epoch)

    def start(self) -> None:
        self.epoch = self._take_over(DELIVER_LEASE)
        live = LiveGroup(self.store, self, self.epoch, self.clock)
        self.follower = Follower(self.store, self, live, self, self.epoch, self.clock)

    def clock(self) -> datetime:
        return self.now

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        return {P0: (1, self.now - timedelta(seconds=10))}

    def files(self, source: str) -> list[FileRange]:
        return [FileRange("b1", 0, 0, 1, 1, ROWS, 100)]

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        (assignment,) = assignments
        job = Job(
            assignment.spec, self._left(assignment.span), parked_room=assignment.parked_room, probe=assignment.probe
        )
        results = self._sink.deliver([job], 30)
        return fold(assignments, [Result(P0, r.batch, r.outcome, r.through) for r in results])

    def _left(self, span: Span) -> pa.RecordBatch:
        return self._rows.filter(pc.greater(self._rows["position"], span.begun.through))

    def turn(self) -> None:
        self.now += timedelta(seconds=30)
        self.follower.catch_up_group()
        for one in self.follower.due():
            self.follower.catch_up(one)

    def at(self) -> int:
        """How many events of the batch are kept as done."""
        through = self.store.cursors("billing").get(P0, Cursor(0)).through
        return 1 + int(through) if through else 0


def flaky(every: int, refused: frozenset[str] = frozenset()) -> object:
    """A receiver that goes down for a while after every so many events, and refuses some for good."""
    taken = [0]

    def answer(got: Got) -> int:
        if got.ids[0] in refused:
            return 422
        taken[0] += 1
        return 408 if taken[0] % every == 0 else 200  # a failure that is no hiccup

    return answer


@pytest.mark.parametrize("ordered", [False, True])
def test_d1_a_batch_goes_on_where_it_stopped_over_failures_and_restarts(
    state: State, receiver: Receiver, sink: WebhookSink, ordered: bool
) -> None:
    """GIVEN one that fails every 30 events of a batch of 200 WHEN each process ends after a turn THEN it gets through.

    In order per key, with no more sent twice than were under way, and what it refuses is parked once.
    """
    refused = frozenset({"e10", "e150"})
    receiver.answer = flaky(30, refused)  # type: ignore[assignment]
    world = World(state, sink)
    spec = spec_for(receiver.url, concurrency=CONCURRENCY, ordered=ordered)
    world.store.register([spec], MadeBy.FILE, {"billing": {P0: Cursor(0)}}, world.epoch)
    world.store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset()), [], T0, world.epoch)
    kept = [0]
    while not world.store.cursors("billing") or world.store.cursors("billing")[P0].batch == 0:
        assert len(kept) < 40, f"no end: {kept}"
        world.turn()
        world.start()  # a new process, which knows nothing but what is in the store
        kept.append(world.at())
    assert kept[:-1] == sorted(kept[:-1]) and len(set(kept)) > 3, f"it goes forward, by pieces: {kept}"
    parked = [row.event.event_id for row in world.store.parked.rows("billing", limit=1_000)]
    held = {f"e{n}" for n in range(ROWS) if ordered and any(n % KEYS == int(r[1:]) % KEYS for r in refused)}
    taken = [ident for ident in receiver.ids if ident not in refused]
    first = list(dict.fromkeys(taken))
    assert set(first) | set(parked) == {f"e{n}" for n in range(ROWS)}, "nothing is lost"
    assert set(parked) >= refused and set(parked) <= refused | held
    for key in range(KEYS):
        mine = [int(ident[1:]) for ident in first if int(ident[1:]) % KEYS == key]
        assert mine == sorted(mine), f"key {key} came out of order"
    assert len(taken) - len(first) <= len(kept) * 3 * KEYS, "it began again from far back"


def test_d1_one_that_leaves_the_group_is_served_from_where_it_got_to(
    state: State, receiver: Receiver, sink: WebhookSink
) -> None:
    """GIVEN a member WHEN its receiver fails in the middle of a batch THEN it leaves, and gets the rest."""
    receiver.answer = flaky(101)  # type: ignore[assignment]
    world = World(state, sink)
    world.store.register([spec_for(receiver.url, concurrency=1)], MadeBy.FILE, {}, world.epoch)
    world.follower.catch_up_group()
    assert (world.store.group().members, world.at()) == (frozenset(), 100)
    world.start()
    world.turn()
    assert receiver.ids == [f"e{n}" for n in [*range(101), *range(100, ROWS)]]
    assert world.store.group().members | {"billing"} == {"billing"}


def test_d10_a_full_queue_takes_what_it_has_room_for_and_the_rest_comes_later(
    state: State, receiver: Receiver, sink: WebhookSink
) -> None:
    """GIVEN room for three WHEN all events of a batch are refused THEN three are parked, and the others come when
    there is room: also those of a batch with more refusals than may ever be parked.
    """
    receiver.answer = lambda got: 422
    world = World(state, sink)
    spec = spec_for(receiver.url, concurrency=1, parked_max=3)
    world.store.register([spec], MadeBy.FILE, {"billing": {P0: Cursor(0)}}, world.epoch)
    world.store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset()), [], T0, world.epoch)
    world.turn()
    assert [row.event.event_id for row in world.store.parked.rows("billing")] == ["e0", "e1", "e2"]
    assert (world.store.parked.room(["billing"]), world.at()) == ({"billing": 0}, 3)
    world.store.parked.drop([row.id for row in world.store.parked.rows("billing")], world.epoch)
    world.now += timedelta(minutes=20)
    world.turn()
    assert [row.event.event_id for row in world.store.parked.rows("billing")] == ["e3", "e4", "e5"]
    assert world.at() == 6
