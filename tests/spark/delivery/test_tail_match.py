"""Predicates of the live tail that only Spark can decide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from evermark.delivery.tail.wish import Wish
from evermark.event import EVENT
from evermark.log.pieces import LogPiece
from evermark.log.row_reader import ROWS
from evermark.spark.tail import wanted_marks
from tests.unit.delivery.tail.tail_scene import P0, MemoryLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_spark_says_which_events_of_a_piece_match_and_of_no_others(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN a file with rows of other batches and partitions WHEN a piece is matched by a predicate that has no exact
    steps THEN the marks of its matching rows, and of no row outside the piece's batches.
    """
    log, path = MemoryLog(), tmp_path / "log.parquet"
    for _ in range(3):
        log.take(P0, 12)
    rows = [row for batch in log.batches[P0] for row in batch]
    others = [{**row, "partition": 1} for row in rows]
    pq.write_table(pa.Table.from_pylist([*rows, *others], schema=EVENT), path)
    mine = [row for row in rows if row["batch"] == 2]
    piece = LogPiece(pa.RecordBatch.from_pylist(mine, schema=ROWS), 2, "", (str(path),))
    found = wanted_marks(spark, P0, piece, Wish(where="key rlike '^1.$'"))
    assert found == {(2, row["position"]) for row in mine if row["key"] in ("10", "11")}
    assert wanted_marks(spark, P0, piece, Wish(streams=("other",), where="key rlike '^1'")) == set()
