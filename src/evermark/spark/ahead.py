"""Reading ahead: decoding the next rows while the last are compressed. Both leave Python's lock most of the time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

from evermark.priority import step_back

T = TypeVar("T")

_DEPTH = 2


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[T], depth: int = _DEPTH, *, humble: bool = False) -> Iterator[T]:
    """The same items in the same order, taken in a thread of their own, at most `depth` ahead.

    Closing the result early closes `items` too, in the thread that used it. `humble`: the thread leaves the processor
    to whoever else wants it. A thread of its own, because who has stepped back may not step forward again.
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
        if humble:
            step_back()
        try:
            for item in items:
                if not put(item):
                    break
            getattr(items, "close", lambda: None)()
        except BaseException as raised:  # noqa: BLE001 - it is raised where the items are used
            error = raised
        finally:
            put(_End(error))  # whatever happened: somebody waits for it

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
