"""What becomes of the live group and its members. Pure: every store carries out what is decided here.

The rule behind all of it: a cursor passes an event only when it was accepted, parked, not matched, or expired and
counted. Whoever cannot show that leaves the group and keeps the cursor the work began at, or what of the work it can
show that for.

| state     | set by                                                              | left by                          |
|-----------|---------------------------------------------------------------------|----------------------------------|
| live      | `join`; `register` or `add` of one that starts now                  | any fate but DONE; a failed      |
|           |                                                                     | retry; a person                  |
| behind    | leaving the group; `register` or `add` of one that starts earlier;  | `join`; failures; a person       |
|           | `resume`; a suspended one that succeeds                             |                                  |
| suspended | 10 endpoint failures in a row, of retries too; a person;            | a success; a person              |
|           | too much parked, or too much of one key (FULL), which is no failure | work that is done: there is room |
| disabled  | 410                                                                 | a new url; a person              |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from evermark.delivery.base import (
    CursorVector,
    Fate,
    Group,
    Outcome,
    ParkedEvent,
    Reached,
    SourcePartition,
    Subscription,
    SubscriptionState,
)
from evermark.delivery.decide.cursors import require_cursor
from evermark.delivery.decide.retry import (
    ENDPOINT_BACKOFF_S_MAX,
    LIMITS,
    EndpointLimits,
    endpoint_backoff_s,
    next_attempt,
    should_suspend,
)
from evermark.errors import ConflictError

Jitter = Callable[[], float]

REASON_CHARS_MAX = 500

_WORST_FIRST = (Fate.GONE, Fate.ENDPOINT_FAILED, Fate.FULL, Fate.UNFINISHED, Fate.DONE)


@dataclass(frozen=True)
class SubscriptionRecord:
    """What the decisions need to know of a subscription."""

    name: str
    state: SubscriptionState
    reason: str = ""
    failures: int = 0
    next_attempt_at: datetime | None = None
    parked_max: int = 10_000
    joined_version: int = 0  # the group's version when it last joined
    generation: int = 0  # tells it from a later subscription of the same name

    @property
    def is_member(self) -> bool:
        return self.state is SubscriptionState.LIVE

    @property
    def is_paused(self) -> bool:
        return self.state is SubscriptionState.SUSPENDED and self.next_attempt_at is None

    @property
    def is_full(self) -> bool:
        """Suspended without a failure: its endpoint works, but no more may be parked."""
        return self.state is SubscriptionState.SUSPENDED and self.failures == 0 and not self.is_paused


@dataclass(frozen=True)
class Work:
    """One piece of work of the group on one place: its batches after `begun_at` up to and with `done_to`."""

    place: SourcePartition
    begun_at: int
    done_to: int
    members: frozenset[str]
    version: int | None = None


@dataclass(frozen=True)
class Step:
    """What one outcome makes of one subscription. `passes`: its cursor may move over the work."""

    standing: SubscriptionRecord
    passes: bool
    parked: tuple[ParkedEvent, ...] = ()
    expired: int = 0


@dataclass(frozen=True)
class Departure:
    """A subscription outside the group, and the cursors it stands at; inside a batch at the place of the work."""

    standing: SubscriptionRecord
    cursors: CursorVector
    through: str = ""


@dataclass(frozen=True)
class Settlement:
    group: Group
    stayed: tuple[SubscriptionRecord, ...]  # only those whose record changed
    departures: tuple[Departure, ...]
    parked: Mapping[str, tuple[ParkedEvent, ...]]
    expired: Mapping[str, int]


def is_due(subscription: Subscription, now: datetime) -> bool:
    """Whether the follower may work for a subscription now."""
    if subscription.state is SubscriptionState.BEHIND:
        return subscription.next_attempt_at is None or subscription.next_attempt_at <= now
    if subscription.state is SubscriptionState.SUSPENDED:
        return subscription.next_attempt_at is not None and subscription.next_attempt_at <= now
    return False


def is_stopped(subscription: Subscription) -> bool:
    """Whether nothing is tried until a person acts: it is paused, or its receiver said that it is gone."""
    if subscription.state is SubscriptionState.SUSPENDED:
        return subscription.next_attempt_at is None
    return subscription.state is SubscriptionState.DISABLED


def drains(standing: SubscriptionRecord, now: datetime) -> bool:
    """Whether the parked rows of a subscription may be tried now.

    One that is full may at any time: only draining gets it out. One suspended for its failures may when it is due:
    there may be nothing else to find out with that it works again.
    """
    if standing.is_paused or standing.state is SubscriptionState.DISABLED:
        return False
    return standing.is_full or standing.next_attempt_at is None or standing.next_attempt_at <= now


def waits_because(subscription: Subscription, now: datetime) -> str:
    """Why the parked rows of a subscription are not tried now, for a sentence; empty when they are. See `drains`."""
    at = subscription.next_attempt_at
    if is_stopped(subscription):
        disabled_by_it = subscription.state is SubscriptionState.DISABLED
        return f"is {'disabled' if disabled_by_it else 'paused'}, and nothing of it is tried"
    full = subscription.state is SubscriptionState.SUSPENDED and subscription.failures == 0
    if at is None or at <= now or full:
        return ""
    return f"failed ({subscription.reason or 'no reason is known'}), and is not tried before {at:%Y-%m-%d %H:%M:%S} UTC"


def subscription_after_failure(
    standing: SubscriptionRecord,
    retry_after_s: float | None,
    reason: str,
    now: datetime,
    jitter: float,
    limits: EndpointLimits = LIMITS,
) -> SubscriptionRecord:
    """After a failure of the endpoint: out of the group, one more failure, and not before its backoff is over."""
    failures = standing.failures + 1
    suspended = standing.state is SubscriptionState.SUSPENDED or should_suspend(failures, limits)
    return replace(
        standing,
        state=SubscriptionState.SUSPENDED if suspended else SubscriptionState.BEHIND,
        reason=reason,
        failures=failures,
        next_attempt_at=now + timedelta(seconds=endpoint_backoff_s(failures, jitter, retry_after_s, limits)),
    )


def merged(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    """One outcome per subscription: a hot one may have been split over several tasks. The worst fate counts."""
    found: dict[str, Outcome] = {}
    for outcome in outcomes:
        other = found.get(outcome.subscription)
        found[outcome.subscription] = outcome if other is None else _together(other, outcome)
    return found


def after_outcome(
    standing: SubscriptionRecord,
    outcome: Outcome,
    parked_now: int,
    now: datetime,
    jitter: Jitter,
    limits: EndpointLimits = LIMITS,
) -> Step:
    """What one outcome makes of one subscription, whether in the group or behind."""
    untouchable = standing.is_paused or standing.state is SubscriptionState.DISABLED
    reason = shortened(outcome.reason)
    if outcome.fate is Fate.DONE:
        return _after_done(standing, outcome, parked_now, now, jitter)
    if outcome.fate is Fate.GONE:
        return Step(disabled(standing, reason), passes=False)
    if untouchable:
        return Step(standing, passes=False)
    if outcome.fate is Fate.ENDPOINT_FAILED:
        failed = subscription_after_failure(
            standing, outcome.retry_after_s, reason or "the receiver did not answer", now, jitter(), limits
        )
        return Step(failed, passes=False)
    if outcome.fate is Fate.FULL:
        full = _full(standing, reason or "no more may be parked", now, jitter, answered=_is_answered(outcome))
        return Step(full, passes=False)
    return Step(_outside(standing, reason or "slower than the live group"), passes=False)


def after_retries(
    standing: SubscriptionRecord, outcome: Outcome, now: datetime, jitter: Jitter, limits: EndpointLimits = LIMITS
) -> SubscriptionRecord:
    """What retries of parked deliveries say about an endpoint. Somebody else may be asking it at the same time."""
    backs_off = standing.next_attempt_at is not None and standing.next_attempt_at > now
    if outcome.fate is Fate.ENDPOINT_FAILED and standing.failures and backs_off:
        return standing  # found out by somebody else while these were under way: one failure counts once
    if outcome.fate is Fate.DONE and standing.is_full:
        return standing  # its batch would be sent again for every row that goes; it comes back at its time
    return after_outcome(standing, outcome, 0, now, jitter, limits).standing


def settle(
    group: Group,
    work: Work,
    outcomes: Sequence[Outcome],
    standings: Mapping[str, SubscriptionRecord],
    parked_now: Mapping[str, int],
    now: datetime,
    jitter: Jitter,
    limits: EndpointLimits = LIMITS,
) -> Settlement:
    """Close one piece of group work. `standings` holds every member of `group`."""
    at = group.cursors.get(work.place)
    stands = None if at is None else Reached(at)
    require_cursor("the live group", work.place, stands, Reached(work.begun_at), Reached(work.done_to))
    by_name = merged(outcomes)
    stayed, departures = [], []
    parked: dict[str, tuple[ParkedEvent, ...]] = {}
    expired: dict[str, int] = {}
    for name in sorted(group.members):
        standing = standings[name]
        if name not in work.members or (work.version is not None and standing.joined_version > work.version):
            # Joined meanwhile, so it did not get these events, whatever an outcome of its former self says.
            departures.append(Departure(_outside(standing, "joined while a batch was under way"), group.cursors))
            continue
        outcome = by_name.get(name, Outcome(name, Fate.UNFINISHED))
        step = after_outcome(standing, outcome, parked_now.get(name, 0), now, jitter, limits)
        if not step.passes:
            departures.append(_departed(step.standing, group, work, outcome.reached))
            continue
        if step.standing != standing:
            stayed.append(step.standing)
        if step.parked:
            parked[name] = step.parked
        if step.expired:
            expired[name] = step.expired
    left = frozenset(d.standing.name for d in departures)
    after = Group(
        version=group.version + 1 if left else group.version,
        members=group.members - left,
        cursors={**group.cursors, work.place: work.done_to},
    )
    return Settlement(after, tuple(stayed), tuple(departures), parked, expired)


def may_join(standing: SubscriptionRecord, cursors: CursorVector, group: Group) -> bool:
    return standing.state is SubscriptionState.BEHIND and dict(cursors) == dict(group.cursors)


def joined(standing: SubscriptionRecord, group: Group) -> tuple[SubscriptionRecord, Group]:
    version = group.version + 1
    member = replace(standing, state=SubscriptionState.LIVE, reason="", joined_version=version)
    return member, replace(group, version=version, members=group.members | {standing.name})


def paused(standing: SubscriptionRecord, reason: str) -> SubscriptionRecord:
    return replace(
        standing,
        state=SubscriptionState.SUSPENDED,
        reason=shortened(reason) or "paused by a person",
        next_attempt_at=None,
    )


def disabled(standing: SubscriptionRecord, reason: str) -> SubscriptionRecord:
    return replace(
        standing,
        state=SubscriptionState.DISABLED,
        reason=shortened(reason) or "the receiver says it is gone",
        next_attempt_at=None,
    )


def resumed(standing: SubscriptionRecord) -> SubscriptionRecord:
    """A person says that it works: whatever it waited for, it is tried now."""
    if standing.is_member:
        return standing
    return clean(replace(standing, state=SubscriptionState.BEHIND))


def first_attempt_at(event: ParkedEvent, now: datetime, jitter: float) -> datetime:
    return now + timedelta(seconds=next_attempt(1, event.retry_after_s, jitter) or 0.0)


def attempts_made(event: ParkedEvent) -> int:
    """An event that was parked without an answer (too large, or held behind its key) was not sent yet."""
    return 0 if event.status is None else 1


def require_outside(name: str, standing: SubscriptionRecord | None, generation: int | None) -> SubscriptionRecord:
    """The subscription that work was done for, if it is still there, the same one, and outside the group."""
    if standing is None or standing.is_member or generation not in (None, standing.generation):
        raise ConflictError(
            f"subscription {name!r} joined the live group, was removed or made anew while work was done for it",
            hint="nothing is lost: what is there now gets what it has not got",
        )
    return standing


def shortened(reason: str) -> str:
    return reason if len(reason) <= REASON_CHARS_MAX else reason[: REASON_CHARS_MAX - 1] + "…"


def _together(a: Outcome, b: Outcome) -> Outcome:
    worst = min(a, b, key=lambda outcome: _WORST_FIRST.index(outcome.fate))
    waits = [o.retry_after_s for o in (a, b) if o.retry_after_s is not None]
    return replace(
        worst,
        accepted=a.accepted + b.accepted,
        parked=a.parked + b.parked,
        expired=a.expired + b.expired,
        retry_after_s=max(waits, default=None),
        reached=None,  # each of its own share
    )


def _departed(standing: SubscriptionRecord, group: Group, work: Work, reached: Reached | None) -> Departure:
    """Whoever leaves stands where the work began, or where it got to."""
    if reached is None or not Reached(work.begun_at) < reached < Reached(work.done_to):
        return Departure(standing, group.cursors)
    return Departure(standing, {**group.cursors, work.place: reached.batch}, reached.through)


def _after_done(standing: SubscriptionRecord, outcome: Outcome, parked_now: int, now: datetime, jitter: Jitter) -> Step:
    more_parked = sum(not event.session for event in outcome.parked)
    if outcome.parked and parked_now + more_parked > standing.parked_max:
        if standing.is_paused or standing.state is SubscriptionState.DISABLED:
            return Step(standing, passes=False)
        more = f"{more_parked} more would exceed parked_max = {standing.parked_max}"
        answered = _is_answered(outcome)
        full = _full(standing, f"{parked_now} deliveries are parked, and {more}", now, jitter, answered=answered)
        return Step(full, passes=False)
    after = standing
    answered = _is_answered(outcome)
    if standing.state is SubscriptionState.SUSPENDED and not standing.is_paused:
        # Work without a single answer says nothing about an endpoint that failed.
        if answered or standing.failures == 0:
            after = clean(replace(standing, state=SubscriptionState.BEHIND))
    elif answered and standing.state in (SubscriptionState.LIVE, SubscriptionState.BEHIND):
        after = clean(standing)
    ordered = tuple(sorted(outcome.parked, key=lambda e: (e.place, e.batch, e.position)))
    return Step(after, passes=True, parked=ordered, expired=outcome.expired)


def _is_answered(outcome: Outcome) -> bool:
    return outcome.accepted > 0 or any(event.status is not None for event in outcome.parked)


def _full(
    standing: SubscriptionRecord, reason: str, now: datetime, jitter: Jitter, *, answered: bool
) -> SubscriptionRecord:
    """Out of the group. With a clean record what is parked goes on being tried, and makes room.

    Nothing may have been asked, because all there was to send is held back: that says nothing of an endpoint that
    failed. Its failures stay on record, and it may be asked when that was due anyway, with what is parked.
    """
    if standing.failures and not answered:
        return replace(
            standing,
            state=SubscriptionState.SUSPENDED,
            reason=reason,
            next_attempt_at=standing.next_attempt_at or now,
        )
    return replace(
        standing,
        state=SubscriptionState.SUSPENDED,
        reason=reason,
        failures=0,
        next_attempt_at=now + timedelta(seconds=ENDPOINT_BACKOFF_S_MAX * (1 + jitter())),
    )


def clean(standing: SubscriptionRecord) -> SubscriptionRecord:
    if not (standing.reason or standing.failures or standing.next_attempt_at):
        return standing  # nearly everybody, nearly always
    return replace(standing, reason="", failures=0, next_attempt_at=None)


def _outside(standing: SubscriptionRecord, reason: str) -> SubscriptionRecord:
    if not standing.is_member:
        return standing
    return replace(standing, state=SubscriptionState.BEHIND, reason=reason)
