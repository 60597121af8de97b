"""Which piece of the log to deliver next. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from evermark.delivery.model import BEGINNING, Cursor, CursorVector, SourcePartition
from evermark.delivery.work import Span
from evermark.log.read import FileRange, overlaps

SPAN_ROWS_MAX = 20_000


def next_span(
    place: SourcePartition, begun: Cursor, head: int, files: Sequence[FileRange], rows_max: int = SPAN_ROWS_MAX
) -> Span | None:
    """The next batches for a reader at `begun`, never beyond `head`; None when there are none.

    Whole batches, and at least one, however large: a reader that gets no further stops inside it (`Outcome.reached`).
    """
    after = begun.batch
    if after >= head:
        return None
    mine = sorted((f for f in files if overlaps(f, place.partition, after, head)), key=lambda f: f.batch_min)
    to, rows = head, 0
    for file in mine:
        share = _rows_within(file, after)
        if rows and rows + share > rows_max:
            to = max(after + 1, min(to, file.batch_min - 1))
            break
        rows += share
        if rows >= rows_max:
            to = min(to, max(after + 1, file.batch_max))
            break
    needed = [f for f in mine if overlaps(f, place.partition, after, to)]
    return Span(place, begun, to, tuple(f.path for f in needed), sum(_rows_within(f, after) for f in needed))


def expired_to(place: SourcePartition, after: int, head: int, files: Sequence[FileRange], before: datetime) -> int:
    """The last batch up to which all events after batch `after` were taken before `before`; `after`: there is none.

    By whole files, as retention goes: a file with one later event keeps all of its batches.
    """
    mine = [file for file in files if overlaps(file, place.partition, after, head)]
    kept = [file.batch_min for file in mine if file.ingested_at_max is None or file.ingested_at_max >= before]
    return max(after, min([head, *(first - 1 for first in kept)])) if mine else after


def _rows_within(file: FileRange, after: int) -> int:
    """An estimate: rows are taken as evenly spread over a compacted file's batches."""
    batches = file.batch_max - file.batch_min + 1
    ahead = min(batches, file.batch_max - after)
    return max(1, file.rows * ahead // batches)


def level_with(mine: CursorVector, theirs: CursorVector) -> bool:
    """Whether two readers have passed exactly the same events everywhere."""
    return dict(mine) == dict(theirs)


def batches(cursors: CursorVector) -> dict[SourcePartition, int]:
    """The last batch that a reader is done with, in each partition."""
    return {place: cursor.batch for place, cursor in cursors.items()}


def distance(mine: CursorVector, theirs: Mapping[SourcePartition, int]) -> int:
    """How many batches a reader is behind `theirs`."""
    return sum(max(0, batch - mine.get(place, BEGINNING).batch) for place, batch in theirs.items())
