"""The embedded Postgres: one server per folder, whoever comes and however they go."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from evermark.embedded import demote, postmaster
from evermark.embedded.lock import FileLock
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.errors import BusyError, ConfigError, FormatError, SetupError
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server, system_binaries
from evermark.testing.until import until

# A user of the folder: starts (or attaches), tells the server's pid, and stays until its input ends.
USER = """
import sys
from pathlib import Path
from evermark.embedded.postgres import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A closed folder for a server, which is stopped afterwards whatever the test did to its users."""
    tmp_path.chmod(0o700)
    path = tmp_path / "state"
    yield path
    if (path / "data" / "PG_VERSION").exists():
        last = EmbeddedPostgres(path)
        last.start()
        last.stop()


def user_of(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def server_pid(user: subprocess.Popen[str]) -> int:
    assert user.stdout is not None
    return int(user.stdout.readline())


def one(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def test_first_start_gives_a_durable_server_with_logical_wal(folder: Path) -> None:
    """A fresh folder becomes a running server fit to be a source and to keep State."""
    with EmbeddedPostgres(folder) as server:
        assert one(server.dsn(), "show wal_level") == "logical"
        assert one(server.dsn(), "show fsync") == "on"
        assert one(server.dsn(), "select current_database()") == "evermark"
        assert one(server.dsn(), "show listen_addresses") == ""


def test_what_was_written_is_there_after_stop_and_start(folder: Path) -> None:
    """Stopping and starting keeps the data."""
    with EmbeddedPostgres(folder) as server, psycopg.connect(server.dsn()) as connection:
        connection.execute("create table kept as select 42 as n")
    with EmbeddedPostgres(folder) as server:
        assert one(server.dsn(), "select n from kept") == 42


def test_access_takes_the_password_and_the_string_handed_out_holds_none(folder: Path) -> None:
    """Neither the socket alone nor a wrong password lets anybody in; secrets stay in a file of mode 0600. The random
    password costs a connection one round, and those that people choose as many as ever."""
    with EmbeddedPostgres(folder) as server:
        without = server.dsn().replace("passfile=", "passfile=%2Fnowhere%2F")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(without)
        assert server.password() not in server.dsn()
        assert stat.S_IMODE(server.passfile.stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "run").stat().st_mode) == 0o700
        kept = "select rolpassword from pg_authid where rolname = 'postgres'"
        assert str(one(server.dsn(), kept)).startswith("SCRAM-SHA-256$1:")
        assert one(server.dsn(), "show scram_iterations") == "4096"


def test_last_user_out_stops_the_server(folder: Path) -> None:
    """Two users share one server; it stops with the second, not with the first."""
    first, second = EmbeddedPostgres(folder), EmbeddedPostgres(folder)
    first.start()
    second.start()
    assert first.pid == second.pid
    first.stop()
    assert one(second.dsn(), "select 1") == 1
    second.stop()
    assert postmaster.running(folder / "data") is None


def test_killed_user_leaves_the_server_to_the_next_one(folder: Path) -> None:
    """kill -9 of the only user leaves the server up; the next start attaches to it, and its stop stops it."""
    user = user_of(folder)
    pid = server_pid(user)
    user.kill()
    user.wait()
    server = EmbeddedPostgres(folder)
    server.start()
    assert server.pid == pid
    server.stop()
    assert postmaster.running(folder / "data") is None


def test_users_that_start_at_once_share_one_server(folder: Path) -> None:
    """Five processes racing for a folder that does not exist yet end up with the same server."""
    users = [user_of(folder) for _ in range(5)]
    with ThreadPoolExecutor(5) as pool:
        pids = list(pool.map(server_pid, users))
    assert len(set(pids)) == 1
    for user in users:
        user.communicate()
    assert [user.returncode for user in users] == [0] * 5
    assert postmaster.running(folder / "data") is None


def test_killed_server_comes_back_with_what_was_committed(folder: Path) -> None:
    """kill -9 of the server itself: the next start recovers, though its old files claim that it still runs."""
    server = EmbeddedPostgres(folder)
    server.start()
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("create table kept as select 42 as n")
    os.kill(server.pid, signal.SIGKILL)
    server.start()
    assert one(server.dsn(), "select n from kept") == 42
    server.stop()


def test_pid_file_from_before_a_power_cut_is_not_believed(folder: Path) -> None:
    """A stale postmaster.pid whose number now belongs to another process does not keep the server down."""
    with EmbeddedPostgres(folder) as server:
        told = (folder / "data" / postmaster.PID_FILE).read_text()
        pid = server.pid
    lines = told.splitlines()
    assert lines[0] == str(pid)
    for claimed in (str(os.getpid()), ""):
        (folder / "data" / postmaster.PID_FILE).write_text("\n".join([claimed, *lines[1:]]) + "\n")
        with EmbeddedPostgres(folder) as server:
            assert one(server.dsn(), "select 1") == 1


def test_forked_copy_of_a_user_cannot_stop_the_server(folder: Path) -> None:
    """A child that inherited the object by fork lets go of nothing that is its parent's."""
    with EmbeddedPostgres(folder) as server:
        child = os.fork()
        if child == 0:
            server.stop()
            os._exit(0)
        os.waitpid(child, 0)
        assert one(server.dsn(), "select 1") == 1
        other = EmbeddedPostgres(folder)
        other.start()
        other.stop()
        assert one(server.dsn(), "select 1") == 1


def test_long_paths_get_a_short_socket_that_is_private_and_removed(tmp_path: Path) -> None:
    """A socket's path may have 107 bytes: beyond that a private folder stands in, and goes with the server."""
    with EmbeddedPostgres(tmp_path / ("long" * 25) / "state") as server:
        told = postmaster.read(server.data)
        assert told is not None
        assert told.socket_folder is not None
        assert stat.S_IMODE(told.socket_folder.stat().st_mode) == 0o700
        assert one(server.dsn(), "select 1") == 1
    assert not told.socket_folder.exists()


def test_folder_made_by_another_major_version_is_refused(folder: Path) -> None:
    """Data of another Postgres is not touched; the error says what to do."""
    with EmbeddedPostgres(folder):
        pass
    version = folder / "data" / "PG_VERSION"
    told = version.read_text()
    version.write_text("16\n")
    with pytest.raises(FormatError, match="made by Postgres 16"):
        EmbeddedPostgres(folder).start()
    version.write_text(told)


def test_starter_that_hangs_does_not_hang_the_next_for_ever(folder: Path) -> None:
    """The turn to start is waited for only so long, and the error says who is waited for."""
    folder.mkdir()
    with FileLock(folder / "start.lock").alone(1.0), pytest.raises(BusyError, match="locked by another process"):
        EmbeddedPostgres(folder).start(timeout_s=0.05)


def test_settings_are_applied_and_checked(folder: Path) -> None:
    """Extra settings reach the server, ALTER SYSTEM has the last word, nonsense is refused by name."""
    with EmbeddedPostgres(folder, settings={"max_slot_wal_keep_size": "64MB", "log_line_prefix": "it's %m "}) as server:
        assert one(server.dsn(), "show max_slot_wal_keep_size") == "64MB"
        assert one(server.dsn(), "show log_line_prefix") == "it's %m "
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("alter system set max_slot_wal_keep_size = '1MB'")
            connection.execute("select pg_reload_conf()")
        until(lambda: one(server.dsn(), "show max_slot_wal_keep_size") == "1MB", "the server reloads")
    for nonsense in ({"port = 1 #": "x"}, {"log_line_prefix": "a\nport = 1"}):
        with pytest.raises(ConfigError):
            EmbeddedPostgres(folder, settings=nonsense).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
def test_started_by_root_it_runs_as_somebody_else_and_opens_no_folder(folder: Path) -> None:
    """The server's user reaches its data in a closed folder without any folder's mode being changed."""
    before = [stat.S_IMODE(parent.stat().st_mode) for parent in folder.parents]
    with EmbeddedPostgres(folder) as server:
        assert folder.joinpath("data").stat().st_uid != 0
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert f"Uid:\t{server.data.stat().st_uid}\t" in status
        effective = int(status.split("CapEff:\t")[1].split()[0], 16)
        assert effective in {0, 1 << demote.CAP_DAC_READ_SEARCH, 1 << demote.CAP_DAC_OVERRIDE}
    assert [stat.S_IMODE(parent.stat().st_mode) for parent in folder.parents] == before


def test_fresh_databases_are_empty_and_apart(pg_server: PostgresServer) -> None:
    """Each test's database is its own, and goes with its slots and connections."""
    with fresh_database(pg_server) as first, fresh_database(pg_server) as second:
        assert first != second
        left_open = psycopg.connect(first, autocommit=True)
        left_open.execute("create table only_here ()")
        left_open.execute("select pg_create_logical_replication_slot('left_open', 'pgoutput')")
        assert one(second, "select count(*) from pg_tables where tablename = 'only_here'") == 0
    assert one(pg_server.dsn(), "select count(*) from pg_database where datname like 'test_%'") == 0
    assert one(pg_server.dsn(), "select count(*) from pg_replication_slots") == 0


def test_killed_test_server_starts_again(tmp_path: Path) -> None:
    """The crash that fault tests make is a real one, and `start` recovers from it."""
    with postgres_server(tmp_path, {"max_slot_wal_keep_size": "64MB"}) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("create table kept as select 42 as n")
        server.kill()
        server.start()
        assert one(server.dsn(), "select n from kept") == 42


@pytest.mark.skipif(not system_binaries(), reason="this machine has no Postgres of its own")
def test_older_major_versions_can_be_run_too(tmp_path: Path) -> None:
    """A Postgres that the machine happens to have serves as a source of another version."""
    oldest = system_binaries()[0]
    with postgres_server(tmp_path, binaries=oldest) as server:
        assert str(one(server.dsn(), "show server_version")).startswith(str(oldest.major))
        assert one(server.dsn(), "show wal_level") == "logical"


def test_a_start_that_fails_half_way_leaves_no_server_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a server that was just launched WHEN it cannot be used THEN it is stopped: nobody else knows of it."""
    server = EmbeddedPostgres(folder)

    def refused(*_: object) -> None:
        raise SetupError("no database can be made")

    monkeypatch.setattr(server, "_ensure_database", refused)
    with pytest.raises(SetupError, match="no database"):
        server.start()
    assert postmaster.running(server.data) is None
