"""Whoever is behind is moved on from here, on a clock of its own: the group's leftovers, subscriptions that fell
behind, parked deliveries that are due. It moves even when no new event comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Protocol

from evermark import failpoint
from evermark.delivery.base import CursorVector, DeliveryStore, Fate, Outcome, Reached, SourcePartition, Subscription
from evermark.delivery.bots.views import BotViews
from evermark.delivery.decide.backlog import SPAN_ROWS_MAX, distance, expired_to, level_with, next_span
from evermark.delivery.decide.expiry import expires_before
from evermark.delivery.decide.group import is_due, is_stopped
from evermark.delivery.decide.retry import ENDPOINT_BACKOFF_S_MAX
from evermark.delivery.decide.turns import TURN_S, TurnClass
from evermark.delivery.run.live import GRACE_S, LiveGroup
from evermark.delivery.work import Assignment, Delivered, Deliverer, DeliveryOptions, Span
from evermark.errors import ConflictError, EvermarkError, StaleError
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
# A span of one that is behind is left after this, so that its turn does not last for ever. What it got is kept, also
# inside a batch; if not a single event was done by then, the next turn is twice as long.
FOLLOW_BUDGET_S = TURN_S
FOLLOW_BUDGET_S_MAX = 7 * 86_400.0
GROUP_ROWS_PER_S_MIN = 200
# What the group got of a batch is not kept before the batch is done: whoever needs longer is served by itself.
GROUP_BUDGET_S_MAX = 300.0
LATE_BUDGET_S = 1.0
# Those who are served together get no more than this at a time: it ends soon, and nobody waits for another's backlog.
SHARED_ROWS_MAX = 1_000
# Whoever failed last time is asked with a few events, however many wait: most often the answer is no once more.
PROBE_ROWS_MAX = 100


class LogView(Protocol):
    """What the follower needs to know of the log: how far it may read, and in which files."""

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
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
    on_delivered: Callable[[SourcePartition, list[Delivered]], None] = lambda _place, _results: None
    bot_views: BotViews | None = None  # needed where there are bots
    # By generation: how long the last span took and when, and how long the next one may take.
    _pace: dict[int, tuple[float, datetime]] = field(default_factory=dict, init=False)
    _budget_s: dict[int, float] = field(default_factory=dict, init=False)
    # Generations that were quick, and close enough to the group to join it at their next turn.
    _near: set[int] = field(default_factory=set, init=False)
    # Generations whose last assignment could not be done at all: their files cannot be read, perhaps.
    _alone: set[int] = field(default_factory=set, init=False)
    # By generation: until when one that fails and is full is left to the queue, which alone can find out more.
    _full: dict[int, datetime] = field(default_factory=dict, init=False)

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
                    self.store.open_partition(place, 0, self.epoch)
                    return True
                if after >= head or (head - after == 1 and now - moved_at < HANDOVER_GRACE):
                    continue
                span = self._span(place, after, head)
                if span is not None:
                    # As long as a receiver needs that is not quick; whoever needs longer is served beside the group.
                    budget_s = min(GROUP_BUDGET_S_MAX, span.rows / GROUP_ROWS_PER_S_MIN)
                    return self.live.work(span, budget_s=max(FOLLOW_BUDGET_S, budget_s))
            return False
        finally:
            self.live.lock.release()

    def due(self) -> list[Subscription]:
        """Subscriptions outside the group whose time has come. A suspended one is still probed, seldom."""
        now = self.clock()
        due = [s for s in self.store.outside().values() if is_due(s, now)]
        return [s for s in due if not s.failures or self._full.get(s.generation, now) <= now]

    def turn_class(self, subscription: Subscription) -> TurnClass:
        """With whom one may be served: whoever makes others wait shares with those who do so too."""
        if subscription.generation in self._alone:
            return TurnClass.NONE
        if subscription.failures > 0:
            return TurnClass.FAILING
        if subscription.generation in self._budget_s:
            return TurnClass.NONE  # needs more time than anybody else would wait
        pace_s = self._pace_s(subscription)
        if pace_s is None:
            return TurnClass.LATE if self.live.was_slow(subscription.name, self.clock() - PACE_AGE) else TurnClass.NONE
        if pace_s > JOIN_PACE_S:
            return TurnClass.SLOW
        return TurnClass.NEAR if subscription.generation in self._near else TurnClass.NONE

    def catch_up(self, *subscriptions: Subscription) -> frozenset[str]:
        """One span for each of some that are behind, or its return into the group: who may go on at once."""
        theirs = self.store.group().cursors
        most = SPAN_ROWS_MAX if len(subscriptions) == 1 else SHARED_ROWS_MAX
        on: set[str] = set()
        near: list[Subscription] = []
        away: list[tuple[Subscription, Span]] = []
        for subscription, mine in self._current(subscriptions):
            if not _comparable(mine, theirs):
                continue
            pace_s = self._pace_s(subscription)
            late = self.turn_class(subscription) is TurnClass.LATE
            quick = subscription.failures == 0 and not late and (pace_s is None or pace_s <= JOIN_PACE_S)
            if level_with(mine, theirs):
                # A suspended one waits here for an event to be tried with.
                if (quick or subscription.failures > 0) and self._join(subscription):
                    on.add(subscription.name)
                continue
            rows_max = PROBE_ROWS_MAX if subscription.failures else most
            # The group waits only for a receiver whose last delivery went well, and quickly: no other may hold it up.
            span = next((s for p in sorted(theirs) if (s := self._span(p, mine.get(p, 0), theirs[p], rows_max))), None)
            is_near = quick and pace_s is not None and distance(mine, theirs) <= JOIN_DISTANCE_MAX
            if is_near or span is None:
                near.append(subscription)
            else:
                away.append((subscription, span))
                left = distance(mine, theirs) - (span.to - span.after)
                (self._near.add if left <= JOIN_DISTANCE_MAX else self._near.discard)(subscription.generation)
        if away and all(self.turn_class(subscription) is TurnClass.LATE for subscription, _ in away):
            # Most of them are well, and wait here for those that are not.
            on |= self._work(away, budget_s=LATE_BUDGET_S, grace_s=GRACE_S)
        elif away:
            budget_s = max(self._budget_s.get(subscription.generation, FOLLOW_BUDGET_S) for subscription, _ in away)
            on |= self._work(away, budget_s=budget_s)
        return frozenset(on | self._rejoin(near) if near else on)

    def expire_stopped(self, over: Callable[[], bool] = lambda: False) -> set[str]:
        """Move those that are paused or disabled over what is older than their `ttl`, counted; who was moved.

        Nobody else would, and what they have not passed the log must keep.
        """
        moved: set[str] = set()
        for subscription in self.store.subscriptions().values():
            while is_stopped(subscription) and not over():
                span = self._expired_span(subscription)
                if span is None:
                    break
                try:
                    done = self._work([(subscription, span)], budget_s=FOLLOW_BUDGET_S, sends=False)
                except ConflictError:
                    break  # a person acted meanwhile
                if not done:
                    break
                moved |= done
        return moved

    def _expired_span(self, subscription: Subscription) -> Span | None:
        before = expires_before(subscription, self.clock())
        if before is None:
            return None
        mine = self.store.cursors(subscription.name)
        for place, (head, _) in sorted(self.log.heads().items()):
            after = mine.get(place)
            if after is not None and after < head:
                to = expired_to(place, after, head, self.log.files(place.source), before)
                if (span := self._span(place, after, to)) is not None:
                    return span
        return None

    def _current(self, subscriptions: Sequence[Subscription]) -> list[tuple[Subscription, CursorVector]]:
        """Those that are still there, as they are now, and where they stand.

        To be asked after the group's cursors: a batch that was taken after a wish was changed is not delivered by the
        former wish. And the wish after the cursors, so that nobody is served by another's who had its name.
        """
        cursors = {one.name: self.store.cursors(one.name) for one in subscriptions}
        known = self.store.outside()
        now = [(known[one.name], one) for one in subscriptions if one.name in known]
        return [(found, cursors[one.name]) for found, one in now if found.generation == one.generation]

    def _rejoin(self, subscriptions: Sequence[Subscription]) -> set[str]:
        """The group stands still while the last few batches are delivered: then all are level, and they join."""
        before: dict[str, CursorVector] = {}
        on: set[str] = set()
        waiting = list(subscriptions)
        with self.live.lock:
            while waiting:
                theirs = self.store.group().cursors
                away: list[tuple[Subscription, Span]] = []
                for subscription, mine in self._current(waiting):
                    # Delivered, but not passed: there is no room to park what was refused.
                    if mine == before.get(subscription.name) or not _comparable(mine, theirs):
                        continue
                    if level_with(mine, theirs):
                        if self._join(subscription):
                            on.add(subscription.name)
                        continue
                    before[subscription.name] = mine
                    spans = (self._span(p, mine.get(p, 0), theirs[p], JOIN_ROWS_MAX) for p in sorted(theirs))
                    # Without one it is ahead of the group, which its own leftovers will bring level.
                    away += [(subscription, span) for span in list(filter(None, spans))[:1]]
                done = self._work(away, budget_s=JOIN_BUDGET_S, grace_s=GRACE_S) if away else set()
                waiting = [subscription for subscription, _ in away if subscription.name in done]
        return on

    def _join(self, subscription: Subscription) -> bool:
        joined = self.store.join(subscription.name, self.epoch)
        if joined:
            # When it leaves again, how quick it was before says nothing.
            self._pace.pop(subscription.generation, None)
            self._near.discard(subscription.generation)
        return joined

    def _work(
        self,
        away: Sequence[tuple[Subscription, Span]],
        *,
        budget_s: float,
        grace_s: float | None = None,
        sends: bool = True,
    ) -> set[str]:
        """Deliver these spans, all at once, and settle each; who is done with all of it."""
        away = self._from_inside(away)
        try:
            assignments = self._errands(away)
            ordered = [assignment.spec.name for assignment in assignments if assignment.spec.ordered]
            held = self.store.held_keys(ordered, {span.place for _, span in away}) if ordered else {}
            # Being late is what this says; the delivery keeps the event's own id, so a repeat is still a repeat.
            options = DeliveryOptions(historical=True, budget_s=budget_s, grace_s=grace_s, held=held, sends=sends)
            began = self.clock()
            results = self.deliverer.deliver(assignments, options)
        except EvermarkError:
            if len(away) > 1:
                return self._one_by_one(away, budget_s=budget_s, grace_s=grace_s)
            self._alone.add(away[0][0].generation)
            raise
        self._alone.difference_update(one.generation for one, _ in away)
        took_s = (self.clock() - began).total_seconds()
        failpoint.hit("settle.begun")
        done: set[str] = set()
        void: list[ConflictError] = []
        for (subscription, span), result in zip(away, results, strict=True):
            self._learn(subscription, span, result, took_s if result.took_s is None else result.took_s, budget_s)
            try:
                self._settle(subscription, span, result)
            except ConflictError as error:
                void.append(error)  # removed or made anew meanwhile: no reason to leave the others unsettled
                continue
            self.on_delivered(span.place, [result])
            if result.outcome.fate is Fate.DONE:
                done.add(subscription.name)
        failpoint.hit("settle.done")
        if void:
            raise void[0]
        return done

    def _errands(self, away: Sequence[tuple[Subscription, Span]]) -> list[Assignment]:
        room = self.store.room([one.name for one, _ in away])
        return [
            Assignment(
                span,
                one.spec,
                probe=one.failures > 0,
                expires_before=expires_before(one, self.clock()),
                bot=self.bot_views.views([one.spec], span)[one.name] if self.bot_views and one.spec.bot else None,
                parked_room=room.get(one.name),
            )
            for one, span in away
        ]

    def _from_inside(self, away: Sequence[tuple[Subscription, Span]]) -> list[tuple[Subscription, Span]]:
        """The spans, without what was done of their first batch before."""
        inside = self.store.inside([one.name for one, _ in away])
        stands = [inside.get(one.name, {}).get(span.place, Reached(span.after)) for one, span in away]
        return [
            (one, replace(span, through=at.through) if at.batch == span.after else span)
            for (one, span), at in zip(away, stands, strict=True)
        ]

    def _one_by_one(
        self, away: Sequence[tuple[Subscription, Span]], *, budget_s: float, grace_s: float | None
    ) -> set[str]:
        """The assignment of one cannot be done, and nobody knows whose: the others go on, and it is told by itself."""
        done: set[str] = set()
        problem: EvermarkError | None = None
        for one in away:
            try:
                done |= self._work([one], budget_s=budget_s, grace_s=grace_s)
            except StaleError:
                raise
            except EvermarkError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return done

    def _settle(self, subscription: Subscription, span: Span, result: Delivered) -> None:
        at = span.begun
        for done, outcome in stages(span, result):
            passed = self.store.settle_subscription(
                subscription.name,
                span.place,
                at.batch,
                done.batch,
                outcome,
                self.clock(),
                self.epoch,
                generation=subscription.generation,
                begun_through=at.through,
                done_through=done.through,
            )
            if not passed:
                return  # it stands where it stood: nothing after that can be settled
            at = done

    def _pace_s(self, subscription: Subscription) -> float | None:
        """How long its last span took; None: it is not known, or was long ago."""
        ago = self.clock() - PACE_AGE
        took_s, at = self._pace.get(subscription.generation, (None, ago))
        return took_s if at > ago else None

    def _learn(self, subscription: Subscription, span: Span, result: Delivered, took_s: float, budget_s: float) -> None:
        """How quick it is, and how much time it needs to get anywhere."""
        number, done = subscription.generation, result.outcome.fate is Fate.DONE
        self._pace[number] = (took_s if done else max(took_s, 2 * JOIN_PACE_S), self.clock())
        self._full.pop(number, None)
        if result.outcome.fate is Fate.FULL:
            self._full[number] = self.clock() + timedelta(seconds=ENDPOINT_BACKOFF_S_MAX)
        if result.done_to > span.after:
            self._budget_s.pop(number, None)
        elif result.outcome.fate is Fate.UNFINISHED and budget_s >= FOLLOW_BUDGET_S:
            # Inside a batch it goes on as it did, in turns of its own; if it got nowhere at all, in longer ones.
            times = 1 if result.reached > span.begun else 2
            self._budget_s[number] = min(FOLLOW_BUDGET_S_MAX, times * budget_s)

    def _span(self, place: SourcePartition, after: int, head: int, rows_max: int = SPAN_ROWS_MAX) -> Span | None:
        if after >= head:
            return None
        return next_span(place, after, head, self.log.files(place.source), rows_max)


def _comparable(mine: CursorVector, theirs: CursorVector) -> bool:
    """False for one that joined meanwhile: members have no cursors of their own, and must not be sent the whole log.

    Also while a place is being opened, which one of the two has not seen yet.
    """
    return mine.keys() == theirs.keys()


def stages(span: Span, result: Delivered) -> list[tuple[Reached, Outcome]]:
    """A span that ended badly is settled in two: what was done of it, then the failure that moves nothing."""
    outcome = result.outcome
    if outcome.fate is Fate.DONE:
        return [(Reached(result.done_to), outcome)]
    failed = replace(outcome, parked=(), expired=0)
    if result.reached <= span.begun:
        return [(Reached(span.to), failed)]
    done = Outcome(outcome.subscription, Fate.DONE, outcome.accepted, outcome.parked, expired=outcome.expired)
    return [(result.reached, done), (Reached(span.to), replace(failed, accepted=0))]
