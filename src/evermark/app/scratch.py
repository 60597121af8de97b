"""Spark's scratch: in memory where there is such a disk, and allowed to vanish at any time."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

import psutil

_MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - nothing that matters is kept there
_LOOK_EVERY_S = 0.5
# Spark's block manager spreads its files over this many folders, which it makes once and never looks for again.
_BLOCK_FOLDERS = 64


class ScratchKeeper:
    """Makes Spark's folders again when another program cleans them away: without them its session never recovers."""

    def __init__(self, scratch: Path) -> None:
        blocks = [p for p in scratch.rglob("blockmgr-*") if p.is_dir()]
        self._folders = [
            scratch,
            *(p for p in scratch.rglob("*") if p.is_dir()),
            *(block / f"{n:02x}" for block in blocks for n in range(_BLOCK_FOLDERS)),
        ]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="scratch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._done.wait(_LOOK_EVERY_S):
            if all(folder.exists() for folder in self._folders[:2]):
                continue
            with suppress(OSError):  # a full disk: looked at again
                for folder in self._folders:
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def scratch_folder(deployment: str) -> Path:
    """Per process, in memory where there is such a disk. Losing it costs nothing."""
    root = scratch_root()
    folder = root / f"evermark-{deployment}-{os.getpid()}"
    for old in root.glob(f"evermark-{deployment}-*"):
        pid = old.name.rpartition("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def scratch_root() -> Path:
    return _MEMORY_DISK if os.access(_MEMORY_DISK, os.W_OK) else Path(gettempdir())
