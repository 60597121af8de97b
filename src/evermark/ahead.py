"""Reading ahead: decoding the next rows while the last are compressed. Both leave Python's lock most of the time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

from evermark.priority import lower_priority

T = TypeVar("T")

_DEPTH = 2


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[T], depth: int = _DEPTH, *, low_priority: bool = False) -> Iterator[T]:
    """The same items in the same order, taken in a thread of their own, at most `depth` ahead.

    Closing the result early closes `items` too, in the thread that used it. `low_priority`: the thread leaves the
    processor to others. It needs a thread of its own, because a thread cannot raise its priority again.
    """
    found: queue.Queue[T | _End] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: T | _End) -> bool:
        while not stopped.is_set():
            try:
                found.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def take() -> None:
        error: BaseException | None = None
        if low_priority:
            lower_priority()
        try:
            for item in items:
                if not put(item):
                    break
            getattr(items, "close", lambda: None)()
        except BaseException as raised:  # noqa: BLE001 - it is raised where the items are used
            error = raised
        finally:
            put(_End(error))  # in every case: the reader waits for it

    thread = threading.Thread(target=take, name="ahead", daemon=True)
    thread.start()
    try:
        while True:
            item = found.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stopped.set()
        thread.join()
