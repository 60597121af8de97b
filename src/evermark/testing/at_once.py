"""A runtime whose clock is set by hand, and whose tasks are over when `spawn` returns: a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from evermark.runtime import Task, Threads


class AtOnce(Threads):
    """An error of a task, also one that ends the process, is raised where the task is begun."""

    def __init__(self, now: Callable[[], datetime], random: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        self.now, self.random = now, random  # type: ignore[method-assign]

    def spawn(self, name: str, work: Callable[[], object]) -> Task:
        work()
        return super().spawn(name, lambda: None)
