"""The command `evermark` as a fork of one process that has loaded it: what a start costs most is imports.

`python -m tests.forked FD` is that process. It imports, starts no thread of its own, and forks whatever it is asked for
over its socket: words, environment, folder, and the three files of a process. From there on the fork does what the
console script does, and ends as any program does: what is registered for the end runs, and threads are waited for. It
is as much a process as any other, with a session of its own if asked for. What only a start from nothing shows (the
console script, what is imported when, other sources by PYTHONPATH) needs the real command.

Spark of a forked `up` starts a Python daemon, whose imports cost as much as those of `up`. That daemon is a fork, too:
of a child of `up`, so that it ends, sleeps and is found with what belongs to its instance.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from evermark.cli.main import run
from evermark.spark.cluster import unsealed_here
from evermark.testing.commands import REAL, Process
from tests.fork_request import BESIDE, LENGTH, PYTHON, STATUS, ask, exactly

_ROOT = Path(__file__).resolve().parents[1]  # where `tests` is found
_PYTHON = Path(__file__).with_name("forked_python")
_POLL_MAX_S = 3600.0
_NAME_ROOM = "-" * 200  # a fork is called by its own words, in the room of those that the first process was given
_PR_SET_PDEATHSIG = 1
# What each command would load when it is called.
_LOADED = (
    "evermark.app.daemon",
    "evermark.app.lane",
    "evermark.app.run",
    "evermark.cli.bot",
    "evermark.cli.checkpoint",
    "evermark.cli.config",
    "evermark.cli.delivery",
    "evermark.cli.instance",
    "evermark.cli.log",
    "evermark.cli.replay",
    "evermark.cli.source",
    "evermark.cli.status",
    "evermark.cli.subscription",
    "evermark.cli.up",
    "evermark.observe.logging",
    "evermark.sources.kinds",
    "evermark.spark.session",
)


class Forked:
    """A process that was forked for us: of `subprocess.Popen` what the tests use."""

    def __init__(self, pid: int, link: socket.socket, words: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(words)
        self.returncode: int | None = None
        self._link = link
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            return self._told(0.0)

    def wait(self, timeout: float | None = None) -> int:
        ends = time.monotonic() + (_POLL_MAX_S if timeout is None else timeout)
        with self._lock:
            code = self._told(max(0.0, ends - time.monotonic()))
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or _POLL_MAX_S)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _told(self, within_s: float) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as ready:
                ready.register(self._link, selectors.EVENT_READ)
                if not ready.select(within_s):
                    return None
            status = self._link.recv(STATUS)
            if not status:
                raise RuntimeError("the process that forks for the tests has ended")
            self._link.close()
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
        return self.returncode


class ForkedCommands:
    """Commands as forks. The process that forks is started with the first one, and ends with us: one for all tests of
    this process, see `FORKED`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def start(self, words: Sequence[str], env: Mapping[str, str], out: IO[bytes]) -> Process:
        return self._forked(words, env, out, out, new_session=True) if _is_ours(env) else REAL.start(words, env, out)

    def run(
        self, words: Sequence[str], env: Mapping[str, str], timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        if not _is_ours(env):
            return REAL.run(words, env, timeout_s)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            fork = self._forked(words, env, out, errors)
            try:
                code = fork.wait(timeout_s)
            except subprocess.TimeoutExpired:
                fork.kill()
                fork.wait()
                raise
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(list(words), code, out.read().decode(), errors.read().decode())

    def _forked(
        self, words: Sequence[str], env: Mapping[str, str], out: IO[bytes], errors: IO[bytes], new_session: bool = False
    ) -> Forked:
        with self._lock, open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), out.fileno(), errors.fileno())
            ours, pid = ask(self._started(), words, env, files, new_session)
        return Forked(pid, ours, words)

    def _started(self) -> socket.socket:
        if self._link is None or self._pid != os.getpid():
            self._link, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.forked", str(theirs.fileno()), _NAME_ROOM],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd=_ROOT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._pid = os.getpid()
            atexit.register(self._end)
        return self._link

    def _end(self) -> None:
        """It ends when our side is closed; waited for, so that what it used counts as used by us."""
        if self._link is not None and self._process is not None and self._pid == os.getpid():
            self._link.close()
            self._process.wait()


FORKED = ForkedCommands()


def _is_ours(env: Mapping[str, str]) -> bool:
    """Whether a fork can stand for a process with this environment: Python reads some of it only when it starts."""
    names = {name for name in (*env, *os.environ) if name.startswith(("PYTHON", "LC_", "LANG", "LD_", "TZ"))}
    return all(env.get(name) == os.environ.get(name) for name in names)


def _serve(link: socket.socket, listens: bool = False) -> list[str] | None:
    """Fork what is asked for and tell how it ended, until the other side is closed. In a fork: the words to run. Where
    `link` listens, each fork is asked for over a connection of its own."""
    children: dict[int, socket.socket] = {}
    woken, wakes = socket.socketpair()
    for each in (woken, wakes):
        each.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as ready:
        ready.register(link, selectors.EVENT_READ)
        ready.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _reap(children)
                    continue
                try:
                    asked, files = _asked_once(link) if listens else _asked(link)
                except (EOFError, ConnectionError):
                    if listens:
                        continue
                    return None
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (link, woken, wakes, *children.values()):
                        other.close()
                    _become(asked, files)
                    return list(asked["words"])
                for file in files[1:]:
                    os.close(file)
                children[pid] = socket.socket(fileno=files[0])
                children[pid].sendall(pid.to_bytes(LENGTH, "big"))


def _asked_once(listening: socket.socket) -> tuple[dict[str, Any], list[int]]:
    with listening.accept()[0] as link:
        return _asked(link)


def _asked(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, files, *_ = socket.recv_fds(link, LENGTH, 4)
    if not length:
        raise EOFError
    length += exactly(link, LENGTH - len(length))
    asked: dict[str, Any] = json.loads(exactly(link, int.from_bytes(length, "big")))
    return asked, files


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as link, suppress(OSError):  # perhaps nobody waits for it
            link.sendall(status.to_bytes(STATUS, "big"))


def _become(asked: Mapping[str, Any], files: Sequence[int]) -> None:
    if asked["new_session"]:
        os.setsid()
    for number, file in enumerate(files[1:]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = ["evermark", *asked["words"]]
    tempfile.tempdir = None  # the environment names it
    importlib.reload(importlib.import_module("evermark.failpoint"))  # which looks when it is loaded


def _called(*words: str) -> None:
    """From here on this process goes by these words, as it would if it had been started with them."""
    with suppress(OSError, IndexError, ValueError):
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(stat[45]), int(stat[46])
        text = "\0".join(words).encode()[: end - begin - 1]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, len(text))


def _fork_daemons_beside() -> list[str] | None:
    """A child of this process, which forks Spark's daemon when Spark starts it, and ends with this process. Returns
    None here, and the daemon's words in each daemon."""
    name = f"evermark-tests-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        instance = os.getpid()
        if os.fork() != 0:
            os.environ.update({BESIDE: name, PYTHON: sys.executable, "PYSPARK_PYTHON": str(_PYTHON)})
            return None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != instance:
            os._exit(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the instance decides
        return _serve(listening, listens=True)


def _run_daemon(words: Sequence[str]) -> None:
    """As `python -m evermark.app.daemon` does it, with its folder and what Spark names on the path."""
    sys.argv = list(words[1:])
    path = [str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:0] = [each for each in path if each and each not in sys.path and not each.endswith("pyspark.zip")]
    _called(sys.executable, *words)
    importlib.import_module("evermark.spark.daemon").run(unfit=unsealed_here())


def _main() -> None:
    for name in _LOADED:
        importlib.import_module(name)
    pa.array([0])  # loads pandas, which the daemon has loaded before it forks
    gc.freeze()  # forks share these objects; a collection would write to each
    words = _serve(socket.socket(fileno=int(sys.argv[1])))
    if words is None:
        return
    _called(sys.executable, "-m", "evermark.cli.main", *words)
    daemon = _fork_daemons_beside() if words[:1] == ["up"] and sys.platform == "linux" else None
    if daemon is not None:
        _run_daemon(daemon)
    else:
        run(words)


if __name__ == "__main__":
    _main()
