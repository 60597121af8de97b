"""How tests and `make chaos` run the command `evermark`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

COMMAND = (sys.executable, "-m", "evermark.cli.main")


class Process(Protocol):
    """Of `subprocess.Popen` what tests use."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...


class Commands(Protocol):
    """A way to run it."""

    def start(self, words: Sequence[str], env: Mapping[str, str], out: IO[bytes]) -> Process:
        """`evermark WORDS` in a session of its own, as a shell with a terminal gives a group to every command."""

    def run(
        self, words: Sequence[str], env: Mapping[str, str], timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`evermark WORDS` until it ends, and what it said. After `timeout_s` it is killed: `TimeoutExpired`."""


class RealCommands:
    """From nothing, as a person starts it."""

    def start(self, words: Sequence[str], env: Mapping[str, str], out: IO[bytes]) -> Process:
        return subprocess.Popen([*COMMAND, *words], env=dict(env), stdout=out, stderr=out, start_new_session=True)

    def run(
        self, words: Sequence[str], env: Mapping[str, str], timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *words], env=dict(env), capture_output=True, text=True, check=False, timeout=timeout_s
        )


REAL: Commands = RealCommands()
