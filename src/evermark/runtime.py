"""The port between a loop and its process: time, randomness, wakes, tasks and locks. And the adapter over threads.

The loops of the product (`cluster/holding.py`, `ingest/owner.py`, `ingest/repair/steps.py`, `delivery/run/owner.py`,
`delivery/replay/owner.py`) use nothing else to wait, to measure time or to do two things at once. So the same loop runs
in threads of a driver, in one long task, and in the simulator, where a seed decides which task goes on.

Contract (checked by `evermark.testing.contracts.runtime` over every adapter):

- `wait` returns at once when one of its wakes is set, by any thread and however long ago, and never later than its
  time. It clears nothing.
- A wake may be set by any thread, also by one that the runtime did not start.
- A task begins soon after `spawn`, beside its caller. Its end, also by an error, is seen by `join`.
- A loop (`loop`) is a generator that yields a `Pause` where it waits, and goes on when the pause is over. While it
  waits it needs no thread: a thousand loops that wait for a thousand idle sources are a list.
- Ending a task is up to the task: a loop ends when a wake that it was given is set.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar, cast

T = TypeVar("T")

# A thread that has nothing to do is kept this long: Spark ties a connection and a thread of its JVM to each.
_IDLE_S = 10.0

# Threads that loops share. More are added when one that could go on has waited for so long: the others are in the
# middle of something that takes its time. Many at once are more likely to want a processor than to wait for a server,
# so there are not many: but one that has been in the middle of a step for long is not counted, it hangs.
_WORKERS = 4
_WORKERS_SOON = 32
_SOON_S = 0.05
_HANGS_S = 0.25
_ADDED_AT_ONCE = 4
_WORKERS_MAX = 2_000
_LATE_S = 1.0
# Loops whose beginning is heavy begin a few at a time. One that takes longer than this does not hold up the next.
_BEGIN_AT_ONCE = 4
_FOR_EVER_S = 1e9
# Pauses of a second and more end on multiples of this: many loops that only look now and then go on by one wake.
_TOGETHER_S = 0.02
_TOGETHER_FROM_S = 1.0


class Wake(Protocol):
    """A flag that can be waited for."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...


def any_set(wakes: Iterable[Wake]) -> bool:
    for wake in wakes:  # noqa: SIM110 - every loop asks it at each step: three times as quick as `any`
        if wake.is_set():
            return True
    return False


class Task(Protocol):
    """Work that was begun with `spawn`."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, at most `timeout_s` (None: for ever); whether it has ended."""


@dataclass(frozen=True)
class Pause:
    """A loop waits until one of the wakes is set, at most so long."""

    seconds: float
    wakes: tuple[Wake, ...] = ()


Steps = Generator[Pause, None, T]


class LoopTask(Task, Protocol):
    def joining(self, timeout_s: float | None = None) -> Steps[bool]:
        """As `join`, for another loop: a thread that waits here may be the thread that this loop needs to end."""


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

    def loop(self, name: str, steps: Steps[object], *, heavy: bool = False, urgent: bool = False) -> LoopTask:
        """Begin a loop. With `heavy`, what it does before its first pause may wait for the beginnings of others. With
        `urgent`, it goes before others that can go on: each of its steps is short."""


def run_through(runtime: Runtime, steps: Steps[T]) -> T:
    """Run a loop in the caller's own thread, which does the waiting. An error of the waiting is raised in the loop."""
    failed: BaseException | None = None
    while True:
        try:
            pause = next(steps) if failed is None else steps.throw(failed)
        except StopIteration as end:
            return cast("T", end.value)
        failed = None
        try:
            runtime.wait(pause.seconds, *pause.wakes)
        except BaseException as error:  # noqa: BLE001 - the loop decides, as if it had waited itself
            failed = error


class Log(Protocol):
    """Where a loop writes log lines for people. Loggers of structlog fit."""

    def debug(self, event: str, **about: object) -> object: ...

    def info(self, event: str, **about: object) -> object: ...

    def warning(self, event: str, **about: object) -> object: ...

    def error(self, event: str, **about: object) -> object: ...


class _Waiting(Protocol):
    def set(self) -> None: ...


class _ThreadWake:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._waiting: list[_Waiting] = []

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

    def begin_wait(self, waiting: _Waiting) -> None:
        with self._lock:
            self._waiting.append(waiting)
            if self._set:
                waiting.set()

    def end_wait(self, waiting: _Waiting) -> None:
        with self._lock:
            self._waiting.remove(waiting)


@dataclass(eq=False)
class _ThreadTask:
    name: str
    work: Callable[[], object]
    ended: threading.Event = field(default_factory=threading.Event)

    def join(self, timeout_s: float | None = None) -> bool:
        return self.ended.wait(timeout_s)


def _ours(wakes: Iterable[Wake]) -> list[_ThreadWake]:
    given = list(wakes)
    mine = [wake for wake in given if isinstance(wake, _ThreadWake)]
    assert len(mine) == len(given), "a wake of another runtime is never noticed"  # noqa: S101
    return mine


@dataclass(eq=False)
class _Loop:
    name: str
    steps: Steps[object]
    heavy: bool = False
    urgent: bool = False
    begun_at: float | None = None  # of a heavy one, while it has not come to its first pause
    pause: _LoopPause | None = None  # the last one
    over: _ThreadWake = field(default_factory=_ThreadWake)
    ended: threading.Event = field(default_factory=threading.Event)

    def join(self, timeout_s: float | None = None) -> bool:
        return self.ended.wait(timeout_s)

    def joining(self, timeout_s: float | None = None) -> Steps[bool]:
        if not self.over.is_set():
            yield Pause(_FOR_EVER_S if timeout_s is None else timeout_s, (self.over,))
        return self.over.is_set()


@dataclass(eq=False)
class _LoopPause:
    """Ended once, by a wake or by its time, whichever comes first. A loop that waits for the same wakes again has the
    same one again: of a thousand loops that look at something every few seconds, none tells its wakes each time.
    """

    loops: _Loops
    loop: _Loop
    asked: tuple[Wake, ...]
    wakes: list[_ThreadWake]
    armed: bool = False  # the loop waits, and all wakes know of it
    number: int = 0  # of the time that ends it

    def set(self) -> None:
        self.loops.end(self)

    def forget(self) -> None:
        for wake in self.wakes:
            wake.end_wait(self)


class _Loops:
    """Loops that share threads: each has one from the end of a pause to the beginning of the next. A clock ends pauses
    whose time has come, and adds a thread where loops that can go on have waited for one.

    No wake is touched under the lock: a wake that is set comes here with its own lock held.
    """

    def __init__(self, spawn: Callable[[str, Callable[[], object]], Task]) -> None:
        self._spawn = spawn
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # workers wait for it
        self._tick = threading.Condition(self._lock)  # the clock does
        self._tick_at: float | None = None  # None: there is no clock
        self._ready: deque[tuple[float, _Loop]] = deque()  # since when each can go on
        self._heavy: deque[_Loop] = deque()
        self._due: list[tuple[float, int, _LoopPause]] = []
        self._numbers = itertools.count()
        self._workers = self._free = 0
        self._beginning: set[_Loop] = set()
        self._begun_at = self._grown_at = 0.0
        self._steps: dict[int, float] = {}  # by thread, since when each is in the middle of a step

    def begin(self, name: str, steps: Steps[object], *, heavy: bool, urgent: bool) -> _Loop:
        loop = _Loop(name, steps, heavy, urgent)
        with self._lock:
            if heavy:
                self._heavy.append(loop)
            else:
                self._can_go_on(loop)
            self._have_it_done()
        return loop

    def end(self, pause: _LoopPause) -> None:
        with self._lock:
            self._end(pause)
            self._have_it_done()

    # under the lock

    def _end(self, pause: _LoopPause) -> None:
        if pause.armed:
            pause.armed = False
            self._can_go_on(pause.loop)

    def _can_go_on(self, loop: _Loop) -> None:
        since = (time.monotonic(), loop)
        if loop.urgent:
            self._ready.appendleft(since)
        else:
            self._ready.append(since)

    def _have_it_done(self) -> None:
        can_go_on = len(self._ready) + bool(self._heavy and self._may_begin())
        self._work.notify(can_go_on)
        if can_go_on > self._free:
            if self._workers < _WORKERS:
                self._add_worker()
            self._look_at(time.monotonic() + _SOON_S)
        elif self._heavy:
            self._look_at(time.monotonic() + _LATE_S)

    def _may_begin(self) -> bool:
        now = time.monotonic()
        young = sum(now - (loop.begun_at or 0.0) < _LATE_S for loop in self._beginning)
        return young < _BEGIN_AT_ONCE

    def _add_worker(self) -> None:
        try:
            self._spawn("loops", self._serve)
        except RuntimeError:  # the machine has no thread to spare: the clock tries again
            return
        self._workers += 1

    def _look_at(self, at: float) -> None:
        """The clock looks then, or before."""
        if self._tick_at is None:
            self._tick_at = at
            try:
                self._spawn("loops clock", self._run_clock)
            except RuntimeError:  # as above; who next waits for something tries again
                self._tick_at = None
        elif at < self._tick_at:
            self._tick_at = at
            self._tick.notify()

    def _grow(self, now: float) -> None:
        """Loops that can go on have waited."""
        waited_s = max((now - since for since, _ in self._ready), default=0.0)
        if self._heavy and self._may_begin() and not self._free:
            waited_s = max(waited_s, now - self._begun_at)
        hanging = sum(now - since >= _HANGS_S for since in self._steps.values())
        wanted = min(_WORKERS_SOON, self._workers - hanging + _ADDED_AT_ONCE) + hanging - self._workers
        if wanted <= 0 and waited_s >= _LATE_S and now - self._grown_at >= _LATE_S:
            wanted = 1
        if waited_s >= _SOON_S:
            for _ in range(min(wanted, len(self._ready) + len(self._heavy), _WORKERS_MAX - self._workers)):
                self._grown_at = now
                self._add_worker()

    def _next(self) -> _Loop | None:
        """A loop that can go on, loops that have begun first; None: there has been none for a while."""
        until = time.monotonic() + _IDLE_S
        self._free += 1
        try:
            while not self._ready and not (self._heavy and self._may_begin()):
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return None
                self._work.wait(left_s)
        finally:
            self._free -= 1
        if self._ready:
            return self._ready.popleft()[1]
        loop = self._heavy.popleft()
        loop.begun_at = self._begun_at = time.monotonic()
        self._beginning.add(loop)
        return loop

    # threads

    def _run_clock(self) -> None:
        with self._lock:
            while True:
                now = time.monotonic()
                while self._due and self._due[0][0] <= now:
                    _, number, pause = heapq.heappop(self._due)
                    if number == pause.number:
                        self._end(pause)
                self._have_it_done()
                self._grow(now)
                busy = self._ready or self._heavy
                if not busy and not self._due:
                    self._tick_at = None
                    return
                self._tick_at = min([self._due[0][0]] if self._due else [], default=now + _SOON_S)
                if busy:
                    self._tick_at = min(self._tick_at, now + _SOON_S)
                self._tick.wait(max(0.0, self._tick_at - now))

    def _serve(self) -> None:
        me = threading.get_ident()
        try:
            while True:
                with self._lock:
                    self._steps.pop(me, None)
                    loop = self._next()
                    if loop is None:
                        return
                    self._steps[me] = time.monotonic()
                threading.current_thread().name = loop.name
                self._step(loop)
        finally:
            with self._lock:
                self._steps.pop(me, None)
                self._workers -= 1

    def _step(self, loop: _Loop) -> None:
        """From one pause to the next. An error ends the loop, and this thread."""
        asked: Pause | None = None
        try:
            asked = next(loop.steps, None)
        finally:
            if loop.begun_at is not None:
                with self._lock:
                    loop.begun_at = None
                    self._beginning.discard(loop)
                    self._have_it_done()
            if asked is None:
                if loop.pause is not None:
                    loop.pause.forget()
                loop.ended.set()
                loop.over.set()
        if asked is not None:
            self._begin_pause(loop, asked)

    def _begin_pause(self, loop: _Loop, asked: Pause) -> None:
        pause = loop.pause
        if pause is None or pause.asked != asked.wakes:
            if pause is not None:
                pause.forget()
            pause = loop.pause = _LoopPause(self, loop, asked.wakes, _ours(asked.wakes))
            for wake in pause.wakes:
                wake.begin_wait(pause)
        with self._lock:
            pause.armed = True
            number = pause.number = next(self._numbers)
            if asked.seconds < _FOR_EVER_S:
                due = time.monotonic() + max(0.0, asked.seconds)
                if asked.seconds >= _TOGETHER_FROM_S:
                    due = math.ceil(due / _TOGETHER_S) * _TOGETHER_S
                heapq.heappush(self._due, (due, number, pause))
                self._look_at(due)
        if any_set(pause.wakes):  # one that was set before could end nothing
            with self._lock:
                if pause.number == number:  # the loop may be at its next pause already
                    self._end(pause)
                    self._have_it_done()


class Threads:
    """A `Runtime` of daemon threads, which are used again. An error that ends a task ends its thread, too, and reaches
    `threading.excepthook` under the name of the task.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_ThreadTask]] = []
        self._loops = _Loops(self.spawn)

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
        mine = _ours(wakes)
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

    def loop(self, name: str, steps: Steps[object], *, heavy: bool = False, urgent: bool = False) -> LoopTask:
        return self._loops.begin(name, steps, heavy=heavy, urgent=urgent)

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
