"""One slice of a source, read into one file of the log: what a task does, and the lane itself where there is one slice.

Every failure becomes part of the report, with its kind and hint: the other slices of the batch are not hurt by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from evermark import failpoint
from evermark.ahead import ahead
from evermark.errors import EvermarkError, Kind
from evermark.event import ADDED_SINCE, TAKEN, Op, with_all_columns
from evermark.event_file import Rows, WrittenEvents, as_batches
from evermark.ingest.dedup import Deduplicated, RecentIds, looked_up_from
from evermark.log.base import LogFile
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.sources.base import Fed, Slice, Source
from evermark.storage import place_of, storage_of

_TAKEN_AT_FIRST = pa.schema([field for field in TAKEN if field.name not in ADDED_SINCE])


@dataclass(frozen=True)
class ReadFrom:
    """A source and the folder of its log. Picklable; holds no secret in the open."""

    name: str
    source: Source
    log_folder: str

    def written(self, piece: Piece, recent: RecentIds | None = None) -> dict[str, Any]:
        """Read and write one piece; its report, for `gather`. Never raises. `recent` ids are left out, too."""
        try:
            return {**piece.where, **_write(piece, self, self.source.read(piece.slice), recent=recent)}
        except Exception as error:  # noqa: BLE001 - every failure is part of the report
            return {**piece.where, "error": error_fields(error)}

    def written_fed(self, fed: Fed, piece: Piece, recent: RecentIds | None = None) -> dict[str, Any]:
        """The same for events that the source has sent; where they end is known when they have been read."""
        try:
            kept: list[pa.RecordBatch] = []
            report = _write(piece, self, fed.batches(), kept, recent)
            return {**piece.where, **report, "end": fed.end()}
        except Exception as error:  # noqa: BLE001 - as above
            return {**piece.where, "error": error_fields(error)}


@dataclass(frozen=True)
class Piece:
    """One slice, with the batch that it is part of."""

    slice: Slice
    batch: int
    start: str
    end: str
    looked_up_from: str | None  # ids that the log holds from here on are left out

    @property
    def where(self) -> dict[str, Any]:
        return {"partition": self.slice.partition, "batch": self.batch, "start": self.start, "end": self.end}


def pieces_of(
    source: Source, partition: int, start: str, end: str, batch: int, repeats_to: str | None
) -> Sequence[Piece]:
    exclude = looked_up_from(start, source.may_repeat_from(partition, start), repeats_to)
    return [Piece(piece, batch, start, end, exclude) for piece in source.slices(partition, start, end)]


def error_fields(error: Exception) -> dict[str, Any]:
    if isinstance(error, EvermarkError):
        return {"kind": error.kind, "message": error.message, "hint": error.hint}
    return {"kind": Kind.UNKNOWN, "message": f"{type(error).__name__}: {error}"[:2000], "hint": ""}


def _write(
    piece: Piece,
    of: ReadFrom,
    batches: Iterator[Rows],
    kept: list[pa.RecordBatch] | None = None,
    recent: RecentIds | None = None,
) -> dict[str, Any]:
    """`kept`: the rows of a small batch are reported, too, to be delivered without being read again."""
    folder, partition = place_of(of.log_folder), piece.slice.partition
    fresh = Deduplicated(_checked(batches), LogReader(folder), partition, piece.looked_up_from, recent)
    controls = _Counter()
    writer = BatchWriter(folder, of.name, partition, piece.batch, kept)
    # A thread that reads ahead costs more than a few rows that have come already.
    rows = ahead(iter(fresh)) if kept is None else iter(fresh)
    files: list[LogFile] = []
    try:
        file = writer.write_all(_with_controls_counted(_row_by_row(rows, writer, files), controls))
    except BaseException:
        for each in files:
            storage_of(folder).delete(folder / each.path)
        raise
    ready = sum(each.rows for each in files)
    files += [file] if file else []
    failpoint.hit("file.written")
    report: dict[str, Any] = {"files": [vars(each) for each in files], "duplicates": fresh.dropped, "ready": ready}
    return {**report, "controls": controls.count, "fresh": pa.Table.from_batches(writer.kept) if writer.kept else None}


def _row_by_row(rows: Iterator[Rows], writer: BatchWriter, files: list[LogFile]) -> Iterator[pa.RecordBatch]:
    """What is written row by row; what stands in a file of its own is taken over as it is."""
    for some in rows:
        if isinstance(some, WrittenEvents) and some.source == writer.source:
            files.append(writer.take_over(some))
        else:
            yield from as_batches([some])


class _Counter:
    count = 0


def _with_controls_counted(batches: Iterator[pa.RecordBatch], found: _Counter) -> Iterator[pa.RecordBatch]:
    """Only their number travels: the control events themselves are in the log."""
    for batch in batches:
        found.count += pc.sum(pc.equal(batch.column("op"), str(Op.CONTROL))).as_py() or 0
        yield batch


def _checked(batches: Iterator[Rows]) -> Iterator[Rows]:
    for batch in batches:
        if isinstance(batch, WrittenEvents):
            yield batch
            continue
        if batch.schema not in (TAKEN, _TAKEN_AT_FIRST):
            raise EvermarkError(
                f"the source returned columns {batch.schema.names} where evermark.event.TAKEN is expected",
                hint="build the batch with evermark.event.taken_batch",
            )
        yield with_all_columns(batch, TAKEN)
