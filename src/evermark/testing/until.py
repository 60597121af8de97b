"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_POLL_S = 0.01
_POLL_S_MAX = 0.1  # asking costs processor, of this process and often of the one that is asked
_DEAR_POLL_S_MAX = 2.0
_POLL_GROWTH = 1.2


def until(condition: Callable[[], _T], what: str, *, timeout_s: float = 300.0) -> _T:
    """Ask `condition` until its answer is true, and return that answer. `what` is said when it takes too long.

    A question that takes long is followed by as long a pause: what is waited for needs the processor more.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _POLL_S
    while True:
        asked = time.monotonic()
        answer = condition()
        took_s = time.monotonic() - asked
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what} (last answer: {answer!r:.200})")
        time.sleep(max(pause_s, min(took_s, _DEAR_POLL_S_MAX)))
        pause_s = min(_POLL_S_MAX, pause_s * _POLL_GROWTH)
