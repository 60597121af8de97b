"""Small batches that are matched where they are posted, predicates included.

All rows are matched before the first request: a subscription that an event leaves in doubt is then left to Spark as a
whole, and nothing of it has been sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from evermark.delivery.decide.matching import has_exact_steps, wanted_by
from evermark.delivery.run.post import MatchedRows, by_span, is_at_hand, matched_by_name, rows_at_hand
from evermark.delivery.work import Assignment, Span
from evermark.log.row_reader import ROWS, RowReader, require_codes
from evermark.log.span import row_addresses

# More rows than this are posted by tasks: they have processors of their own.
ROWS_MAX = 2_000
BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True)
class MatchedHere:
    """What can be posted from here, with the numbers of the assignments that were given."""

    found: MatchedRows | None
    for_spark: frozenset[int]


def is_small(assignments: Sequence[Assignment]) -> bool:
    return sum(span.rows for span, _ in by_span(assignments)) <= ROWS_MAX


def matched_here(assignments: Sequence[Assignment]) -> MatchedHere:
    """The rows that the assignments want, and the numbers of the assignments that Spark has to match."""
    pieces: list[MatchedRows] = []
    for_spark: set[int] = set()
    bytes_left = BYTES_MAX
    for span, numbers in by_span(assignments):
        plain: list[int] = []
        exact: list[int] = []
        for number in numbers:  # one pass: there may be thousands, and a batch every tenth of a second
            where = assignments[number].spec.where
            if not where:
                plain.append(number)
            elif has_exact_steps(where):
                exact.append(number)
            else:
                for_spark.add(number)
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
            wanted = wanted_by(rows, [assignments[number].spec for number in exact])
            for_spark.update(exact[number] for number in wanted.unsure)
            pieces.append((rows, wanted.rows, np.asarray(exact, np.int64)[wanted.of]))
    return MatchedHere(_together(pieces) if pieces else None, frozenset(for_spark))


def _together(pieces: Sequence[MatchedRows]) -> MatchedRows:
    """One piece of all: pieces are sent one after another, and a slow receiver holds up no other span."""
    batches = list({id(rows): rows for rows, _, _ in pieces}.values())
    starts = dict(zip(map(id, batches), np.cumsum([0, *(rows.num_rows for rows in batches)]).tolist(), strict=False))
    return (
        batches[0] if len(batches) == 1 else pa.concat_batches(batches),
        np.concatenate([of_row + starts[id(rows)] for rows, of_row, _ in pieces]),
        np.concatenate([of for _, _, of in pieces]),
    )


def _rows_of(span: Span, bytes_max: int) -> pa.RecordBatch | None:
    """All rows of a span in log order, or None if they are too large to be held at once."""
    if is_at_hand(span):
        rows = rows_at_hand(span)
        return rows if rows.nbytes <= bytes_max else None
    require_codes(span.paths)
    where = (span.paths, span.place.partition, span.after, span.to)
    found = row_addresses(*where, exact=span.exact, through=span.begun.through)
    if not len(found.codes):
        return pa.RecordBatch.from_pylist([], schema=ROWS)
    reader = RowReader(span.paths)
    if len(found.codes) > reader.rows_within(bytes_max):
        return None
    return reader.pick(found.codes, found.numbers)
