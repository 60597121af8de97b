"""File locks between processes. The kernel lets go of them when a process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evermark.errors import BusyError

_POLL_S = 0.02


class FileLock:
    """One holder's handle on a lock file. Two handles exclude each other even within one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        return self._fd is not None

    def share(self, timeout_s: float) -> None:
        self._take(fcntl.LOCK_SH, timeout_s)

    def try_alone(self) -> bool:
        """Become the only holder, or learn that there are others. A shared lock is given up either way."""
        fd = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        self._take(fcntl.LOCK_EX, timeout_s)
        try:
            yield
        finally:
            self.release()

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fd

    def _take(self, how: int, timeout_s: float) -> None:
        fd = self._open()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self.release()
                    raise BusyError(
                        f"{self.path} is locked by another process",
                        hint="wait for the process that starts or stops this server, or end it",
                    ) from None
                time.sleep(_POLL_S)
            else:
                return
