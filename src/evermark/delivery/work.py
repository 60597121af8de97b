"""Pieces of the log on their way to receivers, and what came of them.

`Deliverer` is the port between the decisions here and whatever reads, matches and posts (Spark in production, a model
in the simulator). Its contract:

- Every event of the span that the subscription matches is offered to the receiver, in log order per key.
- `Delivered.done_to` is the last batch of the span all of whose matched events were accepted or are in
  `outcome.parked`; everything after it counts as not done, though some of it may have been accepted.
- A crash in the middle leaves nothing behind but receivers that have seen some events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from evermark.delivery.base import Fate, Outcome, ParkedEvent, Place, SubscriptionSpec


@dataclass(frozen=True)
class Span:
    """The batches `after < batch <= to` of one place, and the files that hold them (and perhaps others too)."""

    place: Place
    after: int
    to: int
    paths: tuple[str, ...]
    rows: int
    exact: bool = False  # the files hold these batches and nothing else


@dataclass(frozen=True)
class BatchResult:
    """One subscription's result in one batch."""

    subscription: str
    batch: int
    outcome: Outcome


@dataclass(frozen=True)
class Delivered:
    """One subscription's result over a span."""

    subscription: str
    done_to: int
    outcome: Outcome


@dataclass(frozen=True)
class Manner:
    """How a span is delivered."""

    historical: bool = False  # these events come late: their receiver was behind
    budget_s: float | None = None  # no new request begins after this; None: as long as it takes
    grace_s: float | None = None  # what is under way by then may take this much longer; None: its own timeout
    # Whoever is not done this long after half of the others were is cut off; None: nobody waits for anybody.
    slack_s: float | None = None
    probe: bool = False  # the endpoint failed last time: one request at a time until one is accepted
    # With `ordered`: per subscription, the keys that have a parked event waiting. Theirs are parked behind it.
    held: Mapping[str, frozenset[tuple[Place, str]]] = field(default_factory=dict)


class Deliverer(Protocol):
    def deliver(self, span: Span, specs: Sequence[SubscriptionSpec], manner: Manner) -> list[Delivered]:
        """One `Delivered` for each of `specs`."""


def fold(span: Span, specs: Sequence[SubscriptionSpec], results: Iterable[BatchResult]) -> list[Delivered]:
    """Per subscription: how far it got, and what is to be parked on the way. Batches without a match are done."""
    by_name: dict[str, dict[int, Outcome]] = {spec.name: {} for spec in specs}
    for result in results:
        by_name[result.subscription][result.batch] = result.outcome
    return [_folded(name, span, by_name[name]) for name in by_name]


def _folded(name: str, span: Span, outcomes: Mapping[int, Outcome]) -> Delivered:
    accepted = expired = 0
    parked: list[ParkedEvent] = []
    for batch in sorted(outcomes):
        outcome = outcomes[batch]
        accepted += outcome.accepted
        if outcome.fate is not Fate.DONE:
            stopped = Outcome(
                name, outcome.fate, accepted, tuple(parked), outcome.reason, outcome.retry_after_s, expired
            )
            return Delivered(name, max(span.after, batch - 1), stopped)
        parked += outcome.parked
        expired += outcome.expired
    return Delivered(name, span.to, Outcome(name, Fate.DONE, accepted, tuple(parked), expired=expired))
