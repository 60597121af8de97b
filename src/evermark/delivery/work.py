"""Pieces of the log on their way to receivers, and their results.

`Deliverer` is the port between the decisions here and the machinery that reads, matches and posts (Spark in production,
a model in the simulator). Its contract:

- Every event of the span that the subscription matches is offered to the receiver, in log order per key.
- A bot is offered the events that `delivery.bots.forward` selects; events of a session whose key is missing are parked
  instead.
- Each `Outcome` says how far it `reached` in the span.
- A crash in the middle leaves nothing behind but receivers that have seen some events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import add
from typing import Any, Protocol, cast

import pyarrow as pa

from evermark.delivery.model import (
    BEGINNING,
    BotView,
    Cursor,
    Fate,
    HeldKey,
    Outcome,
    SourcePartition,
    SubscriptionSpec,
)

_WORST_FIRST = (Fate.GONE, Fate.ENDPOINT_FAILED, Fate.FULL, Fate.STUCK, Fate.UNFINISHED, Fate.DONE)


@dataclass(frozen=True)
class Span:
    """The events of one partition after `begun` up to and with batch `to`, and the files that hold them (and perhaps
    other events)."""

    place: SourcePartition
    begun: Cursor
    to: int
    paths: tuple[str, ...]
    rows: int
    exact: bool = False  # the files hold the batches `after < batch <= to`, and nothing else
    # All rows of these batches, if they were just taken by this process: they need not be read again.
    fresh: pa.Table | None = field(default=None, compare=False, repr=False)

    @property
    def after(self) -> int:
        return self.begun.batch

    def __reduce__(self) -> tuple[Any, ...]:
        """Without its rows: other processes read the files."""
        return Span, (self.place, self.begun, self.to, self.paths, self.rows, self.exact)


@dataclass(frozen=True)
class KeyPart:
    """One of the `of` parts into which a subscription's events are divided by key (`decide/key_parts.py`)."""

    number: int
    of: int
    rows_max: int | None = None  # the first so many events of all parts together; None: all


@dataclass(frozen=True)
class Assignment:
    """A span on its way to one subscription."""

    span: Span
    spec: SubscriptionSpec
    probe: bool = False  # the endpoint failed last time: one request at a time until one is accepted
    expires_before: datetime | None = None  # events taken earlier are passed over, and counted
    bot: BotView | None = None  # of a bot: its memberships, and the session keys it has
    parked_room: int | None = None  # how many more may be parked; None: the subscription's `parked_max`
    part: KeyPart | None = None  # only the events of this part; None: all


@dataclass(frozen=True)
class Result:
    """One subscription's outcome in one batch. Each matched event up to and with position `through` was accepted,
    expired, or is among `outcome.parked`, which holds no other event; in a DONE batch `through` is the last event's.
    None: not even the first event was.
    """

    place: SourcePartition
    batch: int
    outcome: Outcome
    through: str | None = None

    @property
    def subscription(self) -> str:
        return self.outcome.subscription


@dataclass(frozen=True)
class DeliveryOptions:
    """How assignments are carried out. Times begin when the first request could be sent, not when the job starts."""

    historical: bool = False  # these events come late: their receiver was behind
    budget_s: float | None = None  # no new request begins after this; None: as long as it takes
    grace_s: float | None = None  # requests under way by then may take this much longer; None: their own timeout
    # A subscription that is not done this long after half of the others is cut off; None: never.
    slack_s: float | None = None
    # With `ordered`: per subscription, the keys that have parked events, and how many. Later ones are parked behind.
    held: Mapping[str, Mapping[HeldKey, int]] = field(default_factory=dict)
    sends: bool = True  # False: expired events are counted, and a batch with anything else to send is unfinished


class Deliverer(Protocol):
    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        """One outcome for each assignment, in their order. At most one assignment of a subscription in a call."""


def fold(assignments: Sequence[Assignment], results: Iterable[Result]) -> list[Outcome]:
    """Per assignment: how far it got, and which events are to be parked on the way. Batches without a match are done.

    A batch in several pieces is done when all pieces are; until then, up to the first piece that is not.
    """
    by_name: dict[str, dict[int, Result]] = {}
    for result in results:
        mine = by_name.setdefault(result.subscription, {})
        before = mine.get(result.batch)
        mine[result.batch] = result if before is None else _continued(before, result)
    outcomes: list[Outcome] = []
    span, whole = None, BEGINNING
    for assignment in assignments:
        if found := by_name.get(assignment.spec.name):
            outcomes.append(_folded(assignment.span, found))
            continue
        # Of thousands, most want nothing of a batch: they got as far as the others, and it took no time.
        if assignment.span is not span:
            span, whole = assignment.span, Cursor(assignment.span.to)
        outcomes.append(Outcome(assignment.spec.name, Fate.DONE, reached=whole, took_s=0.0))
    return outcomes


def _continued(before: Result, after: Result) -> Result:
    through = after.through if before.outcome.fate is Fate.DONE and after.through else before.through
    return replace(after, outcome=both(before.outcome, after.outcome), through=through)


def _folded(span: Span, results: Mapping[int, Result]) -> Outcome:
    whole: Outcome | None = None
    for batch in sorted(results):
        outcome, through = results[batch].outcome, results[batch].through
        done = outcome.fate is Fate.DONE
        passed = outcome if done or through else replace(outcome, parked=(), expired=0)
        whole = passed if whole is None else both(whole, passed)
        if not done:
            before = max(span.begun, Cursor(batch - 1))
            return replace(whole, reached=Cursor(before.batch, through) if through else before)
    return replace(cast("Outcome", whole), reached=Cursor(span.to))


def both(one: Outcome, other: Outcome) -> Outcome:
    """The outcome of two pieces of one subscription's work: the worse fate with its reason, and the sum of the rest."""
    worse = one if one.fate is other.fate else min(one, other, key=lambda outcome: _WORST_FIRST.index(outcome.fate))
    return Outcome(
        one.subscription,
        worse.fate,
        one.accepted + other.accepted,
        one.parked + other.parked,
        worse.reason,
        _of_both(max, one.retry_after_s, other.retry_after_s),
        one.expired + other.expired,
        took_s=_of_both(add, one.took_s, other.took_s),
    )


def _of_both(together: Callable[[float, float], float], one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return together(one, other)
