"""D3: delivering, publishing a key and flushing what waited, in every order there is; and the bugs that shows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.bots import forward
from evermark.delivery.bots.views import BotViews
from evermark.delivery.model import BotSpec, BotView, Cursor, GroupWork, Parked, ParkedEvent
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.store.memory_bots import MemoryBots
from evermark.delivery.store.memory_parked import MemoryParked, MemoryTables
from evermark.delivery.work import Span
from evermark.event import EVENT
from evermark.testing.contracts.scene import P0, T0, begin, done, event
from evermark.testing.states import owners

WISH = BotSpec("shop", "helper", device="phone", inbox="room")
BATCHES = 2
TURNS = 2  # of the queue, before everything comes to rest


class Run:
    """One order of the steps of three: the group (D), the queue (Q), and a person who publishes the key (P)."""

    def __init__(self, bug: type | None = None) -> None:
        leases = MemoryLeases(is_gone=lambda holder: True)
        self.store = MemoryDelivery(leases, jitter=lambda: 0.0)
        for part in (self.store.parked, self.store.bots, self.store.tables):
            if bug is not None and issubclass(bug, type(part)):
                part.__class__ = bug
        self.take_over = lambda: owners(leases)(DELIVER_LEASE)
        self.epoch = self.take_over()
        begin(self.store, self.epoch, "bot", bot=WISH)
        self.bot_views = BotViews(self.store.bots, lambda _source: [], self.epoch, lambda *_: [])
        self.handled: list[str] = []
        self.published = False
        self.sent_early = False

    def steps(self, fault: str) -> dict[str, Iterator[None]]:
        return {"D": self._deliver(), "Q": self._flush(fault), "P": self._publish()}

    def _deliver(self) -> Iterator[None]:
        for batch in range(1, BATCHES + 1):
            view = self.bot_views.views(self._specs(), Span(P0, Cursor(batch - 1), batch, (), 1, exact=True))["bot"]
            parked = self._post(batch, view)
            yield
            self.store.settle_group(
                GroupWork(P0, Cursor(batch - 1), Cursor(batch), frozenset({"bot"})),
                [done("bot", *parked)],
                T0,
                self.epoch,
            )
            yield

    def _specs(self) -> list[Any]:
        return [found.spec for found in self.store.subscriptions().values()]

    def _post(self, batch: int, view: BotView) -> list[ParkedEvent]:
        """What a task does: sends what is clear, and parks the rest."""
        made = replace(event(batch, status=None, stream="room"), session="s1")
        if forward.waiting(ROW, view):
            return [made]
        self._handle(made)
        return []

    def _handle(self, made: ParkedEvent) -> None:
        self.sent_early = self.sent_early or not self.published
        if made.event_id not in self.handled:
            self.handled.append(made.event_id)

    def _flush(self, fault: str) -> Iterator[None]:
        for turn in range(TURNS):
            rows = self.store.parked.claim(T0, 10, 60, self.epoch)
            yield
            if fault == "busy" and turn == 0:
                for row in rows:
                    self._put_back(row)
                rows = []
            for row in rows:
                self._handle(row.event)
            if fault == "crash" and turn == 0:  # after it sent, before it said so
                self.epoch = self.bot_views.epoch = self.take_over()
            else:
                self.store.parked.delivered([row.id for row in rows], self.epoch)
            yield

    def _put_back(self, row: Parked) -> None:
        later = T0 + timedelta(minutes=1)
        self.store.parked.reschedule(row, next_attempt_at=later, attempts=0, reason="409", status=409, epoch=self.epoch)

    def _publish(self) -> Iterator[None]:
        self.published = True
        self.store.bots.publish("phone", {"s1": "sealed"}, T0, self.epoch)
        yield

    def come_to_rest(self) -> None:
        for _ in range(BATCHES + 1):
            rows = self.store.parked.claim(T0 + timedelta(minutes=5), 10, 60, self.epoch)
            for row in rows:
                self._handle(row.event)
            self.store.parked.delivered([row.id for row in rows], self.epoch)


ROW = pa.RecordBatch.from_pylist(
    [
        {
            "event_id": "e",
            "source": "shop",
            "partition": 0,
            "position": "",
            "batch": 1,
            "stream": "room",
            "op": "message",
        }
        | {"ingested_at": 0, "payload": json.dumps({"kind": "message", "creator": "alice", "tags": {"session": "s1"}})}
    ],
    schema=EVENT,
)


def orders(left: dict[str, int]) -> Iterator[str]:
    if not any(left.values()):
        yield ""
    for who, steps in left.items():
        if steps:
            yield from (who + rest for rest in orders({**left, who: steps - 1}))


def broken(bug: type | None, fault: str) -> Iterator[str]:
    """What is wrong, in which order."""
    for order in orders({"D": 2 * BATCHES, "Q": 2 * TURNS, "P": 1}):
        run = Run(bug)
        steps = run.steps(fault)
        for who in order:
            next(steps[who])
        run.come_to_rest()
        wanted = [f"e{n}" for n in range(1, BATCHES + 1)]
        if run.handled != wanted:
            yield f"{order}: {run.handled}"
        if run.sent_early:
            yield f"{order}: sent without a key"
        if run.store.parked.rows():
            yield f"{order}: stuck"


FAULTS = ("", "crash", "busy")


@pytest.mark.parametrize("fault", FAULTS)
def test_d3_whatever_the_order_nothing_is_stuck_overtaken_or_lost(fault: str) -> None:
    """GIVEN every order of delivery, flush and key, with a crash or a busy receiver THEN all is handled, in order, and
    nothing before its key is there."""
    assert list(broken(None, fault)) == []


class _NotReleased(MemoryBots):
    """Publishing releases nothing."""

    def _make_due(self, now: Any, which: Callable[[str, str], bool]) -> int:
        return 0


class _NotHeldBehind(MemoryBots):
    """Newer events of a session with a key do not look at the queue."""

    def _queued(self, subscriptions: Any, replay_id: str = "") -> dict[str, frozenset[str]]:
        return {}


class _ReleasedTooSoon(MemoryTables):
    """What waits is due whether the key is there or not."""

    def lacks_key(self, subscription: str, session: str) -> bool:
        return False


class _DecidedBefore(MemoryTables):
    """Whether it waits is decided by what was seen before, not when it is parked."""

    def lacks_key(self, subscription: str, session: str) -> bool:
        return True


class _Unordered(MemoryParked):
    """Those of a session are claimed in any order."""

    def claim(self, *given: Any, **named: Any) -> list[Any]:
        return super().claim(*given, **named)[::-1]


class _ClaimedBehindOneUnderWay(MemoryParked):
    """One that is under way holds nobody of its session back."""

    def _before_in_session(self, row: Any) -> list[Any]:
        return []


class _KeyNotVisible(MemoryBots):
    """The key is published, and what waits released, one after the other: the first look misses the second."""

    def _published(self, devices: Any) -> dict[str, frozenset[str]]:
        return dict.fromkeys(devices, frozenset({"s1"}))


MUTANTS: Sequence[type] = (
    _NotReleased,
    _NotHeldBehind,
    _ReleasedTooSoon,
    _DecidedBefore,
    _Unordered,
    _ClaimedBehindOneUnderWay,
    _KeyNotVisible,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_d3_each_of_these_bugs_is_found(mutant: type) -> None:
    """GIVEN a store with a bug THEN some order shows it: the test above is worth something."""
    assert next((said for fault in FAULTS for said in broken(mutant, fault)), None)


class _WithdrawnBetweenLooks(MemoryBots):
    """Somebody withdraws the key as soon as it was seen to be published, unless nobody can just then."""

    def _published(self, devices: Any) -> dict[str, frozenset[str]]:
        found = super()._published(devices)
        somebody = threading.Thread(target=self._withdraw)
        somebody.start()
        somebody.join(30)
        return found

    def _withdraw(self) -> None:
        if self._tables.lock.acquire(blocking=False):
            try:
                self.withdraw("phone", "s1", T0, 1)  # by the first owner
            finally:
                self._tables.lock.release()


def test_d3_what_is_published_and_what_is_queued_are_seen_at_one_moment() -> None:
    """GIVEN events of a session in the queue WHEN its key is withdrawn during the look THEN the session is not clear:
    newer events do not go before those that wait now."""
    run = Run(_WithdrawnBetweenLooks)
    run.store.bots.publish("phone", {"s1": "sealed"}, T0, run.epoch)
    parked = replace(event(1, status=None, stream="room"), session="s1")
    run.store.settle_group(
        GroupWork(P0, Cursor(0), Cursor(1), frozenset({"bot"})), [done("bot", parked)], T0, run.epoch
    )
    view = run.bot_views.views(run._specs(), Span(P0, Cursor(1), 2, (), 1, exact=True))["bot"]
    assert view.clear == frozenset()
