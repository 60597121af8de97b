"""Pieces of a batch read side by side by Spark tasks; and how an error of Spark's is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from evermark.errors import EngineError
from evermark.ingest.pieces import Piece, ReadFrom, written
from evermark.spark.posting import ROW_DDL, rows_batch


def written_by_tasks(spark: SparkSession, of: ReadFrom, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """`WritePieces` on Spark, a task for each piece. Only reports come back: files are written where they are read."""
    frame = spark.range(0, len(pieces), 1, len(pieces)).mapInArrow(_Write(of, tuple(pieces)), ROW_DDL)
    try:
        return [json.loads(row[0]) for row in frame.collect()]
    except Exception as error:
        raise engine_error(f"a batch of {of.name} could not be read", error) from error


@dataclass(frozen=True)
class _Write:
    of: ReadFrom
    pieces: tuple[Piece, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield rows_batch([written(self.pieces[number], self.of) for number in batch.column(0).to_pylist()])


def engine_error(what: str, error: Exception) -> EngineError:
    """What Spark raised, in one line; its stack traces are in spark.log beside the data."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip(" :\t")), type(error).__name__)
    return EngineError(
        f"{what}: {said[:300]}", hint="it is started again; spark.log in the data folder has the details"
    )


def run_long_task(spark: SparkSession, name: str, work: Callable[[str], None]) -> None:
    """Run `work(name)` in one task of a job of its own; returns when it has ended."""
    spark.sparkContext.setJobGroup(name, name, interruptOnCancel=True)  # of this thread
    frame = spark.range(0, 1, 1, 1).mapInArrow(_Long(name, work), ROW_DDL)
    try:
        frame.collect()
    except Exception as error:
        raise engine_error(f"{name} ended", error) from error


def cancel_long_task(spark: SparkSession, name: str) -> None:
    """Its process is killed after a moment."""
    spark.sparkContext.cancelJobGroup(name)


@dataclass(frozen=True)
class _Long:
    name: str
    work: Callable[[str], None]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        self.work(self.name)
        yield rows_batch([])
