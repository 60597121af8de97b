"""Which fresh batches a hand-over may deliver as one."""

from __future__ import annotations

from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.run.live import together
from evermark.delivery.work import Span

PLACE = SourcePartition("shop", 0)


def fresh(*batches: int) -> list[Span]:
    return [Span(PLACE, Cursor(batch - 1), batch, (f"b{batch}",), 10, exact=True) for batch in batches]


def test_batches_left_behind_are_delivered_with_the_fresh_one() -> None:
    """GIVEN a group at 4 WHEN 5, 6 and 7 are known THEN all three are one span, in order."""
    assert together(fresh(3, 4, 5, 6, 7), Cursor(4)) == Span(PLACE, Cursor(4), 7, ("b5", "b6", "b7"), 30, exact=True)


def test_a_batch_that_is_not_known_is_never_passed_over() -> None:
    """GIVEN a gap before or between the known batches THEN nothing is handed over: the follower reads the log."""
    assert together(fresh(6, 7), Cursor(4)) is None
    assert together(fresh(5, 7), Cursor(4)) is None


def test_a_group_that_is_level_or_unknown_gets_nothing() -> None:
    """GIVEN nothing after the cursor, or no cursor THEN there is no span."""
    assert together(fresh(5), Cursor(5)) is None
    assert together(fresh(5), None) is None
