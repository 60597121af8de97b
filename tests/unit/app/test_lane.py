"""A lane that is being stopped: which orders of the driver it still heeds."""

from __future__ import annotations

import queue
from typing import Any

from evermark.app.lane import BEGIN, HURRY, Order, _Lane


class Slow:
    """A part that ends at its third look."""

    looks = 0

    def join(self, _timeout_s: float) -> bool:
        self.looks += 1
        return self.looks >= 3


def stopping(*orders: Order) -> _Lane:
    lane: Any = object.__new__(_Lane)
    lane._orders, lane._hurry, lane._stop_s = queue.SimpleQueue(), False, 20.0
    for order in orders:
        lane._orders.put(order)
    return lane  # type: ignore[no-any-return]


def test_a_part_that_comes_too_late_does_not_hurry_a_lane() -> None:
    """GIVEN a lane that stops WHEN it is told to begin with another part THEN it still waits for those it has."""
    part: Any = Slow()
    assert stopping((BEGIN, "source shop"), (BEGIN, "delivery"))._joined(part)
    assert part.looks == 3


def test_a_lane_that_is_told_to_hurry_waits_for_nothing_more() -> None:
    """And for no later part either."""
    lane, part = stopping((HURRY,)), Slow()
    assert not lane._joined(part)  # type: ignore[arg-type]
    assert not lane._joined(Slow())  # type: ignore[arg-type]
    assert part.looks == 1
