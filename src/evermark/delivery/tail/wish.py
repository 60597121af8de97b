"""What clients of the live tail want, and which events of a piece each wish is met by: each wish tested once, whatever
number of clients have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from evermark.delivery.model import SourcePartition
from evermark.errors import BusyError
from evermark.log.pieces import LogPiece
from evermark.predicate import Predicate, match_sql, vet, vetted
from evermark.predicate.index import Filter
from evermark.predicate.matcher import I64, Matcher, matcher_of

_NONE: I64 = np.empty(0, np.int64)


@dataclass(frozen=True)
class Wish:
    """Streams and operations (none: all that are delivered), and a predicate, as in a subscription."""

    streams: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    where: str | None = None

    @property
    def filter(self) -> Filter:
        return Filter(self.streams, self.ops, self.predicate)

    @property
    def predicate(self) -> Predicate:
        return vetted(self.where)

    @property
    def needs_spark(self) -> bool:
        return self.predicate.exact is None


def require_fit(wish: Wish) -> None:
    """Raises `ConfigError` for a wish that nobody may have."""
    match_sql(wish.streams, wish.ops, vet(wish.where), lambda _: "null")


# The rows of a piece that meet a wish, by (batch, position), as Spark finds them.
BySpark = Callable[[SourcePartition, LogPiece, Wish], set[tuple[int, str]]]


def no_spark(_place: SourcePartition, _piece: LogPiece, wish: Wish) -> set[tuple[int, str]]:
    raise BusyError(
        f"only Spark can say which events match {(wish.where or '')[:200]!r}, and it does not run just now",
        hint="it is asked again in a moment",
    )


@dataclass(frozen=True)
class Matched:
    """By wish, the rows that meet it. A wish that some row leaves in doubt is not among them: Spark decides."""

    rows: dict[Wish, I64]


class Wishes:
    """Some wishes, made ready for many pieces."""

    def __init__(self, wishes: Sequence[Wish]) -> None:
        self.all = tuple(dict.fromkeys(wish for wish in wishes if not wish.needs_spark))
        self._matcher: Matcher = matcher_of([wish.filter for wish in self.all])

    def matched(self, rows: pa.RecordBatch) -> Matched:
        if not rows.num_rows or not self.all:
            return Matched(dict.fromkeys(self.all, _NONE))
        found = self._matcher.wanted(rows)
        by_wish = dict.fromkeys((wish for n, wish in enumerate(self.all) if n not in found.unsure), _NONE)
        order = np.argsort(found.of, kind="stable")
        numbers, starts = np.unique(found.of[order], return_index=True)
        for number, mine in zip(numbers.tolist(), np.split(found.rows[order], starts[1:]), strict=False):
            by_wish[self.all[number]] = mine
        return Matched(by_wish)


def matched_one(wishes: Wishes, wish: Wish, place: SourcePartition, piece: LogPiece, by_spark: BySpark) -> I64:
    """The rows of a piece that one wish is met by, with the help of Spark where there is a doubt."""
    if not piece.rows.num_rows:
        return _NONE
    found = wishes.matched(piece.rows).rows.get(wish)
    if found is not None:
        return found
    wanted = by_spark(place, piece, wish)
    marks = zip(piece.rows.column("batch").to_pylist(), piece.rows.column("position").to_pylist(), strict=True)
    return np.array([number for number, mark in enumerate(marks) if mark in wanted], np.int64)
