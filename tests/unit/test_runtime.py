"""The runtimes that the loops run in: threads, and the simulator's baton."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from evermark import runtime as module
from evermark.runtime import Pause, Runtime, Steps, Task, Threads, Wake
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


def waiting(runtime: Threads, over: Wake, begun: list[int]) -> Steps[None]:
    begun.append(threading.get_ident())
    while not over.is_set():
        yield Pause(LONG_S, (over,))


def test_a_thousand_loops_that_wait_need_a_handful_of_threads() -> None:
    """GIVEN a thousand loops that wait WHEN one wake is set THEN all have ended, and few threads were ever there."""
    runtime, over, begun = Threads(), Threads().wake(), list[int]()
    before = threading.active_count()
    tasks = [runtime.loop(f"loop {n}", waiting(runtime, over, begun)) for n in range(1_000)]
    until(lambda: len(begun) == 1_000, "all have begun")
    assert threading.active_count() - before <= module._WORKERS_SOON + 1  # and the clock
    until(lambda: runtime._loops._free == runtime._loops._workers, "all wait")
    over.set()
    assert all(task.join(LONG_S) for task in tasks)


def test_a_loop_that_waits_again_for_the_same_wakes_is_ended_by_them_and_its_own_time_alone() -> None:
    """GIVEN a loop whose pause a wake ended WHEN it waits for the same wakes again THEN the time of the first pause
    does not end the second; a wake does, also one set in between; and a loop that ended is known to no wake."""
    runtime = Threads()
    wakes = first, second = runtime.wake(), runtime.wake()
    seen: list[str] = []

    def steps() -> Steps[None]:
        seen.append("waits")
        yield Pause(0.2, wakes)
        first.clear()
        seen.append("waits again")
        yield Pause(LONG_S, wakes)
        assert second.is_set()
        seen.append("has met a wake")
        yield Pause(LONG_S, wakes)  # the wake is set already
        seen.append("ends")

    loop = runtime.loop("twice", steps())
    until(lambda: seen == ["waits"], "it waits")
    first.set()
    until(lambda: seen == ["waits", "waits again"], "the wake ended it")
    assert not loop.join(0.5), "the first pause's time has passed"
    assert seen == ["waits", "waits again"]
    second.set()
    assert loop.join(LONG_S)
    assert seen[2:] == ["has met a wake", "ends"]
    assert not any(wake._waiting for wake in wakes)  # type: ignore[attr-defined]


def test_loops_that_hang_hold_up_no_neighbour() -> None:
    """GIVEN more loops that hang, in a call or in their beginning, than there are threads WHEN another could go on THEN
    it does, soon."""
    runtime, gate, news = Threads(), threading.Event(), Threads().wake()
    seen: list[float] = []

    def hangs() -> Steps[None]:
        gate.wait(LONG_S)
        yield Pause(0.0)

    def neighbour() -> Steps[None]:
        yield Pause(LONG_S, (news,))
        seen.append(time.monotonic())

    well = runtime.loop("well", neighbour())
    hanging = [runtime.loop(f"hangs {n}", hangs(), heavy=n % 8 == 0) for n in range(4 * module._WORKERS_SOON)]
    late = runtime.loop("begins", neighbour(), heavy=True)
    began = time.monotonic()
    news.set()
    assert well.join(LONG_S) and late.join(LONG_S)
    assert not gate.is_set() and not hanging[0].join(0.0)
    assert seen[0] - began < LONG_S / 4
    gate.set()
    assert all(task.join(LONG_S) for task in hanging)


def test_an_urgent_loop_goes_before_those_that_wait_for_a_thread() -> None:
    """GIVEN a thousand loops that can go on WHEN an urgent one can, too THEN it does not wait for all of them."""
    runtime, news, order = Threads(), Threads().wake(), list[str]()

    def loop(name: str) -> Steps[None]:
        yield Pause(LONG_S, (news,))
        runtime.wait(0.002)  # as a server would take
        order.append(name)

    tasks = [runtime.loop("many", loop("many")) for _ in range(1_000)]
    tasks.append(runtime.loop("lease", loop("urgent"), urgent=True))
    until(lambda: runtime._loops._free == runtime._loops._workers and len(runtime._loops._due) == 1_001, "all wait")
    news.set()
    assert all(task.join(LONG_S) for task in tasks)
    assert order.index("urgent") < 500


def test_where_no_thread_can_be_started_loops_go_on_when_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a machine without threads to spare WHEN a loop is begun, and a wake set THEN nothing fails; and WHEN there
    are some again THEN it goes on."""
    runtime, over, begun = Threads(), Threads().wake(), list[int]()
    spawn, spare = runtime.spawn, threading.Event()

    def spawned(name: str, work: Callable[[], object]) -> Task:
        if not spare.is_set():
            raise RuntimeError("can't start new thread")
        return spawn(name, work)

    monkeypatch.setattr(runtime._loops, "_spawn", spawned)
    first = runtime.loop("first", waiting(runtime, over, begun))
    over.set()
    assert not begun
    spare.set()
    second = runtime.loop("second", waiting(runtime, over, begun))
    assert first.join(LONG_S) and second.join(LONG_S)


def test_heavy_beginnings_are_few_at_a_time_and_loops_that_have_begun_go_first() -> None:
    """GIVEN many loops whose beginning is heavy WHEN they begin THEN a few at a time, and one that waits goes on."""
    runtime, lock = Threads(), threading.Lock()
    at_once, most, order = 0, 0, list[str]()

    def heavy() -> Steps[None]:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        runtime.wait(0.005)  # as a server would take
        with lock:
            at_once -= 1
            order.append("heavy")
        yield Pause(0.0)

    def light() -> Steps[None]:
        for _ in range(3):
            yield Pause(0.001)
        order.append("light")

    tasks = [runtime.loop("heavy", heavy(), heavy=True) for _ in range(100)] + [runtime.loop("light", light())]
    assert all(task.join(LONG_S) for task in tasks)
    assert most <= module._BEGIN_AT_ONCE
    assert order.index("light") < 50


def test_an_error_that_ends_a_loop_is_told_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a loop that raises after a pause THEN it has ended, the hook of threads is told, and others go on."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append((args.thread.name, str(args.exc_value))))
    runtime, over = Threads(), Threads().wake()

    def fails() -> Steps[None]:
        yield Pause(0.001)
        raise RuntimeError("unforeseen")

    other = runtime.loop("other", waiting(runtime, over, []))
    assert runtime.loop("source shop", fails()).join(LONG_S)
    until(lambda: told, "the hook is told")
    assert told == [("source shop", "unforeseen")]
    over.set()
    assert other.join(LONG_S)
