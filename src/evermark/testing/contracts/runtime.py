"""What every `Runtime` promises to the loops that run in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from evermark.runtime import Pause, Runtime, Steps

# Calls a function as a task of the runtime, and returns when it has ended; what it raised is raised here.
Run = Callable[[Callable[[], object]], None]

LONG_S = 60.0
SHORT_S = 0.01


class RuntimeContract:
    @pytest.fixture
    def runtime(self) -> Runtime:
        raise NotImplementedError("override this fixture")

    @pytest.fixture
    def run(self, runtime: Runtime) -> Run:
        raise NotImplementedError("override this fixture with a way to do something in a task")

    def test_a_wait_without_a_wake_takes_its_time(self, runtime: Runtime, run: Run) -> None:
        """Nothing sets a wake: `wait` says so after the time that was asked for, and not before."""

        def work() -> None:
            began = runtime.monotonic()
            assert not runtime.wait(SHORT_S, runtime.wake())
            assert runtime.monotonic() - began >= SHORT_S

        run(work)

    def test_any_of_several_wakes_ends_a_wait(self, runtime: Runtime, run: Run) -> None:
        """Another task sets the second of three wakes: the wait ends long before its time, and clears none."""

        def work() -> None:
            wakes = [runtime.wake() for _ in range(3)]
            began = runtime.monotonic()
            task = runtime.spawn("sets one", wakes[1].set)
            assert runtime.wait(LONG_S, *wakes)
            assert runtime.monotonic() - began < LONG_S
            assert [wake.is_set() for wake in wakes] == [False, True, False]
            assert task.join(LONG_S)

        run(work)

    def test_a_wake_that_was_set_before_is_not_missed(self, runtime: Runtime, run: Run) -> None:
        """What was set before anybody waits ends the wait at once, until it is cleared."""

        def work() -> None:
            wake = runtime.wake()
            wake.set()
            assert runtime.wait(LONG_S, wake)
            assert runtime.wait(LONG_S, wake)
            wake.clear()
            assert not runtime.wait(SHORT_S, wake)

        run(work)

    def test_one_wake_ends_every_wait_for_it(self, runtime: Runtime, run: Run) -> None:
        """Three tasks wait for the same wake: all of them go on."""

        def work() -> None:
            wake, woken = runtime.wake(), list[bool]()
            tasks = [runtime.spawn(f"waits {n}", lambda: woken.append(runtime.wait(LONG_S, wake))) for n in range(3)]
            wake.set()
            assert all(task.join(LONG_S) for task in tasks)
            assert woken == [True] * 3

        run(work)

    def test_join_says_whether_a_task_has_ended(self, runtime: Runtime, run: Run) -> None:
        """A task that goes on is waited for no longer than was asked; its end is seen, more than once."""

        def work() -> None:
            over = runtime.wake()
            task = runtime.spawn("goes on", lambda: runtime.wait(LONG_S, over))
            assert not task.join(SHORT_S)
            over.set()
            assert task.join()
            assert task.join(0.0)

        run(work)

    def test_tasks_follow_each_other(self, runtime: Runtime, run: Run) -> None:
        """What a task does is done once, however many came before it."""

        def work() -> None:
            done: list[int] = []
            for number in range(20):
                assert runtime.spawn(f"number {number}", partial(done.append, number)).join(LONG_S)
            assert done == list(range(20))

        run(work)

    def test_a_lock_keeps_tasks_apart(self, runtime: Runtime, run: Run) -> None:
        """While one task holds a lock another does not get it, at once or after waiting; then it does."""

        def work() -> None:
            lock, over = runtime.lock(), runtime.wake()
            inside = runtime.wake()

            def hold() -> None:
                with lock:
                    inside.set()
                    runtime.wait(LONG_S, over)

            task = runtime.spawn("holds", hold)
            assert runtime.wait(LONG_S, inside)
            assert not lock.acquire(blocking=False)
            assert not lock.acquire(timeout=SHORT_S)
            over.set()
            assert lock.acquire()
            lock.release()
            assert task.join(LONG_S)

        run(work)

    def test_a_loop_goes_on_after_each_pause_and_its_end_is_seen(self, runtime: Runtime, run: Run) -> None:
        """A pause ends by its time, and by any of its wakes, also by one that was set before; another loop may wait for
        the end.
        """

        def work() -> None:
            seen: list[str] = []
            wakes = [runtime.wake() for _ in range(2)]

            def steps() -> Steps[None]:
                seen.append("begun")
                yield Pause(SHORT_S)
                seen.append("after its time")
                yield Pause(LONG_S, tuple(wakes))
                seen.append("woken")
                yield Pause(LONG_S, tuple(wakes))
                seen.append("woken again")

            def waits() -> Steps[None]:
                assert (yield from first.joining(LONG_S))
                seen.append("seen")

            began = runtime.monotonic()
            first = runtime.loop("loop", steps())
            second = runtime.loop("waits", waits())
            while len(seen) < 2:
                runtime.wait(SHORT_S)
            assert not first.join(0.0)
            runtime.spawn("sets one", wakes[1].set)
            assert first.join(LONG_S) and second.join(LONG_S)
            assert runtime.monotonic() - began < LONG_S
            assert seen == ["begun", "after its time", "woken", "woken again", "seen"]

        run(work)

    def test_time_and_chance(self, runtime: Runtime, run: Run) -> None:
        """The time of day has a zone and goes on with the time that passes; chance lies between 0 and 1."""

        def work() -> None:
            before, began = runtime.now(), runtime.monotonic()
            runtime.wait(SHORT_S)
            assert before.tzinfo is not None and runtime.now() > before
            assert runtime.monotonic() > began
            assert all(0 <= runtime.random() < 1 for _ in range(100))

        run(work)
