"""The runtimes that the loops run in: threads, and the simulator's baton."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from evermark import runtime as module
from evermark.runtime import Runtime, Threads
from evermark.testing.contracts.runtime import LONG_S, Run, RuntimeContract
from evermark.testing.until import until
from simulator.baton import Baton, BatonRuntime, Process


class TestThreads(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> Runtime:
        return Threads()

    @pytest.fixture
    def run(self, runtime: Runtime) -> Run:
        return lambda work: (work(), None)[1]


class TestBaton(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> Runtime:
        return BatonRuntime(Baton(random.Random(1), 0.5, 0.01), Process("p"))

    @pytest.fixture
    def run(self, runtime: BatonRuntime) -> Run:
        def run(work: Callable[[], object]) -> None:
            task = runtime.spawn("test", work)
            runtime.baton.run(lambda: task.task.done)
            runtime.baton.close()

        return run


def test_tasks_that_follow_each_other_share_a_thread() -> None:
    """GIVEN a task that has ended WHEN the next one begins THEN no thread is made for it, and it has its own name."""
    runtime, seen = Threads(), list[tuple[int, str]]()

    def work() -> None:
        seen.append((threading.get_ident(), threading.current_thread().name))

    for name in ("first", "second"):
        assert runtime.spawn(name, work).join(LONG_S)
        until(lambda: runtime._idle, "its thread is idle")
    (first, _), (second, _) = seen
    assert first == second
    assert [name for _, name in seen] == ["first", "second"]


def test_an_idle_thread_ends_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a thread with nothing to do WHEN its time is over THEN it ends, and the next task is done all the same."""
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    runtime = Threads()
    assert runtime.spawn("first", lambda: None).join(LONG_S)
    until(lambda: not [t for t in threading.enumerate() if t.name == "first"], "the thread has ended")
    assert runtime.spawn("second", lambda: None).join(LONG_S)


def test_an_error_that_ends_a_task_is_told_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a task that raises THEN it has ended, its thread does no other work, and the hook of threads is told."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append((args.thread.name, str(args.exc_value))))
    runtime = Threads()

    def fail() -> None:
        raise RuntimeError("unforeseen")

    assert runtime.spawn("deliver", fail).join(LONG_S)
    until(lambda: told, "the hook is told")
    assert told == [("deliver", "unforeseen")]
    assert not runtime._idle
