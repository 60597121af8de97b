"""An instance as a user runs it, `evermark up` in processes of its own: started, measured and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from evermark.embedded import postmaster
from evermark.embedded.address import DATA
from evermark.errors import EvermarkError

_EVERMARK = (sys.executable, "-m", "evermark.cli.main")
_STOP_S = 40.0
_POLL_S = 0.02


class Instance:
    """Its source is installed at once, unless it is; it runs while the block does. Its data is in `folder/data`."""

    def __init__(self, folder: Path, config: str, env: Mapping[str, str], *, installed: bool = False) -> None:
        self._folder = folder
        self._config = folder / "evermark.yaml"
        self._config.write_text(config)
        self._env = {**os.environ, **env}
        self._log = folder / "up.log"
        if not installed:
            command = [*_EVERMARK, "source", "install", "-c", str(self._config)]
            subprocess.run(command, env=self._env, check=True, capture_output=True)

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self.began = time.time()
            self._up = subprocess.Popen(
                [*_EVERMARK, "up", "-c", str(self._config)], env=self._env, stdout=log, stderr=log
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._up.send_signal(signal.SIGTERM)
        late = threading.Timer(_STOP_S, self._up.kill)
        late.start()
        self._up.wait()
        late.cancel()

    def wait_for(self, is_so: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline or self._up.poll() is not None:
                raise self.error(what)
            time.sleep(_POLL_S)

    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text(errors="replace")

    def error(self, what: str) -> EvermarkError:
        return EvermarkError(what, hint=self.said()[-3000:])

    def processes(self) -> list[psutil.Process]:
        """All of the instance, the embedded State among them: it has no parent of ours."""
        found: list[psutil.Process] = []
        state = postmaster.read(self._folder / "data" / "state" / DATA)
        for pid in (self._up.pid, state.pid if state is not None else 0):
            with suppress(psutil.Error):
                root = psutil.Process(pid)
                found += [root, *root.children(recursive=True)]
        return [each for each in found if each.pid]

    def cpu_s(self) -> float:
        """Seconds of processor since each process began, with the seconds of processes that have ended."""
        return sum(self.cpu_s_by_process().values())

    def cpu_s_by_process(self) -> dict[psutil.Process, float]:
        """The time of a process that has ended is its parent's, which has waited for it."""
        found: dict[psutil.Process, float] = {}
        for process in self.processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                found[process] = times.user + times.system + times.children_user + times.children_system
        return found

    def memory(self) -> Memory:
        """Of all processes, now."""
        return Memory.of(self.processes())


@dataclass(frozen=True)
class Memory:
    """Pages that processes share are counted once (PSS), where the system tells; else in each of them (RSS)."""

    mb: float
    shared_once: bool

    @classmethod
    def of(cls, processes: Iterable[psutil.Process]) -> Memory:
        total, shared_once = 0, True
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                try:
                    full = process.memory_full_info()
                    total += full.pss
                except (psutil.AccessDenied, AttributeError):  # a process of another user, or another system than Linux
                    total, shared_once = total + process.memory_info().rss, False
        return cls(total / 2**20, shared_once)
