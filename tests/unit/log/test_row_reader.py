"""Rows by their places: whatever the order they are asked for in, and however many files and row groups they lie in."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.event import EVENT
from evermark.log.row_reader import RowReader, code_of

_FILES, _ROWS, _GROUP = 3, 70, 30


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("log")
    return [str(_written(folder / f"{n}.parquet", n)) for n in range(_FILES)]


def _written(path: Path, number: int) -> Path:
    columns: dict[str, list[object]] = {
        "event_id": [f"{number}-{row}" for row in range(_ROWS)],
        "position": [str(row) for row in range(_ROWS)],
        "source": ["shop"] * _ROWS,
        "stream": [f"s{number}" if row % 3 else "s" for row in range(_ROWS)],
        "op": ["insert" if row < _GROUP else "update" for row in range(_ROWS)],
        "partition": [0] * _ROWS,
        "batch": [1] * _ROWS,
        "ingested_at": [datetime(2026, 11, 15, tzinfo=UTC)] * _ROWS,
    }
    arrays = [pa.array(columns.get(field.name, [None] * _ROWS), field.type) for field in EVENT]
    pq.write_table(pa.table(arrays, schema=EVENT), path, row_group_size=_GROUP)
    return path


_ALL = [(file, row) for file in range(_FILES) for row in range(_ROWS)]
_ORDERS = {
    "as they lie": _ALL,
    "across two groups": _ALL[25:35],
    "across two files": _ALL[65:75],
    "backwards": _ALL[::-1],
    "files turned round": sorted(_ALL, key=lambda one: (-one[0], one[1])),
    "every other one": _ALL[::2],
    "shuffled": random.Random(7).sample(_ALL, len(_ALL)),
    "one": _ALL[:1],
}


@pytest.mark.parametrize("order", _ORDERS.values(), ids=_ORDERS.keys())
def test_rows_come_in_the_order_they_were_asked_for(paths: list[str], order: list[tuple[int, int]]) -> None:
    """GIVEN places in some order WHEN picked THEN exactly those rows come, in that order."""
    codes = np.array([code_of(paths[file]) for file, _ in order], np.int64)
    numbers = np.array([row for _, row in order], np.int64)
    found = RowReader(paths).pick(codes, numbers)
    assert found.column("event_id").to_pylist() == [f"{file}-{row}" for file, row in order]
    assert found.column("stream").to_pylist() == [f"s{file}" if row % 3 else "s" for file, row in order]
    assert found.column("op").to_pylist() == ["insert" if row < _GROUP else "update" for _, row in order]
