"""Which layers of a kept table may be used, and when they become one. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.log import kept_table
from evermark.log.format import KEPT
from evermark.log.kept_table import (
    KeptFile,
    Layer,
    Mark,
    Shelf,
    described,
    moment_us_max,
    newest_of_each,
    to_fold,
    to_merge,
    usable,
    write_kept,
)
from evermark.log.newest_rows import RUN_ROWS, RUN_ROWS_MAX, NotPlain, Part, buckets_for, runs_of
from evermark.log.read import FileRange

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
    monkeypatch.setattr(kept_table, "MERGED_BYTES_MAX", 3)  # a layer here has one
    lowest = layer(1, rows=1)
    assert to_merge([lowest]) is None
    assert to_merge([lowest, layer(2)]) is None
    assert to_merge([lowest, layer(2, rows=50), layer(3, rows=50)]) == 1
    assert to_merge([lowest, layer(2, rows=51), layer(3, rows=50)]) is None
    assert to_merge([lowest, layer(2, rows=100), layer(3, rows=1), layer(4, rows=1)]) == 2
    assert to_merge([lowest, *(layer(n) for n in range(2, 6))]) == 2


def test_of_each_key_of_a_partition_the_newest_row_stays() -> None:
    """GIVEN tables, the newest first WHEN they become one THEN each key has one row in each partition, the newest."""

    def rows(*keys: tuple[int, str, int]) -> pa.Table:
        made = [{"partition": partition, "row_key": key, "batch": batch} for partition, key, batch in keys]
        return pa.Table.from_pylist(made, KEPT)

    found = newest_of_each([rows((0, "a", 9), (1, "b", 9)), rows(), rows((0, "b", 5), (0, "a", 5)), rows((1, "b", 1))])
    told = [(row["partition"], row["row_key"], row["batch"]) for row in found.to_pylist()]
    assert sorted(told) == [(0, "a", 9), (0, "b", 5), (1, "b", 9)]
    assert newest_of_each([rows()]).num_rows == 0


@pytest.mark.parametrize("by_spark", [False, True])
def test_layers_are_merged_unless_spark_has_written_one(tmp_path: Path, *, by_spark: bool) -> None:
    """GIVEN layers above the lowest WHEN they are merged THEN the newest rows are in one file; one that Spark has
    written, with times of its own, stays."""
    shelf = Shelf(tmp_path, "public.orders")
    assert shelf.open()
    layers = []
    for batch, keys in enumerate([["a", "b"], ["b", "c"]]):
        rows = [{"partition": 0, "row_key": key, "batch": batch, "event_time": NOON, "gone": False} for key in keys]
        path = shelf.folder / f"{batch}.parquet"
        table = pa.Table.from_pylist(rows, KEPT)
        if by_spark and batch == 0:
            pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
        else:
            write_kept(path, [table])
        layers.append(replace(layer(batch), files=(described(path),)))
    merged = shelf.merged(layers)
    if by_spark:
        assert merged == layers
        return
    (one,) = merged
    assert one.marks == layers[-1].marks
    found = pq.read_table(shelf.folder / one.files[0].name)
    assert found.schema == KEPT
    assert sorted((row["row_key"], row["batch"]) for row in found.to_pylist()) == [("a", 0), ("b", 1), ("c", 1)]


def test_a_file_is_read_for_its_checksum_once_and_again_when_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a kept file that this process has read WHEN it is asked for again THEN it is not read; when a byte of it
    was changed THEN that is noticed."""
    shelf = Shelf(tmp_path, "t")
    assert shelf.open()
    path = shelf.folder / "rows.parquet"
    write_kept(path, [KEPT.empty_table()])
    kept = replace(layer(1), files=(described(path),))
    shelf.keep([kept])
    assert shelf.layers() == [kept]
    with monkeypatch.context() as patched:
        patched.setattr(kept_table.zlib, "crc32", lambda *_: pytest.fail("it was read again"))
        assert shelf.layers() == [kept]
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 0xFF
    path.write_bytes(bytes(body))
    assert shelf.layers() == []


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
