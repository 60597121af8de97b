"""What the rounds of one step of a replay come to. Pure: whoever posts says what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evermark.delivery.base import Fate, Outcome
from evermark.delivery.replay.plan import Replayed, ReplayWork
from evermark.delivery.replay.timeslice import Mark


@dataclass(frozen=True)
class Round:
    """Some events of a slice, in its order: the first `rows` of them are done with, the last one stands at `at`."""

    outcome: Outcome
    rows: int
    at: Mark | None  # none: not even the first


def both(one: Outcome, other: Outcome) -> Outcome:
    """The outcome of two pieces of one subscription's work, the first one first."""
    worse = other if one.fate is Fate.DONE else one
    return Outcome(
        one.subscription,
        worse.fate,
        one.accepted + other.accepted,
        one.parked + other.parked,
        worse.reason,
        worse.retry_after_s,
        one.expired + other.expired,
    )


def folded(work: ReplayWork, rounds: Sequence[Round], limit: int) -> Replayed:
    """How far a slice got. One of which no more than `limit` was looked for is done up to its last row."""
    whole = Outcome(work.spec.name, Fate.DONE)
    mark, seen = work.slice.mark, 0
    for one in rounds:
        whole = both(whole, one.outcome)
        seen += one.rows
        mark = mark if one.at is None else one.at
    if whole.fate is Fate.DONE and seen < limit:
        mark = work.slice.end
    return Replayed(mark, whole)
