"""The live group and its members: who stays, leaves and joins. Pure: stores carry it out.

The rule behind all of it: a cursor passes an event only when it was accepted, parked, not matched, or expired and
counted. A member for which that does not hold for all of the work leaves the group, at the cursor the work began at or
at the last cursor up to which it holds.

| state     | set by                                                              | left by                          |
|-----------|---------------------------------------------------------------------|----------------------------------|
| live      | `join`; `register` or `add` with a start from now on                | any fate but DONE; a failed      |
|           |                                                                     | retry; a person                  |
| behind    | leaving the group; `register` or `add` with an earlier start;       | `join`; failures; a person       |
|           | `resume`; a success while suspended                                 |                                  |
| suspended | `suspend_after` endpoint failures in a row, of retries too; a person;| a success; a person              |
|           | too much parked, or too much of one key (FULL), which is no failure | work that is done: there is room |
| disabled  | 410; `webhook-delivery: disable`                                    | a new url; a person              |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from evermark.delivery.decide import retry
from evermark.delivery.decide.retry import LIMITS, EndpointLimits
from evermark.delivery.model import (
    Cursor,
    CursorVector,
    Fate,
    Group,
    GroupWork,
    Outcome,
    ParkedEvent,
    SourcePartition,
    Subscription,
    SubscriptionState,
)
from evermark.delivery.work import both
from evermark.errors import ConflictError

Jitter = Callable[[], float]

REASON_CHARS_MAX = 500


@dataclass(frozen=True)
class SubscriptionRecord:
    """The part of a subscription that the decisions need."""

    name: str
    state: SubscriptionState
    reason: str = ""
    failures: int = 0
    next_attempt_at: datetime | None = None
    parked_max: int = 10_000
    joined_version: int = 0  # the group's version when it last joined
    generation: int = 0  # tells it from a later subscription of the same name
    by_stream: bool = False  # a bot: `parked_max` holds for each of its streams, and stops that stream alone

    @property
    def is_member(self) -> bool:
        return self.state is SubscriptionState.LIVE

    @property
    def is_paused(self) -> bool:
        return self.state is SubscriptionState.SUSPENDED and self.next_attempt_at is None

    @property
    def is_stopped(self) -> bool:
        return self.is_paused or self.state is SubscriptionState.DISABLED

    @property
    def is_full(self) -> bool:
        """Suspended without a failure: its endpoint works, but no more may be parked."""
        return self.state is SubscriptionState.SUSPENDED and self.failures == 0 and not self.is_paused


@dataclass(frozen=True)
class Step:
    """A subscription after one outcome. `passes`: its cursor may move over the work."""

    record: SubscriptionRecord
    passes: bool
    parked: tuple[ParkedEvent, ...] = ()
    expired: int = 0


@dataclass(frozen=True)
class Settlement:
    group: Group
    records: tuple[SubscriptionRecord, ...]  # that changed
    left: Mapping[str, CursorVector]  # the cursors at which members left the group
    parked: Mapping[str, tuple[ParkedEvent, ...]]
    expired: Mapping[str, int]


def is_due(subscription: Subscription, now: datetime) -> bool:
    """Whether the follower may work for a subscription now."""
    at = subscription.next_attempt_at
    if subscription.state is SubscriptionState.BEHIND:
        return at is None or at <= now
    return subscription.state is SubscriptionState.SUSPENDED and at is not None and at <= now


def is_stopped(subscription: Subscription) -> bool:
    """Whether nothing is tried until a person acts: it is paused, or its receiver said that it is gone."""
    paused = subscription.state is SubscriptionState.SUSPENDED and subscription.next_attempt_at is None
    return paused or subscription.state is SubscriptionState.DISABLED


def drains(record: SubscriptionRecord, now: datetime) -> bool:
    """Whether the parked rows of a subscription may be tried now.

    Rows of a full subscription at any time: only retries get it out. Rows of a subscription suspended for failures
    when it is due: there may be no other way to find out that it works again.
    """
    due = record.is_full or record.next_attempt_at is None or record.next_attempt_at <= now
    return due and not record.is_stopped


def waits_because(subscription: Subscription, now: datetime) -> str:
    """Why the parked rows of a subscription are not tried now, for a sentence; empty when they are. See `drains`."""
    at = subscription.next_attempt_at
    if is_stopped(subscription):
        gone = subscription.state is SubscriptionState.DISABLED
        return f"is {'disabled' if gone else 'paused'}, and nothing of it is tried"
    full = subscription.state is SubscriptionState.SUSPENDED and subscription.failures == 0
    if at is None or at <= now or full:
        return ""
    return f"failed ({subscription.reason or 'no reason is known'}), and is not tried before {at:%Y-%m-%d %H:%M:%S} UTC"


def subscription_after_failure(
    record: SubscriptionRecord, outcome: Outcome, now: datetime, jitter: float, limits: EndpointLimits = LIMITS
) -> SubscriptionRecord:
    """After a failure of the endpoint: out of the group, one more failure, and tried again when its backoff is over."""
    failures = record.failures + 1
    suspended = record.state is SubscriptionState.SUSPENDED or retry.should_suspend(failures, limits)
    state = SubscriptionState.SUSPENDED if suspended else SubscriptionState.BEHIND
    reason = shortened(outcome.reason) or "the receiver did not answer"
    at = now + timedelta(seconds=retry.endpoint_backoff_s(failures, jitter, outcome.retry_after_s, limits))
    return replace(record, state=state, reason=reason, failures=failures, next_attempt_at=at)


def merged(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    """One outcome per subscription: its work may have been split over several tasks. The worst fate counts."""
    found: dict[str, Outcome] = {}
    for outcome in outcomes:
        other = found.get(outcome.subscription)
        found[outcome.subscription] = outcome if other is None else both(other, outcome)
    return found


def after_outcome(
    record: SubscriptionRecord, outcome: Outcome, parked_now: int, now: datetime, jitter: Jitter, limits: EndpointLimits
) -> Step:
    """A subscription, in the group or behind, after one outcome."""
    reason = shortened(outcome.reason)
    if outcome.fate is Fate.DONE:
        return _after_done(record, outcome, parked_now, now, jitter)
    if outcome.fate is Fate.GONE:
        return Step(disabled(record, reason), passes=False)
    if record.is_stopped:
        return Step(record, passes=False)
    if outcome.fate is Fate.ENDPOINT_FAILED:
        return Step(subscription_after_failure(record, outcome, now, jitter(), limits), passes=False)
    if outcome.fate is Fate.STUCK:
        return Step(replace(out_of_group(record, reason), reason=reason), passes=False)
    if outcome.fate is Fate.FULL:
        return Step(_full(record, reason or "no more may be parked", outcome, now, jitter), passes=False)
    return Step(out_of_group(record, reason or "slower than the live group"), passes=False)


def after_retries(
    record: SubscriptionRecord, outcome: Outcome, now: datetime, jitter: Jitter, limits: EndpointLimits = LIMITS
) -> SubscriptionRecord:
    """A subscription after retries of its parked deliveries. The follower may be asking its endpoint meanwhile."""
    backs_off = record.next_attempt_at is not None and record.next_attempt_at > now
    if outcome.fate is Fate.ENDPOINT_FAILED and record.failures and backs_off:
        return record  # the follower met the failure while retries ran: it counts once
    if outcome.fate is Fate.DONE and record.is_full:
        return record  # its batch would be sent again for every parked row that goes; it comes back at its time
    return after_outcome(record, outcome, 0, now, jitter, limits).record


def settle(
    group: Group,
    work: GroupWork,
    outcomes: Sequence[Outcome],
    records: Mapping[str, SubscriptionRecord],
    parked_now: Mapping[str, int],
    now: datetime,
    jitter: Jitter,
    limits: EndpointLimits = LIMITS,
) -> Settlement:
    """Close one piece of group work. `records` holds every member of `group`."""
    require_cursor("the live group", work.place, group.cursors.get(work.place), work.begun, work.done)
    by_name = merged(outcomes)
    changed: list[SubscriptionRecord] = []
    left: dict[str, CursorVector] = {}
    parked: dict[str, tuple[ParkedEvent, ...]] = {}
    expired: dict[str, int] = {}
    for name in sorted(group.members):
        record = records[name]
        if name not in work.members or (work.version is not None and record.joined_version > work.version):
            # Joined meanwhile, so it did not get these events, even if there is an outcome of its former self.
            changed.append(out_of_group(record, "joined while a batch was under way"))
            left[name] = group.cursors
            continue
        outcome = by_name.get(name, Outcome(name, Fate.UNFINISHED))
        step = after_outcome(record, outcome, parked_now.get(name, 0), now, jitter, limits)
        if not step.passes:
            changed.append(step.record)
            reached = outcome.reached
            inside = reached is not None and work.begun < reached < work.done
            left[name] = {**group.cursors, work.place: reached} if reached and inside else group.cursors
            continue
        if step.record != record:
            changed.append(step.record)
        if step.parked:
            parked[name] = step.parked
        if step.expired:
            expired[name] = step.expired
    cursors = {**group.cursors, work.place: work.done}
    after = Group(group.version + 1 if left else group.version, group.members - left.keys(), cursors)
    return Settlement(after, tuple(changed), left, parked, expired)


def only_moves(work: GroupWork, outcomes: Sequence[Outcome]) -> bool:
    """Whether settling moves the group's cursor and nothing else, if the group and its members are as work began."""
    whole = not work.begun.through and not work.done.through and work.version is not None and work.begun < work.done
    well = all(one.fate is Fate.DONE and not one.parked and not one.expired for one in outcomes)
    return whole and well and {one.subscription for one in outcomes} == work.members


def may_join(record: SubscriptionRecord, cursors: CursorVector, group: Group) -> bool:
    return record.state is SubscriptionState.BEHIND and dict(cursors) == dict(group.cursors)


def joined(record: SubscriptionRecord, group: Group) -> tuple[SubscriptionRecord, Group]:
    version = group.version + 1
    member = replace(record, state=SubscriptionState.LIVE, reason="", joined_version=version)
    return member, replace(group, version=version, members=group.members | {record.name})


def paused(record: SubscriptionRecord, reason: str) -> SubscriptionRecord:
    reason = shortened(reason) or "paused by a person"
    return replace(record, state=SubscriptionState.SUSPENDED, reason=reason, next_attempt_at=None)


def disabled(record: SubscriptionRecord, reason: str) -> SubscriptionRecord:
    reason = shortened(reason) or "the receiver says it is gone"
    return replace(record, state=SubscriptionState.DISABLED, reason=reason, next_attempt_at=None)


def resumed(record: SubscriptionRecord) -> SubscriptionRecord:
    """A person says that it works: it is tried now, and waits for nothing."""
    return record if record.is_member else clean(replace(record, state=SubscriptionState.BEHIND))


def first_attempt_at(event: ParkedEvent, now: datetime, jitter: float, waits_s: Sequence[float]) -> datetime:
    return now + timedelta(seconds=retry.next_attempt(1, event.retry_after_s, jitter, waits_s) or 0.0)


def attempts_made(event: ParkedEvent) -> int:
    """An event that was parked without an answer (too large, or held behind its key) was not sent yet."""
    return 0 if event.status is None else 1


def require_outside(name: str, record: SubscriptionRecord | None, generation: int | None) -> SubscriptionRecord:
    """The record of the subscription that work was done for, if it is still there, not made anew, and outside."""
    if record is None or record.is_member or generation not in (None, record.generation):
        raise ConflictError(
            f"subscription {name!r} joined the live group, was removed or made anew while work was done for it",
            hint="nothing is lost: the subscription of that name gets the events it has not got",
        )
    return record


def require_cursor(who: str, place: SourcePartition, stands: Cursor | None, begun: Cursor, done: Cursor) -> None:
    """The compare of a cursor's compare-and-set: work is settled only from where it began, and only forward."""
    where = f"cursor of {who} at {place.source}/{place.partition}"
    if stands != begun:
        raise ConflictError(
            f"{where} is at {_said(stands)}, and the work began at {_said(begun)}",
            hint="another worker did this work meanwhile; it is not repeated",
        )
    if done <= begun:
        raise ConflictError(f"{where} would go from {_said(begun)} to {_said(done)}", hint="a cursor only goes forward")


def _said(cursor: Cursor | None) -> str:
    if cursor is None:
        return "no batch"
    return f"batch {cursor.batch}" + (f", position {cursor.through} of the next" if cursor.through else "")


def shortened(reason: str) -> str:
    return reason if len(reason) <= REASON_CHARS_MAX else reason[: REASON_CHARS_MAX - 1] + "…"


def _after_done(record: SubscriptionRecord, outcome: Outcome, parked_now: int, now: datetime, jitter: Jitter) -> Step:
    more_parked = 0 if record.by_stream else sum(not event.session for event in outcome.parked)
    if outcome.parked and parked_now + more_parked > record.parked_max:
        if record.is_stopped:
            return Step(record, passes=False)
        more = f"{more_parked} more would exceed parked_max = {record.parked_max}"
        full = _full(record, f"{parked_now} deliveries are parked, and {more}", outcome, now, jitter)
        return Step(full, passes=False)
    after, answered = record, is_answered(outcome)
    if record.state is SubscriptionState.SUSPENDED and not record.is_paused:
        # Work without a single answer says nothing about an endpoint that failed.
        if answered or record.failures == 0:
            after = clean(replace(record, state=SubscriptionState.BEHIND))
    elif answered and record.state in (SubscriptionState.LIVE, SubscriptionState.BEHIND):
        after = clean(record)
        if outcome.reason:
            after = replace(after, reason=shortened(outcome.reason))
    ordered = tuple(sorted(outcome.parked, key=lambda e: (e.place, e.batch, e.position)))
    return Step(after, passes=True, parked=ordered, expired=outcome.expired)


def is_answered(outcome: Outcome) -> bool:
    """Whether the receiver took or refused at least one event: what is not sent says nothing of it."""
    return outcome.accepted > 0 or any(event.status is not None for event in outcome.parked)


def _full(one: SubscriptionRecord, reason: str, outcome: Outcome, now: datetime, jitter: Jitter) -> SubscriptionRecord:
    """Out of the group. With a clean record its parked rows go on being tried, and make room.

    Without an answer (all events may be held back) its failures stay on record: the endpoint is tried when that was
    due anyway, with a parked row.
    """
    full = replace(one, state=SubscriptionState.SUSPENDED, reason=reason)
    if one.failures and not is_answered(outcome):
        return replace(full, next_attempt_at=one.next_attempt_at or now)
    wait = timedelta(seconds=retry.ENDPOINT_BACKOFF_S_MAX * (1 + jitter()))
    return replace(full, failures=0, next_attempt_at=now + wait)


def clean(record: SubscriptionRecord) -> SubscriptionRecord:
    if not (record.reason or record.failures or record.next_attempt_at):
        return record  # the usual case
    return replace(record, reason="", failures=0, next_attempt_at=None)


def out_of_group(record: SubscriptionRecord, reason: str) -> SubscriptionRecord:
    return replace(record, state=SubscriptionState.BEHIND, reason=reason) if record.is_member else record
