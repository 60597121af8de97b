"""Whether a loop goes on: what counts as life, and for how long."""

from __future__ import annotations

import pytest

from evermark.progress import Progress
from evermark.runtime import Pause, Steps


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_loop_is_idle_from_its_last_mark_on() -> None:
    """GIVEN a loop WHEN it has said nothing yet, goes on, may take long, or rests THEN only silence counts as idle."""
    clock = Clock()
    progress = Progress(clock)
    assert progress.idle_for(1e9) == 0.0, "it has not begun"
    progress.alive()
    assert progress.idle_for(130.0) == 30.0
    progress.alive(for_s=20.0)
    assert progress.idle_for(110.0) == 0.0 and progress.idle_for(130.0) == 10.0
    progress.rest()
    assert progress.idle_for(1e9) == 0.0


def test_a_loop_that_pauses_is_alive_and_one_that_hangs_between_pauses_is_not() -> None:
    """GIVEN a watched loop WHEN it pauses for long THEN it is alive until the pause is over; behind it, time counts."""
    clock = Clock()
    progress = Progress(clock)

    def loop() -> Steps[str]:
        yield Pause(500.0)
        yield Pause(0.0)
        return "done"

    steps = progress.watched(loop())
    next(steps)
    assert progress.idle_for(600.0) == 0.0 and progress.idle_for(601.0) == 1.0
    clock.now = 700.0
    next(steps)
    assert progress.idle_for(730.0) == 30.0, "from the end of the pause on"
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert ended.value.value == "done"


def test_a_loop_is_busy_from_the_end_of_a_pause_to_the_next() -> None:
    """GIVEN a watched loop WHEN it works for long between two pauses THEN it is busy for so long, whatever it says in
    between; WHEN it pauses, or has ended, THEN it is not."""
    clock = Clock()
    progress = Progress(clock)
    seen: list[float] = []

    def loop() -> Steps[None]:
        clock.now += 5.0
        progress.alive(3_600.0)
        seen.append(progress.busy_s())
        yield Pause(500.0)
        clock.now += 7.0
        seen.append(progress.busy_s())

    assert progress.busy_s() == 0.0
    steps = progress.watched(loop())
    next(steps)
    clock.now += 100.0
    assert progress.busy_s() == 0.0
    assert list(steps) == [] and seen == [5.0, 7.0]
    assert progress.busy_s() == 0.0


def test_a_watched_loop_is_told_errors_and_its_end_as_if_it_were_not_watched() -> None:
    """GIVEN a watched loop WHEN its waiting fails, or it is closed THEN the loop itself decides."""
    met: list[str] = []

    def loop() -> Steps[None]:
        try:
            yield Pause(1.0)
        except ValueError:
            met.append("error")
        try:
            yield Pause(1.0)
        finally:
            met.append("end")

    steps = Progress().watched(loop())
    next(steps)
    steps.throw(ValueError())
    steps.close()
    assert met == ["error", "end"]
