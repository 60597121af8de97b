"""The live group at work: fresh batches handed over by ingest, and batches that hand-overs left.

The hand-over is an optimisation. It happens only when the group stands exactly before the fresh batch and no other
thread works for the group; batches that it leaves are taken by the follower. What takes long in one partition is done
without the lock (`beside`), so that the group goes on in the others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise

import pyarrow as pa

from evermark import failpoint
from evermark.delivery.bots.views import BotViews
from evermark.delivery.decide.expiry import expires_before
from evermark.delivery.decide.group import is_answered
from evermark.delivery.model import Cursor, Fate, Group, GroupWork, HeldKey, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.run.matched_here import ROWS_MAX
from evermark.delivery.work import Assignment, Deliverer, DeliveryOptions, Span
from evermark.errors import ConflictError, FormatError
from evermark.progress import PATIENT_S, Progress
from evermark.runtime import Lock

# Requests under way when the budget ends may still finish in this time; then a slow receiver leaves the group.
GRACE_S = 1.0
# The group waits this much longer for its slowest member: then that member leaves, and is served by itself.
SLACK_S = 1.0
# What this process needs for one subscription, on a busy machine.
_OWN_S_PER_MEMBER = 0.01
LOOKED_UP = "its streams are being looked up in the log"


@dataclass(frozen=True)
class HandoverLimits:
    """More than this would hold ingest up: the follower takes it."""

    rows_max: int = 2_000
    batches_max: int = 32
    budget_s: float = 2.0
    wait_s: float = 1.0


@dataclass(frozen=True)
class _Ready:
    """A span and what to deliver of it, by one look at the group and its members."""

    span: Span
    work: GroupWork
    assignments: Sequence[Assignment]
    unready: Sequence[Outcome]  # of bots that cannot be served here
    held: Mapping[str, Mapping[HeldKey, int]]
    generations: Mapping[str, int]

    @property
    def members(self) -> frozenset[str]:
        return self.work.members


@dataclass
class LiveGroup:
    """One per process that holds the `deliver` lease. `lock` is held while a thread works for the group, but for work
    beside.
    """

    store: DeliveryStore
    deliverer: Deliverer
    epoch: int
    clock: Callable[[], datetime]
    on_delivered: Callable[[SourcePartition, list[Outcome]], None] = lambda _place, _outcomes: None
    bot_views: BotViews | None = None  # needed where there are bots
    lock: Lock = field(default_factory=threading.Lock)
    limits: HandoverLimits = HandoverLimits()
    progress: Progress = field(default_factory=Progress)  # of the thread that works for the group; rests without one
    _beside: dict[SourcePartition, frozenset[str]] = field(default_factory=dict, init=False)  # whom it is sent to
    _fresh: dict[SourcePartition, deque[Span]] = field(default_factory=dict, init=False)
    _slow_at: dict[str, datetime] = field(default_factory=dict, init=False)

    def hand_over(self, *spans: Span) -> bool:
        """Deliver fresh batches of one partition, with the few before them that were left; False leaves them to the
        follower.

        A group that is a little behind is caught up here and not by the follower: if both took turns, each a batch too
        late for the other, the group would stay behind for ever.
        """
        span, fresh = spans[-1], self.note(*spans)
        if span.rows > self.limits.rows_max:
            return False
        with self.alone(self.limits.wait_s) as is_alone:
            if not is_alone or span.place in self._beside:
                return False
            group = self.store.group()
            whole = together(fresh, group.cursors.get(span.place))
            if whole is None or whole.rows > self.limits.rows_max:
                return False
            return self.work(whole, group, budget_s=self.limits.budget_s)

    @contextmanager
    def alone(self, wait_s: float | None = None) -> Iterator[bool]:
        """Whether no other thread works for the group, which is waited for so long; None: until that is so."""
        timeout_s = -1 if wait_s is None else wait_s
        if not (self.lock.acquire(timeout=timeout_s) if timeout_s else self.lock.acquire(blocking=False)):
            yield False
            return
        try:
            self.progress.alive()
            yield True
        finally:
            self.progress.rest()
            self.lock.release()

    def note(self, *spans: Span) -> Sequence[Span]:
        """Remember fresh batches of one partition, for the next hand-over; returns all remembered batches."""
        fresh = self._fresh.setdefault(spans[0].place, deque(maxlen=self.limits.batches_max))
        fresh.extend(spans)
        return fresh

    @property
    def beside(self) -> Mapping[SourcePartition, frozenset[str]]:
        """Where the group is sent something that takes long, and the members that are sent it: they may leave
        meanwhile, and are not sent the same by anybody else, nor join again, until that is settled.
        """
        return dict(self._beside)

    def begin_beside(self, span: Span, group: Group, *, budget_s: float) -> Callable[[], None]:
        """Work for the group in one partition, to be done without the lock. The caller holds it, and has looked at the
        group since: until the work ends, no other thread works for the group in this partition.
        """
        ready = self._ready(span, group)
        self._beside[span.place] = ready.members

        def work() -> None:
            try:
                self._do(ready, budget_s, Progress())
            finally:
                del self._beside[span.place]

        return work

    def work(self, span: Span, group: Group, *, budget_s: float | None) -> bool:
        """Deliver a span to all members of the group and settle it; False if the group is not exactly before it.

        The caller holds `lock`, and has looked at the group since. Members and cursor come from one look: a member that
        joined later is not sent the span.
        """
        if group.cursors.get(span.place) != span.begun:
            return False
        self._do(self._ready(span, group), budget_s, self.progress)
        return True

    def _ready(self, span: Span, group: Group) -> _Ready:
        known = self.store.subscriptions()
        # A member that was removed and made anew in between may begin behind: then it is not sent this span.
        live = [name for name, one in known.items() if one.state is SubscriptionState.LIVE]
        members = group.members.intersection(live)
        now = self.clock()
        wanted = [
            Assignment(span, known[name].spec, expires_before=expires_before(known[name], now))
            for name in sorted(members)
        ]
        assignments, unready = with_bots(wanted, self.bot_views)
        ordered = [assignment.spec.name for assignment in assignments if assignment.spec.ordered]
        held = self.store.parked.held_keys(ordered, [span.place]) if ordered else {}
        work = GroupWork(span.place, span.begun, Cursor(span.to), members, group.version)
        generations = {name: known[name].generation for name in members}
        return _Ready(span, work, assignments, unready, held, generations)

    def _do(self, ready: _Ready, budget_s: float | None, progress: Progress) -> None:
        span, assignments = ready.span, ready.assignments
        options = DeliveryOptions(budget_s=budget_s, grace_s=GRACE_S, slack_s=SLACK_S, held=ready.held)
        progress.alive(may_take_s(span.rows, assignments, budget_s))
        outcomes = self.deliverer.deliver(assignments, options) if assignments else []
        progress.alive()
        for outcome in outcomes:
            if outcome.fate is Fate.UNFINISHED:
                self._slow_at[outcome.subscription] = self.clock()
            else:
                self._slow_at.pop(outcome.subscription, None)
        failpoint.hit("settle.begun")
        told = [*map(group_outcome, outcomes), *ready.unready]
        self.store.settle_group(ready.work, told, self.clock(), self.epoch)
        if span.place in self._beside:
            self._settle_left(ready, outcomes)
        failpoint.hit("settle.done")
        self.on_delivered(span.place, outcomes)

    def _settle_left(self, ready: _Ready, outcomes: Sequence[Outcome]) -> None:
        """What members were sent that have left meanwhile, in the work of another partition, or by this: it does not
        come again. How it ended is noted once more where an answer on the way has wiped it from their records.
        """
        span, members = ready.span, self.store.group().members
        for outcome in outcomes:
            name, begun, parts = outcome.subscription, span.begun, stages(span, outcome)
            if name in members or parts[0][1].fate is not Fate.DONE:
                continue
            if outcome.fate is Fate.ENDPOINT_FAILED and not is_answered(outcome):
                parts = parts[:1]
            settle, now, generation = self.store.settle_subscription, self.clock(), ready.generations[name]
            with suppress(ConflictError):  # it left now, as far as it got; or it was removed, or made anew
                for done, part in parts:
                    if not settle(name, span.place, begun, done, part, now, self.epoch, generation=generation):
                        break  # its cursor stays where it was: nothing after that can be settled
                    begun = done

    def was_slow(self, name: str, since: datetime) -> bool:
        """Whether a subscription left because the others would have had to wait."""
        return self._slow_at.get(name, since) > since


def may_take_s(rows: int, assignments: Sequence[Assignment], budget_s: float | None) -> float:
    """How long a delivery may take. Where Spark has a part in it, it may wait for Spark's cores without any bound."""
    if budget_s is None or rows > ROWS_MAX or any(one.spec.where for one in assignments):
        return PATIENT_S
    return budget_s + _OWN_S_PER_MEMBER * len(assignments)


def together(fresh: Sequence[Span], begun: Cursor | None) -> Span | None:
    """The fresh batches after `begun` as one span; None when a batch of them is no longer known."""
    wanted = [span for span in fresh if begun is not None and span.begun >= begun]
    gaps = any(one.to != other.after for one, other in pairwise(wanted))
    if not wanted or wanted[0].begun != begun or gaps:
        return None
    paths = tuple(path for span in wanted for path in span.paths)
    tables = [span.fresh for span in wanted]
    rows = None if any(table is None for table in tables) else pa.concat_tables(tables)
    count = sum(span.rows for span in wanted)
    return Span(wanted[0].place, wanted[0].begun, wanted[-1].to, paths, count, exact=True, fresh=rows)


def with_bots(assignments: Sequence[Assignment], bot_views: BotViews | None) -> tuple[list[Assignment], list[Outcome]]:
    """The assignments of one span, each bot's with its memberships and session keys; and the outcomes of bots whose
    memberships would take too long to find here: the follower serves those bots by themselves.
    """
    bots = [assignment.spec for assignment in assignments if assignment.spec.bot is not None]
    if not bots or bot_views is None:
        return list(assignments), []
    try:
        views = bot_views.views(bots, assignments[0].span, quick=True)
    except FormatError:
        views = {}  # their own affair: memberships may stand where the log cannot be read, and the group does not
    missing = {spec.name for spec in bots} - views.keys()
    ready = [replace(one, bot=views.get(one.spec.name)) for one in assignments if one.spec.name not in missing]
    return ready, [Outcome(name, Fate.UNFINISHED, reason=LOOKED_UP) for name in sorted(missing)]


def group_outcome(outcome: Outcome) -> Outcome:
    """A member that did not finish leaves where it got to; at the span's beginning if events would have to be parked or
    counted on the way: then all of the span comes again.
    """
    if outcome.fate is Fate.DONE:
        return outcome
    reached = None if outcome.parked or outcome.expired else outcome.reached
    return replace(outcome, parked=(), expired=0, reached=reached)


def stages(span: Span, outcome: Outcome) -> list[tuple[Cursor, Outcome]]:
    """A span that ended badly is settled in two stages: the part that was done, then the failure that moves nothing."""
    if outcome.fate is Fate.DONE:
        return [(Cursor(span.to), outcome)]
    failed = replace(outcome, parked=(), expired=0)
    reached = outcome.reached or span.begun
    if reached <= span.begun:
        return [(Cursor(span.to), failed)]
    done = Outcome(outcome.subscription, Fate.DONE, outcome.accepted, outcome.parked, expired=outcome.expired)
    return [(reached, done), (Cursor(span.to), replace(failed, accepted=0))]
