"""The log read on piece by piece: every row once, in order, whatever files hold it and wherever reading stopped."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evermark.event import EVENT
from evermark.log.pieces import PieceReader, few_files
from evermark.log.read import FileRange, LogReader, overlaps
from tests.unit.delivery.tail.tail_scene import T0

Row = tuple[int, str]


class Files(LogReader):
    """A log whose files are given. Of batch 4 there is nothing: all its events were forgotten."""

    def __init__(self, folder: Path, files: list[list[Row]], partition: int = 0) -> None:
        super().__init__(folder)
        self._given = [
            self._written(folder / f"{n}-{partition}.parquet", rows, partition) for n, rows in enumerate(files)
        ]

    def _written(self, path: Path, rows: list[Row], partition: int) -> FileRange:
        columns: dict[str, list[object]] = {
            "event_id": [f"{b}/{p}" for b, p in rows], "position": [p for _, p in rows], "batch": [b for b, _ in rows],
            "source": ["shop"] * len(rows), "stream": ["s"] * len(rows), "op": ["insert"] * len(rows),
            "partition": [0] * len(rows), "ingested_at": [T0] * len(rows), "payload": ["{}"] * len(rows),
        }  # fmt: skip
        arrays = [pa.array(columns.get(field.name, [None] * len(rows)), field.type) for field in EVENT]
        pq.write_table(pa.table(arrays, schema=EVENT), path, row_group_size=5)
        batches = [b for b, _ in rows]
        return FileRange(str(path), 0, 0, min(batches), max(batches), len(rows), 1)

    def files(self) -> list[FileRange]:
        return self._given

    def files_of(self, partition: int, after_batch: int, to_batch: int) -> list[FileRange]:
        return [f for f in self._given if overlaps(f, partition, after_batch, to_batch)]


ROWS: list[Row] = [(b, f"{n:04}") for b, count in {1: 3, 2: 17, 3: 1, 5: 40, 6: 2}.items() for n in range(count)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A merged file of three batches, a batch whose rows lie in three files, and a file of one batch."""
    five = [row for row in ROWS if row[0] == 5]
    files = [[r for r in ROWS if r[0] <= 3], five[0:10], five[25:], five[10:25], [r for r in ROWS if r[0] == 6]]
    return Files(tmp_path_factory.mktemp("log"), files)


@given(rows_max=st.integers(1, 30), to=st.integers(1, 6), seed=st.integers(0, 10))
@settings(max_examples=25)
def test_every_row_comes_once_in_order_from_wherever_reading_stopped(
    log: Files, rows_max: int, to: int, seed: int
) -> None:
    """GIVEN batches in merged, split and single files WHEN read in pieces of any size, now and then by a reader that
    knows nothing of the last piece THEN every row up to a batch comes once, in log order, and no row after it.
    """
    chance, reader = random.Random(seed), PieceReader(log)
    found: list[Row] = []
    at = (0, "")
    while at[0] < to:
        if chance.random() < 0.3:
            reader = PieceReader(log)
        piece = reader.next(0, *at, to, rows_max, 1 << 20)
        assert piece.rows.num_rows <= rows_max and (piece.batch, piece.through) > at
        found += list(
            zip(piece.rows.column("batch").to_pylist(), piece.rows.column("position").to_pylist(), strict=True)
        )
        at = (piece.batch, piece.through)
    assert found == [row for row in ROWS if row[0] <= to]


def test_a_partition_without_files_is_read_at_once(log: Files) -> None:
    """GIVEN a partition whose files are gone WHEN read THEN there is nothing up to the end, and no first batch."""
    piece = PieceReader(log).next(7, 0, "", 9, 100, 1 << 20)
    assert (piece.rows.num_rows, piece.batch, piece.through) == (0, 9, "")
    assert PieceReader(log).first_batch(7) is None and PieceReader(log).first_batch(0) == 1


def test_few_files_hold_whole_batches_and_little_more() -> None:
    """GIVEN small files and a merged one WHEN some rows are asked for THEN no more batches are looked through than that
    needs, and each of them whole.
    """

    def file(low: int, high: int, rows: int) -> FileRange:
        return FileRange(f"{low}-{high}", 0, 0, low, high, rows, 1)

    small = [file(n, n, 10) for n in range(1, 100)]
    chosen, to = few_files(small, 0, 99, 25, 100)
    assert [f.batch_min for f in chosen] == [1, 2, 3] and to == 3
    chosen, to = few_files([file(1, 1_000, 100_000), *small[50:]], 500, 1_000, 200, 100)
    assert to == 502
    chosen, to = few_files(small, 0, 99, 25_000, 4)
    assert [f.batch_min for f in chosen] == [1, 2, 3, 4] and to == 4, "each file has to be opened"
    split = [file(7, 7, 10), file(7, 7, 10), file(7, 7, 10), file(8, 8, 10)]
    assert few_files(split, 6, 8, 5, 1) == (split[:3], 7)
