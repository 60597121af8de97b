"""Log files: their statistics, their names, and how readers find batches in them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evermark import event_file
from evermark.errors import NotFoundError
from evermark.event import EVENT, taken_batch
from evermark.log import maintenance
from evermark.log.append import DeltaLog
from evermark.log.base import LogFile
from evermark.log.compact import FAN_IN
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader
from evermark.log.table import DELTA_CHECKPOINT_EVERY
from evermark.log.write import BatchWriter
from tests.contract.log.log_scene import TIME, append, events, fill, position, write

LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    DeltaLog(tmp_path / "shop")
    return tmp_path / "shop"


def written(folder: Path, times: list[datetime | None]) -> LogFile:
    file = BatchWriter(folder, "shop", 3, 7).write_all([events(3, 7, len(times), times)])
    assert file is not None
    return file


@pytest.mark.parametrize(
    ("times", "low", "high", "nulls"),
    [
        ([TIME], "2026-11-01T12:00:00.123Z", "2026-11-01T12:00:00.124Z", 0),
        ([TIME.replace(microsecond=123_000)], "2026-11-01T12:00:00.123Z", "2026-11-01T12:00:00.123Z", 0),
        ([None, TIME, None], "2026-11-01T12:00:00.123Z", "2026-11-01T12:00:00.124Z", 2),
        ([None, None], None, None, 2),
        (
            [datetime(2026, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)],
            "2026-12-31T23:59:59.999Z",
            "2027-01-01T00:00:00.000Z",
            0,
        ),
        (
            [datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)],
            "1969-12-31T23:59:59.999Z",
            "1970-01-01T00:00:00.000Z",
            0,
        ),
        ([datetime(1, 1, 1, tzinfo=UTC)], "0001-01-01T00:00:00.000Z", "0001-01-01T00:00:00.000Z", 0),
        ([LAST], "9999-12-31T23:59:59.999Z", None, 0),
    ],
)
def test_statistics_round_outwards(
    folder: Path, times: list[datetime | None], low: str | None, high: str | None, nulls: int
) -> None:
    """Milliseconds below and above, across years and the epoch; unknown where no calendar reaches."""
    file = written(folder, times)
    assert file.stats["event_time"] == (low, high, nulls)
    assert file.stats["partition"] == (3, 3, 0)
    assert file.stats["batch"] == (7, 7, 0)
    assert file.stats["position"] == (position(7), position(7, len(times) - 1), 0)
    assert (file.rows, file.size) == (len(times), (folder / file.path).stat().st_size)


def test_times_beyond_every_calendar_are_kept(folder: Path) -> None:
    """A database's year 294276 is an event like any other; its file just has no bound."""
    batch = events(3, 7, 1)
    far = pa.array([9_223_372_036_854_775_806], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    batch = batch.set_column(batch.schema.get_field_index("event_time"), batch.schema.field("event_time"), far)
    file = BatchWriter(folder, "shop", 3, 7).write_all([batch])
    assert file is not None
    assert file.stats["event_time"] == (None, None, 0)
    log = DeltaLog(folder)
    log.commit(append([file], 1, partition=3))
    assert LogReader(folder).files()[0].event_time_max is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.none(), st.datetimes(timezones=st.just(UTC))), min_size=1, max_size=20))
def test_no_row_lies_outside_its_file_s_bounds(
    tmp_path_factory: pytest.TempPathFactory, times: list[datetime | None]
) -> None:
    """Pruning by statistics never loses a row."""
    file = written(tmp_path_factory.mktemp("bounds"), times)
    low, high, nulls = file.stats["event_time"]
    known = [t for t in times if t is not None]
    assert nulls == len(times) - len(known)
    for t in known:
        assert low is None or datetime.fromisoformat(low) <= t
        assert high is None or t <= datetime.fromisoformat(high)
        assert high is None or datetime.fromisoformat(high) - max(known) < timedelta(milliseconds=1)


def test_rows_come_back_as_they_were(folder: Path) -> None:
    """What ingest fills in is filled in, everything else is untouched, and merging changes nothing."""
    log = DeltaLog(folder)
    fill(log, FAN_IN[0], rows=2)
    before = pa.concat_tables(
        pq.read_table(f.path).cast(EVENT) for f in sorted(LogReader(folder).files(), key=lambda f: f.batch_min)
    )
    Maintenance(folder).run()
    (merged,) = LogReader(folder).files()
    assert pq.read_table(merged.path).cast(EVENT).equals(before)
    assert (merged.rows, merged.batch_min, merged.batch_max) == (2 * FAN_IN[0], 1, FAN_IN[0])
    assert (merged.position_min, merged.position_max) == (position(1), position(FAN_IN[0], 1))
    assert before["source"].unique().to_pylist() == ["shop"]
    assert before["flags"][0].as_py() == ["repaired"]


def test_a_failed_task_leaves_no_file(folder: Path) -> None:
    """The error passes, the half-written file does not stay."""

    def failing() -> Iterator[pa.RecordBatch]:
        yield events(0, 1, 10)
        raise RuntimeError("the source went away")

    with pytest.raises(RuntimeError, match="went away"):
        BatchWriter(folder, "shop", 0, 1).write_all(failing())
    assert list(folder.glob("*.parquet")) == []


def test_no_rows_are_no_file(folder: Path) -> None:
    """A slice without an event writes nothing."""
    assert BatchWriter(folder, "shop", 0, 1).write_all([events(0, 1, 0)]) is None
    assert list(folder.glob("*.parquet")) == []


def test_every_attempt_has_a_name_of_its_own(folder: Path) -> None:
    """A task that is run again does not touch what its predecessor wrote."""
    assert write(folder, 1).path != write(folder, 1).path


def test_many_small_batches_become_few_row_groups_in_bounded_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are gathered into groups, and groups do not pile up: memory is that of one."""
    monkeypatch.setattr(event_file, "_GROUP_ROWS_MAX", 1_000)
    payload = "x" * 1_000

    def many() -> Iterator[pa.RecordBatch]:
        for i in range(2_000):
            columns = {c: [c] * 10 for c in ("event_id", "position", "stream", "op")}
            yield taken_batch({**columns, "payload": [f"{payload}{i}"] * 10}, 10)

    start = pa.total_allocated_bytes()
    tracemalloc.start()
    peak = 0

    def watched() -> Iterator[pa.RecordBatch]:
        nonlocal peak
        for batch in many():
            peak = max(peak, pa.total_allocated_bytes() - start)
            yield batch

    file = BatchWriter(folder, "shop", 0, 1).write_all(watched())
    tracemalloc.stop()
    assert file is not None
    assert pq.ParquetFile(folder / file.path).num_row_groups == 20
    assert peak < 12_000_000  # 20 MB went through; one group is 1 MB


@pytest.fixture(scope="module", params=["as committed", "compacted", "compacted and cleaned"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LogReader:
    """Three partitions: 0 and 1 with 40 batches of 2 rows, an hour apart; 2 with one. The reader saw it empty."""
    folder = tmp_path_factory.mktemp("log") / "shop"
    log = DeltaLog(folder)
    reader = LogReader(folder)
    assert reader.files() == []
    for batch in range(1, 41):
        for partition in (0, 1):
            times = [TIME + timedelta(hours=batch), None]
            file = BatchWriter(folder, "shop", partition, batch).write_all([events(partition, batch, 2, times)])
            assert file is not None
            log.commit(append([file], batch, partition=partition))
    fill(log, 1, partition=2)
    if request.param != "as committed":
        assert Maintenance(folder).run().compacted == 80
    if request.param == "compacted and cleaned":
        fill(log, DELTA_CHECKPOINT_EVERY, partition=3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(maintenance, "KEPT_COMMITS", 10)
            assert Maintenance(folder).run().commits_cleaned
    return reader


def test_files_of_hold_exactly_the_batches_asked_for(reader: LogReader) -> None:
    """Every row of (after, to] is in them, of this partition; a kept reader sees through compaction and cleaning."""
    files = reader.files_of(1, 10, 12)
    rows = [row for f in files for row in pq.read_table(f.path, columns=["partition", "batch"]).to_pylist()]
    assert sum(10 < row["batch"] <= 12 for row in rows) == 4
    assert {row["partition"] for row in rows} == {1}
    assert reader.files_of(1, 40, 99) == []
    assert reader.files_of(9, 0, 99) == []


def test_whether_the_log_has_an_event_at_a_position(reader: LogReader) -> None:
    """GIVEN events of several partitions WHEN asked for a position THEN it counts exactly, and in its partition."""
    assert reader.holds(0, position(39, 1)) and reader.holds(0, position(1, 0))
    assert not reader.holds(0, position(39, 7))
    assert not reader.holds(9, position(39, 1))


def test_ids_from_a_position_on(reader: LogReader) -> None:
    """At the position and after it, of this partition alone."""
    assert sorted(reader.ids_from(0, position(39, 1)).to_pylist()) == ["0-39-1", "0-40-0", "0-40-1"]
    assert reader.ids_from(2, position(2)).to_pylist() == []
    assert reader.ids_from(9, "").to_pylist() == []


def test_position_max_is_that_of_the_last_batch(reader: LogReader) -> None:
    """Read from the rows; none where there is none."""
    assert [reader.position_max(p) for p in (0, 2, 9)] == [position(40, 1), position(1), None]


def test_position_max_knows_that_incarnations_have_no_common_order(folder: Path) -> None:
    """A restored source may count from a lower position: the last batch decides, not the greatest text."""
    log = DeltaLog(folder)
    old = BatchWriter(folder, "shop", 0, 1).write_all([events(0, 900)])
    new = BatchWriter(folder, "shop", 0, 2).write_all([events(0, 5)])
    assert old is not None and new is not None
    log.commit(append([old], 1))
    log.commit(append([new], 2))
    assert LogReader(folder).position_max(0) == position(5)


@pytest.mark.parametrize(
    ("since", "batch"),
    [
        ("2026-11-01T00:00:00Z", 0),
        ((TIME + timedelta(hours=10)).isoformat(), 9),
        ((TIME + timedelta(hours=10, microseconds=1)).isoformat(), 10),
        ("2027-01-01", 40),
    ],
)
def test_batch_at_a_time(reader: LogReader, since: str, batch: int) -> None:
    """The last batch before which nothing is as young as that."""
    assert reader.batch_at(0, since) == batch


def test_tails_are_exact_after_everything(reader: LogReader) -> None:
    """Neither compaction nor cleaning changes what the last batch was."""
    assert [reader.tail_batch(p) for p in (0, 1, 2, 9)] == [40, 40, 1, 0]


def test_no_log_is_said(tmp_path: Path) -> None:
    """A folder that is not there is an error with a hint, and no log afterwards either."""
    with pytest.raises(NotFoundError, match="no log at"):
        LogReader(tmp_path / "none").files()
    assert not (tmp_path / "none").exists()
