"""The embedded state server, started again when it died under us: a full disk or an operator may have ended it."""

from __future__ import annotations

import threading

from evermark.embedded import postmaster
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.error_policy import backoff_s
from evermark.errors import EvermarkError
from evermark.observe.logging import get_logger

_LOOK_EVERY_S = 1.0
_START_TIMEOUT_S = 30.0
_BACKOFF_MAX_S = 10.0


class StateSupervisor:
    """Keeps one server running until stopped. Threads that need State meanwhile fail, wait and try again."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        self._done = threading.Event()
        self._log = get_logger(part="state")
        self._thread = threading.Thread(target=self._keep, name="state", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        attempt = 0
        wait_s = _LOOK_EVERY_S
        while not self._done.wait(wait_s):
            wait_s = _LOOK_EVERY_S
            if postmaster.running(self._server.data) is not None:
                continue
            self._log.error("the embedded state server is gone; it is started again")
            try:
                self._server.start(_START_TIMEOUT_S)
            except (EvermarkError, OSError) as error:
                wait_s = backoff_s(attempt, base_s=_LOOK_EVERY_S, max_s=_BACKOFF_MAX_S)
                attempt += 1
                self._log.error("the embedded state server does not start", error=error, again_in_s=wait_s)
            else:
                attempt = 0
                self._log.info("the embedded state server is back")
