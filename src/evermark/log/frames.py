"""Log rows as Spark DataFrames, by methods of the frame alone: nothing of Spark is imported here."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from evermark.event import EVENT, TAKEN, TIMESTAMP, with_all_columns
from evermark.log.format import KEPT
from evermark.log.opened import opened, require_there
from evermark.log.row_reader import ROW_ADDRESS, ROW_ADDRESS_SQL, code_of
from evermark.storage import is_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from evermark.predicate import Alias, Predicate

_SPARK_TYPES = {
    pa.string(): "string",
    pa.int32(): "int",
    pa.int64(): "bigint",
    TIMESTAMP: "timestamp",
    pa.list_(pa.string()): "array<string>",
    pa.binary(): "binary",
    pa.bool_(): "boolean",
}


def _spark_type(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {_spark_type(field.type)}' for field in kind)}>"
    return _SPARK_TYPES[kind]


# Read with this and never inferred: Spark would open a file to find out what we know. A file from before a column was
# added has nulls in it.
SCHEMA, TAKEN_SCHEMA, KEPT_SCHEMA = (
    ", ".join(f"{f.name} {_spark_type(f.type)}" for f in schema) for schema in (EVENT, TAKEN, KEPT)
)


def schema_text(columns: Iterable[str]) -> str:
    """Of some columns of an event."""
    return ", ".join(f"{name} {_spark_type(EVENT.field(name).type)}" for name in columns)


_ADDRESS_SCHEMA = ", ".join(f"{name} bigint" for name in ROW_ADDRESS)
# Tasks that read files of a store at a time: each mostly waits for it.
_TASKS_MAX = 32
_READ_ROWS = 10_000
_LISTED_BY_A_JOB = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_FILES_OF_A_JOB = 10_000
_LISTING = threading.Lock()


def files_frame(spark: SparkSession, paths: Sequence[str], schema: str = SCHEMA) -> DataFrame:
    if not paths:
        return spark.createDataFrame([], schema)
    if is_url(paths[0]):
        return _read_by_tasks(spark, paths)
    with _listed_by_the_driver(spark):
        try:
            return spark.read.schema(schema).parquet(*paths)
        except Exception:
            if schema != KEPT_SCHEMA:  # what is kept beside the log is made anew, and not put back
                require_there(paths)
            raise


def frame_of(spark: SparkSession, rows: pa.Table) -> DataFrame:
    """In one piece: of small tables Spark 4.3 makes no row of what stands behind two empty pieces, and says nothing."""
    return spark.createDataFrame(rows.combine_chunks())


@contextmanager
def _listed_by_the_driver(spark: SparkSession) -> Iterator[None]:
    """More than 32 paths Spark looks up by a job of as many tasks, in a session that nobody told otherwise: for files
    that are known to be there this takes longer than reading them. The person's own setting is put back."""
    with _LISTING:
        before = spark.conf.get(_LISTED_BY_A_JOB) or ""
        spark.conf.set(_LISTED_BY_A_JOB, _FILES_OF_A_JOB)
        try:
            yield
        finally:
            spark.conf.set(_LISTED_BY_A_JOB, before)


def addressed_frame(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Events, each with its `ROW_ADDRESS`."""
    if paths and is_url(paths[0]):
        return _read_by_tasks(spark, paths, addressed=True)
    return files_frame(spark, paths).selectExpr("*", *ROW_ADDRESS_SQL)


def _read_by_tasks(spark: SparkSession, paths: Sequence[str], *, addressed: bool = False) -> DataFrame:
    """Files of a store: the JVM has no library for it, and our tasks have one."""
    schema = f"{SCHEMA}, {_ADDRESS_SCHEMA}" if addressed else SCHEMA
    read = _ReadFiles(tuple(paths), addressed)
    return spark.range(0, len(paths), 1, min(len(paths), _TASKS_MAX)).mapInArrow(read, schema)


@dataclass(frozen=True)
class _ReadFiles:
    """The task that reads. It is told names alone, and finds out by itself how their store is reached."""

    paths: tuple[str, ...]
    addressed: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._rows(self.paths[number])

    def _rows(self, path: str) -> Iterator[pa.RecordBatch]:
        first = 0
        for batch in opened(path).iter_batches(_READ_ROWS, use_threads=False):
            columns, names = with_all_columns(batch, EVENT).columns, list(EVENT.names)
            if self.addressed:
                columns += [pa.array(np.full(len(batch), code_of(path), np.int64))]
                columns += [pa.array(np.arange(first, first + len(batch)))]
                names += ROW_ADDRESS
            first += len(batch)
            # By name alone: Spark takes a column that is never null for another one than it asked for.
            yield pa.RecordBatch.from_arrays(columns, names=names)


def with_paths(frame: DataFrame, predicates: Sequence[Predicate]) -> tuple[DataFrame, Alias]:
    """The frame with every JSON path of the predicates extracted once, and the name of each path's column."""
    from evermark.predicate import variant_sql  # here: Spark loads this module at every start, for its schema

    paths = list(dict.fromkeys(path for predicate in predicates for path in predicate.paths))
    names = {path: f"_path_{i}" for i, path in enumerate(paths)}
    variants = {path.column: f"_variant_{path.column}" for path in paths}
    if variants:
        frame = frame.selectExpr("*", *[f"{variant_sql(column)} as {name}" for column, name in variants.items()])
        frame = frame.selectExpr(
            "*", *[f"{path.extract_sql(variants[path.column])} as {name}" for path, name in names.items()]
        )

    return frame, names.__getitem__


def where_matches(frame: DataFrame, where: str) -> DataFrame:
    """Keep the events a predicate matches, with the meaning it has in a subscription."""
    from evermark.predicate import vet

    columns = frame.columns
    predicate = vet(where)
    wide, alias = with_paths(frame, [predicate])
    return wide.where(f"coalesce({predicate.sql(alias)}, false)").select(*columns)
