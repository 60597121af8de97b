"""Whether rows need sorting: a wrong yes costs time, a wrong no costs the order of events."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from evermark.log.find import in_order

ROWS = st.lists(st.tuples(st.integers(0, 3), st.text("ab", max_size=2)), max_size=6, unique=True)


@given(ROWS, st.booleans())
def test_rows_are_in_order_exactly_when_sorting_them_changes_nothing(rows: list[tuple[int, str]], done: bool) -> None:
    """GIVEN rows with ties in the first column WHEN asked whether they are in order THEN the second one decides."""
    rows = sorted(rows) if done else rows
    one = pa.chunked_array([[time for time, _ in rows]], pa.int64())
    other = pa.chunked_array([[name for _, name in rows]], pa.string())
    assert in_order(one, other) == (rows == sorted(rows))
