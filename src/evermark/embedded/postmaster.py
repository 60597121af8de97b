"""Is a server running on this data folder? Read from `postmaster.pid`, then checked against the world.

The file outlives a machine that lost power, and its process number may by then belong to another program. Believing it
would keep State down for ever; deleting it under a running server would let two servers write one data folder. So a
server counts as running when that process works in this very folder, or when a process listens on its socket (which
also finds a server in another container that shares the folder).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from evermark.embedded.hang import Answer, Seen
from evermark.errors import BusyError

PID_FILE = "postmaster.pid"
_LINES = 8
_CONNECT_TIMEOUT_S = 2.0
_POLL_S = 0.02
# Told to quit, a server gives its own processes 5 s before it kills them.
_QUIT_S = 10.0
_PROTOCOL = 3 << 16
_NOT_NOW = b"C57P03\0"
_STARTUP = re.compile(r"postgres: (.*: )?startup\b")


@dataclass(frozen=True)
class Postmaster:
    """What `postmaster.pid` says. `ready` is the server's own word that it takes connections; it stands there also
    while the server starts anew after a crash. `stops`: it was told to."""

    pid: int
    port: int
    socket_folder: Path | None
    ready: bool
    stops: bool = False

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
        stops=lines[7].strip() == "stopping",
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
    try:
        return _is_seen_in(pid, data)
    except psutil.AccessDenied:
        # Not ours to look into. Only a server would be worth worrying about.
        with suppress(psutil.Error):
            return "postgres" in psutil.Process(pid).name()
        return False


def _is_seen_in(pid: int, data: Path) -> bool:
    if pid <= 0:
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == data.resolve()
    except psutil.NoSuchProcess:
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


def look(data: Path) -> Seen | None:
    """The server on `data`, and whether it lets anybody in. None where it is not a process that we can see."""
    told = read(data)
    if told is None or not _is_behind(told, data):
        return None
    answer = _asked(told)
    # The startup process is looked for after the answer: one that began in between is no hang.
    return Seen(told.pid, answer, answer is Answer.NOT_NOW and _recovers(told.pid), told.stops)


def _is_behind(server: Postmaster, data: Path) -> bool:
    """Whether it is the process that the file names. In a container root often may not see where a process of another
    user works: there the server's own socket tells who listens."""
    try:
        return _is_seen_in(server.pid, data)
    except psutil.AccessDenied:
        return server.pid == _listener(server)


def _listener(server: Postmaster) -> int | None:
    """The process that listens on its socket, where the system tells that."""
    if server.socket_path is None or not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(server.socket_path))
            found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    return int(struct.unpack("3i", found)[0])


def _asked(server: Postmaster) -> Answer:
    """What it says to the first message of a connection, before a password is asked for."""
    if server.socket_path is None:
        return Answer.NONE
    body = struct.pack("!i", _PROTOCOL) + b"user\0postgres\0database\0postgres\0\0"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(server.socket_path))
            probe.sendall(struct.pack("!i", len(body) + 4) + body)
            with probe.makefile("rb") as said:
                kind, length = struct.unpack("!ci", said.read(5))
                refusal = said.read(length - 4) if kind == b"E" else b""
        except (OSError, struct.error):
            return Answer.NONE
    return Answer.NOT_NOW if _NOT_NOW in refusal else Answer.IN


def _recovers(pid: int) -> bool:
    """Whether the server has a startup process. Where that cannot be seen, it may have one."""
    try:
        children = psutil.Process(pid).children()
    except psutil.Error:
        return True
    for child in children:
        try:
            if _STARTUP.match(" ".join(child.cmdline())):
                return True
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            return True
    return False


def end(pid: int, data: Path, *, quit_s: float = _QUIT_S) -> None:
    """End the server with its children, without a checkpoint: it recovers when it is started again. By SIGKILL where
    it does not go by itself; its children end when they notice."""
    for how in (signal.SIGQUIT, signal.SIGKILL):
        if not works_in(pid, data):
            return
        with suppress(ProcessLookupError):
            os.kill(pid, how)
        deadline = time.monotonic() + quit_s
        while works_in(pid, data) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    if works_in(pid, data):
        raise BusyError(
            f"the server in {data.parent}, process {pid}, does not end", hint="its disk may hang: see to that first"
        )
