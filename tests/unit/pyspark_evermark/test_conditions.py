"""Conditions of a Spark read: what files and rows they leave out before Spark sees them."""

from __future__ import annotations

import operator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.event import EVENT
from evermark.log.read import FileRange
from pyspark_evermark.conditions import OPENING_BYTES, Condition, expression, is_usable, may_hold, packed

T0 = datetime(2026, 11, 1, tzinfo=UTC)
COMPARED = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

numbers = st.integers(0, 5)
times = numbers.map(lambda n: T0 + timedelta(hours=n))
streams = st.sampled_from(["a", "b", "B"])
rows = st.lists(st.tuples(numbers, numbers, st.none() | times, streams), min_size=1, max_size=6)


def value_of(column: str) -> st.SearchStrategy[Any]:
    return {"batch": numbers, "partition": numbers, "event_time": times, "stream": streams}[column]


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    column = draw(st.sampled_from(["batch", "partition", "event_time", "stream"]))
    comparison = draw(st.sampled_from(["=", "in"] if column == "stream" else [*COMPARED, "in"]))
    value = draw(value_of(column))
    return Condition(column, comparison, (value, draw(value_of(column))) if comparison == "in" else value)


def is_wanted(row: dict[str, Any], condition: Condition) -> bool:
    """As SQL has it: nothing is known of a null."""
    value = row[condition.column]
    if value is None:
        return False
    if condition.comparison == "in":
        return value in condition.value
    return bool(COMPARED[condition.comparison](value, condition.value))


def file_of(found: list[dict[str, Any]]) -> FileRange:
    at = [row["event_time"] for row in found if row["event_time"] is not None]
    batches, partitions = [row["batch"] for row in found], [row["partition"] for row in found]
    return FileRange(
        "f", min(partitions), max(partitions), min(batches), max(batches), len(found), 1,
        event_time_min=min(at, default=None), event_time_max=max(at, default=None),
    )  # fmt: skip


@given(rows, st.lists(conditions(), max_size=3))
def test_no_wanted_row_is_left_out(given_rows: list[tuple[Any, ...]], wanted: list[Condition]) -> None:
    """GIVEN any rows and conditions THEN exactly the rows that SQL wants are kept, and their file is not left out."""
    found = [dict(zip(("batch", "partition", "event_time", "stream"), row, strict=True)) for row in given_rows]
    kept = [row for row in found if all(is_wanted(row, one) for one in wanted)]
    table = pa.Table.from_pylist(found, pa.schema([EVENT.field(name) for name in found[0]]))
    condition = expression(wanted)
    assert (table if condition is None else table.filter(condition)).to_pylist() == kept
    assert may_hold(file_of(found), wanted) or not kept


@pytest.mark.parametrize(
    "wanted",
    [
        Condition("batch", "=", 7),
        Condition("batch", "in", (1, 7)),
        Condition("batch", ">", 3),
        Condition("batch", "<", 2),
    ],
    ids=str,
)
def test_a_file_that_cannot_hold_a_wanted_row_is_left_out(wanted: Condition) -> None:
    """GIVEN a file of batches 2 and 3 WHEN others are wanted THEN it is not opened."""
    assert not may_hold(FileRange("f", 0, 0, 2, 3, 10, 1), [wanted])


def test_what_arrow_and_spark_may_see_differently_is_left_to_spark() -> None:
    """GIVEN text in an order, a column of lists, a value of another type or an unknown column THEN it is not used."""
    assert is_usable(Condition("stream", "=", "a")) and is_usable(Condition("event_time", "<", T0))
    for condition in (
        Condition("stream", "<", "a"),
        Condition("flags", "=", ["a"]),
        Condition("batch", "=", True),
        Condition("batch", "=", "7"),
        Condition("stream", "in", ()),
        Condition("stream.name", "=", "a"),
    ):
        assert not is_usable(condition)


def test_small_files_share_a_task_and_large_ones_do_not() -> None:
    """GIVEN files in order THEN a task reads as many as its bytes allow, in order, each file once."""
    files = [FileRange(str(n), 0, 0, n, n, 1, size) for n, size in enumerate([1, 1, 1, 10**9, 1, 1])]
    found = [[file.path for file in some] for some in packed(files, 2 * OPENING_BYTES + 10)]
    assert found == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert list(packed([])) == []
