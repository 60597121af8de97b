"""Writing log files: of a batch, by the task that reads it, and merged files, by maintenance. Memory stays bounded."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import EVENT, TAKEN, TIMESTAMP, with_all_columns
from evermark.event_file import EventFileWriter, Fill, Rows, WrittenEvents, as_batches, filled
from evermark.log.base import LogFile
from evermark.log.format import STATS_COLUMNS
from evermark.storage import Place, storage_of, trouble_is_said

_KEPT_ROWS_MAX = 2_000
_KEPT_BYTES_MAX = 1024 * 1024

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US_MIN = (datetime(1, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_US_MAX = (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


@dataclass
class _Range:
    """Least and greatest value of one column over a file."""

    ends: list[Any] = field(default_factory=list)
    nulls: int = 0
    is_time: bool = False

    def see(self, column: pa.ChunkedArray) -> None:
        self.nulls += column.null_count
        if column.null_count == len(column):
            return
        if pa.types.is_timestamp(column.type):
            self.is_time = True
            column = column.cast(pa.int64())  # a database's calendar is wider than Python's
        self.ends += pc.min_max(column).as_py().values()

    def as_tuple(self) -> tuple[Any, Any, int]:
        low: Any = min(self.ends, default=None)
        high: Any = max(self.ends, default=None)
        if self.is_time:
            # Delta keeps timestamps in statistics to the millisecond: round outwards, or pruning would lose rows.
            low, high = _time_text(low // 1000 * 1000), _time_text(-(-high // 1000) * 1000)
        return low, high, self.nulls


def _time_text(us: int) -> str | None:
    """None beyond the years 1 to 9999: an unknown bound loses nothing."""
    if not _US_MIN <= us <= _US_MAX:
        return None
    return (_EPOCH + timedelta(microseconds=us)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class FileWriter:
    """One log file: EVENT rows in, with its statistics."""

    def __init__(self, folder: Place, prefix: str) -> None:
        self._name = _name(prefix)
        self._draft = storage_of(folder).draft(folder / self._name)
        self._ranges = {column: _Range() for column in STATS_COLUMNS}
        try:
            self._writer = EventFileWriter(self._draft.sink, seen=self._see)
        except OSError:
            self._draft.discard()
            raise

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write(batch)

    def finish(self) -> LogFile:
        """The file's description; its contents are on the disk, its name will be when the folder is synced."""
        self._writer.flush()
        self._writer.close()
        size = self._draft.finish()
        return LogFile(self._name, self._writer.rows, size, _statistics(self._ranges))

    def discard(self) -> None:
        with suppress(OSError):  # a full disk refuses the footer, too
            self._writer.close()
        self._draft.discard()

    def _see(self, group: pa.Table) -> None:
        for column, seen in self._ranges.items():
            seen.see(group[column])


def _name(prefix: str) -> str:
    """Unique to this attempt: a retried task never meets its predecessor's file."""
    return f"{prefix}-{uuid.uuid4().hex}.parquet"


def _statistics(ranges: Mapping[str, _Range]) -> dict[str, Any]:
    return {column: seen.as_tuple() for column, seen in ranges.items()}


@dataclass
class BatchWriter:
    """Writes TAKEN record batches as one log file of (source, partition, batch)."""

    folder: Place
    source: str
    partition: int
    batch: int
    kept: list[pa.RecordBatch] | None = None  # a list: the rows of a small batch are kept in it; None if there are more
    _writer: FileWriter | None = field(default=None, init=False)

    def write_all(self, rows: Iterable[Rows]) -> LogFile | None:
        """The file's description, fsynced and not yet committed; None when there was no row."""
        try:
            with trouble_is_said(self.folder):
                for taken in as_batches(rows):
                    if taken.num_rows:
                        self._write(taken)
                return self._writer.finish() if self._writer is not None else None
        except BaseException:
            if self._writer is not None:
                self._writer.discard()
            raise

    def take_over(self, written: WrittenEvents) -> LogFile:
        """Events in a file of their own: a copy of the one that they stand in, which stays as it is."""
        self.kept = None
        now = datetime.now(UTC)
        fill = Fill({**written.fill.numbers, "batch": self.batch, "ingested_at": _us(now)}, written.fill.position)
        name = _name(f"p{self.partition}-b{self.batch}")
        draft = storage_of(self.folder).draft(self.folder / name)
        try:
            with trouble_is_said(self.folder), written.open() as source:
                _write_to(draft.sink, filled(source, fill))
                size = draft.finish()
        except BaseException:
            draft.discard()
            raise
        times = (_us(now), fill.numbers["event_time"])
        ranges = {
            "partition": _Range([self.partition]),
            "batch": _Range([self.batch]),
            "event_time": _Range([times[1]], is_time=True),
            "ingested_at": _Range([times[0]], is_time=True),
            "position": _Range([*written.ends]),
        }
        return LogFile(name, written.rows, size, _statistics(ranges))

    def _write(self, taken: pa.RecordBatch) -> None:
        taken = with_all_columns(taken, TAKEN)
        known = {
            "source": pa.scalar(self.source, pa.string()),
            "partition": pa.scalar(self.partition, pa.int32()),
            "batch": pa.scalar(self.batch, pa.int64()),
            "ingested_at": pa.scalar(datetime.now(UTC), TIMESTAMP),
        }
        arrays = [pa.repeat(known[f.name], taken.num_rows) if f.name in known else taken.column(f.name) for f in EVENT]
        if self._writer is None:
            self._writer = FileWriter(self.folder, f"p{self.partition}-b{self.batch}")
        rows = pa.RecordBatch.from_arrays(arrays, schema=EVENT)
        self._writer.write(rows)
        if self.kept is not None:
            self.kept.append(rows)
            few = sum(part.num_rows for part in self.kept) <= _KEPT_ROWS_MAX
            if not few or sum(part.nbytes for part in self.kept) > _KEPT_BYTES_MAX:
                self.kept = None


def _us(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)


def _write_to(sink: Any, pieces: Iterable[bytes]) -> None:
    if isinstance(sink, Path):
        with sink.open("wb") as file:
            file.writelines(pieces)
    else:
        for piece in pieces:
            sink.write(piece)
