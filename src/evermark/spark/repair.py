"""Closing a gap as a Spark job: events of the source that the log lacks, in order, as files of the log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr, lit

from evermark.errors import EngineError, EvermarkError
from evermark.event import TAKEN, with_all_columns
from evermark.ingest.repair.steps import FoundFile, RepairTarget
from evermark.log import kept_table
from evermark.log.base import LogFile
from evermark.log.frames import TAKEN_SCHEMA, files_frame, frame_of
from evermark.log.implied_table import implied_tables
from evermark.log.kept_table import KeptTable
from evermark.log.opened import require_readable
from evermark.log.read import FileRange, within
from evermark.log.write import BatchWriter
from evermark.sources.base import Gap
from evermark.spark.job import error_of_task
from evermark.storage import Place

# Reads of the source at a time: it has other work to do.
_READERS_MAX = 4
# Rows of one batch: the live group settles whole batches, and a whole outage in one batch is much to send again.
BATCH_ROWS_MAX = 50_000
BATCH_BYTES_MAX = 128 * 1024 * 1024
# Of more streams all tables are made by one query over the log: a query for each would take longer than the log does.
_KEPT_STREAMS_MAX = 4

# The id of an event that is made here, because records differ from the log. Where reading goes on is part of it: a
# record may differ again at the next gap. Events that the source still has keep their ids, by which they are missed.
_MADE_ID = "concat('r', left(sha2(concat_ws('\\n', :position, {of}), 256), 39))"
# No event can name a record without a key, and say that it is gone: a truncate says it of all of its stream.
_TRUNCATES = f"""
select {_MADE_ID.format(of="stream")} as event_id, :position as position,
       stream, cast(null as string) as key, 'truncate' as op, current_timestamp() as event_time,
       cast(null as string) as payload, cast(null as string) as before, array('repaired') as flags
from {{keyless}}
"""
_RECORD_OPS = "'insert', 'update', 'delete', 'read', 'truncate'"
# Of a record that cannot be decoded nobody knows whether it differs from what the log implies: it is told as poison,
# unless the log says the same of it already, and nothing later.
_POISONED = """
select p.stream, p.key, p.newest.payload as payload, p.newest.bytes as bytes from (
    select stream, key, max_by(struct(op, payload, bytes, batch, position), struct(batch, position)) as newest
    from {logged} where partition = :partition and key is not null group by stream, key
) as p left anti join {logged} as t on t.op = 'truncate' and t.stream = p.stream and if(
    t.partition = :partition, t.batch > p.newest.batch, t.position > p.newest.position
) where p.newest.op = 'poison'
"""
_DIFFERENCES = f"""
select {_MADE_ID.format(of="stream, key")} as event_id, :position as position,
       stream, key, if(is_poison, 'poison', if(now is null, 'delete', if(was is null, 'insert', 'update'))) as op,
       coalesce(event_time, current_timestamp()) as event_time,
       now as payload, if(is_poison, null, was) as before, array('repaired') as flags, bytes
from (
    select coalesce(f.stream, i.stream) as stream, coalesce(f.key, i.key) as key, f.payload as now, i.payload as was,
           f.event_time, f.bytes, coalesce(f.op, '') = 'poison' as is_poison,
           f.key is not null and i.is_told_anew as is_told_anew, p.key is not null as is_known
    from {{found}} as f full outer join {{implied}} as i on f.stream = i.stream and f.key = i.key
    left join {{poisoned}} as p on f.op = 'poison'
        and p.stream = f.stream and p.key = f.key and p.payload <=> f.payload and p.bytes <=> f.bytes
) where (now is distinct from was or is_told_anew) and key is not null and not is_known
"""


def found_missing(
    spark: SparkSession,
    gap: Gap,
    files: Sequence[FileRange],
    wanted: RepairTarget,
    folder: Place,
    rows_max: int = BATCH_ROWS_MAX,
) -> list[FoundFile]:
    """The gap's events that the log lacks, in order: files written, nothing committed."""
    # An event has one time: files that are older than the oldest candidate cannot hold any; poison has none.
    needed = [f for f in files if gap.is_state or f.timeless != 0 or within(f, gap.since, None)]
    try:
        return _found(spark, gap, needed, wanted, folder, rows_max)
    except Exception as error:
        if isinstance(error, EngineError) or not isinstance(error, EvermarkError):
            require_readable(file.path for file in needed)  # Spark's words name no remedy
        raise


def _found(
    spark: SparkSession, gap: Gap, files: Sequence[FileRange], wanted: RepairTarget, folder: Place, rows_max: int
) -> list[FoundFile]:
    if gap.is_state:
        differing = differences(spark, gap, files, wanted, folder)
        # A key that one record left may be another's by now: its delete comes first. A truncate comes before all.
        order = ("if(op = 'truncate', '', op)", "position", "event_id")
        return _written(differing, gap, wanted, folder, rows_max, order)
    if not gap.pieces:
        return []
    logged = files_frame(spark, [file.path for file in files]).select("event_id")
    missing = _candidates(spark, gap).join(logged, "event_id", "left_anti").select(*TAKEN.names)
    return _written(missing, gap, wanted, folder, rows_max)


def differences(
    spark: SparkSession, gap: Gap, files: Sequence[FileRange], wanted: RepairTarget, folder: Place
) -> DataFrame:
    """What has to happen to the records that the log implies, so that they are the records of the gap's pieces."""
    told, keyless = _implied(spark, gap, files, wanted.partition, folder)
    found, at = _candidates(spark, gap), {"position": gap.position}
    parts, again = [spark.createDataFrame([], TAKEN_SCHEMA)], [*gap.told_anew, *keyless]
    if gap.truncates is not None:
        rows = gap.truncates.filter(pc.greater_equal(gap.truncates["position"], wanted.start))
        if rows.num_rows:  # and no earlier try took them
            again += rows["stream"].to_pylist()
            told = told.where(~told["stream"].isin(rows["stream"].to_pylist()))
            parts.append(frame_of(spark, rows))
    if keyless:
        told = told.where(~told["stream"].isin(keyless))
        names = spark.createDataFrame([(name,) for name in keyless], "stream string")
        parts.append(spark.sql(_TRUNCATES, at, keyless=names))
    told = told.withColumn("is_told_anew", told["stream"].isin(list(gap.told_anew)))
    poisoned = _poisoned(spark, files, wanted.partition)
    poisoned = poisoned.where(~poisoned["stream"].isin(again))
    parts.append(spark.sql(_DIFFERENCES, at, implied=told, found=found, poisoned=poisoned))
    return reduce(lambda some, more: some.unionByName(more, allowMissingColumns=True), parts)


def _implied(
    spark: SparkSession, gap: Gap, files: Sequence[FileRange], partition: int, folder: Place
) -> tuple[DataFrame, list[str]]:
    """Stream, key and payload of each record that the log implies; and the streams in which a record without a key is
    still there, though their places give keys: it was inserted before the place had one.
    """
    read = {piece.detail["stream"] for piece in gap.pieces}
    if (tables := kept_table.here(files, partition=partition)) is not None:
        rows = [kept_table.NO_ROWS.append_column("stream", pa.array([], pa.string()))]
        for name, table in tables.items():
            if name in read or gap.covers(name):
                rows.append(table.append_column("stream", pa.array([name] * table.num_rows, pa.string())))
        small = pa.concat_tables(rows).select(["stream", "key", "payload"])
        return frame_of(spark, small), sorted(set(small.filter(pc.is_null(small["key"]))["stream"].to_pylist()))
    logged = files_frame(spark, [file.path for file in files]).where(f"op in ({_RECORD_OPS})")
    # A truncate stands in one partition, and ends the records of all.
    mine = logged.where(f"partition = {partition} or op = 'truncate'")
    known = {row[0] for row in mine.select("stream").distinct().collect()}
    # A stream that is not chosen any more has no piece: its records are not gone, they are not looked at.
    names = sorted({name for name in known if gap.covers(name)} | read)
    alone = all(file.partition_min == file.partition_max == partition for file in files)
    is_large = sum(file.rows for file in files) >= kept_table.KEPT_FROM_ROWS
    if alone and is_large and 0 < len(names) <= _KEPT_STREAMS_MAX:
        kept = [KeptTable(spark, folder, name, files).table().withColumn("stream", lit(name)) for name in names]
        implied = reduce(DataFrame.unionByName, kept)
    else:
        implied = implied_tables(spark, mine.where(mine["stream"].isin(names)))
    told = implied.select("stream", "key", "payload")
    # Hardly any log has such an event, which is seen from one column.
    ever = mine.where("key is null and op <> 'truncate'").where(mine["stream"].isin(names))
    if not ever.select("stream").head(1):
        return told, []
    return told, sorted(row[0] for row in told.where("key is null").select("stream").distinct().collect())


def _poisoned(spark: SparkSession, files: Sequence[FileRange], partition: int) -> DataFrame:
    """The records of which the log says last that they cannot be decoded: stream, key, payload and bytes."""
    logged = files_frame(spark, [file.path for file in files])
    poison = logged.where(f"op = 'poison' and partition = {partition} and key is not null").select("stream", "key")
    if not poison.head(1):  # as hardly any log has one
        return spark.createDataFrame([], "stream string, key string, payload string, bytes binary")
    keys = poison.distinct()
    records = logged.where(f"op in ({_RECORD_OPS}, 'poison') and key is not null").join(keys, ["stream", "key"], "semi")
    ends = logged.where("op = 'truncate'")
    return spark.sql(_POISONED, {"partition": partition}, logged=records.unionByName(ends))


def _candidates(spark: SparkSession, gap: Gap) -> DataFrame:
    """The rows of all pieces."""
    pieces = len(gap.pieces)
    return spark.range(0, pieces, 1, max(1, min(_READERS_MAX, pieces))).mapInArrow(_Read(gap), TAKEN_SCHEMA)


def _written(
    missing: DataFrame,
    gap: Gap,
    wanted: RepairTarget,
    folder: Place,
    rows_max: int,
    order: Sequence[str] = ("position", "event_id"),
) -> list[FoundFile]:
    in_order = missing.repartition(1).sortWithinPartitions(*map(expr, order))
    write = _Write(gap, folder, wanted, rows_max)
    try:
        rows = [json.loads(row[0]) for row in in_order.mapInArrow(write, "row string").collect()]
    except EvermarkError:
        raise
    except Exception as error:
        raise error_of_task(f"looking for what the log of {wanted.source} lacks failed", error) from error
    return [FoundFile(LogFile(**row["file"]), str(row["end"]), row["ops"]) for row in rows]


@dataclass(frozen=True)
class _Read:
    gap: Gap

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for rows in self.gap.read(self.gap.pieces[number]):
                    yield with_all_columns(rows, TAKEN)


@dataclass(frozen=True)
class _Write:
    """Gives each event its position, and cuts the events into batches."""

    gap: Gap
    folder: Place
    target: RepairTarget
    rows_max: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        placed = 0
        for batch, some in enumerate(_cut(batches, self.rows_max, BATCH_BYTES_MAX), self.target.batch + 1):
            writer = BatchWriter(self.folder, self.target.source, self.target.partition, batch)
            file = writer.write_all(self._placed(some, placed))
            placed += sum(part.num_rows for part in some)
            end = self.gap.positions(placed, 1)[0].as_py()
            ops = Counter(op for part in some for op in part.column("op").to_pylist())
            row = json.dumps({"file": vars(file) if file else None, "end": end, "ops": ops})
            yield pa.RecordBatch.from_arrays([pa.array([row])], names=["row"])

    def _placed(self, parts: Sequence[pa.RecordBatch], first: int) -> Iterator[pa.RecordBatch]:
        at = TAKEN.get_field_index("position")
        for part in parts:
            rows = part.cast(TAKEN)
            placed = self.gap.positions(first, rows.num_rows)
            if self.gap.is_state:  # an event of its own keeps its place
                placed = pc.if_else(pc.equal(rows["position"], self.gap.position), placed, rows["position"])
            yield rows.set_column(at, TAKEN.field(at), placed)
            first += rows.num_rows


def _cut(batches: Iterable[pa.RecordBatch], rows_max: int, bytes_max: int) -> Iterator[list[pa.RecordBatch]]:
    some: list[pa.RecordBatch] = []
    rows = size = 0
    for whole in batches:
        left = whole
        while left.num_rows:
            some.append(left.slice(0, rows_max - rows))
            left = left.slice(some[-1].num_rows)
            rows += some[-1].num_rows
            size += some[-1].nbytes
            if rows >= rows_max or size >= bytes_max:
                yield some
                some, rows, size = [], 0, 0
    if some:
        yield some
