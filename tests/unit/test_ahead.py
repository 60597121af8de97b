"""Reading ahead keeps items, order and errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from evermark.ahead import ahead


def test_items_come_in_order_and_complete() -> None:
    """GIVEN many items WHEN read ahead THEN the same come out, in order."""
    assert list(ahead(iter(range(1000)))) == list(range(1000))


def test_an_error_is_raised_after_the_items_before_it() -> None:
    """GIVEN an iterator that fails THEN what came before is seen, and then the error: nothing ends silently early."""

    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("torn")

    items = ahead(failing())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="torn"):
        next(items)


def test_closing_early_closes_what_is_read() -> None:
    """GIVEN a reader that stops early THEN the source's own clean-up has run when closing returns."""
    closed: list[bool] = []

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    items = ahead(endless())
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert closed == [True]


def test_a_humble_reader_steps_back_and_nobody_else_does() -> None:
    """GIVEN a reader that is to leave the processor to others THEN its thread has a lower priority, ours has not."""
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def priorities() -> Iterator[int]:
        yield os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert list(ahead(priorities())) == [ours]
    assert list(ahead(priorities(), low_priority=True)) == [max(ours, 10)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == ours
