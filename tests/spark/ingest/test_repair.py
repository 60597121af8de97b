"""Closing a gap in Spark: what the source holds without what the log holds, in order, once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from evermark.event import taken_batch
from evermark.ingest.repair.steps import RepairTarget, batches_of
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.sources.base import Gap, Slice
from evermark.spark.repair import found_missing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = 1_790_000_000_000_000


@dataclass
class Shelf(Gap):
    """Events number so and so, a hundred to a piece, in no order."""

    numbers: Sequence[int]
    since: datetime | None = None

    @property
    def pieces(self) -> Sequence[Slice]:  # type: ignore[override]
        return [Slice(0, "", "", {"at": str(n)}) for n in range(0, len(self.numbers), 100)]

    @property
    def position(self) -> str:
        return "z"

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        at = int(piece.detail["at"])
        yield batch_of(self.numbers[at : at + 100])

    def positions(self, first: int, count: int) -> pa.Array:
        return pa.array([f"y{n:08d}" for n in range(first, first + count)])


def batch_of(numbers: Sequence[int]) -> pa.RecordBatch:
    columns: dict[str, object] = {
        "event_id": [f"id-{n}" for n in numbers],
        "position": [f"{n:08d}" for n in numbers],
        "stream": ["s"] * len(numbers),
        "op": ["insert"] * len(numbers),
        "event_time": pa.array([DAY + n for n in numbers], pa.int64()),
        "payload": [f'{{"n": {n}}}' for n in numbers],
        "flags": [["recovered"]] * len(numbers),
    }
    return taken_batch(columns, len(numbers))


def test_p6_exactly_what_the_log_lacks_is_found_in_order_and_cut_into_batches(
    spark: SparkSession, tmp_path: Path
) -> None:
    """GIVEN a log with some of the events WHEN the gap is closed THEN the others are there, once, in their order."""
    dice = random.Random(7)
    numbers = list(range(1_000))
    dice.shuffle(numbers)
    known, missing = sorted(numbers[:600]), sorted(numbers[600:])
    log = DeltaLog(tmp_path)
    log.fence(0, 1)
    for batch, first in enumerate(range(0, 600, 200), start=1):
        file = BatchWriter(tmp_path, "shop", 0, batch).write_all([batch_of(known[first : first + 200])])
        assert file is not None
        log.commit(Append(0, batch, 1, "", "m", (file,)))
    reader = LogReader(tmp_path)
    shelf = Shelf(numbers, since=datetime.fromtimestamp(DAY / 1e6, UTC))
    wanted = RepairTarget("shop", 0, 3, 1, "m")
    taken = batches_of(found_missing(spark, shelf, reader.files(), wanted, tmp_path, rows_max=150), shelf, wanted)
    assert [(t.batch, t.rows) for t in taken] == [(4, 150), (5, 150), (6, 100)]
    assert [t.start for t in taken] == ["m", *(t.end for t in taken[:-1])]
    assert taken[-1].end == "z"
    for each in taken:
        log.commit(each)
    rows = [row for f in reader.files() for row in pq.read_table(f.path).to_pylist() if row["batch"] > 3]
    rows.sort(key=lambda row: (row["batch"], row["position"]))
    assert [row["event_id"] for row in rows] == [f"id-{n}" for n in missing]
    assert [row["position"] for row in rows] == [f"y{n:08d}" for n in range(400)]
    assert rows[0]["flags"] == ["recovered"] and rows[0]["payload"] == f'{{"n": {missing[0]}}}'
    # A second look finds nothing more.
    assert found_missing(spark, shelf, reader.files(), RepairTarget("shop", 0, 6, 1, "z"), tmp_path) == []


def test_a_gap_without_candidates_needs_no_job(spark: SparkSession, tmp_path: Path) -> None:
    """An idle source that lost its slot has nothing to look through."""
    assert found_missing(spark, Shelf([]), [], RepairTarget("shop", 0, 3, 1, "m"), tmp_path) == []
