"""A log in an object store as Spark sees it: the JVM has no library for it, so tasks read it for the JVM."""

from __future__ import annotations

import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from evermark import Log
from evermark.delivery.model import Cursor, SourcePartition, SubscriptionSpec
from evermark.delivery.replay.plan import ReplayWork
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.delivery.work import Span
from evermark.log.append import DeltaLog
from evermark.log.read import LogReader
from evermark.log.row_reader import RowReader
from evermark.secrets import KeyRef, SecretBox
from evermark.spark.deliver import SparkDeliverer
from evermark.spark.query import query
from evermark.spark.replay import places
from evermark.storage import Place, access
from pyspark_evermark.source import DefaultSource
from tests.contract.log.log_scene import expected, fill

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WANTED = SubscriptionSpec("one", "http://127.0.0.1:1/", where="cast(key as int) >= 1 and data.x is null")


@pytest.fixture
def store(spark: SparkSession, s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Workers of this session are told how the bucket is reached; those of `evermark up` inherit it."""
    monkeypatch.setitem(spark.sparkContext.environment, access.VARIABLE, os.environ[access.VARIABLE])
    fill(DeltaLog(s3_place / "shop"), 3, rows=3)
    return s3_place


def test_events_tables_and_queries_come_from_the_store(spark: SparkSession, store: Place) -> None:
    """GIVEN a log in S3 WHEN it is read, asked for a table, and queried by Spark THEN it answers as one on a disk."""
    log = Log(str(store))
    assert (log.sources(), len(log.files())) == (["shop"], 3)
    rows = log.read(spark, source="shop", stream="public.orders", batches=(2, 3), where="key = '1'")
    assert sorted(row["event_id"] for row in rows.collect()) == ["0-2-1", "0-3-1"]
    assert sorted(row["event_id"] for row in log.read(spark).select("event_id").collect()) == sorted(
        expected(3, rows=3)
    )
    table = log.table(spark, "shop", "public.orders").collect()
    assert sorted((row["key"], row["event_id"]) for row in table) == [("0", "0-3-0"), ("1", "0-3-1"), ("2", "0-3-2")]
    columns, found = query(spark, log, "select batch, count(*) as n from shop group by batch order by batch", 10)
    assert (columns, list(found)) == (["batch", "n"], [(1, 3), (2, 3), (3, 3)])


def test_rows_that_a_predicate_wants_are_found_with_their_places(spark: SparkSession, store: Place) -> None:
    """GIVEN predicates that Spark matches WHEN a delivery and a replay look for rows THEN tasks can pick them."""
    paths = tuple(file.path for file in sorted(LogReader(store / "shop").files(), key=lambda file: file.batch_min))
    deliverer = SparkDeliverer(spark, SecretBox(KeyRef("env", "NOT_NEEDED")))
    span = Span(SourcePartition("shop", 0), Cursor(1), 3, paths[1:], 6, exact=True)
    found = deliverer.places(span, [WANTED]).toArrow()
    assert _ids(paths, found.columns[0], found.columns[1]) == ["0-2-1", "0-2-2", "0-3-1", "0-3-2"]
    since, to = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC)
    work = ReplayWork("r1", TimeSlice(Mark(since), to, paths, 9), WANTED, (), None, None, 100, 10.0, False, 10)
    again = places(spark, work).toArrow()
    assert _ids(paths, again.columns[0], again.columns[1]) == [
        f"0-{batch}-{row}" for batch in (1, 2, 3) for row in (1, 2)
    ]


class InTheStore(DefaultSource):
    """The format, registered by hand: its processes have the environment of a session that knows the bucket."""

    @classmethod
    def name(cls) -> str:
        return "evermark_in_the_store"


def test_the_public_format_reads_the_store(spark: SparkSession, store: Place, tmp_path: Path) -> None:
    """GIVEN the url of a log WHEN Spark reads all of it, a part of it, and follows it as a stream that is started twice
    THEN every event that is asked for comes once."""
    spark.dataSource.register(InTheStore)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = spark.read.format(InTheStore.name()).load(str(store))
        assert frame.count() == 9
        rows = frame.where("batch in (2, 3) and stream = 'public.orders'").select("event_id").collect()
        assert Counter(row["event_id"] for row in rows) == expected(3, rows=3) - expected(1, rows=3)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    got: Counter[str] = Counter()

    def keep(part: DataFrame, _: int) -> None:
        got.update(row["event_id"] for row in part.collect())

    def follow() -> None:
        stream = spark.readStream.format(InTheStore.name()).option("maxBatchesPerTrigger", 2).load(str(store))
        begun = stream.writeStream.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
        begun.foreachBatch(
            lambda part, _: got.update(row["event_id"] for row in part.collect())
        ).start().awaitTermination()

    follow()
    assert got == expected(3, rows=3)
    fill(DeltaLog(store / "shop"), 5, first=4, rows=3)
    follow()
    assert got == expected(5, rows=3)


def _ids(paths: tuple[str, ...], codes: object, numbers: object) -> list[str]:
    rows = RowReader(paths).pick(codes.to_numpy(), numbers.to_numpy())
    return [str(each) for each in rows.column("event_id").to_pylist()]
