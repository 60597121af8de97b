"""Is a server running on this data folder? Read from `postmaster.pid`, then checked against the world.

The file outlives a machine that lost power, and its process number may by then belong to another program. Believing it
would keep State down for ever; deleting it under a running server would let two servers write one data folder. So a
server counts as running when that process works in this very folder, or when a process listens on its socket (which
also finds a server in another container that shares the folder).
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PID_FILE = "postmaster.pid"
_LINES = 8
_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Postmaster:
    """What `postmaster.pid` says. `ready` is the server's own word that it takes connections."""

    pid: int
    port: int
    socket_folder: Path | None
    ready: bool

    @property
    def socket_path(self) -> Path | None:
        return self.socket_folder / socket_name(self.port) if self.socket_folder else None


def socket_name(port: int) -> str:
    return f".s.PGSQL.{port}"


def read(data: Path) -> Postmaster | None:
    """None without a file. A file cut short by a crash gives process 0, which there never is."""
    try:
        lines = (data / PID_FILE).read_text(errors="replace").splitlines()[:_LINES]
    except FileNotFoundError:
        return None
    lines += [""] * (_LINES - len(lines))
    return Postmaster(
        pid=_number(lines[0]),
        port=_number(lines[3]),
        socket_folder=Path(lines[4].strip()) if lines[4].strip() else None,
        ready=lines[7].strip() == "ready",
    )


def _number(line: str) -> int:
    text = line.strip()
    return int(text) if text.isdigit() else 0


def running(data: Path) -> Postmaster | None:
    """The server on `data`, or None: no file, or a file that nothing stands behind."""
    told = read(data)
    return told if told is not None and (works_in(told.pid, data) or listening(told)) else None


def works_in(pid: int, data: Path) -> bool:
    """Whether process `pid` has `data` as its working folder, as every Postgres process has."""
    if pid <= 0:
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == data.resolve()
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        # Not ours to look into. Only a server would be worth worrying about.
        with suppress(psutil.Error):
            return "postgres" in psutil.Process(pid).name()
        return False


def left_over(data: Path) -> list[int]:
    """Processes that still work in `data`: what a killed server leaves behind for a moment."""
    here = str(data.resolve())
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == here and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def listening(server: Postmaster) -> bool:
    """Whether anybody accepts connections on its socket."""
    if server.socket_path is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(server.socket_path))
        except OSError:
            return False
        return True
