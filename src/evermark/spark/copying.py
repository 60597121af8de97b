"""Chunks of copies written side by side by Spark tasks. Only reports come back: files stay where they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark import SparkContext

from evermark.ingest.pieces import error_fields
from evermark.sources.copies import ChunkWork, Copying
from evermark.spark.job import Report, run_tasks


def copied_by_tasks(
    context: SparkContext, copying: Copying, works: Sequence[Sequence[ChunkWork]], epoch: int, until_s: float
) -> list[Report]:
    """`CopyTools.write_chunks` on Spark."""
    write = _Copy(copying, tuple(tuple(each) for each in works), epoch, until_s)
    return run_tasks(context, len(works), write, "chunks of a copy could not be written")


@dataclass(frozen=True)
class _Copy:
    copying: Copying
    works: tuple[tuple[ChunkWork, ...], ...]
    epoch: int
    until_s: float

    def __call__(self, number: int) -> list[Report]:
        return [self._report(self.works[number])]

    def _report(self, works: Sequence[ChunkWork]) -> Report:
        """Before the first chunk is begun, an error is about all copies of the task."""
        about = sorted({work.copy for work in works})
        try:
            for work in self.copying.write(works, self.epoch, self.until_s):
                about = [work.copy]
        except Exception as error:  # noqa: BLE001 - every failure is part of the report
            return {"copies": about, "error": error_fields(error)}
        return {"copies": about}
