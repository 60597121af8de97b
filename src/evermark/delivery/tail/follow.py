"""The log followed by one reader that waits for nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from evermark.delivery.model import BEGINNING, Cursor, SourcePartition
from evermark.delivery.tail.place import Places, Point, Resync, Trouble, gone, moved, new_troubles, told_of
from evermark.delivery.tail.ports import TailLog
from evermark.delivery.tail.wish import BySpark, Wish, Wishes, matched_one
from evermark.log.row_reader import ROWS

_ROWS, _BYTES = 1_000, 4 * 1024 * 1024


@dataclass(frozen=True)
class Followed:
    """Events that a reader wants, in log order, and what it has to be told before them."""

    rows: pa.RecordBatch
    resyncs: tuple[Resync, ...] = ()


def end_of(
    log: TailLog, sources: frozenset[str]
) -> tuple[Mapping[SourcePartition, int], Mapping[SourcePartition, Trouble]]:
    """How far some sources may be read, and their gaps."""
    heads, troubles = log.heads(), log.troubles()
    return (
        {place: head for place, head in heads.items() if place.source in sources},
        {place: trouble for place, trouble in troubles.items() if place.source in sources},
    )


def started_at(log: TailLog, end: Places, start: str | int) -> Places:
    """Where a reader begins: now, at the beginning of what the log has, at a time, or after a batch."""
    if start == "now":
        return end
    found: dict[SourcePartition, Point] = {}
    for place, last in end.items():
        if isinstance(start, int):
            cursor = Cursor(start)
        elif start == "beginning":
            first = log.first_batch(place) if last.cursor > BEGINNING else None
            cursor = BEGINNING if first is None else Cursor(first - 1)
        else:
            cursor = Cursor(log.batch_at(place, start))
        found[place] = Point(min(cursor, last.cursor), last.resync)
    return found


def follow(
    log: TailLog, sources: frozenset[str], wish: Wish, places: Places, by_spark: BySpark
) -> Iterator[Followed | None]:
    """Piece by piece, for ever; None where the log ends for now."""
    alone = Wishes([wish])
    while True:
        heads, troubles = end_of(log, sources)
        told = new_troubles(places, troubles)
        places = told_of(places, told, troubles)
        if told:
            yield Followed(pa.RecordBatch.from_pylist([], schema=ROWS), tuple(told))
        behind = [place for place in sorted(heads) if places.get(place, Point()).cursor.batch < heads[place]]
        for place in behind:
            cursor = places.get(place, Point()).cursor
            lost = gone(place, cursor, log.first_batch(place), heads[place])
            piece = log.piece(place, cursor, heads[place], _ROWS, _BYTES)
            rows = piece.rows.take(matched_one(alone, wish, place, piece, by_spark))
            places = moved(places, place, Cursor(piece.batch, piece.through))
            if rows.num_rows or lost is not None:
                yield Followed(rows, (lost,) if lost is not None else ())
        if not behind:
            yield None
