"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_POLL_S = 0.01


def until(condition: Callable[[], _T], what: str, *, timeout_s: float = 30.0) -> _T:
    """Ask `condition` until its answer is true, and return that answer. `what` is said when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what} (last answer: {answer!r:.200})")
        time.sleep(_POLL_S)
