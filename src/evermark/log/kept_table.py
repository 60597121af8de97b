"""A stream's table, kept beside its log, so that the next reader reads only the events that came since.

It is kept in layers (`kept_shelf.py`). Here it is told which of them may be used, when some become one, and how the
events that came since are read. Layers that do not fit the log (another log, batches set aside or removed by retention)
are not used.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evermark.log.format import KEPT
from evermark.log.frames import files_frame, frame_of
from evermark.log.implied_table import (
    TABLE,
    Truncates,
    implied_table,
    kept_rows,
    last_truncates,
    merged_layers,
    table_of,
    without_forgettable,
)
from evermark.log.kept_shelf import KeptFile, Layer, Mark, Shelf, described, images_of, remember_checksum, write_kept
from evermark.log.newest_rows import RECORD_OPS, NewestRows, NotPlain, Part, Wanted, buckets_for, parts_of, runs_of
from evermark.log.opened import damage_is_said, opened
from evermark.log.read import FileRange, LogReader
from evermark.log.row_reader import row_groups
from evermark.log.small_table import small_tables
from evermark.storage import Place, is_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Of smaller logs nothing is kept: reading them takes no time.
KEPT_FROM_ROWS = 50_000
# A log that is looked at here and now.
SMALL_LOG_BYTES = 8 * 1024 * 1024
SMALL_LOG_FILES = 1000
# So many events are looked at where they are asked for; more, by Spark's tasks. A row group is read as a whole.
HERE_ROWS_MAX = 200_000
HERE_GROUP_BYTES_MAX = 128 * 1024 * 1024
# Later layers become one when they are so many, and become part of the lowest when they are so large.
LAYERS_MAX = 16
SHARE_MAX = 0.25
# Of the later layers the newest become one at once, by Arrow, as long as they are this small: of several, Spark has to
# find the newest row of each key, by a shuffle.
MERGED_ROWS_MAX = 100_000
MERGED_BYTES_MAX = 64 * 1024 * 1024
SMALL_ROWS = 20_000
FEW_ROWS = 1_000_000
TOO_LARGE = (pa.ArrowInvalid, pa.ArrowCapacityError)  # texts of more than 2 GiB in one array
NO_ROWS = pa.schema([KEPT.field(name) for name in TABLE]).empty_table()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def usable(layers: Sequence[Layer], as_of: datetime | None, fits: Callable[[Layer], bool]) -> list[Layer]:
    """The most layers, from the lowest on, that hold nothing later than `as_of` and fit the log."""
    for count in range(len(layers), 0, -1):
        top = layers[count - 1]
        early = as_of is None or (top.moment_us_max is not None and top.moment_us_max <= _us(as_of))
        if early and fits(top):
            return list(layers[:count])
    return []


def to_fold(layers: Sequence[Layer]) -> int | None:
    """From which layer on all are made one; None: they stay."""
    later = sum(layer.rows for layer in layers[1:])
    if later > max(SMALL_ROWS, SHARE_MAX * layers[0].rows):
        return 0
    return 1 if len(layers) > LAYERS_MAX else None


def to_merge(layers: Sequence[Layer], size_of: Callable[[Layer], int]) -> int | None:
    """From which layer on all are made one where they are asked for; None: they stay. `size_of`: in memory."""
    first, rows, size = len(layers), 0, 0
    while first > 1:
        rows, size = rows + layers[first - 1].rows, size + size_of(layers[first - 1])
        if rows > MERGED_ROWS_MAX or size > MERGED_BYTES_MAX:
            break
        first -= 1
    return first if len(layers) - first > 1 else None


def moment_us_max(files: Iterable[FileRange]) -> int | None:
    """A time that no event of the files is later than; None: not known."""
    found = [0]
    for file in files:
        timed = file.timeless is None or file.timeless < file.rows
        if (timed and file.event_time_max is None) or (file.timeless != 0 and file.ingested_at_max is None):
            return None
        found += [_us(at) for at in (file.event_time_max, file.ingested_at_max if file.timeless != 0 else None) if at]
    return max(found)


def _us(moment: datetime) -> int:
    return round((moment - _EPOCH).total_seconds() * 1_000_000)


class LogFiles:
    """The files of one snapshot of a log, each of a single partition."""

    def __init__(self, files: Sequence[FileRange]) -> None:
        self.files = files
        self.rows = sum(file.rows for file in files)

    def marks(self) -> dict[int, Mark]:
        """Where every partition ends."""
        last: dict[int, int] = {}
        for file in self.files:
            last[file.partition_min] = max(last.get(file.partition_min, 0), file.batch_max)
        return {
            partition: Mark(batch, self._rows_to(partition, batch), self._taken_us(partition, batch))
            for partition, batch in last.items()
        }

    def after(self, marks: Mapping[int, Mark]) -> list[FileRange]:
        return [f for f in self.files if f.partition_min not in marks or f.batch_max > marks[f.partition_min].batch]

    def fit(self, layer: Layer) -> bool:
        return all(
            mark.rows == self._rows_to(partition, mark.batch) and mark.taken_us == self._taken_us(partition, mark.batch)
            for partition, mark in layer.marks.items()
        )

    def _rows_to(self, partition: int, batch: int) -> int:
        mine = [file for file in self.files if file.partition_min == partition]
        whole = sum(file.rows for file in mine if file.batch_max <= batch)
        cut = [file for file in mine if file.batch_min <= batch < file.batch_max]
        return whole + sum(int((rows["batch"].to_numpy() <= batch).sum()) for rows in _rows_about(cut, batch, to=True))

    def _taken_us(self, partition: int, batch: int) -> int:
        """When the batch was taken; -1 where the log has no event of it."""
        mine = [f for f in self.files if f.partition_min == partition and f.batch_min <= batch <= f.batch_max]
        times = [
            pc.max(rows["ingested_at"].filter(pc.equal(rows["batch"], batch)).cast(pa.int64())).as_py()
            for rows in _rows_about(mine, batch)
        ]
        return max((at for at in times if at is not None), default=-1)


def _rows_about(files: Sequence[FileRange], batch: int, *, to: bool = False) -> Iterator[pa.Table]:
    """Batch and time of the row groups that may hold the batch; `to`: or one before it."""
    for file in files:
        with damage_is_said(file.path), opened(file.path) as parquet:
            for group, _ in row_groups(parquet, "batch", lambda s: s.min <= batch and (to or batch <= s.max)):
                yield parquet.read_row_group(group, columns=["batch", "ingested_at"], use_threads=False)


@dataclass(frozen=True)
class _Newest:
    """One bucket of a stream's keys, by one task: its rows as a file, and a row that tells of it."""

    folder: Path
    wanted: Wanted
    runs: Sequence[Sequence[Part]]
    below: Sequence[Layer] = ()  # what is kept of the events before

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for bucket in batch.column(0).to_pylist():
                row = json.dumps(self.bucket(int(bucket)))
                yield pa.RecordBatch.from_arrays([pa.array([row])], names=["row"])

    def bucket(self, number: int) -> dict[str, Any]:
        newest = NewestRows(replace(self.wanted, bucket=number), self._images)
        path = self.folder / f"{secrets.token_hex(16)}.parquet"
        try:
            rows = newest.batches(self.runs)
            write_kept(path, rows if self.below else map(_remembered, rows))
        except (NotPlain, *TOO_LARGE) as why:
            return {"not_plain": str(why)}
        except OSError as error:
            return {"failed": str(error)}
        return {"file": asdict(described(path)), "partitions": sorted(newest.partitions)}

    def _images(self, keys: Sequence[str]) -> Iterator[dict[str, str | None]]:
        return images_of(keys, [self.folder / file.name for layer in reversed(self.below) for file in layer.files])


def _are_read_here(parts: Iterable[Part]) -> bool:
    """Whether each fits beside all else that this process does."""
    return all(part.size <= HERE_GROUP_BYTES_MAX for part in parts)


def _remembered(rows: pa.Table) -> pa.Table:
    """Without deletes that say no more than that there is nothing."""
    return rows.filter(pa.array(~(rows["gone"].to_numpy() & np.asarray(pc.is_null(rows["payload"]).to_numpy(), bool))))


def here(
    files: Sequence[FileRange], streams: Collection[str] | None = None, partition: int | None = None
) -> dict[str, pa.Table] | None:
    """The tables of these streams (of all) of a small log, found in the memory of this process; None where it takes
    SQL."""
    if sum(file.rows for file in files) >= KEPT_FROM_ROWS or sum(file.size for file in files) > SMALL_LOG_BYTES:
        return None
    if len(files) > SMALL_LOG_FILES or any(is_url(file.path) for file in files):
        return None  # opened one after the other here, and side by side by tasks
    try:
        return small_tables([file.path for file in files], streams, partition)
    except (NotPlain, *TOO_LARGE):
        return None


@dataclass
class KeptTable:
    """The table of one stream of one log, over the files of one snapshot."""

    spark: SparkSession
    log: Place
    stream: str
    files: Sequence[FileRange]

    def __post_init__(self) -> None:
        self._log = LogFiles(self.files)

    def table(self, as_of: datetime | None = None) -> DataFrame:
        mixed = any(file.partition_min != file.partition_max for file in self.files)
        # Nothing is kept in an object store: Spark could not read it there, and Python's readers gain little by it.
        if not isinstance(self.log, Path) or mixed:
            return implied_table(self.spark, self._events(self.files, (), as_of))
        if self._log.rows < KEPT_FROM_ROWS:
            found = here(self.files, [self.stream]) if as_of is None else None
            if found is None:
                return implied_table(self.spark, self._events(self.files, (), as_of))
            return frame_of(self.spark, found.get(self.stream, NO_ROWS))
        self._reader = LogReader(self.log)
        forgotten = self._reader.forgotten()
        # Of files that were replaced since they were listed it is not known how often events had been forgotten then.
        if forgotten and not {file.path for file in self.files} <= {file.path for file in self._reader.files()}:
            return self._told([], as_of)
        self._shelf = Shelf(self.log, self.stream, forgotten=forgotten)
        layers = usable(self._shelf.layers(), as_of, self._log.fit)
        if as_of is None and self._shelf.open():
            try:
                layers = self._brought_up(layers)
                return table_of(self.spark, self._merged(layers), len(layers[-1].partitions))
            except OSError:  # a full disk, say: what cannot be kept can still be told
                pass
        return self._told(layers, as_of)

    def _told(self, layers: Sequence[Layer], as_of: datetime | None) -> DataFrame:
        """Without keeping anything."""
        marks = layers[-1].marks if layers else {}
        fresh = self._events(self._log.after(marks), marks, as_of)
        found = self._look(fresh) if layers else {}
        if not layers or self._begins_anew(layers[-1], found):
            return implied_table(self.spark, self._events(self.files, (), as_of))
        if any(found.values()):
            return implied_table(self.spark, fresh)
        below = self._merged(layers)
        rows = kept_rows(self.spark, fresh, layers[-1].truncates, below)
        partitions = {*layers[-1].partitions, *found}
        merged = merged_layers([below, rows], few=False, alone=len(partitions) <= 1)
        return table_of(self.spark, merged, len(partitions))

    def _brought_up(self, layers: list[Layer]) -> list[Layer]:
        """The layers with all that the log holds; kept."""
        marks = layers[-1].marks if layers else {}
        fresh = self._log.after(marks)
        if layers and not fresh:
            return layers
        try:
            layers = [*layers, self._plain(layers, fresh)]
        except NotPlain:
            layers = self._by_sql(layers, fresh)
        if (first := to_fold(layers)) is not None:
            layers = [*layers[:first], self._folded(layers[first:], lowest=first == 0)]
        elif (first := to_merge(layers, self._shelf.size_of)) is not None:
            layers = [*layers[:first], *self._shelf.merged(layers[first:])]
        self._shelf.keep(layers, self._is_current)
        return layers

    def _is_current(self) -> bool:
        return self._reader.forgotten() == self._shelf.forgotten

    def _plain(self, layers: Sequence[Layer], fresh: Sequence[FileRange]) -> Layer:
        marks = layers[-1].marks if layers else {}
        known = set(layers[-1].partitions) if layers else set()
        if len(known) > 1:
            raise NotPlain("its events are in several partitions")
        after = {partition: mark.batch for partition, mark in marks.items()}
        partition_of = {file.path: file.partition_min for file in fresh}
        parts = parts_of([file.path for file in fresh])
        parts = [part for part in parts if part.batch_max > after.get(partition_of[part.path], -1)]
        rows = sum(part.rows for part in parts)
        if not (buckets := buckets_for(rows)):
            raise NotPlain("the log is too large for this way")
        work = _Newest(self._shelf.folder, Wanted(self.stream, after, 0, buckets), runs_of(parts), layers)
        here = rows <= HERE_ROWS_MAX and _are_read_here(parts)
        told = [work.bucket(0)] if here else self._by_tasks(work, buckets)
        for one in told:
            if "failed" in one:
                raise OSError(one["failed"])
            if "not_plain" in one:
                raise NotPlain(one["not_plain"])
        partitions = known.union(*(one["partitions"] for one in told))
        if len(partitions) > 1:
            raise NotPlain("its events are in several partitions")
        files = tuple(KeptFile(**one["file"]) for one in told)
        for file in files:
            remember_checksum(self._shelf.folder, file)
        return self._layer(files, partitions, (), layers, fresh)

    def _by_tasks(self, work: _Newest, buckets: int) -> list[dict[str, Any]]:
        try:
            rows = self.spark.range(0, buckets, 1, buckets).mapInArrow(work, "row string").collect()
        except Exception as error:
            # Somebody's own session, whose workers may not have this program: SQL needs none of it.
            raise NotPlain(f"Spark's Python workers cannot do it: {type(error).__name__}") from error
        return [json.loads(row[0]) for row in rows]

    def _by_sql(self, layers: Sequence[Layer], fresh: Sequence[FileRange]) -> list[Layer]:
        marks = layers[-1].marks if layers else {}
        events = self._events(fresh, marks, None)
        found = self._look(events)
        if layers and self._begins_anew(layers[-1], found):
            layers, fresh = [], self.files
            events = self._events(fresh, (), None)
            found = self._look(events)
        partitions = {*(layers[-1].partitions if layers else ()), *found}
        if layers and not any(found.values()):
            few = sum(file.rows for file in fresh) <= FEW_ROWS
            rows = kept_rows(self.spark, events, layers[-1].truncates, self._merged(layers), few=few)
            files = self._shelf.written(rows)
            return [*layers, self._layer(files, partitions, layers[-1].truncates, layers, fresh)]
        # From the beginning; or everything before was truncated away, in the only partition.
        truncates = tuple(last_truncates(self.spark, events)) if any(found.values()) else ()
        rows = kept_rows(self.spark, events, truncates)
        alone = len(partitions) <= 1
        files = self._shelf.written(without_forgettable(rows) if alone else rows)
        return [self._layer(files, partitions, () if alone else truncates, layers, fresh)]

    @staticmethod
    def _begins_anew(top: Layer, found: Mapping[int, int]) -> bool:
        """A truncate may end events of other partitions, also events for which a newer event stands in a kept row. And
        of a stream in one partition less is kept than a second partition would need."""
        partitions = {*top.partitions, *found}
        return len(partitions) > 1 and (any(found.values()) or len(top.partitions) == 1)

    def _look(self, events: DataFrame) -> dict[int, int]:
        """How many truncates each partition has that has events."""
        told = events.selectExpr("partition", "if(op = 'truncate', 1, 0) as truncates").groupBy("partition")
        return {int(row[0]): int(row[1]) for row in told.sum("truncates").collect()}

    def _layer(
        self,
        files: tuple[KeptFile, ...],
        partitions: Iterable[int],
        truncates: tuple[Truncates, ...],
        below: Sequence[Layer],
        fresh: Sequence[FileRange],
    ) -> Layer:
        latest = moment_us_max(fresh)
        if below:
            was = below[-1].moment_us_max
            latest = max(latest, was) if latest is not None and was is not None else None
        return Layer(files, self._log.marks(), tuple(sorted(partitions)), truncates, latest)

    def _folded(self, layers: Sequence[Layer], *, lowest: bool) -> Layer:
        rows = self._merged(layers)
        if lowest and len(layers[-1].partitions) <= 1:
            rows = without_forgettable(rows)
        return replace(layers[-1], files=self._shelf.written(rows))

    def _merged(self, layers: Sequence[Layer]) -> DataFrame:
        few = sum(layer.rows for layer in layers[1:]) <= FEW_ROWS
        alone = len(layers[-1].partitions) <= 1
        return merged_layers([self._shelf.frame(self.spark, layer) for layer in layers], few=few, alone=alone)

    def _events(
        self, files: Sequence[FileRange], marks: Mapping[int, Mark] | tuple[()], as_of: datetime | None
    ) -> DataFrame:
        """The stream's events in these files, after the batches of the marks."""
        events = files_frame(self.spark, [file.path for file in files])
        ops = ", ".join(f"'{op}'" for op in RECORD_OPS)
        events = events.where(events["stream"] == self.stream).where(f"op in ({ops})")
        for partition, mark in dict(marks).items():
            events = events.where(f"partition <> {partition} or batch > {mark.batch}")
        if as_of is not None:
            at = events.selectExpr("*", "coalesce(event_time, ingested_at) as _at")
            events = at.where(at["_at"] <= as_of).drop("_at")
        return events
