"""How far behind a reader is, by what the log's files say of themselves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.status import Lag, lag_of
from evermark.log.read import FileRange

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
SHOP = SourcePartition("shop", 0)


def batch(first: int, last: int | None = None, rows: int = 10, partition: int = 0) -> FileRange:
    """A file of some batches, one a minute."""
    last = last or first
    began, ended = NOON + timedelta(minutes=first), NOON + timedelta(minutes=last)
    return FileRange("", partition, partition, first, last, rows, 0, ended, None, began, ended)


def test_whoever_is_level_has_no_lag() -> None:
    """GIVEN a cursor at the head WHEN looked at THEN nothing is before it."""
    assert lag_of({SHOP: Cursor(3)}, {SHOP: 3}, {"shop": [batch(1), batch(2), batch(3)]}.__getitem__) == Lag(0, None)


def test_events_after_the_cursor_are_counted_and_the_first_of_them_tells_the_age() -> None:
    """GIVEN four batches WHEN one was passed and one is beyond the head THEN the two in between are the lag."""
    files = {"shop": [batch(n, rows=n) for n in (1, 2, 3, 4)]}
    assert lag_of({SHOP: Cursor(1)}, {SHOP: 3}, files.__getitem__) == Lag(2 + 3, NOON + timedelta(minutes=2))


def test_a_place_without_a_cursor_is_all_before_the_reader() -> None:
    """GIVEN a partition a reader has not seen WHEN looked at THEN all of it counts, and no other partition's."""
    files = {"shop": [batch(1), batch(1, partition=1), batch(2, partition=1)]}
    assert lag_of({SHOP: Cursor(1)}, {SHOP: 1, SourcePartition("shop", 1): 2}, files.__getitem__) == Lag(
        20, NOON + timedelta(minutes=1)
    )


def test_a_merged_file_is_taken_as_evenly_spread() -> None:
    """GIVEN ten batches in one file WHEN half are passed THEN half of its events are left, and they are the younger."""
    lag = lag_of({SHOP: Cursor(5)}, {SHOP: 10}, {"shop": [batch(1, 10, rows=100)]}.__getitem__)
    assert lag.events == 50
    assert lag.oldest is not None
    assert NOON + timedelta(minutes=4) < lag.oldest < NOON + timedelta(minutes=7)


@given(st.integers(0, 20), st.integers(0, 20), st.lists(st.integers(1, 100), min_size=20, max_size=20))
def test_events_between_cursor_and_head_are_exact_while_nothing_is_merged(
    after: int, head: int, rows: list[int]
) -> None:
    """GIVEN batches in files of their own WHEN looked at from anywhere THEN the count is exact."""
    files = {"shop": [batch(n, rows=count) for n, count in enumerate(rows, start=1)]}
    assert lag_of({SHOP: Cursor(after)}, {SHOP: head}, files.__getitem__).events == sum(rows[after:head])
