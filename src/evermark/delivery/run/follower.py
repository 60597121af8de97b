"""Moves readers on that are behind, on a clock of its own: the group, where hand-overs left batches, and subscriptions
outside the group. It moves them even when no new event comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial

from evermark import failpoint
from evermark.delivery.bots.views import BotViews
from evermark.delivery.decide.backlog import SPAN_ROWS_MAX, batches, distance, expired_to, level_with, next_span
from evermark.delivery.decide.expiry import expires_before
from evermark.delivery.decide.group import is_due, is_stopped, shortened
from evermark.delivery.decide.retry import ENDPOINT_BACKOFF_S_MAX, STUCK_REST_S
from evermark.delivery.decide.turns import TURN_S, TurnClass
from evermark.delivery.model import (
    BEGINNING,
    Cursor,
    CursorVector,
    Fate,
    Outcome,
    SourcePartition,
    Subscription,
    SubscriptionState,
)
from evermark.delivery.ports import DeliveryStore, LogView
from evermark.delivery.run.live import GRACE_S, LiveGroup, may_take_s, stages
from evermark.delivery.work import Assignment, Deliverer, DeliveryOptions, Span
from evermark.error_policy import is_stuck
from evermark.errors import ConflictError, EvermarkError, FormatError, StaleError
from evermark.progress import Progress

# A fresh batch is left to its hand-over for this long before the follower takes it for the group.
HANDOVER_GRACE = timedelta(seconds=0.5)
JOIN_BUDGET_S = 1.0
# A subscription that took longer than this for its last span stays outside: in the group others would wait for it.
JOIN_PACE_S = 1.0
# A subscription that was slow this long ago may be quick by now: it is tried again.
PACE_AGE = timedelta(seconds=30)
# Work on a span of a subscription that is behind ends after this, so that its turn does not last for ever. Its cursor
# moves as far as it got, also inside a batch; if it did not move at all, the next turn is twice as long.
FOLLOW_BUDGET_S = TURN_S
FOLLOW_BUDGET_S_MAX = 7 * 86_400.0
GROUP_ROWS_PER_S_MIN = 200
# The group's cursor never stands inside a batch: a member that needs longer than this is served by itself.
GROUP_BUDGET_S_MAX = 300.0
LATE_BUDGET_S = 1.0
# A subscription that failed last time is asked with a few events, however many wait: most often it fails once more.
PROBE_ROWS_MAX = 100
# Where the log cannot be read it is tried again after this; a reader that has nothing else to read is looked at more
# often, for what comes elsewhere.
STUCK_REST = timedelta(seconds=STUCK_REST_S)
STUCK_LOOK = timedelta(seconds=1)
_GROUP = -1  # no subscription has this generation


# Begins a task that does this work.
Begin = Callable[[str, Callable[[], None]], None]
# Each subscription with the span it is to get.
Away = Sequence[tuple[Subscription, Span]]


@dataclass(frozen=True)
class FollowLimits:
    # This close to the group, the group waits while the subscription comes level and joins.
    join_distance_max: int = 16  # batches
    join_rows_max: int = 5_000
    span_rows_max: int = SPAN_ROWS_MAX
    # What the group is sent of one partition, if it is more than this, holds up no other partition; so many at once.
    beside_rows_min: int = 2_000
    beside_at_once: int = 2
    # Subscriptions that are served together get no more rows at a time, so that none waits long for another's backlog.
    shared_rows_max: int = 1_000


@dataclass
class Follower:
    store: DeliveryStore
    log: LogView
    live: LiveGroup
    deliverer: Deliverer
    epoch: int
    clock: Callable[[], datetime]
    on_delivered: Callable[[SourcePartition, list[Outcome]], None] = lambda _place, _outcomes: None
    bot_views: BotViews | None = None  # needed where there are bots
    limits: FollowLimits = FollowLimits()
    # Told when a subscription, or the group (None), cannot go on in a partition: the log cannot be read there.
    on_stuck: Callable[[SourcePartition, str | None, EvermarkError], None] = lambda *_: None
    # Whether the work ends, or the lease is lost: what is done is ended, and nothing more is begun.
    over: Callable[[], bool] = lambda: False
    # By partition, in which turn the group was caught up there last.
    _caught_up: dict[SourcePartition, int] = field(default_factory=dict, init=False)
    # By generation: how long the last span took and when, and how long the next span may take.
    _pace: dict[int, tuple[float, datetime]] = field(default_factory=dict, init=False)
    _budget_s: dict[int, float] = field(default_factory=dict, init=False)
    # By generation, the partition of the last span that was not in vain.
    _served: dict[int, SourcePartition] = field(default_factory=dict, init=False)
    # Generations that were quick, and close enough to the group to join it at their next turn.
    _near: set[int] = field(default_factory=set, init=False)
    # Generations whose last assignment could not be done at all: their files cannot be read, perhaps.
    _alone: set[int] = field(default_factory=set, init=False)
    # By generation, subscriptions that fail and have no room to park: not tried by the follower before this time;
    # retries of parked deliveries probe them meanwhile.
    _full: dict[int, datetime] = field(default_factory=dict, init=False)
    # By generation and partition, readers for which the log cannot be read: not tried there before this time, and why.
    _stuck: dict[tuple[int, SourcePartition], tuple[datetime, str]] = field(default_factory=dict, init=False)
    _stuck_all: dict[int, datetime] = field(default_factory=dict, init=False)  # that have nothing to read elsewhere
    # So many rows at a time, until they stand right before what cannot be read: half as many after a failure, twice as
    # many after a success.
    _narrow: dict[tuple[int, SourcePartition], int] = field(default_factory=dict, init=False)

    def catch_up_group(self, wait_s: float = 0.0, begin: Begin | None = None) -> bool:
        """Deliver one span of batches that hand-overs left, or begin to; True when there was any. Waits at most so long
        for a thread that works for the group. `begin`: does beside what takes long.
        """
        with self.live.alone(wait_s) as is_alone:
            if not is_alone:
                return False
            beside = self.live.beside  # before the look at the group: what was settled since is in it
            group = self.store.group()
            cursors = group.cursors
            now = self.clock()
            # Where the group was caught up longest ago: a partition that always has something new holds up no other.
            heads = sorted(self.log.heads().items(), key=lambda one: (self._caught_up.get(one[0], 0), one[0]))
            for place, (head, moved_at) in heads:
                if place in beside or self._is_stuck(_GROUP, place):
                    continue
                begun = cursors.get(place)
                if begun is None:
                    self.store.open_partition(place, 0, self.epoch)
                    return True
                if begun.batch >= head or (head - begun.batch == 1 and now - moved_at < HANDOVER_GRACE):
                    continue
                try:
                    span = self._span(place, begun, head)
                except EvermarkError as error:
                    self._require_stuck(error, Span(place, begun, head, (), 0))
                    continue
                takes_long = begin is not None and span is not None and span.rows > self.limits.beside_rows_min
                if span is not None and not (takes_long and len(beside) >= self.limits.beside_at_once):
                    self._caught_up[place] = max(self._caught_up.values(), default=0) + 1
                    # As long as a slow receiver needs; a member that needs longer is served beside the group.
                    budget_s = max(FOLLOW_BUDGET_S, min(GROUP_BUDGET_S_MAX, span.rows / GROUP_ROWS_PER_S_MIN))
                    try:
                        if begin is None or not takes_long:
                            moved = self.live.work(span, group, budget_s=budget_s)
                            self._widen(_GROUP, place)
                            return moved
                        work = self.live.begin_beside(span, group, budget_s=budget_s)
                    except EvermarkError as error:
                        self._require_stuck(error, span)
                        if self.over():
                            return False
                        continue  # the group goes on in the other partitions
                    begin(f"group {place}", partial(self._unless_stuck, work, span))
                    return True
            return False

    def _unless_stuck(self, work: Callable[[], None], span: Span) -> None:
        try:
            work()
        except EvermarkError as error:
            self._require_stuck(error, span)
        else:
            self._widen(_GROUP, span.place)

    def _require_stuck(self, error: EvermarkError, span: Span) -> None:
        """Note that the group cannot go on here; any other trouble is raised."""
        if not is_stuck(error):
            raise error
        if not self._narrowed(_GROUP, span):
            self._stuck[_GROUP, span.place] = self.clock() + STUCK_REST, error.message
            self.on_stuck(span.place, None, error)

    def _narrowed(self, generation: int, span: Span) -> bool:
        """Whether a part of the span may be read, though not all of it: the next span is shorter."""
        limit = self._narrow.get((generation, span.place), span.rows)
        if len(span.paths) <= 1 or limit <= 1:
            return False
        self._narrow[generation, span.place] = max(1, min(limit, span.rows) // 2)
        return True

    def _widen(self, generation: int, place: SourcePartition) -> None:
        limit = self._narrow.pop((generation, place), None)
        if limit is not None and limit < self.limits.span_rows_max:
            self._narrow[generation, place] = 2 * limit

    def _is_stuck(self, generation: int, place: SourcePartition) -> bool:
        if not self._stuck:
            return False  # the usual case
        found = self._stuck.get((generation, place))
        return found is not None and found[0] > self.clock()

    def due(self) -> list[Subscription]:
        """Subscriptions outside the group whose time has come. A suspended subscription is still probed, seldom."""
        now = self.clock()
        due = [s for s in self.store.outside().values() if is_due(s, now)]
        due = [s for s in due if self._stuck_all.get(s.generation, now) <= now]
        return [s for s in due if not s.failures or self._full.get(s.generation, now) <= now]

    def turn_class(self, subscription: Subscription) -> TurnClass:
        """The class it may share a turn with: slow and failing subscriptions make only their own class wait."""
        if subscription.generation in self._alone:
            return TurnClass.NONE
        if subscription.failures > 0:
            return TurnClass.FAILING
        if subscription.generation in self._budget_s:
            return TurnClass.NONE  # needs more time than others should wait
        pace_s = self._pace_s(subscription)
        if pace_s is None:
            return TurnClass.LATE if self.live.was_slow(subscription.name, self.clock() - PACE_AGE) else TurnClass.NONE
        if pace_s > JOIN_PACE_S:
            return TurnClass.SLOW
        return TurnClass.NEAR if subscription.generation in self._near else TurnClass.NONE

    def catch_up(self, *subscriptions: Subscription) -> frozenset[str]:
        """One span for each subscription, or its return into the group. Returns the names that may go on at once."""
        beside = self.live.beside  # before the look at cursors: what was settled since is in them
        theirs = self.store.group().cursors
        heads = batches(theirs)
        most = self.limits.span_rows_max if len(subscriptions) == 1 else self.limits.shared_rows_max
        on: set[str] = set()
        near: list[Subscription] = []
        away: list[tuple[Subscription, Span]] = []
        for subscription, mine in self._current(subscriptions):
            if not _comparable(mine, theirs):
                continue
            pace_s = self._pace_s(subscription)
            late = self.turn_class(subscription) is TurnClass.LATE
            quick = subscription.failures == 0 and not late and (pace_s is None or pace_s <= JOIN_PACE_S)
            under_way = {place for place, members in beside.items() if subscription.name in members}
            if level_with(mine, theirs):
                if under_way:
                    continue  # as a member again it would be taken for one that was not sent this
                # A suspended subscription waits here for an event to be tried with.
                if (quick or subscription.failures > 0) and self._join(subscription):
                    on.add(subscription.name)
                continue
            rows_max = PROBE_ROWS_MAX if subscription.failures else most
            # The group waits only for a receiver whose last delivery went well, and quickly: no other may hold it up.
            span = self._next_span(subscription, mine, _without(heads, under_way), rows_max)
            stuck = any(self._is_stuck(subscription.generation, place) for place in heads)
            if span is None and stuck:
                self._stuck_all[subscription.generation] = self.clock() + STUCK_LOOK
            if span is None and (under_way or stuck):
                continue
            is_near = (
                not (under_way or stuck)
                and quick
                and pace_s is not None
                and distance(mine, heads) <= self.limits.join_distance_max
            )
            if is_near or span is None:
                near.append(subscription)
            else:
                away.append((subscription, span))
                left = distance(mine, heads) - (span.to - span.after)
                note = self._near.add if left <= self.limits.join_distance_max else self._near.discard
                note(subscription.generation)
        if away and all(self.turn_class(subscription) is TurnClass.LATE for subscription, _ in away):
            # Most of them are well, and wait here for the others.
            on |= self._work(away, budget_s=LATE_BUDGET_S, grace_s=GRACE_S, moved_too=True)
        elif away:
            budget_s = max(self._budget_s.get(subscription.generation, FOLLOW_BUDGET_S) for subscription, _ in away)
            on |= self._work(away, budget_s=budget_s, moved_too=True)
        return frozenset(on | self._rejoin(near) if near else on)

    def expire_stopped(self, over: Callable[[], bool] = lambda: False) -> None:
        """Move paused and disabled subscriptions over events that are older than their `ttl`, counted.

        Nothing else moves them, and the log must keep every event that they have not passed. One that cannot be moved
        keeps no other from it.
        """
        problem: EvermarkError | None = None
        for subscription in self.store.subscriptions().values():
            try:
                self._expire(subscription, over)
            except ConflictError:
                continue  # a person acted meanwhile
            except StaleError:
                raise
            except EvermarkError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _expire(self, subscription: Subscription, over: Callable[[], bool]) -> None:
        goes_on = is_stopped(subscription)
        while goes_on and not over() and (span := self._expired_span(subscription)) is not None:
            goes_on = bool(self._work([(subscription, span)], budget_s=FOLLOW_BUDGET_S, sends=False))

    def _expired_span(self, subscription: Subscription) -> Span | None:
        before = expires_before(subscription, self.clock())
        if before is None:
            return None
        mine = self.store.cursors(subscription.name)
        for place, (head, _) in sorted(self.log.heads().items()):
            begun = mine.get(place)
            if begun is not None and begun.batch < head:
                try:
                    to = expired_to(place, begun.batch, head, self.log.files(place.source), before)
                    span = self._span(place, begun, to, generation=subscription.generation)
                except EvermarkError as error:
                    if not is_stuck(error):
                        raise
                    continue  # its source says so; nothing expires there meanwhile
                if span is not None:
                    return span
        return None

    def _current(self, subscriptions: Sequence[Subscription]) -> list[tuple[Subscription, CursorVector]]:
        """The subscriptions that are still there, as they are now, and their cursors.

        To be asked after the group's cursors: a batch that was taken after a spec was changed is not delivered by the
        former spec. And specs after cursors: none is served by the spec of a removed subscription of its name.
        """
        cursors = {one.name: self.store.cursors(one.name) for one in subscriptions}
        known = self.store.outside()
        now = [(known[one.name], one) for one in subscriptions if one.name in known]
        return [(found, cursors[one.name]) for found, one in now if found.generation == one.generation]

    def _rejoin(self, subscriptions: Sequence[Subscription]) -> set[str]:
        """The group stands still while the last few batches are delivered: then all are level, and they join."""
        before: dict[str, CursorVector] = {}
        on: set[str] = set()
        waiting, progress = list(subscriptions), self.live.progress
        with self.live.alone():
            while waiting:
                progress.alive()
                theirs = self.store.group().cursors
                away: list[tuple[Subscription, Span]] = []
                for subscription, mine in self._current(waiting):
                    # Delivered, but not passed: there is no room to park the refused events.
                    if mine == before.get(subscription.name) or not _comparable(mine, theirs):
                        continue
                    if level_with(mine, theirs):
                        if self._join(subscription):
                            on.add(subscription.name)
                        continue
                    before[subscription.name] = mine
                    # Without a span it is ahead of the group, which will come level by itself.
                    span = self._next_span(subscription, mine, batches(theirs), self.limits.join_rows_max)
                    if span is not None:
                        away.append((subscription, span))
                done = self._work(away, budget_s=JOIN_BUDGET_S, grace_s=GRACE_S, progress=progress) if away else set()
                waiting = [subscription for subscription, _ in away if subscription.name in done]
        return on

    def _join(self, subscription: Subscription) -> bool:
        if subscription.state is not SubscriptionState.BEHIND:
            return False  # it cannot, and to be told so costs a transaction at every look
        joined = self.store.join(subscription.name, self.epoch)
        if joined:
            # When it leaves again, how quick it was before says nothing.
            self._pace.pop(subscription.generation, None)
            self._served.pop(subscription.generation, None)
            self._near.discard(subscription.generation)
        return joined

    def _work(
        self,
        away: Away,
        *,
        budget_s: float,
        grace_s: float | None = None,
        sends: bool = True,
        moved_too: bool = False,
        progress: Progress | None = None,
    ) -> set[str]:
        """Deliver these spans, all at once, and settle each. Returns the names of the subscriptions that are done.

        `moved_too`: and of those whose time was up, and which moved: a `rate` is reached only if nothing is waited for.
        """
        progress = progress or Progress()
        try:
            assignments = self._assignments(away)
            ordered = [assignment.spec.name for assignment in assignments if assignment.spec.ordered]
            held = self.store.parked.held_keys(ordered, {span.place for _, span in away}) if ordered else {}
            # `historical` says that the delivery is late; it keeps the event's own id, so a repeat is still a repeat.
            options = DeliveryOptions(historical=True, budget_s=budget_s, grace_s=grace_s, held=held, sends=sends)
            began = self.clock()
            progress.alive(may_take_s(sum(span.rows for _, span in away), assignments, budget_s))
            outcomes = self.deliverer.deliver(assignments, options)
        except EvermarkError as error:
            if len(away) > 1:
                return self._one_by_one(away, progress, budget_s=budget_s, grace_s=grace_s)
            if is_stuck(error):
                self._note_stuck(*away[0], error)
                return set()
            self._alone.add(away[0][0].generation)
            raise
        self._alone.difference_update(one.generation for one, _ in away)
        took_s = (self.clock() - began).total_seconds()
        failpoint.hit("settle.begun")
        done: set[str] = set()
        void: list[ConflictError] = []
        for (subscription, span), outcome in zip(away, outcomes, strict=True):
            if outcome.fate is Fate.STUCK:  # by a part of the deliverer that could not stop the others
                self._note_stuck(subscription, span, FormatError(outcome.reason))
                continue
            self._learn(subscription, span, outcome, took_s if outcome.took_s is None else outcome.took_s, budget_s)
            progress.alive()
            try:
                self._settle(subscription, span, outcome)
            except ConflictError as error:
                void.append(error)  # removed or made anew meanwhile: no reason to leave the others unsettled
                continue
            self.on_delivered(span.place, [outcome])
            moved = outcome.fate is Fate.UNFINISHED and (outcome.reached or span.begun) > span.begun
            if outcome.fate is Fate.DONE or (moved_too and moved):
                done.add(subscription.name)
        failpoint.hit("settle.done")
        if void:
            raise void[0]
        return done

    def _assignments(self, away: Away) -> list[Assignment]:
        room = self.store.parked.room([one.name for one, _ in away])
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

    def _one_by_one(self, away: Away, progress: Progress, *, budget_s: float, grace_s: float | None) -> set[str]:
        """One assignment cannot be done, and it is not known which: the others go on, and it fails by itself."""
        done: set[str] = set()
        problem: EvermarkError | None = None
        for one in away:
            if self.over():
                break  # those that are left are served by the next owner
            try:
                done |= self._work([one], budget_s=budget_s, grace_s=grace_s, progress=progress)
            except StaleError:
                raise
            except EvermarkError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return done

    def _note_stuck(self, subscription: Subscription, span: Span, error: EvermarkError) -> None:
        """Its reason says why it does not go on in this partition; it does in the others."""
        name, place, generation = subscription.name, span.place, subscription.generation
        if self._narrowed(generation, span):
            return
        reason = "; ".join(filter(None, (error.message, error.hint)))
        self._stuck[generation, place] = self.clock() + STUCK_REST, reason
        self.on_stuck(place, name, error)
        outcome = Outcome(name, Fate.STUCK, reason=reason)
        if subscription.reason != shortened(outcome.reason):
            with suppress(ConflictError):  # removed or made anew meanwhile
                settle, now, done = self.store.settle_subscription, self.clock(), Cursor(span.to)
                settle(name, place, span.begun, done, outcome, now, self.epoch, generation=generation)

    def _settle(self, subscription: Subscription, span: Span, outcome: Outcome) -> None:
        name, generation, begun = subscription.name, subscription.generation, span.begun
        settle, epoch = self.store.settle_subscription, self.epoch
        self._stuck.pop((generation, span.place), None)
        self._widen(generation, span.place)
        elsewhere = next((why for (number, _), (_, why) in list(self._stuck.items()) if number == generation), "")
        for done, stage in stages(span, outcome):
            part = replace(stage, reason=elsewhere) if elsewhere and stage.fate is Fate.DONE else stage
            if not settle(name, span.place, begun, done, part, self.clock(), epoch, generation=generation):
                return  # its cursor stays where it was: nothing after that can be settled
            begun = done

    def _pace_s(self, subscription: Subscription) -> float | None:
        """How long its last span took; None: it is not known, or was long ago."""
        ago = self.clock() - PACE_AGE
        took_s, at = self._pace.get(subscription.generation, (None, ago))
        return took_s if at > ago else None

    def _learn(self, subscription: Subscription, span: Span, outcome: Outcome, took_s: float, budget_s: float) -> None:
        """Note how quick it is, and how much time its next span gets."""
        number, reached = subscription.generation, outcome.reached or span.begun
        self._pace[number] = (took_s if outcome.fate is Fate.DONE else max(took_s, 2 * JOIN_PACE_S), self.clock())
        self._full.pop(number, None)
        if outcome.fate is Fate.FULL:
            self._full[number] = self.clock() + timedelta(seconds=ENDPOINT_BACKOFF_S_MAX)
        if outcome.fate is not Fate.UNFINISHED or reached > span.begun:
            self._served[number] = span.place  # else it is tried there again, with more time
        if outcome.fate is Fate.DONE or reached.batch > span.after:
            self._budget_s.pop(number, None)
        elif outcome.fate is Fate.UNFINISHED and budget_s >= FOLLOW_BUDGET_S:
            # It goes on inside the batch, in turns of its own; in longer turns if it got nowhere at all.
            times = 1 if reached > span.begun else 2
            self._budget_s[number] = min(FOLLOW_BUDGET_S_MAX, times * budget_s)

    def _next_span(
        self, subscription: Subscription, mine: CursorVector, heads: Mapping[SourcePartition, int], rows_max: int
    ) -> Span | None:
        """The next span of a partition in which the reader lacks a batch. Partitions take turns: a partition that
        always has more than the receiver can take holds up no other.
        """
        places = [place for place in sorted(heads) if not self._is_stuck(subscription.generation, place)]
        # An owner that has just begun does not know which partition was last. Its epoch, one more than that of the
        # owner before it, chooses: else owners of short lives would all begin with the same partition.
        last = self._served.get(subscription.generation) or (places[self.epoch % len(places)] if places else None)
        places.sort(key=lambda place: (last is not None and place <= last, place))
        number = subscription.generation
        for place in places:
            begun, head = mine.get(place, BEGINNING), heads[place]
            try:
                span = self._span(place, begun, head, rows_max, number)
            except EvermarkError as error:
                if not is_stuck(error):
                    raise
                self._note_stuck(subscription, Span(place, begun, head, (), 0), error)
                continue
            if span is not None:
                return span
        return None

    def _span(
        self, place: SourcePartition, begun: Cursor, head: int, rows_max: int | None = None, generation: int = _GROUP
    ) -> Span | None:
        if begun.batch >= head:
            return None  # without a batch to read the files are not asked for
        most = rows_max or self.limits.span_rows_max
        most = min(most, self._narrow.get((generation, place), most))
        return next_span(place, begun, head, self.log.files(place.source), most)


def _without(heads: Mapping[SourcePartition, int], places: Collection[SourcePartition]) -> dict[SourcePartition, int]:
    return {place: head for place, head in heads.items() if place not in places}


def _comparable(mine: CursorVector, theirs: CursorVector) -> bool:
    """False for a subscription that joined meanwhile: members have no cursors of their own, and must not be sent the
    whole log. Also while a partition is being opened, which one of the two has not seen yet.
    """
    return mine.keys() == theirs.keys()
