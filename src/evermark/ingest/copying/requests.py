"""Copies that persons ask for, heard of at once: one who listens for all sources of a process.

It is no more than an aid: what is asked for while State cannot be heard is found by the copiers, which look by
themselves every second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from evermark.runtime import Log, Runtime, Wake
from evermark.sources.copies import CopyStore

_HEAR_S = 1.0  # so often it is asked whether all is over


class CopyRequests:
    again_s = 5.0  # after State could not be heard

    def __init__(self, copies: CopyStore, runtime: Runtime, log: Log) -> None:
        self._copies, self._runtime, self._log = copies, runtime, log
        self._wakes: dict[str, Wake] = {}
        self._lock = threading.Lock()
        self._listens = False
        self.stopped = runtime.wake()

    def watch(self, source: str, wake: Wake) -> None:
        """Have `wake` set when a copy of the source is asked for. Listening begins with the first source."""
        with self._lock:
            self._wakes[source] = wake
            begins, self._listens = not self._listens, True
        if begins:
            self._runtime.spawn("copy requests", self._listen)

    def _listen(self) -> None:
        while not self.stopped.is_set():
            try:
                with self._copies.requests() as heard:
                    self._wake(list(self._wakes))  # what was asked for before
                    while not self.stopped.is_set():
                        self._wake(heard(_HEAR_S))
            except Exception as error:  # noqa: BLE001 - an aid must not end the lane with its thread
                self._log.debug("requests for copies are not heard; copiers look by themselves", error=error)
            self._runtime.wait(self.again_s, self.stopped)

    def _wake(self, sources: Iterable[str]) -> None:
        for source in sources:
            if (wake := self._wakes.get(source)) is not None:
                wake.set()
