"""Replays: a window of the log, delivered once more under ids of its own. Pure decisions; stores carry them out.

A replay reads time slices of the log, in the order (event_time, event_id), for one subscription at a time. Its
**mark** is its cursor: everything before it is done. It has its own failures and its own backoff, and touches neither
the subscription's cursor nor its state, with one exception: a receiver that says it is gone is gone.

| replay    | set by                                                             | left by                           |
|-----------|--------------------------------------------------------------------|-----------------------------------|
| waiting   | a request: SQL at the source, or the command line                  | its start, which fixes the heads  |
| running   | its start                                                          | its last target; a person         |
| done      | every target is done, or was ended with its subscription           | -                                 |
| cancelled | a person                                                           | -                                 |
| failed    | it can never run: its source or its subscription is not there      | -                                 |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import reduce
from typing import Protocol

from evermark.delivery.decide.group import REASON_CHARS_MAX, Jitter
from evermark.delivery.decide.key_parts import with_room
from evermark.delivery.decide.retry import STUCK_REST_S, endpoint_backoff_s
from evermark.delivery.model import (
    BotView,
    Fate,
    HeldKey,
    Outcome,
    SourcePartition,
    Subscription,
    SubscriptionSpec,
    SubscriptionState,
)
from evermark.delivery.replay.timeslice import Mark, TimeSlice, exceeds, with_rest
from evermark.delivery.work import both
from evermark.log.read import FileRange

# With this many cores a replay may work half of the time beside fresh events; with a third of them, a quarter.
CORES_BESIDE = 6
# How long one step should take; while fresh events flow, short steps with rests in between.
STEP_S = 4.0
STEP_S_FLOWING = 1.0
# A step that is not done by then is cut off; events it has delivered count.
STEP_S_MAX = 20.0
# A step that moved nothing though nothing failed is tried again after this.
IDLE_WAIT_S = 1.0
Subscriptions = Mapping[str, Subscription]
_SERVED = (SubscriptionState.LIVE, SubscriptionState.BEHIND)


@dataclass(frozen=True)
class SliceLimits:
    """As much as there may be: a step is cut off in time, and finding the rows of a slice costs next to nothing."""

    rows_start: int = 1_000_000
    rows_min: int = 100
    rows_max: int = 1_000_000
    rows_max_flowing: int = 2_000


SLICES = SliceLimits()


class AskedBy(StrEnum):
    SQL = "sql"
    CLI = "cli"
    API = "api"


class ReplayState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TargetState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Control:
    """A control event as it stands in the log."""

    event_id: str
    partition: int
    batch: int
    stream: str
    event_time: datetime | None
    payload: str | None


@dataclass(frozen=True)
class Request:
    """A request for a replay: of events of `source` with `since` ≤ event_time ≤ `until`, and for which subscription."""

    asked_by: AskedBy
    source: str
    since: datetime
    until: datetime
    streams: tuple[str, ...] = ()  # empty: all
    where: str | None = None
    subscription: str | None = None  # None: all there are when it starts
    rate_per_s: float = 0.0
    control: Control | None = None  # the event that asked
    asked_since: str | None = None  # the window as the event wrote it, to clear it at the source afterwards
    asked_until: str | None = None


@dataclass(frozen=True)
class Target:
    """How far a replay is with one subscription."""

    replay: str
    subscription: str
    generation: int
    state: TargetState
    mark: Mark
    reason: str = ""
    slice_rows: int = SLICES.rows_start
    passed_rows: int = 0
    delivered: int = 0
    parked: int = 0
    failures: int = 0
    next_attempt_at: datetime | None = None
    # In its turn, and nothing of it could be delivered since; or nothing of one before it, which was given up.
    stuck_since: datetime | None = None


@dataclass(frozen=True)
class Replay:
    id: str
    nth: int
    request: Request
    state: ReplayState
    reason: str = ""
    heads: Mapping[int, int] = field(default_factory=dict)  # per partition, the last batch when it started
    log_rows: int = 0
    created_at: datetime | None = None
    changed_at: datetime | None = None
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True)
class Due:
    """A target whose turn it is."""

    replay: Replay
    target: Target
    subscription: Subscription


@dataclass(frozen=True)
class ReplayWork:
    """One step of one target, as a `ReplayDeliverer` gets it."""

    replay: str
    slice: TimeSlice
    spec: SubscriptionSpec
    streams: tuple[str, ...]
    where: str | None
    heads: Mapping[int, int] | None  # None: the files hold nothing beyond them
    rows_max: int  # at most this many matching events, however dense the slice is
    budget_s: float
    probe: bool
    parked_room: int
    held: Mapping[HeldKey, int] = field(default_factory=dict)
    bot: BotView | None = None  # as in `Assignment`


@dataclass(frozen=True)
class Replayed:
    """The outcome of a step. Every matching event before `mark` was accepted or is in `outcome.parked`."""

    mark: Mark
    outcome: Outcome


@dataclass(frozen=True)
class Round:
    """Some events of a slice, in its order: the first `rows` are done, and the last done event stands at `at`."""

    outcome: Outcome
    rows: int
    at: Mark | None  # None: not even the first
    parked_at: tuple[Mark, ...] = ()  # where those in `outcome.parked` stand, if it is one of several parts


class ReplayDeliverer(Protocol):
    def replay(self, work: ReplayWork, ahead: ReplayWork | None = None) -> Replayed:
        """Offer the events of the slice that the subscription matches, in the order of (event_time, event_id).

        `ahead` is the next work if this goes well: it may be prepared meanwhile.
        """


def may_start(replay: Replay, heads: Mapping[SourcePartition, int]) -> bool:
    """Whether the log is durable at least up to the event that asked: earlier events must be replayed."""
    control = replay.request.control
    return control is None or heads.get(SourcePartition(replay.request.source, control.partition), 0) >= control.batch


def targets_of(replay: Replay, subscriptions: Subscriptions, slices: SliceLimits = SLICES) -> list[Target] | str:
    """The targets of a replay that starts now; or a text: why it never can."""
    request = replay.request
    wanted = list(subscriptions.values())
    if request.subscription is not None:
        if request.subscription not in subscriptions:
            return f"no subscription is called {request.subscription[:80]!r}"
        wanted = [subscriptions[request.subscription]]
        if wanted[0].state is SubscriptionState.DISABLED:
            return f"subscription {request.subscription!r} is disabled: {wanted[0].reason}"
        if not _hears(wanted[0].spec, request.source):
            return f"bot {request.subscription!r} hears another source than {request.source!r}"
    return [
        Target(replay.id, s.name, s.generation, TargetState.RUNNING, Mark(request.since), slice_rows=slices.rows_start)
        for s in sorted(wanted, key=lambda s: s.name)
        if s.state is not SubscriptionState.DISABLED
        and _hears(s.spec, request.source)
        and (not (s.spec.streams and request.streams) or set(s.spec.streams) & set(request.streams))
    ]


def _hears(spec: SubscriptionSpec, source: str) -> bool:
    """A bot hears the streams of one source: streams of another may have the same names."""
    return spec.bot is None or spec.bot.source == source


def is_orphaned(target: Target, subscriptions: Subscriptions) -> bool:
    """Whether its subscription is gone; a later subscription of the same name has not asked for this."""
    found = subscriptions.get(target.subscription)
    return found is None or found.generation != target.generation


def is_over_for(target: Target, subscriptions: Subscriptions, now: datetime, *, was_tried: bool = True) -> str:
    """Why a target can end unfinished; empty while it cannot.

    A subscription that is suspended, or whose endpoint fails, may come back: it is waited for as long as its ttl, and
    not for ever, because the log keeps everything while a replay is open. `was_tried`: by this owner. Of a receiver
    that is served, the time in which nobody delivered says nothing.
    """
    if is_orphaned(target, subscriptions):
        return "the subscription is gone"
    subscription = subscriptions[target.subscription]
    if subscription.state is SubscriptionState.DISABLED:
        return "the subscription is disabled"
    ttl = timedelta(seconds=subscription.spec.ttl_s)
    is_tried = was_tried or subscription.state not in _SERVED
    if ttl and is_tried and target.stuck_since is not None and now - target.stuck_since > ttl:
        why = f": {target.reason}" if target.reason else ""
        return f"expired: nothing of it could be delivered since {target.stuck_since:%Y-%m-%d %H:%M} UTC, its ttl{why}"
    return ""


def handed_on(
    replay: Replay, target: Target, replays: Iterable[Replay], subscriptions: Subscriptions
) -> tuple[Target, datetime] | None:
    """Of a target of a replay that is given up as nothing of it could be delivered: the one whose turn comes then, and
    since when it may be called stuck. Not since its turn: many requests would keep the log for a ttl each.
    """
    later = [each for each in replays if each.nth > replay.nth]
    after = {one.target.subscription: one for one in _in_turn(later, subscriptions)}.get(target.subscription)
    if after is None or target.stuck_since is None:
        return None
    return after.target, max(target.stuck_since, after.replay.created_at or target.stuck_since)


def _in_turn(replays: Iterable[Replay], subscriptions: Subscriptions) -> Iterable[Due]:
    """Per subscription the oldest request that is not done: requests do not overtake."""
    first: dict[str, Due] = {}
    for each in sorted(replays, key=lambda r: r.nth):
        for target in each.targets if each.state is ReplayState.RUNNING else ():
            if target.state is TargetState.RUNNING and not is_orphaned(target, subscriptions):
                first.setdefault(target.subscription, Due(each, target, subscriptions[target.subscription]))
    return first.values()


def newly_stuck(replays: Iterable[Replay], subscriptions: Subscriptions) -> list[Target]:
    """Targets whose turn it is and whose subscription is not served, so that no step would ever note it."""
    stuck = (one for one in _in_turn(replays, subscriptions) if one.subscription.state not in _SERVED)
    return [one.target for one in stuck if one.target.stuck_since is None]


def due(replays: Iterable[Replay], subscriptions: Subscriptions, now: datetime) -> list[Due]:
    """Targets whose turn it is, whose subscription is served, and whose backoff and the subscription's are over."""
    served = (one for one in _in_turn(replays, subscriptions) if one.subscription.state in _SERVED)
    waits = ((one, (one.target.next_attempt_at, one.subscription.next_attempt_at)) for one in served)
    return [one for one, until in waits if all(at is None or at <= now for at in until)]


def to_begin(waiting: Sequence[Due], busy: Collection[str], served: Mapping[str, float], at_once: int) -> list[Due]:
    """The target that waited longest comes first: the oldest request must not starve the others.

    `busy`: subscriptions that were worked for when `waiting` was read. Their targets may have moved since, and a slice
    that was sent and settled meanwhile would be sent once more.
    """
    free = [one for one in waiting if one.target.subscription not in busy]
    free.sort(key=lambda one: served.get(one.target.subscription, 0.0))
    return free[: max(0, at_once - len(busy))]


def work_of(
    one: Due, piece: TimeSlice, files: Sequence[FileRange], rows: int, parked_now: int = 0, bot: BotView | None = None
) -> ReplayWork:
    """One step of a target, of about so many rows. The slice was cut from `files`."""
    request, spec = one.replay.request, one.subscription.spec
    rate = least_rate(request.rate_per_s, spec.rate_per_s)
    return ReplayWork(
        replay=one.replay.id,
        slice=piece,
        spec=replace(spec, rate_per_s=rate),
        streams=request.streams,
        where=request.where,
        heads=one.replay.heads if exceeds(piece, files, one.replay.heads) else None,
        # A step of its own for the last few rows of a slice costs more than the rows do.
        rows_max=rows if rate else with_rest(rows),
        budget_s=STEP_S_MAX,
        probe=one.target.failures > 0,
        parked_room=max(0, spec.parked_max - parked_now),
        bot=bot,
    )


def folded(work: ReplayWork, rounds: Sequence[Round], limit: int) -> Replayed:
    """How far a slice got. If `limit` rows were found, there may be more: it is done up to the last of them."""
    whole = Outcome(work.spec.name, Fate.DONE)
    mark, seen = work.slice.mark, 0
    for one in rounds:
        whole = both(whole, one.outcome)
        seen += one.rows
        mark = mark if one.at is None else one.at
    if whole.fate is Fate.DONE and seen < limit:
        mark = work.slice.end
    return Replayed(mark, whole)


def joined(work: ReplayWork, parts: Iterable[Sequence[Round]], limit: int) -> Replayed:
    """How far a slice got whose events were divided by key (`decide/key_parts.py`), from the rounds of all parts.

    The mark moves to the place that every part has reached. Events beyond it come again: what was parked of them is
    left out. Each part may park as many as there is room for, so the mark stops before one too many.
    """
    rounds = list(parts)
    found = [folded(work, part, limit) for part in rounds]
    mark = min((one.mark for one in found), key=_place)
    told = (
        (at, event)
        for part in rounds
        for one in part
        for at, event in zip(one.parked_at, one.outcome.parked, strict=True)
    )
    parked = sorted((one for one in told if _place(one[0]) <= _place(mark)), key=lambda one: _place(one[0]))
    room = max(0, work.parked_room)
    whole = reduce(both, (with_room(one.outcome, room, len(parked)) for one in found))
    if len(parked) > room:
        full = Outcome(work.spec.name, Fate.FULL, reason=f"no room to park more than {room}")
        whole, parked = both(whole, full), parked[:room]
        mark = parked[-1][0] if parked else work.slice.mark
    return Replayed(mark, replace(whole, parked=tuple(event for _, event in parked)))


def _place(mark: Mark) -> tuple[datetime, bool, str]:
    return mark.time, mark.event_id is not None, mark.event_id or ""


def least_rate(*rates: float) -> float:
    """The least of some limits, where 0 is none."""
    return min((rate for rate in rates if rate > 0), default=0.0)


def rows_of(one: Due, *, flowing: bool, slices: SliceLimits = SLICES) -> int:
    """How many rows the next step takes: as many as fit into its time, and never more than its rate lets through.

    While fresh events flow, few: both share processors and receivers.
    """
    rate = least_rate(one.replay.request.rate_per_s, one.subscription.spec.rate_per_s)
    rows = min(one.target.slice_rows, slices.rows_max_flowing) if flowing else one.target.slice_rows
    if rate:
        rows = min(rows, max(1, int(rate * STEP_S)) * max(1, one.subscription.spec.bundle))
    return max(1, rows)


def after_step(
    target: Target, piece: TimeSlice, step: Replayed, pace: float, now: datetime, jitter: Jitter, slices: SliceLimits
) -> Target:
    """A target after a step. Its mark moves over the events that are done, even if the step failed."""
    outcome = step.outcome
    moved = step.mark != target.mark
    target = replace(
        target,
        mark=step.mark,
        passed_rows=target.passed_rows + round(piece.rows * piece.share_before(step.mark)),
        delivered=target.delivered + outcome.accepted,
        parked=target.parked + len(outcome.parked),
    )
    if outcome.fate is Fate.DONE:
        # Towards steps that take as long as they should; the time of a first step says little.
        rows = min(slices.rows_max, max(slices.rows_min, int(target.slice_rows * min(pace, 4.0))))
        return replace(target, slice_rows=rows, failures=0, next_attempt_at=None, reason="", stuck_since=None)
    if outcome.fate is Fate.STUCK and (narrower := _narrower(target, piece)):
        return replace(target, slice_rows=narrower)
    target = replace(target, stuck_since=None if moved else target.stuck_since or now)
    smaller = max(slices.rows_min, target.slice_rows // 2)
    reason = outcome.reason[:REASON_CHARS_MAX]
    if outcome.fate is Fate.UNFINISHED:
        wait = None if moved else now + timedelta(seconds=IDLE_WAIT_S)
        return replace(target, slice_rows=smaller, next_attempt_at=wait, reason="" if moved else reason)
    failures, reason = 1 if moved else target.failures + 1, reason or "the receiver did not answer"
    if outcome.fate is Fate.STUCK:
        wait_s = min(STUCK_REST_S, endpoint_backoff_s(failures, jitter()))
        return replace(target, failures=failures, next_attempt_at=now + timedelta(seconds=wait_s), reason=reason)
    at = now + timedelta(seconds=endpoint_backoff_s(failures, jitter(), outcome.retry_after_s))
    return replace(target, slice_rows=smaller, failures=failures, next_attempt_at=at, reason=reason)


def _narrower(target: Target, piece: TimeSlice) -> int:
    """So many rows for the next slice, at once: a part of this slice may be read, though not all of it. 0: none may."""
    rows = min(target.slice_rows, piece.rows)
    return rows // 2 if len(piece.paths) > 1 else 0


def passed(target: Target) -> Target:
    """Nothing is left in the window."""
    return replace(target, state=TargetState.DONE, reason="", failures=0, next_attempt_at=None)


def without_room(target: Target, now: datetime, jitter: Jitter, parked_max: int) -> Target:
    """Nothing moves: refused events could not be parked."""
    failures = target.failures + 1
    return replace(
        target,
        failures=failures,
        stuck_since=target.stuck_since or now,
        next_attempt_at=now + timedelta(seconds=endpoint_backoff_s(failures, jitter())),
        reason=f"{parked_max} deliveries of replays are parked: parked_max allows no more",
    )


def rest_s(took_s: float, flowing: bool, cores: int) -> float:
    """While fresh events flow, a replay rests: the fewer cores there are to share, the longer."""
    return took_s * max(1, CORES_BESIDE // cores) if flowing else 0.0


def has_ended(replay: Replay) -> bool:
    return replay.state is ReplayState.RUNNING and all(t.state is not TargetState.RUNNING for t in replay.targets)


def percent(replay: Replay, target: Target) -> float:
    """How much of the window is behind it, by the log's own statistics."""
    if target.state is TargetState.DONE:
        return 100.0
    return min(99.9, 100.0 * target.passed_rows / replay.log_rows) if replay.log_rows else 0.0


def running_windows(replays: Sequence[Replay]) -> dict[str, tuple[datetime, datetime]]:
    """Per source, the window that is being replayed: from the earliest to the latest of all that run."""
    found: dict[str, tuple[datetime, datetime]] = {}
    for each in replays:
        if each.state is ReplayState.RUNNING:
            since, until = each.request.since, each.request.until
            old = found.get(each.request.source, (since, until))
            found[each.request.source] = (min(old[0], since), max(old[1], until))
    return found
