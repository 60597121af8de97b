"""Small batches that are matched where they are posted, predicates included.

All rows are matched before the first request: a subscription that an event leaves in doubt is then left to Spark as a
whole, and nothing of it has been sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from evermark.delivery.run.post import MatchedRows, by_span, is_at_hand, matched_by_name, rows_at_hand
from evermark.delivery.work import Assignment, Span
from evermark.errors import ConfigError
from evermark.log.row_reader import I64, ROWS, RowReader, require_codes
from evermark.log.span import row_addresses
from evermark.predicate import vetted
from evermark.predicate.index import Filter
from evermark.predicate.matcher import Matcher, matcher_of

# More rows than this are posted by tasks: they have processors of their own.
ROWS_MAX = 2_000
BYTES_MAX = 64 * 1024 * 1024
_KEPT_MAX = 8

Asked = tuple[tuple[str, ...], tuple[str, ...], str | None]


@dataclass(frozen=True)
class MatchedHere:
    """What can be posted from here; `pieces` number the assignments that were given."""

    pieces: tuple[MatchedRows, ...]
    for_spark: frozenset[int]


def is_small(assignments: Sequence[Assignment]) -> bool:
    return sum(span.rows for span in {one.span for one in assignments}) <= ROWS_MAX


def matched_here(assignments: Sequence[Assignment]) -> MatchedHere:
    """The rows that the assignments want, and the numbers of the assignments that Spark has to match."""
    pieces: list[MatchedRows] = []
    for_spark: set[int] = set()
    bytes_left = BYTES_MAX
    for span, numbers in by_span(assignments):
        plain = [number for number in numbers if not assignments[number].spec.where]
        exact = [number for number in numbers if has_exact_steps(assignments[number].spec.where)]
        for_spark.update(set(numbers) - set(plain) - set(exact))
        if not plain and not exact:
            continue
        rows = _rows_of(span, bytes_left)
        if rows is None:
            for_spark.update(numbers)
            continue
        bytes_left -= rows.nbytes
        if plain:
            streams, ops = (pa.chunked_array([rows.column(name).cast(pa.string())]) for name in ("stream", "op"))
            pieces.append((rows, *matched_by_name(streams, ops, assignments, plain)))
        if exact:
            row_numbers, of, unsure = _matched_by_predicate(rows, assignments, exact)
            for_spark |= unsure
            pieces.append((rows, row_numbers, of))
    return MatchedHere(tuple(_together(pieces)), frozenset(for_spark))


def has_exact_steps(where: str | None) -> bool:
    """Whether there is a predicate, and it means the same without Spark."""
    try:
        return bool(where) and vetted(where).exact is not None
    except ConfigError:  # an earlier version took it: Spark's side says what becomes of it
        return False


def _together(pieces: Sequence[MatchedRows]) -> list[MatchedRows]:
    """One piece for each batch of rows: its subscriptions are served side by side."""
    by_rows: dict[int, list[MatchedRows]] = {}
    for piece in pieces:
        by_rows.setdefault(id(piece[0]), []).append(piece)
    return [
        (same[0][0], np.concatenate([rows for _, rows, _ in same]), np.concatenate([of for _, _, of in same]))
        for same in by_rows.values()
    ]


def _rows_of(span: Span, bytes_max: int) -> pa.RecordBatch | None:
    """All rows of a span in log order, or None if they are too large to be held at once."""
    if is_at_hand(span):
        return rows_at_hand(span)
    require_codes(span.paths)
    where = (span.paths, span.place.partition, span.after, span.to)
    found = row_addresses(*where, exact=span.exact, through=span.begun.through)
    if not len(found.codes):
        return pa.RecordBatch.from_pylist([], schema=ROWS)
    reader = RowReader(span.paths)
    if len(found.codes) > reader.rows_within(bytes_max):
        return None
    return reader.pick(found.codes, found.numbers)


def _matched_by_predicate(
    rows: pa.RecordBatch, assignments: Sequence[Assignment], numbers: Sequence[int]
) -> tuple[I64, I64, set[int]]:
    specs = [assignments[number].spec for number in numbers]
    found = _matcher(tuple((spec.streams, spec.ops, spec.where) for spec in specs)).wanted(rows)
    return found.rows, np.asarray(numbers, np.int64)[found.of], {numbers[number] for number in found.unsure}


# Subscriptions seldom change, and batches are many.
@lru_cache(maxsize=_KEPT_MAX)
def _matcher(asked: tuple[Asked, ...]) -> Matcher:
    return matcher_of([Filter(streams, ops, vetted(where)) for streams, ops, where in asked])
