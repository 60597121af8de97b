"""The files of a kept table: layers made one, and what a damaged file is worth. In a folder, without Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.log import kept_shelf
from evermark.log.format import KEPT
from evermark.log.kept_shelf import Layer, Mark, Shelf, described, newest_of_each, write_kept

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def layer(batch: int, path: Path) -> Layer:
    return Layer((described(path),), {0: Mark(batch, batch, batch)}, (0,), (), 0)


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
        layers.append(layer(batch, path))
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
    kept = layer(1, path)
    shelf.keep([kept])
    assert shelf.layers() == [kept]
    with monkeypatch.context() as patched:
        patched.setattr(kept_shelf.zlib, "crc32", lambda *_: pytest.fail("it was read again"))
        assert shelf.layers() == [kept]
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 0xFF
    path.write_bytes(bytes(body))
    assert shelf.layers() == []


def test_how_large_a_layer_is_says_how_much_memory_it_takes(tmp_path: Path) -> None:
    """GIVEN rows that have much in common WHEN it is asked how large their layer is THEN it is not the file's size."""
    shelf = Shelf(tmp_path, "t")
    assert shelf.open()
    path = shelf.folder / "rows.parquet"
    rows = [{"partition": 0, "row_key": str(n), "payload": "template " * 2_000} for n in range(100)]
    table = pa.Table.from_pylist(rows, KEPT)
    write_kept(path, [table])
    kept = layer(1, path)
    assert kept.files[0].size < 1_000_000 < table.nbytes <= 1.01 * shelf.size_of(kept)
