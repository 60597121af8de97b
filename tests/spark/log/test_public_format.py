"""The public format: `spark.read.format("evermark")` and `spark.readStream.format("evermark")`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from evermark import Log, event_file
from evermark.event import ADDED_SINCE, EVENT
from evermark.log import write
from evermark.log.append import DeltaLog
from evermark.log.forget import Forgotten
from evermark.log.maintenance import Maintenance
from evermark.log.opened import PLAYBOOK
from evermark.log.write import BatchWriter
from tests.contract.log.log_scene import append, events, expected, fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def log(tmp_path: Path) -> DeltaLog:
    log = DeltaLog(tmp_path / "log" / "shop")
    fill(log, 5, rows=2)
    return log


class Stream:
    """A streaming query that ends when it has read what there is, and keeps what it got over restarts."""

    def __init__(self, spark: SparkSession, log: Path, scratch: Path) -> None:
        self._spark = spark
        self._log = str(log)
        self._scratch = str(scratch)
        self.got: Counter[str] = Counter()
        self.batches = 0

    def run(self, **options: Any) -> None:
        frame = self._spark.readStream.format("evermark").option("log", self._log).options(**options).load()
        query = (
            frame.writeStream.option("checkpointLocation", self._scratch)
            .foreachBatch(self._keep)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def _keep(self, frame: Any, _: int) -> None:
        self.got.update(row["event_id"] for row in frame.select("event_id").collect())
        self.batches += 1


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path / "log", tmp_path / "scratch")


def read(spark: SparkSession, path: Path, **options: str) -> Counter[str]:
    frame = spark.read.format("evermark").option("log", str(path)).options(**options).load()
    return Counter(row["event_id"] for row in frame.select("event_id").collect())


def test_spark_finds_the_format_by_itself(spark: SparkSession, log: DeltaLog) -> None:
    """Nobody registered it: the package's name is enough. All columns of the log are there."""
    frame = spark.read.format("evermark").load(str(log.folder.parent))
    assert frame.count() == 10
    row = frame.where("event_id = '0-2-1'").first()
    assert row is not None
    assert (row["source"], row["partition"], row["batch"], row["flags"]) == ("shop", 0, 2, ["repaired"])
    assert row["event_time"].microsecond == 123_456


def test_a_file_that_is_missing_is_named_with_what_to_do(spark: SparkSession, log: DeltaLog) -> None:
    """GIVEN a file of the log that is missing WHEN it is read THEN Spark's error tells which, and the remedy."""
    victim = Path(Log(log.folder.parent).files()[0].path)
    victim.unlink()
    with pytest.raises(Exception, match=rf"the file {victim} of the log is missing\n.*{PLAYBOOK}"):
        read(spark, log.folder.parent)


def test_all_events_are_planned_and_read_without_pandas(log: DeltaLog) -> None:
    """GIVEN a worker that has just begun WHEN it plans and reads a log whole THEN it has not loaded pandas for it: that
    takes longer than a small log."""
    code = (
        "import sys; from types import SimpleNamespace as Schema; from evermark.event import EVENT\n"
        "from pyspark_evermark import DefaultSource\n"
        f"reader = DefaultSource({{'log': '{log.folder.parent}'}}).reader(Schema(names=EVENT.names))\n"
        "print(sum(len(rows) for part in reader.partitions() for rows in reader.read(part)), 'pandas' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["10", "False"]


def test_files_from_before_a_column_was_added_have_nulls_in_it(
    spark: SparkSession, log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the format, and by `evermark.Log`, beside files that have it."""
    for module in (write, event_file):
        monkeypatch.setattr(module, "EVENT", pa.schema([field for field in EVENT if field.name not in ADDED_SINCE]))
    fill(log, 6, first=6)
    path = log.folder.parent
    for frame in (spark.read.format("evermark").load(str(path)), Log(path).read(spark)):
        rows = frame.select("event_id", "previous_key", "key").collect()
        assert len(rows) == 11
        assert {row["previous_key"] for row in rows} == {None}
        assert {row["key"] for row in rows} == {"0", "1"}
    named = spark.read.format("evermark").option("columns", "previous_key").load(str(path))
    assert [row["previous_key"] for row in named.collect()] == [None] * 11


def test_a_log_that_was_read_before_is_read_as_it_is_now(spark: SparkSession, log: DeltaLog) -> None:
    """GIVEN a log that a session has read WHEN more is appended, its files are merged, or another log is put in its
    place THEN the next read has exactly what is there: a process of Spark's keeps what it knows of a log.
    """
    path = log.folder.parent
    assert read(spark, path) == expected(5, rows=2)
    fill(log, 40, first=6, rows=2)
    assert read(spark, path) == expected(40, rows=2)
    assert Maintenance(log.folder).run().compacted == 40
    assert read(spark, path) == expected(40, rows=2)
    shutil.rmtree(log.folder)
    fill(DeltaLog(log.folder), 3)
    assert read(spark, path) == expected(3)


def test_a_batch_read_by_source_stream_and_time(spark: SparkSession, log: DeltaLog) -> None:
    """Options narrow what is read."""
    path = log.folder.parent
    fill(DeltaLog(path / "other"), 1)
    assert read(spark, path, source="shop") == expected(5, rows=2)
    assert read(spark, path) == expected(5, rows=2) + expected(1)
    assert read(spark, path, stream="public.none") == Counter()
    assert read(spark, path, source="shop", since="2026-11-01T12:00:00.123456Z") == expected(5, rows=2)
    assert read(spark, path, source="shop", since="2026-11-01T12:00:00.123457Z") == Counter()
    assert read(spark, path, source="shop", until="2026-11-01T12:00:00.123456Z") == Counter()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sorce": "shop"}, "option 'sorce' is not known to the evermark format"),
        ({"source": "sop"}, "has no source 'sop'"),
        ({"since": "yesterday"}, "'yesterday' is not a time"),
    ],
)
def test_wrong_options_are_said(spark: SparkSession, log: DeltaLog, options: dict[str, str], message: str) -> None:
    """An option that is not known, or not right, is an error and not ignored."""
    with pytest.raises(Exception, match=message):
        read(spark, log.folder.parent, **options)


def test_a_stream_reads_everything_once_over_restarts_and_compaction(log: DeltaLog, stream: Stream) -> None:
    """GIVEN a stream that stopped half-way WHEN files are merged and more events come THEN each is read once."""
    stream.run(maxBatchesPerTrigger=2)
    assert stream.got == expected(5, rows=2)
    assert stream.batches == 3
    fill(log, 40, first=6, rows=2)
    assert Maintenance(log.folder).run().compacted == 40
    stream.run(maxBatchesPerTrigger=13)
    fill(log, 41, first=41, rows=2)
    stream.run()
    stream.run()
    assert stream.got == expected(41, rows=2)


def test_partitions_and_sources_that_come_later_are_read_too(log: DeltaLog, stream: Stream) -> None:
    """Each place has its own offset: a high batch of one never hides the low ones of another."""
    stream.run()
    fill(log, 3, partition=1)
    fill(DeltaLog(log.folder.parent / "other"), 2, partition=9)
    stream.run()
    fill(log, 4, first=4, partition=1)
    stream.run()
    assert stream.got == expected(5, rows=2) + expected(4, partition=1) + expected(2, partition=9)


def test_a_stream_may_begin_at_the_end(log: DeltaLog, stream: Stream) -> None:
    """`startingBatch = latest` reads what comes after the first start."""
    stream.run(startingBatch="latest")
    assert stream.got == Counter()
    fill(log, 6, first=6)
    stream.run(startingBatch="latest")
    assert stream.got == Counter({"0-6-0": 1})


def test_a_stream_that_retention_passed_says_what_is_missing(log: DeltaLog, stream: Stream) -> None:
    """Nothing is skipped in silence; a stream that begins later reads what there is."""
    stream.run()
    fill(log, 9, first=6, rows=2)
    later = Maintenance(log.folder, timedelta(days=1), clock=lambda: 4_000_000_000.0)
    assert later.run(lambda: {0: 7}).retained_out_rows == 14
    with pytest.raises(Exception, match="batches 6 to 7 of shop/0 are no longer in the log"):
        stream.run()
    fresh = Stream(stream._spark, log.folder.parent, log.folder.parent.parent / "fresh")
    fresh.run()
    assert fresh.got == expected(9, rows=2) - expected(7, rows=2)


def test_a_stream_goes_on_behind_a_batch_of_which_all_was_forgotten(log: DeltaLog, stream: Stream) -> None:
    """GIVEN a stream that has read the log WHEN the next batch is forgotten whole THEN it reads those behind it."""
    stream.run()
    made = events(0, 6)
    at = made.schema.get_field_index("key")
    of_bob = made.set_column(at, made.schema.field(at), pa.array(["bob"]))
    file = BatchWriter(log.folder, "shop", 0, 6).write_all([of_bob])
    assert file is not None
    log.commit(append([file], 6))
    fill(log, 7, first=7)
    assert Maintenance(log.folder).forget(Forgotten("public.orders", frozenset({"bob"}))) == 1
    stream.run()
    assert stream.got == expected(5, rows=2) + Counter({"0-7-0": 1})


def test_a_stream_of_which_retention_left_nothing_says_so_before_the_next_event(log: DeltaLog, stream: Stream) -> None:
    """GIVEN batches that a stream has not read WHEN retention removes all there is THEN the next start names them."""
    stream.run()
    fill(log, 7, first=6, rows=2)
    later = Maintenance(log.folder, timedelta(days=1), clock=lambda: 4_000_000_000.0)
    assert later.run(lambda: {0: 7}).retained_out_rows == 14
    with pytest.raises(Exception, match="batches 6 to 7 of shop/0 are no longer in the log"):
        stream.run()


def tasks_of(frame: Any) -> int:
    return int(frame.rdd.getNumPartitions())


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    """A session that tells formats its conditions: by itself Spark does not."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield spark
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_conditions_leave_out_files_and_change_no_answer(pushing: SparkSession, tmp_path: Path) -> None:
    """GIVEN a log of many files WHEN some of its events are asked for in SQL THEN only their files are read, small
    files by one task, and the answer is that of a session that tells no conditions."""
    log = DeltaLog(tmp_path / "log" / "shop")
    fill(log, 40, rows=2)

    def read() -> Any:
        return pushing.read.format("evermark").option("log", str(tmp_path / "log")).load()

    wanted = "stream = 'public.orders' and batch in (3, 4) and event_time is not null and op <> 'delete'"
    pushed = sorted(row["event_id"] for row in read().where(wanted).collect())
    assert (tasks_of(read()), tasks_of(read().where("batch = 3"))) == (2, 1)
    assert read().where("batch = -1").collect() == [], "where no file is left there is nothing to read"
    pushing.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    assert sorted(row["event_id"] for row in read().where(wanted).collect()) == pushed != []


def test_columns_that_are_named_are_read_alone(spark: SparkSession, log: DeltaLog) -> None:
    """GIVEN the option `columns` THEN the frame has those; a name that is none is refused."""
    read = spark.read.format("evermark").option("log", str(log.folder.parent))
    assert read.option("columns", "batch, event_id").load().columns == ["batch", "event_id"]
    assert read.option("columns", "batch, event_id").load().count() == 10
    with pytest.raises(Exception, match="an event has no column 'colour'"):
        read.option("columns", "colour").load().count()
