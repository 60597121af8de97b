"""A Postgres of our own in a folder, shared by every process that uses the folder.

- The first process to start makes and starts the server; later processes attach. Each user holds a shared file lock;
  the last one to stop, stops the server. A user that is killed lets go without stopping it: the next one attaches.
- Starting and stopping exclude each other by a second lock.
- Access: a socket in a folder that only the server's user (and root) may enter, *and* a generated password, kept in
  a file of mode 0600. The connection strings handed out name that file and hold no secret.
- Nothing listens on the network unless `tcp` is asked for, and then only on 127.0.0.1.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

import psycopg

from evermark.embedded import datafolder, demote, postmaster
from evermark.embedded.address import DATA, DATABASE, PASSFILE, by_file, socket_dsn
from evermark.embedded.binaries import Binaries, find_binaries
from evermark.embedded.hang import HUNG_AFTER_S, HangClock
from evermark.embedded.lock import FileLock
from evermark.errors import BusyError, DeniedError, DiskFullError, SetupError, UnreachableError

_PORT = 5432
_SOCKET_PATH_BYTES_MAX = 103  # 107 on Linux, 103 on macOS
_PORT_TRIES = 3
_POLL_S = 0.02
_PATIENCE_S = 5.0
_IDLE_POLL_S = 0.5
_RECOVERY_S = 30.0  # that a server which is started in place of one that hung has for it
_STOP_TIMEOUT_S = 60
_TEMP_PREFIX = "evermark-pg-"


class EmbeddedPostgres:
    """`start()` gives a connection string; `stop()` lets go. Usable as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, str] | None = None,
        tcp: bool = False,
        binaries: Binaries | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.data = self.folder / DATA
        self.passfile = self.folder / PASSFILE
        self.binaries = binaries or find_binaries()
        self._config = self.folder / "postgresql.conf"
        self._settings = dict(settings or {})
        self._pid: int | None = None
        self._tcp = tcp
        self._users = FileLock(self.folder / "users.lock")
        self._start_lock = self.folder / "start.lock"
        self._account: demote.Account | None = None
        self._capability = demote.NO_CAPABILITY
        self._running: postmaster.Postmaster | None = None

    def start(self, timeout_s: float = 60.0) -> str:
        """Make the data folder if there is none, start the server or attach to it; the connection string."""
        # Root's folder must be open for walking through, so that the server's user reaches its part of it.
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o711 if os.geteuid() == 0 else 0o700)
        deadline = time.monotonic() + timeout_s
        with FileLock(self._start_lock).alone(timeout_s):
            self._choose_account()
            datafolder.ensure_password(self.passfile)
            if (self.data / "PG_VERSION").exists():
                datafolder.require_version(self.data, self.binaries)
            else:
                password = datafolder.password_in(self.passfile)
                datafolder.create(self.data, self.binaries, password, self._run, self._own)
            found = postmaster.running(self.data)
            try:
                self._running = self._serve(deadline)
                # The turn is ours, so no other process holds this lock alone for longer than a look at it.
                self._users.share(timeout_s)
            except BaseException:
                if found is None and postmaster.running(self.data) is not None:
                    self._shut_down()  # started here, and no other process would ever stop it
                raise
            self._pid = os.getpid()
        return self.dsn()

    def stop(self) -> None:
        """Let go of the server; stop it when no other process uses it. Harmless when it was never started."""
        if not self._users.held:
            return
        if self._pid != os.getpid():
            self._users.release()  # a forked copy of the user: the lock is still the parent's
            return
        with FileLock(self._start_lock).alone(2 * _STOP_TIMEOUT_S):
            try:
                if self._users.try_alone() and postmaster.running(self.data) is not None:
                    self._shut_down()
            finally:
                self._users.release()
                self._running = None

    def end_hung(self, pid: int) -> None:
        """End server `pid`, which hangs. Nothing happens where another process has ended it, or it hangs no more."""
        with FileLock(self._start_lock).alone(_STOP_TIMEOUT_S):
            seen = postmaster.look(self.data)
            if seen is not None and seen.pid == pid and seen.is_idle:
                postmaster.end(pid, self.data)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def dsn(self, database: str = DATABASE) -> str:
        """By the socket. Holds no secret: it names the file that does."""
        return socket_dsn(self.folder, self._server(), database)

    def tcp_dsn(self, database: str = DATABASE) -> str:
        """By 127.0.0.1, for what cannot use a socket. Only with `tcp=True`."""
        if not self._tcp:
            raise SetupError(f"the server in {self.folder} does not listen on a port", hint="start it with tcp=True")
        return (
            f"postgresql://{datafolder.USER}@127.0.0.1:{self._server().port}/{quote(database)}?{by_file(self.folder)}"
        )

    def password(self) -> str:
        """For a program that cannot read a libpq password file."""
        return datafolder.password_in(self.passfile)

    @property
    def pid(self) -> int:
        return self._server().pid

    @property
    def port(self) -> int:
        return self._server().port

    def _server(self) -> postmaster.Postmaster:
        if self._running is None:
            raise SetupError(f"the server in {self.folder} is not started", hint="call start() first")
        return self._running

    def _choose_account(self) -> None:
        if os.geteuid() != 0:
            if self.data.exists() and self.data.stat().st_uid != os.geteuid():
                raise DeniedError(
                    f"{self.data} belongs to user {self.data.stat().st_uid}, and we are {os.geteuid()}",
                    hint="start it as the user that made it (root, if it was root), or give the folder away: chown -R",
                )
            return
        account = demote.account_for_root(self.data)
        if account is None:
            raise SetupError(
                "Postgres does not run as root, and there is no other user for it",
                hint=f"add one (useradd --system evermark), name one in {demote.USER_ENV}, or do not run as root",
            )
        capability = demote.capability_for([self.data, self.binaries.tool("postgres")], account)
        if capability is None:
            raise DeniedError(
                f"the user {account.pw_name} cannot reach {self.data} or {self.binaries.folder}",
                hint=f"choose folders that {account.pw_name} may enter, or do not run as root",
            )
        self._account, self._capability = account, capability

    def _run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run one of Postgres's programs as the server's user, with nothing of our environment that could steer it."""
        account = self._account
        full = command if account is None else demote.command_as(account, self._capability, command)
        kept = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        env = {"LC_ALL": "C", "TZ": "UTC"} | {name: os.environ[name] for name in kept if name in os.environ}
        try:
            return subprocess.run(
                full,
                cwd="/",  # ours may be a folder that the server's user cannot enter
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
                # Ctrl-C at our terminal is a signal for us: pg_ctl interrupted half-way would look like a failure.
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"{Path(command[0]).name} on {self.data} took over {timeout_s:.0f} s") from error

    def _own(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _launch(self, deadline: float) -> None:
        self._clear_stale(deadline)
        log = self.folder / "log"
        for folder in (log, self.folder / "run"):
            folder.mkdir(mode=0o700, exist_ok=True)
            self._own(folder)
        sockets = self._socket_folder()
        first_words = log / "start.log"
        for attempt in range(1, _PORT_TRIES + 1):
            port = _free_port() if self._tcp else _PORT
            own = {
                "listen_addresses": "127.0.0.1" if self._tcp else "",
                "port": str(port),
                "unix_socket_directories": str(sockets),
                "log_directory": str(log),
            }
            datafolder.write_settings(
                self._config, self.data, {**datafolder.settings_for(self.binaries), **self._settings, **own}, self._own
            )
            first_words.unlink(missing_ok=True)
            left_s = max(1, int(deadline - time.monotonic()))
            command = [str(self.binaries.tool("pg_ctl")), "start", "--wait", f"--timeout={left_s}", "--silent"]
            options = f"-c config_file={shlex.quote(str(self._config))}"
            command += [f"--pgdata={self.data}", f"--log={first_words}", f"--options={options}"]
            ran = self._run(command, left_s + 5.0)
            if ran.returncode == 0:
                return
            words = _last_words(first_words, log) or ran.stderr
            # Between finding a free port and listening on it, another program may have taken it.
            if not ("Address already in use" in words and self._tcp and attempt < _PORT_TRIES):
                if "No space left" in words:
                    raise DiskFullError(
                        f"no space for the server in {self.folder}", hint="free some space, then start again"
                    )
                raise SetupError(f"the server in {self.folder} does not start: {words[-1500:]}", hint=f"see {log}")

    def _clear_stale(self, deadline: float) -> None:
        """Wait for what a killed server left running, then remove the files that claim it still runs."""
        while pids := postmaster.left_over(self.data):
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"processes {pids[:10]} still work in {self.data}, but no server answers there",
                    hint="end them, then start again",
                )
            time.sleep(_POLL_S)
        _remove_sockets(postmaster.read(self.data))
        # Postgres would keep all of these as long as anybody, even a dead child of init, has the old process number.
        for path in (self.folder / "run").glob(".s.PGSQL.*"):
            path.unlink(missing_ok=True)
        (self.data / postmaster.PID_FILE).unlink(missing_ok=True)

    def _socket_folder(self) -> Path:
        """Beside the data; where that path is too long for a socket, a private folder with a short one."""
        beside = self.folder / "run"
        if _fits(beside):
            return beside
        for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):  # noqa: S108 - private below
            if base and Path(base).is_dir() and _fits(Path(base) / f"{_TEMP_PREFIX}12345678"):
                made = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=base))  # mode 0700
                self._own(made)
                return made
        raise SetupError(f"{beside} is too long for a socket", hint="set TMPDIR to a folder with a short path")

    def _serve(self, deadline: float) -> postmaster.Postmaster:
        """A server that lets us in. A server that runs may still recover from a crash, or be about to vanish, and a
        killed server looks alive for a moment longer: try again, briefly. One that may hang has the time until that is
        certain: then it is ended, and another is started."""
        patience = min(deadline, time.monotonic() + _PATIENCE_S)
        hang = HangClock(HUNG_AFTER_S)
        while True:
            server, poll_s = postmaster.running(self.data), _POLL_S
            if server is None:
                self._launch(deadline)
            elif server.ready and server.socket_folder is not None and postmaster.listening(server):
                try:
                    self._ensure_database(server, deadline)
                except UnreachableError:
                    if self._may_hang(hang):
                        deadline, poll_s = max(deadline, time.monotonic() + _RECOVERY_S), _IDLE_POLL_S
                    elif time.monotonic() >= patience:
                        raise
                else:
                    return server
            if server is not None:
                time.sleep(poll_s)
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"the server in {self.folder} is not ready in time", hint=f"see {self.folder / 'log'}"
                )

    def _may_hang(self, hang: HangClock) -> bool:
        """Whether the server lets nobody in, and nothing is under way after which it would; it is ended when that has
        been so for long enough."""
        seen = postmaster.look(self.data)
        if hang.hung(seen, time.monotonic()) and seen is not None:
            postmaster.end(seen.pid, self.data)
        return seen is not None and seen.is_idle

    def _ensure_database(self, server: postmaster.Postmaster, deadline: float) -> None:
        left_s = max(2, int(deadline - time.monotonic()))
        try:
            with psycopg.connect(
                socket_dsn(self.folder, server, "postgres"), autocommit=True, connect_timeout=left_s
            ) as connection:
                found = connection.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone()
                if found is None:
                    connection.execute(f"create database {DATABASE}")
        except psycopg.OperationalError as error:
            raise UnreachableError(
                f"the server in {self.folder} does not let us in: {str(error).strip()[:300]}",
                hint=f"if {self.passfile} was lost or replaced, bring it back; see {self.folder / 'log'}",
            ) from error

    def _shut_down(self) -> None:
        server = postmaster.read(self.data)
        seen = postmaster.look(self.data)
        if seen is not None and seen.is_idle:  # if it hangs, it does not hear of it: there is nothing to wait for
            postmaster.end(seen.pid, self.data)
            _remove_sockets(server)
            return
        command = [str(self.binaries.tool("pg_ctl")), "stop", "--mode=fast", "--wait", "--silent"]
        ran = self._run([*command, f"--timeout={_STOP_TIMEOUT_S}", f"--pgdata={self.data}"], _STOP_TIMEOUT_S + 5.0)
        if ran.returncode != 0 and postmaster.running(self.data) is not None:
            raise BusyError(
                f"the server in {self.folder} does not stop: {ran.stderr.strip()[-300:]}",
                hint=f"see {self.folder / 'log'}",
            )
        _remove_sockets(server)


def _remove_sockets(gone: postmaster.Postmaster | None) -> None:
    """A folder made for the socket of a server alone goes with the server."""
    if gone is not None and gone.socket_folder is not None and gone.socket_folder.name.startswith(_TEMP_PREFIX):
        shutil.rmtree(gone.socket_folder, ignore_errors=True)


def _last_words(first_words: Path, log: Path) -> str:
    """What the server said last: in its first log, or in the log files it goes on with."""
    later = sorted(log.glob("postgres-*.log"), key=lambda found: found.stat().st_mtime)[-1:]
    said = [path.read_text(errors="replace")[-1500:] for path in (first_words, *later) if path.exists()]
    return "".join(said).strip()


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder / postmaster.socket_name(65535))) <= _SOCKET_PATH_BYTES_MAX


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
