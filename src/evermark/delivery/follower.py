"""Whoever is behind is moved on from here, on a clock of its own: the group's leftovers, subscriptions that fell
behind, parked deliveries that are due. It moves even when no new event comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from evermark import failpoint
from evermark.delivery.backlog import SPAN_ROWS_MAX, distance, level_with, next_span
from evermark.delivery.base import CursorVector, DeliveryStore, Fate, Outcome, Place, Subscription
from evermark.delivery.group import is_due
from evermark.delivery.live import GRACE_S, LiveGroup
from evermark.delivery.work import Delivered, Deliverer, Manner, Span
from evermark.log.read import FileRange

# A fresh batch is left to its hand-over for this long before the follower takes it for the group.
HANDOVER_GRACE = timedelta(seconds=0.5)
# This close to the group, the group waits while the subscription comes level and joins.
JOIN_DISTANCE_MAX = 16
JOIN_ROWS_MAX = 5_000
JOIN_BUDGET_S = 1.0
# Whoever took longer than this for its last span stays outside: in the group others would wait for it.
JOIN_PACE_S = 1.0
# What was slow this long ago may be quick by now: it is tried again.
PACE_AGE = timedelta(seconds=30)
# A span of one that is behind is left after this, so that its turn does not last for ever; if nothing was done by then,
# the next one gets twice as long.
FOLLOW_BUDGET_S = 10.0
FOLLOW_BUDGET_S_MAX = 3600.0


class LogView(Protocol):
    """What the follower needs to know of the log: how far it may read, and in which files."""

    def heads(self) -> Mapping[Place, tuple[int, datetime]]:
        """Durable head of each place, and when it moved there. Nobody delivers beyond it."""

    def files(self, source: str) -> list[FileRange]: ...


@dataclass
class Follower:
    store: DeliveryStore
    log: LogView
    live: LiveGroup
    deliverer: Deliverer
    epoch: int
    clock: Callable[[], datetime]
    on_delivered: Callable[[Place, list[Delivered]], None] = lambda _place, _results: None
    # By generation: how long the last span took and when, and how long the next one may take.
    _pace: dict[int, tuple[float, datetime]] = field(default_factory=dict, init=False)
    _budget_s: dict[int, float] = field(default_factory=dict, init=False)

    def catch_up_group(self) -> bool:
        """Deliver what hand-overs left, one span; True when there was any."""
        if not self.live.lock.acquire(blocking=False):
            return False
        try:
            cursors = self.store.group().cursors
            now = self.clock()
            for place, (head, moved_at) in sorted(self.log.heads().items()):
                after = cursors.get(place)
                if after is None:
                    self.store.open_place(place, 0, self.epoch)
                    return True
                if after >= head or (head - after == 1 and now - moved_at < HANDOVER_GRACE):
                    continue
                span = self._span(place, after, head)
                if span is not None:
                    return self.live.work(span, budget_s=None)
            return False
        finally:
            self.live.lock.release()

    def due(self) -> list[Subscription]:
        """Subscriptions outside the group whose time has come. A suspended one is still probed, seldom."""
        now = self.clock()
        return [s for s in self.store.subscriptions().values() if is_due(s, now)]

    def catch_up(self, subscription: Subscription) -> bool:
        """One span for a subscription that is behind, or its return into the group; True when it may go on at once."""
        mine = self.store.cursors(subscription.name)
        theirs = self.store.group().cursors
        if not _comparable(mine, theirs):
            return False
        pace_s = self._pace_s(subscription)
        quick = subscription.failures == 0 and (pace_s is None or pace_s <= JOIN_PACE_S)
        if level_with(mine, theirs) and subscription.failures == 0:
            return quick and self._join(subscription)
        # The group waits only for a receiver whose last delivery went well, and quickly: no other may hold it up.
        if quick and pace_s is not None and distance(mine, theirs) <= JOIN_DISTANCE_MAX:
            return self._rejoin(subscription)
        for place in sorted(theirs):
            span = self._span(place, mine.get(place, 0), theirs[place])
            if span is not None:
                budget_s = self._budget_s.get(subscription.generation, FOLLOW_BUDGET_S)
                return self._work(subscription, span, budget_s=budget_s)
        return self._rejoin(subscription)

    def _rejoin(self, subscription: Subscription) -> bool:
        """The group stands still while the last few batches are delivered: then both are level, and it joins."""
        before: CursorVector | None = None
        with self.live.lock:
            while True:
                mine = self.store.cursors(subscription.name)
                if mine == before:
                    return False  # delivered, but not passed: there is no room to park what was refused
                theirs = self.store.group().cursors
                if not _comparable(mine, theirs):
                    return False
                if level_with(mine, theirs):
                    return self._join(subscription)
                place = next((p for p in sorted(theirs) if mine.get(p, 0) < theirs[p]), None)
                if place is None:
                    return False  # ahead of the group, which its own leftovers will bring level
                before = mine
                span = self._span(place, mine.get(place, 0), theirs[place], rows_max=JOIN_ROWS_MAX)
                if span is None or not self._work(subscription, span, budget_s=JOIN_BUDGET_S, grace_s=GRACE_S):
                    return False

    def _join(self, subscription: Subscription) -> bool:
        joined = self.store.join(subscription.name, self.epoch)
        if joined:
            # When it leaves again, how quick it was before says nothing.
            self._pace.pop(subscription.generation, None)
        return joined

    def _work(self, subscription: Subscription, span: Span, *, budget_s: float, grace_s: float | None = None) -> bool:
        # Being late is what `historical` says; the delivery keeps the event's own id, so a repeat is still a repeat.
        held = self.store.held_keys() if subscription.spec.ordered else {}
        probe = subscription.failures > 0
        manner = Manner(historical=True, budget_s=budget_s, grace_s=grace_s, probe=probe, held=held)
        began = self.clock()
        (result,) = self.deliverer.deliver(span, [subscription.spec], manner)
        self._learn(subscription, span, result, (self.clock() - began).total_seconds(), budget_s)
        failpoint.hit("settle.begun")
        at = span.after
        for done_to, outcome in stages(span, result):
            self.store.settle_subscription(
                subscription.name,
                span.place,
                at,
                done_to,
                outcome,
                self.clock(),
                self.epoch,
                generation=subscription.generation,
            )
            at = done_to
        failpoint.hit("settle.done")
        self.on_delivered(span.place, [result])
        return result.outcome.fate is Fate.DONE

    def _pace_s(self, subscription: Subscription) -> float | None:
        took_s, at = self._pace.get(subscription.generation, (None, self.clock()))
        return None if self.clock() - at > PACE_AGE else took_s

    def _learn(self, subscription: Subscription, span: Span, result: Delivered, took_s: float, budget_s: float) -> None:
        """How quick it is, and how much time it needs to get anywhere."""
        number, done = subscription.generation, result.outcome.fate is Fate.DONE
        self._pace[number] = (took_s if done else max(took_s, 2 * JOIN_PACE_S), self.clock())
        if result.outcome.fate is Fate.UNFINISHED and result.done_to <= span.after:
            self._budget_s[number] = min(FOLLOW_BUDGET_S_MAX, 2 * max(budget_s, FOLLOW_BUDGET_S))
        elif result.done_to > span.after:
            self._budget_s.pop(number, None)

    def _span(self, place: Place, after: int, head: int, rows_max: int = SPAN_ROWS_MAX) -> Span | None:
        if after >= head:
            return None
        return next_span(place, after, head, self.log.files(place.source), rows_max)


def _comparable(mine: CursorVector, theirs: CursorVector) -> bool:
    """False for one that joined meanwhile: members have no cursors of their own, and must not be sent the whole log.

    Also while a place is being opened, which one of the two has not seen yet.
    """
    return mine.keys() == theirs.keys()


def stages(span: Span, result: Delivered) -> list[tuple[int, Outcome]]:
    """A span that ended badly is settled in two: the batches that were done, then the failure that moves nothing."""
    outcome = result.outcome
    if outcome.fate is Fate.DONE:
        return [(result.done_to, outcome)]
    done = Outcome(outcome.subscription, Fate.DONE, outcome.accepted, outcome.parked, expired=outcome.expired)
    failed = Outcome(outcome.subscription, outcome.fate, 0, (), outcome.reason, outcome.retry_after_s)
    before = [(result.done_to, done)] if result.done_to > span.after else []
    return [*before, (span.to, failed)]
