"""An embedded server that hangs, as Postgres 18.4 to 18.6 do, and servers that only look like it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from structlog.testing import capture_logs

from evermark.app.state_supervisor import StateSupervisor
from evermark.embedded import postgres as embedded_postgres
from evermark.embedded import postmaster
from evermark.embedded.hang import Answer, Seen
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.testing.until import until

HUNG_AFTER_S = 1.0
ASK_EVERY_S = 0.1

# Works in a server's folder, and does not hear SIGQUIT.
DEAF = """
import signal, time
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    tmp_path.chmod(0o711)
    with EmbeddedPostgres(tmp_path / "state") as started:
        yield started


class Looks:
    """What the supervisor sees, and how often it looked."""

    def __init__(self) -> None:
        self.seen: list[Seen | None] = []

    def __call__(self, data: Path) -> Seen | None:
        self.seen.append(postmaster.look(data))
        return self.seen[-1]


@contextmanager
def supervised(server: EmbeddedPostgres) -> Iterator[Looks]:
    looks = Looks()
    keeper = StateSupervisor(server, look=looks, look_every_s=0.05, ask_every_s=ASK_EVERY_S, hung_after_s=HUNG_AFTER_S)
    try:
        yield looks
    finally:
        keeper.stop()


def crash(server: EmbeddedPostgres) -> None:
    """One of its processes dies: the server ends the others, and starts anew in place."""
    os.kill(until(lambda: background_writer(server.pid), "it has a background writer"), signal.SIGKILL)


def background_writer(postmaster_pid: int) -> int | None:
    for child in psutil.Process(postmaster_pid).children():
        with suppress(psutil.NoSuchProcess):  # another child may end just now
            if "background writer" in " ".join(child.cmdline()):
                return child.pid
    return None


@contextmanager
def without_wal(server: EmbeddedPostgres) -> Iterator[None]:
    """Recovery ends with an error, as it does on a full disk."""
    wal, away = server.data / "pg_wal", server.data / "pg_wal_away"
    wal.rename(away)
    try:
        yield
    finally:
        away.rename(wal)


def make_hang(server: EmbeddedPostgres) -> None:
    crash(server)

    def ended_or_idle() -> bool:
        seen = postmaster.look(server.data)
        return seen is None or (seen.is_idle and "does not exist" in server_log(server))

    until(ended_or_idle, "its startup process has ended")
    if postmaster.running(server.data) is None:
        pytest.skip("this Postgres ends by itself when its recovery fails")


def server_log(server: EmbeddedPostgres) -> str:
    return "".join(path.read_text() for path in (server.folder / "log").glob("postgres-*.log"))


def test_a_hung_server_is_ended_and_started_again_and_has_kept_everything(server: EmbeddedPostgres) -> None:
    """GIVEN a server whose recovery ended with an error, and which waits for it since WHEN it has let nobody in for
    some time THEN it is ended and started again, again and again until it starts, with what was committed."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("create table kept as select 7 as n")
    first = server.pid
    with capture_logs() as lines, ExitStack() as stack:
        with without_wal(server):
            make_hang(server)
            stack.enter_context(supervised(server))
            until(lambda: any("does not start" in line["event"] for line in lines), "it is tried, and cannot start yet")
            assert not postmaster.works_in(first, server.data)
        try:
            until(lambda: any("is back" in line["event"] for line in lines), "it is back", timeout_s=120)
        finally:
            print(*lines[-5:], sep="\n")  # shown where it fails
    assert server.pid != first
    with psycopg.connect(server.dsn()) as conn:
        assert conn.execute("select n from kept").fetchone() == (7,)
    assert "lets nobody in and does not recover" in lines[0]["event"] and lines[0]["pid"] == first


def test_a_hung_server_is_stopped_without_waiting_for_it(server: EmbeddedPostgres) -> None:
    """GIVEN a hung server WHEN its last user stops it THEN it is gone, though it does not hear pg_ctl."""
    first = server.pid
    with without_wal(server):
        make_hang(server)
        server.stop()
        assert not postmaster.works_in(first, server.data)
    server.start()


def test_whoever_finds_a_hung_server_ends_it_and_starts_another(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a server that hangs since the instance beside it was killed WHEN the next one attaches to it THEN it waits
    until that is certain, longer than it would wait for a server to start, and has a server that lets it in."""
    monkeypatch.setattr(embedded_postgres, "HUNG_AFTER_S", 6.0)
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("create table kept as select 7 as n")
    first = server.pid
    with without_wal(server):
        make_hang(server)
    other = EmbeddedPostgres(server.folder)
    other.start(timeout_s=1.0)
    try:
        assert other.pid != first
        with psycopg.connect(other.dsn()) as conn:
            assert conn.execute("select n from kept").fetchone() == (7,)
    finally:
        other.stop()


def test_a_recovery_that_takes_long_is_left_alone(tmp_path: Path) -> None:
    """GIVEN a server in a recovery that takes many times as long as a hang may WHEN it lets nobody in all the while
    THEN nothing is done to it, and it is there when it is ready."""
    tmp_path.chmod(0o711)
    # Recovery asks for a file of the archive, and waits for the answer: there is none.
    waits = "while ! test -e ready; do sleep 0.1; done; false"
    with EmbeddedPostgres(tmp_path / "state", settings={"restore_command": waits, "hot_standby": "off"}) as server:
        first = server.pid
        asks = server.data / "recovery.signal"
        asks.touch()
        os.chown(asks, server.data.stat().st_uid, server.data.stat().st_gid)
        crash(server)
        recovers = Seen(first, Answer.NOT_NOW, recovers=True)
        until(lambda: postmaster.look(server.data) == recovers, "it recovers", timeout_s=60)
        try:
            with capture_logs() as lines, supervised(server) as looks:
                until(lambda: len(looks.seen) > 3 * HUNG_AFTER_S / ASK_EVERY_S, "it was looked at for long enough")
            assert set(looks.seen) == {recovers} and lines == []
        finally:
            (server.data / "ready").touch()
        until(lambda: postmaster.look(server.data) == Seen(first, Answer.IN), "it lets us in, and is the same")


def test_a_server_that_was_stopped_with_a_signal_is_left_alone(server: EmbeddedPostgres) -> None:
    """GIVEN a server that somebody stopped (SIGSTOP) WHEN it says nothing THEN that is no word of it, and it goes on
    where it was."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        seen = postmaster.look(server.data)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert seen == Seen(server.pid, Answer.NONE) and not seen.is_idle
    until(lambda: postmaster.look(server.data) == Seen(server.pid, Answer.IN), "it goes on")


def test_a_server_of_another_user_is_known_by_its_socket(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a system that does not tell where processes of other users work, as most containers WHEN the server is
    looked at THEN it is seen; another process that the file names is not."""

    def refused(self: psutil.Process) -> str:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "cwd", refused)
    assert postmaster.look(server.data) == Seen(server.pid, Answer.IN)
    with without_wal(server):
        make_hang(server)
        seen = postmaster.look(server.data)
        assert seen is not None and seen.is_idle and seen.pid == server.pid
        server.end_hung(server.pid)
    assert not postmaster.works_in(server.pid, server.data)
    server.start()
    told = server.data / postmaster.PID_FILE
    text = told.read_text()
    told.write_text(text.replace(str(server.pid), str(os.getpid()), 1))
    assert postmaster.look(server.data) is None
    told.write_text(text)


def test_a_server_on_its_way_to_its_end_is_left_alone(server: EmbeddedPostgres) -> None:
    """GIVEN a server that was told to stop when its clients are done WHEN it lets nobody in THEN it is not idle."""
    with psycopg.connect(server.dsn()):
        os.kill(server.pid, signal.SIGTERM)
        stops = Seen(server.pid, Answer.NOT_NOW, stops=True)
        until(lambda: postmaster.look(server.data) == stops, "it lets nobody in any more", timeout_s=60)
        assert not stops.is_idle
    until(lambda: postmaster.look(server.data) is None, "it has ended by itself")


def test_a_server_with_as_many_clients_as_it_takes_is_left_alone(tmp_path: Path) -> None:
    """GIVEN a server that refuses us for what its clients do WHEN it is looked at THEN it lets in whom it can."""
    tmp_path.chmod(0o711)
    few = {"max_connections": "3", "superuser_reserved_connections": "0", "max_wal_senders": "0"}
    with EmbeddedPostgres(tmp_path / "state", settings=few) as server, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(psycopg.connect(server.dsn()))
        with pytest.raises(psycopg.OperationalError, match="too many clients"):
            psycopg.connect(server.dsn())
        assert postmaster.look(server.data) == Seen(server.pid, Answer.IN)


def test_a_process_that_does_not_hear_is_killed_and_no_other_is_touched(tmp_path: Path) -> None:
    """GIVEN a process in a server's folder, and one elsewhere, both deaf WHEN they are to be ended THEN the first is
    killed, and to the second nothing is done: its number had been another's."""
    here, elsewhere = tmp_path / "data", tmp_path / "other"
    deaf = []
    try:
        for folder in (here, elsewhere):
            folder.mkdir()
            one = subprocess.Popen([sys.executable, "-c", DEAF], cwd=folder, stdout=subprocess.PIPE, text=True)
            deaf.append(one)
            assert one.stdout is not None and one.stdout.readline() == "deaf\n"
            postmaster.end(one.pid, here, quit_s=0.2)
        assert deaf[0].wait(10) == -signal.SIGKILL
        assert deaf[1].poll() is None
    finally:
        for one in deaf:
            one.kill()
            one.communicate()
