"""How many rows of a table are in memory at once while a snapshot is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from evermark.replicas import sql_snapshots
from evermark.replicas.sql_snapshots import fetched

Row = tuple[Any, ...]


def cursor(rows: list[Row]) -> Callable[[int], list[Row]]:
    left = iter(rows)
    return lambda count: [row for _, row in zip(range(count), left, strict=False)]


@pytest.mark.parametrize("rows_max", [1, 3, 200, 300, 5000])
def test_r11_all_rows_come_in_lists_of_so_many_at_most(rows_max: int) -> None:
    """GIVEN small rows WHEN fetched THEN all come, in order, and every list but the last is full."""
    rows: list[Row] = [(number, "x", None) for number in range(1_001)]
    lists = list(fetched(cursor(rows), rows_max))
    assert [row for each in lists for row in each] == rows
    assert all(len(each) == rows_max for each in lists[:-1]) and len(lists[-1]) <= rows_max


def test_r11_large_rows_are_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN rows that are large WHEN fetched THEN a list ends as soon as it is large enough."""
    monkeypatch.setattr(sql_snapshots, "_PIECE_BYTES", 1_000_000)
    rows: list[Row] = [(number, "x" * 10_000) for number in range(1_000)]
    lists = list(fetched(cursor(rows), 5000))
    assert [row for each in lists for row in each] == rows
    assert max(map(len, lists)) == 200
