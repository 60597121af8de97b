"""How an owned source is, beside its reading: its gauges as metrics, warnings before a limit is met, its upkeep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from evermark.observe.health import HealthBoard
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.runtime import Pause, Runtime, Steps, Threads
from evermark.sources.base import Condition, Source, Warned

EVERY_S = 15.0
UPKEEP_EVERY_S = 3600.0
UPKEEP_AGAIN_S = 300.0
UPKEEP_DUE_S = 60.0  # the least time between upkeeps that the source asks for
WARN_AGAIN_S = 600.0


@dataclass
class WarningThrottle:
    """Warns when a condition begins, again every now and then while it lasts, and not in between. Pure."""

    rung_at: dict[str, float] = field(default_factory=dict)

    def heard(self, what: Mapping[str, Warned], now: float) -> tuple[list[Warned], list[str]]:
        """The warnings to log now, and the names of ended warnings."""
        over = [name for name in self.rung_at if name not in what]
        for name in over:
            del self.rung_at[name]
        due = [name for name in what if now - self.rung_at.get(name, float("-inf")) >= WARN_AGAIN_S]
        self.rung_at.update(dict.fromkeys(due, now))
        return [what[name] for name in due], over


@dataclass(eq=False)
class SourceMonitor:
    """A loop per owned source. A source that cannot be asked is not warned of here: its reading says so."""

    source: Source
    name: str
    board: HealthBoard
    metrics: Metrics
    runtime: Runtime = field(default_factory=Threads)
    every_s: float = EVERY_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._bell = WarningThrottle()
        self._shown: set[str] = set()
        self._keep_up_at = float("-inf")
        self._kept_up_at = float("-inf")
        self._stopping = self.runtime.wake()
        self._showing = self.runtime.lock()
        self._log = get_logger(source=self.name, part="watch")
        self._stale_shown = self._copies_shown = True  # not known: the lane before may have said something

    def start(self) -> None:
        self.runtime.loop(f"watch {self.name}", self._steps())

    def stop(self) -> None:
        """Does not wait for a server that answers late: asking changes nothing, and its answer is shown no more."""
        with self._showing:
            self._stopping.set()
            self._put(Condition())  # a source of another instance shows nothing here

    def _steps(self) -> Steps[None]:
        while not self._stopping.is_set():
            self._keep_up()
            self._look()
            yield Pause(self.every_s, (self._stopping,))

    def _look(self) -> None:
        try:
            found = self.source.condition()
        except Exception as error:  # noqa: BLE001 - a look that fails must not end the thread
            self._log.debug("the source could not be asked", error=error)
            self._show(Condition())  # an old value would look like a good one
            return
        self._show(found)
        if found.upkeep_due:
            self._keep_up_at = min(self._keep_up_at, self._kept_up_at + UPKEEP_DUE_S)
        said, over = self._bell.heard(found.warnings, self.clock())
        for each in said:
            self._log.warning(each.said, hint=each.hint)
        for name in over:
            self._log.info("what was warned of is over", about=name)

    def _show(self, found: Condition) -> None:
        with self._showing:
            if not self._stopping.is_set():  # else the next owner may have said something already
                self._put(found)

    def _put(self, found: Condition) -> None:
        for name in self._shown - found.gauges.keys():
            self.metrics.source_gauge.remove(self.name, name)
        for name, value in found.gauges.items():
            self.metrics.source_gauge.labels(self.name, name).set(value)
        self._shown = set(found.gauges)
        stale = {
            p: (stale.count, {each.stream: each.reason for each in stale.first}) for p, stale in found.stale.items()
        }
        if stale or self._stale_shown:  # of a thousand sources few have something to tell
            self.board.stale(self.name, stale)
        self._stale_shown = bool(stale)
        if found.failing_copies or self._copies_shown:
            self.board.copies_wait(self.name, found.failing_copies)
        self._copies_shown = bool(found.failing_copies)

    def _keep_up(self) -> None:
        now = self.clock()
        if now < self._keep_up_at:
            return
        try:
            self.source.upkeep()
            self._keep_up_at, self._kept_up_at = now + UPKEEP_EVERY_S, now
        except Exception as error:  # noqa: BLE001 - likewise
            self._keep_up_at, self._kept_up_at = now + UPKEEP_AGAIN_S, now + UPKEEP_AGAIN_S - UPKEEP_DUE_S
            self._log.warning("upkeep failed", error=error, again_in_s=UPKEEP_AGAIN_S)
