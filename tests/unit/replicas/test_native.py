"""Which values of a peer's file are stored as their kind says, by the order of SQLite's classes."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from evermark.replicas.native import _STORED
from evermark.replicas.values import Kind


@pytest.mark.parametrize(
    ("kind", "value", "is_good"),
    [
        (Kind.INTEGER, 0, True),
        (Kind.INTEGER, 2**63 - 1, True),
        (Kind.INTEGER, -(2**63), True),
        (Kind.INTEGER, float("inf"), False),
        (Kind.INTEGER, float("-inf"), False),
        (Kind.INTEGER, "7", False),
        (Kind.INTEGER, b"7", False),
        (Kind.REAL, 1.5, True),
        (Kind.REAL, "1.5", False),
        (Kind.BOOLEAN, 1, True),
        (Kind.BOOLEAN, 2, False),
        (Kind.BOOLEAN, "1", False),
        (Kind.TEXT, "", True),
        (Kind.TEXT, 7, False),
        (Kind.TEXT, b"7", False),
        (Kind.BYTES, b"", True),
        (Kind.BYTES, "7", False),
    ],
)
def test_r8_a_value_of_another_kind_is_told_from_one_that_fits(kind: Kind, value: Any, is_good: bool) -> None:
    """GIVEN a value in a column without a type, as a hostile peer may store it WHEN it is checked THEN only what fits
    the column's kind passes. (That a finite real stands among integers a sum shows.)"""
    with sqlite3.connect(":memory:") as db:
        db.execute("create table t (x)")
        db.execute("insert into t values (?)", (value,))
        found = db.execute(f"select count(*) from t where {_STORED[kind].format('x')}").fetchone()
    assert bool(found[0]) is is_good
