"""The port between a loop and its process: time, randomness, wakes, tasks and locks. And the adapter over threads.

The loops of the product (`cluster/holding.py`, `ingest/owner.py`, `ingest/repair/steps.py`, `delivery/run/owner.py`,
`delivery/replay/owner.py`) use nothing else to wait, to measure time or to do two things at once. So the same loop runs
in threads of a driver, in one long task, and in the simulator, where a seed decides which task goes on.

Contract (checked by `evermark.testing.contracts.runtime` over every adapter):

- `wait` returns at once when one of its wakes is set, by any thread and however long ago, and never later than its
  time. It clears nothing.
- A wake may be set by any thread, also by one that the runtime did not start.
- A task begins soon after `spawn`, beside its caller. Its end, also by an error, is seen by `join`.
- Ending a task is up to the task: a loop ends when a wake that it was given is set.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Protocol

# A thread that has nothing to do is kept this long: Spark ties a connection and a thread of its JVM to each.
_IDLE_S = 10.0


class Wake(Protocol):
    """A flag that can be waited for."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...


def any_set(wakes: Iterable[Wake]) -> bool:
    return any(wake.is_set() for wake in wakes)


class Task(Protocol):
    """Work that was begun with `spawn`."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, at most `timeout_s` (None: for ever); whether it has ended."""


class Lock(AbstractContextManager[bool], Protocol):
    """As `threading.Lock`: not to be acquired twice by one task."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Runtime(Protocol):
    def now(self) -> datetime:
        """The time of day, with a zone. People and servers may set it back."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""

    def random(self) -> float:
        """At least 0, less than 1."""

    def wake(self) -> Wake: ...

    def lock(self) -> Lock: ...

    def wait(self, seconds: float, *wakes: Wake) -> bool:
        """Until a wake is set, at most `seconds`; returns whether a wake is set."""

    def spawn(self, name: str, work: Callable[[], object]) -> Task: ...


class Log(Protocol):
    """Where a loop writes log lines for people. Loggers of structlog fit."""

    def debug(self, event: str, **about: object) -> object: ...

    def info(self, event: str, **about: object) -> object: ...

    def warning(self, event: str, **about: object) -> object: ...

    def error(self, event: str, **about: object) -> object: ...


class _ThreadWake:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._waiting: list[threading.Event] = []

    def set(self) -> None:
        with self._lock:
            self._set = True
            for each in self._waiting:
                each.set()

    def clear(self) -> None:
        with self._lock:
            self._set = False

    def is_set(self) -> bool:
        return self._set

    def begin_wait(self, waiting: threading.Event) -> None:
        with self._lock:
            self._waiting.append(waiting)
            if self._set:
                waiting.set()

    def end_wait(self, waiting: threading.Event) -> None:
        with self._lock:
            self._waiting.remove(waiting)


@dataclass(eq=False)
class _ThreadTask:
    name: str
    work: Callable[[], object]
    ended: threading.Event = field(default_factory=threading.Event)

    def join(self, timeout_s: float | None = None) -> bool:
        return self.ended.wait(timeout_s)


class Threads:
    """A `Runtime` of daemon threads, which are used again. An error that ends a task ends its thread, too, and reaches
    `threading.excepthook` under the name of the task.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_ThreadTask]] = []

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def random(self) -> float:
        return random.random()

    def wake(self) -> Wake:
        return _ThreadWake()

    def lock(self) -> Lock:
        return threading.Lock()

    def wait(self, seconds: float, *wakes: Wake) -> bool:
        mine = [wake for wake in wakes if isinstance(wake, _ThreadWake)]
        assert len(mine) == len(wakes), "a wake of another runtime is never noticed"  # noqa: S101
        any_set = threading.Event()
        for wake in mine:
            wake.begin_wait(any_set)
        try:
            return any_set.wait(max(0.0, seconds))
        finally:
            for wake in mine:
                wake.end_wait(any_set)

    def spawn(self, name: str, work: Callable[[], object]) -> Task:
        task = _ThreadTask(name, work)
        with self._lock:
            tasks = self._idle.pop() if self._idle else None
        if tasks is None:
            tasks = SimpleQueue()
            threading.Thread(target=self._serve, args=(tasks,), name=name, daemon=True).start()
        tasks.put(task)
        return task

    def _serve(self, tasks: SimpleQueue[_ThreadTask]) -> None:
        while (task := self._next(tasks)) is not None:
            threading.current_thread().name = task.name
            try:
                task.work()
            finally:
                task.ended.set()
            task.work = lambda: None  # an idle thread must not keep its objects
            with self._lock:
                self._idle.append(tasks)

    def _next(self, tasks: SimpleQueue[_ThreadTask]) -> _ThreadTask | None:
        try:
            return tasks.get(timeout=_IDLE_S)
        except Empty:
            with self._lock:
                if tasks in self._idle:
                    self._idle.remove(tasks)
                    return None
        return tasks.get()  # `spawn` has just chosen this thread
