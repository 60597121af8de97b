"""Which of many sources have a gap to be closed: looked up once for all of them, and their repairers woken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evermark.errors import EvermarkError
from evermark.runtime import Log, Pause, Runtime, Steps, Wake


class RecoveryWatch:
    """`known` says of every source that ever had a recovery whether one is open."""

    def __init__(self, known: Callable[[], Mapping[str, bool]], runtime: Runtime, log: Log, every_s: float) -> None:
        self._known, self._runtime, self._log, self._every_s = known, runtime, log, every_s
        self._watching: dict[str, Wake] = {}
        self._ever: frozenset[str] | None = None  # not known yet
        self.stopped = runtime.wake()

    def watch(self, source: str, wake: Wake) -> None:
        """Have `wake` set, once in a look, while a recovery of the source is open; until `unwatch`."""
        self._watching[source] = wake

    def unwatch(self, source: str) -> None:
        self._watching.pop(source, None)

    def may_have(self, source: str) -> bool:
        """Whether the source may ever have had a recovery."""
        return self._ever is None or source in self._ever

    def steps(self) -> Steps[None]:
        said = ""
        while not self.stopped.is_set():
            try:
                self._look()
                said = ""
            except EvermarkError as error:
                if error.message != said:
                    self._log.warning("recoveries cannot be looked up; it is tried again", error=error)
                said = error.message
            yield Pause(self._every_s, (self.stopped,))

    def _look(self) -> None:
        known = self._known()
        self._ever = frozenset(known)
        for source, is_open in known.items():
            wake = self._watching.get(source)
            if is_open and wake is not None:
                wake.set()
