"""The embedded state server, started again when it died under us (a full disk or an operator may have ended it), and
ended and started again when it hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from evermark.embedded import postmaster
from evermark.embedded.hang import ASK_EVERY_S, HUNG_AFTER_S, HangClock, Seen
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.error_policy import backoff_s
from evermark.errors import EvermarkError
from evermark.observe.logging import get_logger

_LOOK_EVERY_S = 1.0
_START_TIMEOUT_S = 30.0
_BACKOFF_MAX_S = 10.0


def is_there(data: Path) -> bool:
    return postmaster.running(data) is not None


class StateSupervisor:
    """Keeps one server running until stopped. Threads that need State meanwhile fail, wait and try again."""

    def __init__(
        self,
        server: EmbeddedPostgres,
        *,
        is_there: Callable[[Path], bool] = is_there,
        look: Callable[[Path], Seen | None] = postmaster.look,
        clock: Callable[[], float] = time.monotonic,
        look_every_s: float = _LOOK_EVERY_S,
        ask_every_s: float = ASK_EVERY_S,
        hung_after_s: float = HUNG_AFTER_S,
    ) -> None:
        self._server = server
        self._is_there = is_there
        self._look = look
        self._clock = clock
        self._look_every_s = look_every_s
        self._ask_every_s = ask_every_s
        self._asked_at = clock()
        self._hang = HangClock(hung_after_s, ask_every_s)
        self._owes_start = False
        self._done = threading.Event()
        self._log = get_logger(part="state")
        self._thread = threading.Thread(target=self._keep, name="state", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        attempt = 0
        wait_s = self._look_every_s
        while not self._done.wait(wait_s):
            wait_s = self._look_every_s
            try:
                if not self._was_brought_back():
                    continue
            except (EvermarkError, OSError) as error:
                wait_s = backoff_s(attempt, base_s=self._look_every_s, max_s=_BACKOFF_MAX_S)
                attempt += 1
                self._log.error("the embedded state server does not start", error=error, again_in_s=wait_s)
            else:
                attempt = 0
                self._log.info("the embedded state server is back")

    def _was_brought_back(self) -> bool:
        """False where there was no need."""
        if not self._is_there(self._server.data):
            self._log.error("the embedded state server is gone; it is started again")
        elif (hung := self._hung()) is not None:
            self._log.error(
                "the embedded state server lets nobody in and does not recover; it is ended and started again",
                pid=hung.pid,
            )
            self._server.end_hung(hung.pid)
        elif not self._owes_start:
            return False
        # A start that gave up may have left a server that came later: it is attached to, and said to be back.
        self._owes_start = True
        self._server.start(_START_TIMEOUT_S)
        self._owes_start = False
        return True

    def _hung(self) -> Seen | None:
        now = self._clock()
        if now - self._asked_at < self._ask_every_s:
            return None
        self._asked_at = now
        seen = self._look(self._server.data)
        return seen if self._hang.hung(seen, now) else None
