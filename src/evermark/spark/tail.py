"""Which events of a piece of the log match, for clients of the live tail whose predicate only Spark can decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evermark.delivery.model import SourcePartition, SubscriptionSpec
from evermark.delivery.tail.wish import Wish
from evermark.log.frames import files_frame
from evermark.log.pieces import LogPiece
from evermark.spark.job import engine_error
from evermark.spark.match import wanted_by

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def wanted_marks(spark: SparkSession, place: SourcePartition, piece: LogPiece, wish: Wish) -> set[tuple[int, str]]:
    """By batch and position. The files of the piece may hold other events, too, which are not asked about."""
    batches = piece.rows.column("batch")
    first, last = batches[0].as_py(), batches[-1].as_py()
    spec = SubscriptionSpec("tail", "", streams=wish.streams, ops=wish.ops, where=wish.where)
    try:
        rows = files_frame(spark, piece.paths).where(
            f"partition = {place.partition} and batch between {first} and {last}"
        )
        wide, wanted = wanted_by(rows, spec)
        found = wide.where(wanted).select("batch", "position").collect()
    except Exception as error:
        raise engine_error("matching for the live tail failed", error) from error
    return {(row[0], row[1]) for row in found}
