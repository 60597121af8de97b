"""The one internal Spark data source: it wraps any `Source` and emits one row per file written, never an event.

What runs where: `latestOffset` and `partitions` in a process of their own that lives as long as the query; `read` in
task workers; neither shares anything with the driver but what was pickled here. Every failure becomes a row, so
that the driver sees an error with its kind and hint, and the other partitions of the batch are not hurt by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from evermark import failpoint
from evermark.errors import EvermarkError, GapError, Kind
from evermark.event import ADDED_SINCE, TAKEN, Op, with_all_columns
from evermark.ingest.dedup import Deduplicated, excluded_from
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.sources.base import Limit, Slice, Source
from evermark.spark.ahead import ahead

ROW = pa.schema([pa.field("row", pa.string())])


@dataclass(frozen=True)
class IngestPlan:
    """Everything the query's other processes need to know. Pickled once; holds no secret in the open."""

    name: str
    source: Source
    log_folder: str
    starts: Mapping[int, str]
    repeats_to: Mapping[int, str | None]
    limit: Limit


@dataclass
class _Piece(InputPartition):
    """One slice on its way to a task, with the batch number it will have."""

    piece: Slice | None
    batch: int = 0
    start: str = ""
    end: str = ""
    excluded_from: str | None = None
    error: dict[str, Any] | None = None


def source_class(plan: IngestPlan) -> type[DataSource]:
    """A data source class with the plan in its closure: nothing of it passes through options or query plans."""

    class EvermarkIngest(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"evermark-ingest-{plan.name}"

        def schema(self) -> str:
            return "row string"

        def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
            return _Reader(plan)

    return EvermarkIngest


class _Reader(DataSourceStreamReader):
    def __init__(self, plan: IngestPlan) -> None:
        self._plan = plan
        self._log: LogReader | None = None
        self._failures = 0

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {str(p): position for p, position in self._plan.starts.items()}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802
        after = _positions(start)
        try:
            found = self._plan.source.latest(after, self._plan.limit)
            backwards = [p for p in after if found.get(p, after[p]) < after[p]]
            if backwards:
                raise GapError(
                    f"source {self._plan.name} went back in partition {backwards[0]}:"
                    f" {found[backwards[0]]} comes before {after[backwards[0]]}",
                    hint="the source is not the one we left; see `evermark source recover`",
                )
            return {str(p): found.get(p, after[p]) for p in after}
        except Exception as error:  # noqa: BLE001 - every failure travels to the driver as a row
            self._failures += 1
            return {**start, "error": _told(error), "failures": self._failures}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begins, ends = _positions(start), _positions(end)
        if "error" in end and end.get("failures") != start.get("failures"):
            # Of one partition if the source can tell which; else of all its partitions.
            partition = end["error"].get("partition")
            at = begins.get(partition) if partition is not None else None
            return [_Piece(Slice(partition, at, at) if at is not None else None, error=end["error"])]
        pieces: list[InputPartition] = []
        for partition in sorted(ends):
            if ends[partition] == begins[partition]:
                continue
            try:
                pieces += self._pieces(partition, begins[partition], ends[partition])
            except Exception as error:  # noqa: BLE001
                pieces.append(_Piece(Slice(partition, begins[partition], ends[partition]), error=_told(error)))
        return pieces

    def _pieces(self, partition: int, start: str, end: str) -> list[InputPartition]:
        plan = self._plan
        if self._log is None:
            self._log = LogReader(Path(plan.log_folder))
        batch = self._log.tail_batch(partition) + 1
        exclude = excluded_from(start, plan.source.may_repeat_from(partition, start), plan.repeats_to.get(partition))
        return [_Piece(piece, batch, start, end, exclude) for piece in plan.source.slices(partition, start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Piece)  # noqa: S101 - Spark hands back what `partitions` gave it
        yield pa.RecordBatch.from_arrays([pa.array([json.dumps(self._read(partition))])], schema=ROW)

    def _read(self, piece: _Piece) -> dict[str, Any]:
        if piece.piece is None:
            return {"error": piece.error or {}}
        where = {"partition": piece.piece.partition, "batch": piece.batch, "start": piece.start, "end": piece.end}
        if piece.error:
            return {**where, "error": piece.error}
        try:
            return {**where, **self._write(piece, piece.piece)}
        except Exception as error:  # noqa: BLE001
            return {**where, "error": _told(error)}

    def _write(self, piece: _Piece, source_slice: Slice) -> dict[str, Any]:
        plan = self._plan
        folder = Path(plan.log_folder)
        writer = BatchWriter(folder, plan.name, source_slice.partition, piece.batch)
        read = _checked(plan.source.read(source_slice))
        fresh = Deduplicated(read, LogReader(folder), source_slice.partition, piece.excluded_from)
        controls = 0  # only their number travels: the control events themselves are in the log

        def with_controls_counted() -> Iterator[pa.RecordBatch]:
            nonlocal controls
            for batch in ahead(iter(fresh)):
                controls += pc.sum(pc.equal(batch.column("op"), str(Op.CONTROL))).as_py() or 0
                yield batch

        file = writer.write_all(with_controls_counted())
        failpoint.hit("file.written")
        return {"file": vars(file) if file else None, "duplicates": fresh.dropped, "controls": controls}


_TAKEN_AT_FIRST = pa.schema([field for field in TAKEN if field.name not in ADDED_SINCE])


def _checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.schema not in (TAKEN, _TAKEN_AT_FIRST):
            raise EvermarkError(
                f"the source returned columns {batch.schema.names} where evermark.event.TAKEN is expected",
                hint="build the batch with evermark.event.taken_batch",
            )
        yield with_all_columns(batch, TAKEN)


def _positions(offset: Mapping[str, Any]) -> dict[int, str]:
    return {int(p): position for p, position in offset.items() if p.isdigit()}


def _told(error: Exception) -> dict[str, Any]:
    if isinstance(error, EvermarkError):
        return {"kind": error.kind, "message": error.message, "hint": error.hint, "partition": error.partition}
    return {"kind": Kind.UNKNOWN, "message": f"{type(error).__name__}: {error}"[:2000], "hint": ""}
