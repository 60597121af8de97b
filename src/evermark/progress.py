"""Whether a loop goes on. The lease of a loop is renewed only while it does (`cluster/holding.py`): a process whose
threads live may still have a loop that hangs, and nobody else could do its work.

A loop says `alive` at each step. A call that may take its time, because a server or Spark takes it, is said before it
begins, with how long it may take; a loop that has nothing to do says so, too (`rest`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from evermark.runtime import Steps

T = TypeVar("T")

# What nobody can tell from a hang: Postgres decodes WAL for as long as there is WAL, a job of Spark waits for cores.
PATIENT_S = 3600.0


class Progress:
    """Of one loop. Rests until the loop first says that it is alive."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._alive_until = math.inf
        self._busy_since: float | None = None  # None: it pauses, or is not watched

    def alive(self, for_s: float = 0.0) -> None:
        """The loop goes on; its next step may take so long, and the usual bound on top of it."""
        self._alive_until = self._clock() + for_s

    def rest(self) -> None:
        """The loop has nothing to do, or another one is watched in its place."""
        self._alive_until = math.inf

    @property
    def rests(self) -> bool:
        return self._alive_until == math.inf

    def idle_for(self, now: float) -> float:
        """For how many seconds the loop has not said that it is alive, beyond what its last step may take."""
        return max(0.0, now - self._alive_until)

    def busy_s(self) -> float:
        """For how long a watched loop has gone on since its last pause; 0 while it pauses. Any thread may ask."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def watched(self, steps: Steps[T]) -> Steps[T]:
        """The same loop: alive while it pauses, and at the end of each pause."""
        self._goes_on()
        try:
            pause = next(steps)
            while True:
                self._busy_since = None
                self.alive(pause.seconds)
                try:
                    yield pause
                except BaseException as error:  # noqa: BLE001 - the loop decides
                    self._goes_on()
                    pause = steps.throw(error)
                else:
                    self._goes_on()
                    pause = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            self._busy_since = None
            self.alive()

    def _goes_on(self) -> None:
        self._busy_since = self._clock()
        self.alive()
