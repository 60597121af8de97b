"""Threads of which exactly one runs at a time: the one that has the baton.

Real, synchronous code can be suspended in the middle of a call this way, and the seed alone decides who goes on. Time
is simulated too: it moves a little at each step, and jumps when everybody sleeps.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from evermark.runtime import Steps, Wake, run_through


class Ended(BaseException):
    """Unwinds a thread whose instance died. Not an `Exception`: no code under test may catch it."""


@dataclass(eq=False)
class Process:
    """What dies, stops and wakes up as one: an instance, or the world around it."""

    name: str
    dead: bool = False
    paused_until: float = 0.0
    cut_off_until: float = 0.0  # from State


class _Thread:
    """A thread that is used again and again: making one costs more than most tasks take."""

    _idle: list[_Thread] = []  # noqa: RUF012 - shared on purpose, and only touched by whoever has the baton

    def __init__(self) -> None:
        self.may_run = threading.Lock()
        self.may_run.acquire()
        self.work: Callable[[], None] = lambda: None
        threading.Thread(target=self._loop, name="simulated", daemon=True).start()

    @classmethod
    def take(cls) -> _Thread:
        return cls._idle.pop() if cls._idle else cls()

    def give_back(self) -> None:
        self._idle.append(self)

    def _loop(self) -> None:
        while True:
            self.may_run.acquire()
            self.work()


_NEVER = float("inf")


def _never() -> bool:
    return False


class Task:
    """One simulated thread."""

    def __init__(self, name: str, process: Process, work: Callable[[], object], number: int) -> None:
        self.name = name
        self.process = process
        self.work = work
        self.number = number
        self.wake_at = 0.0
        self.is_woken: Callable[[], bool] = _never  # asked while it waits: may it go on before `wake_at`?
        self.done = False
        self.idle = (-1, 1.0)  # in the calm: how much had happened when it waited last, and how long it waits now
        self.thread: _Thread | None = None


class Baton:
    """The scheduler. Whoever yields picks the next by the seed and hands over; there is no thread in between."""

    def __init__(self, rng: random.Random, switch_chance: float, tick_s: float) -> None:
        self.rng = rng
        self.now = 0.0
        self.steps = 0
        self.spawned = 0
        self.failure: BaseException | None = None
        self._switch_chance = switch_chance
        self._tick_s = tick_s
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._main = threading.Lock()
        self._main.acquire()
        self._stop: Callable[[], bool] = lambda: False
        self.closing = False

    @property
    def current(self) -> Task:
        assert self._current is not None, "only a simulated thread may wait"
        return self._current

    @property
    def current_name(self) -> str:
        return self._current.name if self._current else "main"

    def spawn(self, name: str, process: Process, work: Callable[[], object]) -> Task:
        self.spawned += 1
        task = Task(name, process, work, self.spawned)
        self._tasks.append(task)
        return task

    def run(self, stop: Callable[[], bool]) -> None:
        """Let the tasks run until `stop` says so or one of them fails; that failure is raised here."""
        self._stop = stop
        self._hand_over(self._choose())
        self._main.acquire()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Unwind every thread, so that the next seed finds them idle."""
        self.closing = True
        self._tasks = [t for t in self._tasks if t.thread is not None]
        if self._tasks:
            self._hand_over(self._choose())
            self._main.acquire()

    def step(self) -> None:
        """One effect is about to happen: time passes, and somebody else may go first."""
        self.steps += 1
        self.now += self.rng.random() * self._tick_s
        if self.rng.random() < self._switch_chance:
            self.switch()

    def sleep(self, seconds: float) -> None:
        self.wait(seconds, _never)

    def wait(self, seconds: float, is_woken: Callable[[], bool]) -> None:
        """The current thread rests until it is woken, and not longer than this; its instance goes on."""
        me = self._current
        assert me is not None
        me.wake_at, me.is_woken = self.now + seconds, is_woken
        self.switch()
        me.wake_at, me.is_woken = 0.0, _never

    def switch(self) -> None:
        me = self._current
        assert me is not None and me.thread is not None
        chosen = self._choose()
        if chosen is not me:
            self._hand_over(chosen)
            me.thread.may_run.acquire()
        if me.process.dead or self.closing:
            raise Ended

    def _hand_over(self, task: Task | None) -> None:
        self._current = task
        if task is None:
            self._main.release()
            return
        if task.thread is None:
            task.thread = _Thread.take()
            task.thread.work = lambda: self._perform(task)
        task.thread.may_run.release()

    def _perform(self, task: Task) -> None:
        try:
            if not (task.process.dead or self.closing):
                task.work()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the run ends with it
            self.failure = self.failure or error
        task.done = True
        self._tasks.remove(task)
        assert task.thread is not None
        task.thread.give_back()
        self._hand_over(self._choose())

    def _choose(self) -> Task | None:
        """The next task; None is the main thread."""
        if self.closing:
            return self._tasks[0] if self._tasks else None
        if self.failure is not None or self._stop():
            return None
        for task in self._tasks:
            if task.process.dead:
                return task
        ready = self._ready()
        while not ready:
            next_at = min((_ready_at(task) for task in self._tasks), default=_NEVER)
            if next_at == _NEVER:
                self.failure = AssertionError(f"every thread waits for another one: {[t.name for t in self._tasks]}")
                return None
            self.now = next_at
            if self._stop():
                return None
            ready = self._ready()
        return ready[int(self.rng.random() * len(ready))]

    def _ready(self) -> list[Task]:
        now = self.now
        return [t for t in self._tasks if t.process.paused_until <= now and (t.wake_at <= now or t.is_woken())]


def _ready_at(task: Task) -> float:
    return max(0.0 if task.is_woken() else task.wake_at, task.process.paused_until)


class SimLock:
    """Stands in for `threading.Lock`: waiting for it hands the baton on."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self.held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        until = self._baton.now + timeout if timeout >= 0 else _NEVER
        while self.held:
            if not blocking or self._baton.now >= until:
                return False
            self._baton.wait(until - self._baton.now, lambda: not self.held)
        self.held = True
        return True

    def release(self) -> None:
        self.held = False

    def locked(self) -> bool:
        return self.held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimWake:
    """A wake of the runtime: a thread that waits for it may go on."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set


@dataclass(frozen=True)
class SimTask:
    baton: Baton
    task: Task

    def join(self, timeout_s: float | None = None) -> bool:
        if not self.task.done and timeout_s != 0.0:
            self.baton.wait(_NEVER if timeout_s is None else timeout_s, lambda: self.task.done)
        return self.task.done

    def joining(self, timeout_s: float | None = None) -> Steps[bool]:
        yield from ()
        return self.join(timeout_s)


@dataclass
class BatonRuntime:
    """The `Runtime` of one process. `stretched` may make a wait longer than was asked for, never shorter."""

    baton: Baton
    process: Process
    stretched: Callable[[Task, float], float] = lambda _task, seconds: seconds

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.baton.now)

    def monotonic(self) -> float:
        return self.baton.now

    def random(self) -> float:
        return self.baton.rng.random()

    def wake(self) -> SimWake:
        return SimWake()

    def lock(self) -> SimLock:
        return SimLock(self.baton)

    def wait(self, seconds: float, *wakes: Wake) -> bool:
        def any_set() -> bool:
            return any(wake.is_set() for wake in wakes)

        self.baton.wait(self.stretched(self.baton.current, max(0.0, seconds)), any_set)
        return any_set()

    def spawn(self, name: str, work: Callable[[], object]) -> SimTask:
        return SimTask(self.baton, self.baton.spawn(f"{self.process.name} {name}", self.process, work))

    def loop(self, name: str, steps: Steps[object], *, heavy: bool = False, urgent: bool = False) -> SimTask:
        """In a simulated thread of its own: who runs when is chosen by the seed all the same."""
        return self.spawn(name, lambda: run_through(self, steps))
