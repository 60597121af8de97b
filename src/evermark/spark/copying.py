"""Chunks of copies written side by side by Spark tasks. Only reports come back: files stay where they are written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from evermark.ingest.pieces import error_fields
from evermark.sources.copies import ChunkWork, Copying
from evermark.spark.job import engine_error
from evermark.spark.posting import ROW_DDL, rows_batch


def copied_by_tasks(
    spark: SparkSession, copying: Copying, works: Sequence[Sequence[ChunkWork]], epoch: int, until_s: float
) -> list[dict[str, Any]]:
    """`CopyWorks.write_chunks` on Spark."""
    write = _Copy(copying, tuple(tuple(each) for each in works), epoch, until_s)
    frame = spark.range(0, len(works), 1, len(works)).mapInArrow(write, ROW_DDL)
    try:
        return [json.loads(row[0]) for row in frame.collect()]
    except Exception as error:
        raise engine_error("chunks of a copy could not be written", error) from error


@dataclass(frozen=True)
class _Copy:
    copying: Copying
    works: tuple[tuple[ChunkWork, ...], ...]
    epoch: int
    until_s: float

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield rows_batch([self._report(self.works[number]) for number in batch.column(0).to_pylist()])

    def _report(self, works: Sequence[ChunkWork]) -> dict[str, Any]:
        """Before the first chunk is begun, an error is about all copies of the task."""
        about = sorted({work.copy for work in works})
        try:
            for work in self.copying.write(works, self.epoch, self.until_s):
                about = [work.copy]
        except Exception as error:  # noqa: BLE001 - every failure is part of the report
            return {"copies": about, "error": error_fields(error)}
        return {"copies": about}
