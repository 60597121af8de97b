"""Pieces of the log on their way to receivers, and what came of them.

`Deliverer` is the port between the decisions here and whatever reads, matches and posts (Spark in production, a model
in the simulator). Its contract:

- Every event of the span that the subscription matches is offered to the receiver, in log order per key.
- A bot is offered the events that `delivery.bots.forward` selects; events of a session whose key is missing are parked
  instead.
- `Delivered.done_to` is the last batch of the span all of whose matched events were accepted or are in
  `outcome.parked`; `through` is the position in the next one up to and with which that holds too. Everything after it
  counts as not done, though some of it may have been accepted.
- A crash in the middle leaves nothing behind but receivers that have seen some events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from evermark.delivery.base import Fate, HeldKey, Outcome, ParkedEvent, Reached, SourcePartition, SubscriptionSpec
from evermark.delivery.bots.base import BotView


@dataclass(frozen=True)
class Span:
    """The batches `after < batch <= to` of one place, and the files that hold them (and perhaps others too)."""

    place: SourcePartition
    after: int
    to: int
    paths: tuple[str, ...]
    rows: int
    exact: bool = False  # the files hold these batches and nothing else
    through: str = ""  # of the first batch, what stands up to and with this position is done, and left out

    @property
    def begun(self) -> Reached:
        return Reached(self.after, self.through)


@dataclass(frozen=True)
class Assignment:
    """A span on its way to one subscription."""

    span: Span
    spec: SubscriptionSpec
    probe: bool = False  # the endpoint failed last time: one request at a time until one is accepted
    expires_before: datetime | None = None  # what was taken earlier is passed over, and counted
    bot: BotView | None = None  # for a bot: what it is a member of, and which session keys it has
    parked_room: int | None = None  # how many more may be parked; None: the subscription's `parked_max`


@dataclass(frozen=True)
class BatchResult:
    """One subscription's result in one batch. If it is not DONE, its rows up to and with `through` are done all the
    same, and `outcome.parked` and `expired` are of these alone.
    """

    subscription: str
    batch: int
    outcome: Outcome
    through: str | None = None


@dataclass(frozen=True)
class Delivered:
    """One subscription's result over a span."""

    subscription: str
    done_to: int
    outcome: Outcome
    took_s: float | None = None  # until this one was finished, whoever else was served beside it; None: not measured
    through: str = ""  # of the batch after `done_to`, what stands up to and with this position is done

    @property
    def reached(self) -> Reached:
        return Reached(self.done_to, self.through)


@dataclass(frozen=True)
class DeliveryOptions:
    """How assignments are carried out. Times begin when the first request could be sent, not when the job starts."""

    historical: bool = False  # these events come late: their receiver was behind
    budget_s: float | None = None  # no new request begins after this; None: as long as it takes
    grace_s: float | None = None  # what is under way by then may take this much longer; None: its own timeout
    # Whoever is not done this long after half of the others were is cut off; None: nobody waits for anybody.
    slack_s: float | None = None
    # With `ordered`: per subscription, the keys that have parked events, and how many. Theirs are parked behind them.
    held: Mapping[str, Mapping[HeldKey, int]] = field(default_factory=dict)
    sends: bool = True  # False: what is too old is counted, and a batch with anything else to send is unfinished


class Deliverer(Protocol):
    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Delivered]:
        """One `Delivered` for each, in their order. At most one assignment of a subscription in a call."""


def fold(assignments: Sequence[Assignment], results: Iterable[BatchResult]) -> list[Delivered]:
    """Per subscription: how far it got, and what is to be parked on the way. Batches without a match are done."""
    by_name: dict[str, dict[int, BatchResult]] = {assignment.spec.name: {} for assignment in assignments}
    for result in results:
        by_name[result.subscription][result.batch] = result
    return [_folded(assignment.spec.name, assignment.span, by_name[assignment.spec.name]) for assignment in assignments]


def _folded(name: str, span: Span, results: Mapping[int, BatchResult]) -> Delivered:
    accepted = expired = 0
    parked: list[ParkedEvent] = []
    for batch in sorted(results):
        outcome, through = results[batch].outcome, results[batch].through
        accepted += outcome.accepted
        if outcome.fate is Fate.DONE or through:
            parked += outcome.parked
            expired += outcome.expired
        if outcome.fate is not Fate.DONE:
            stopped = Outcome(
                name, outcome.fate, accepted, tuple(parked), outcome.reason, outcome.retry_after_s, expired
            )
            done_to = max(span.after, batch - 1)
            return Delivered(name, done_to, stopped, through=through or (span.through if done_to == span.after else ""))
    return Delivered(name, span.to, Outcome(name, Fate.DONE, accepted, tuple(parked), expired=expired))
