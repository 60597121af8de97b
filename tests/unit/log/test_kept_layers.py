"""Which layers of a kept table may be used, and when they become one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evermark.errors import FormatError
from evermark.log import kept_table
from evermark.log.kept_shelf import KeptFile, Layer, Mark
from evermark.log.kept_table import LogFiles, moment_us_max, to_fold, to_merge, usable
from evermark.log.newest_rows import RUN_ROWS, RUN_ROWS_MAX, NotPlain, Part, buckets_for, runs_of
from evermark.log.read import FileRange, LogReader
from tests.spark.log.test_frames import Filler, change

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
US = 1_000_000


def at(hours: float) -> datetime:
    return NOON + timedelta(hours=hours)


def layer(batch: int, latest: float | None = 0.0, rows: int = 1) -> Layer:
    moment = round((at(latest) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * US) if latest is not None else None
    return Layer((KeptFile("f", rows, 1, 0),), {0: Mark(batch, batch, batch)}, (0,), (), moment)


def test_the_most_layers_that_fit_and_hold_nothing_later_are_used() -> None:
    """GIVEN layers of batches 1 to 3 WHEN a time is asked for, or batches were set aside THEN those above are left."""
    layers = [layer(1, 1.0), layer(2, 2.0), layer(3, 3.0)]
    assert usable(layers, None, lambda _: True) == layers
    assert usable(layers, at(3.0), lambda _: True) == layers
    assert usable(layers, at(2.5), lambda _: True) == layers[:2]
    assert usable(layers, at(0.5), lambda _: True) == []
    assert usable(layers, None, lambda top: top.marks[0].batch < 3) == layers[:2]
    assert usable(layers, None, lambda _: False) == []


@pytest.mark.parametrize("harm", ["missing", "empty", "damaged"])
def test_a_file_that_cannot_be_read_is_named_where_layers_are_compared_with_the_log(tmp_path: Path, harm: str) -> None:
    """GIVEN a file of the log that is missing, or damaged as a whole or in a column WHEN it is looked at whether a
    layer fits the log THEN an error names the file, and says what to do."""
    fill = Filler(tmp_path)
    fill(*(change("insert", str(n), f"v{n}") for n in range(1_000)))
    files = LogReader(fill.folder).files()
    path, log = Path(files[0].path), LogFiles(files)
    marked = Layer((), log.marks(), (0,))
    assert log.fit(marked)
    body = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    else:
        about = pq.read_metadata(path).row_group(0)
        at = about.column(pq.read_schema(path).names.index("batch"))
        begin = at.dictionary_page_offset or at.data_page_offset
        body[begin : begin + at.total_compressed_size] = b"\xff" * at.total_compressed_size
        path.write_bytes(b"" if harm == "empty" else body)
    said = "missing" if harm == "missing" else "damaged"
    with pytest.raises(FormatError, match=f"{path.name} of the log is {said}") as error:
        log.fit(marked)
    assert "put it back" in error.value.hint


def test_a_layer_whose_latest_time_is_not_known_serves_no_time() -> None:
    """GIVEN events with a time beyond the calendar WHEN a time is asked for THEN nothing kept is used."""
    assert usable([layer(1, None)], at(9.0), lambda _: True) == []
    assert usable([layer(1, None)], None, lambda _: True) != []


def test_layers_become_one_when_they_are_many_or_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a large lowest layer WHEN those above are many THEN they are merged without it; WHEN large, with it."""
    monkeypatch.setattr(kept_table, "SMALL_ROWS", 10)
    lowest = layer(1, rows=1000)
    assert to_fold([lowest]) is None
    assert to_fold([lowest, layer(2, rows=250)]) is None
    assert to_fold([lowest, layer(2, rows=251)]) == 0
    assert to_fold([lowest, *(layer(n) for n in range(2, 2 + kept_table.LAYERS_MAX))]) == 1
    assert to_fold([layer(1, rows=0), layer(2, rows=10)]) is None


def test_small_later_layers_become_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN later layers WHEN the newest of them are few rows together THEN these are merged; the lowest never is."""
    monkeypatch.setattr(kept_table, "MERGED_ROWS_MAX", 100)
    monkeypatch.setattr(kept_table, "MERGED_BYTES_MAX", 3)
    lowest = layer(1, rows=1)

    def merge(layers: list[Layer], size: int = 1) -> int | None:
        return to_merge(layers, lambda _: size)

    assert merge([lowest]) is None
    assert merge([lowest, layer(2)]) is None
    assert merge([lowest, layer(2, rows=50), layer(3, rows=50)]) == 1
    assert merge([lowest, layer(2, rows=51), layer(3, rows=50)]) is None
    assert merge([lowest, layer(2, rows=100), layer(3, rows=1), layer(4, rows=1)]) == 2
    assert merge([lowest, *(layer(n) for n in range(2, 6))]) == 2
    assert merge([lowest, layer(2), layer(3)], size=2) is None


def file(**more: object) -> FileRange:
    return FileRange("f", 0, 0, 1, 1, 10, 1, **more)  # type: ignore[arg-type]


def test_no_event_of_a_file_is_later_than_is_said() -> None:
    """Events without a time count from when they were taken; what statistics do not tell is not known."""
    assert moment_us_max([]) == 0
    noon = moment_us_max([file(event_time_max=NOON, timeless=0)])
    assert noon == round(NOON.timestamp()) * US
    later = moment_us_max([file(event_time_max=NOON, timeless=1, ingested_at_max=at(1.0))])
    assert later == noon + 3600 * US
    assert moment_us_max([file(timeless=10, ingested_at_max=NOON)]) == noon
    assert moment_us_max([file(timeless=0)]) is None
    assert moment_us_max([file(event_time_max=NOON, timeless=None)]) is None


def part(low: int, high: int, rows: int = RUN_ROWS) -> Part:
    return Part("f", 0, rows, low, high)


def test_a_batch_is_never_in_two_runs_and_the_newest_run_comes_first() -> None:
    """GIVEN row groups that share batches WHEN they are put into runs THEN no batch is in two."""
    runs = runs_of([part(1, 2), part(4, 6), part(2, 3), part(6, 7), part(9, 9)])
    assert [{(p.batch_min, p.batch_max) for p in run} for run in runs] == [
        {(9, 9)}, {(4, 6), (6, 7)}, {(1, 2), (2, 3)},
    ]  # fmt: skip
    # A file across others holds all of them together; small ones share a run.
    assert len(runs_of([part(1, 9), part(3, 3), part(5, 6)])) == 1
    assert len(runs_of([part(n, n, 1) for n in range(100)])) == 1
    with pytest.raises(NotPlain, match="too large"):
        runs_of([part(1, 1, RUN_ROWS_MAX), part(1, 1, 1)])


def test_keys_are_split_into_as_many_buckets_as_a_task_can_hold() -> None:
    """And left to Spark where they would be too many."""
    assert buckets_for(0) == buckets_for(20_000_000) == 1
    assert buckets_for(100_000_000) == 4
    assert buckets_for(10**10) == 0
