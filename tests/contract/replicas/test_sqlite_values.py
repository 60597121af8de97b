"""What SQLite keeps in columns whose type it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.replicas.replica_nodes import sqlite_node

NUMBERS = [0.1, 0.1 + 0.2, 2460000.1234567891, 1 / 3, 1.0, 1e300 / 7]


@pytest.mark.parametrize("by", ["events", "snapshot"])
@pytest.mark.parametrize("kind", ["datetime", "numeric", "real"])
def test_r11_a_real_is_the_same_number_at_every_node(tmp_path: Path, kind: str, by: str) -> None:
    """GIVEN reals in a column of times, of numbers or of reals WHEN they come as events or by a snapshot THEN they are
    the same numbers to the last bit."""
    a, b = (sqlite_node(name, tmp_path / f"{name}.db") for name in "ab")
    for node in (a, b):
        node.sql(f"create table times (id bigint primary key, at {kind})")
    insert = "insert into times values (?, ?)"
    if by == "snapshot":
        for key, number in enumerate(NUMBERS):
            a.sql(insert, key, number)
    for node in (a, b):
        node.install("times")
    if by == "events":
        b.meet(a)
        for key, number in enumerate(NUMBERS):
            a.sql(insert, key, number)
    b.meet(a)
    assert b.sql("select at from times order by id") == a.sql("select at from times order by id")
    assert [number for (number,) in a.sql("select at from times order by id")] == NUMBERS
    a.close()
    b.close()
