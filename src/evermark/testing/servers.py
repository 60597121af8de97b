"""Real Postgres servers for tests and benches: fresh, with logical WAL, gone afterwards.

They listen on 127.0.0.1 as well as on a socket, so that a proxy that delays and cuts can stand in between. They do not
sync: what a killed server wrote is with the system, and no power is cut here. And a password costs no connection 10 ms.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import random
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from psycopg import sql

from evermark.embedded import datafolder, postmaster
from evermark.embedded.binaries import Binaries, binaries_in
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.errors import EvermarkError
from evermark.testing import ready_folders

_DROP_TRIES = 250
_SYSTEM_FOLDER = Path("/usr/lib/postgresql")
_STRATEGIES_SINCE = 15
_PORTS = (20_000, 32_000)  # connections are given ports from 32 768 on


class PostgresServer:
    """One running server. `dsn` and `socket_dsn` hold no password: they name the file that does."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None, binaries: Binaries | None) -> None:
        # A test that fails wants to see the statement that did.
        ours = {"log_min_error_statement": "error", "fsync": "off"} | dict(settings or {})
        self.embedded = EmbeddedPostgres(folder, settings=ours, tcp=True, binaries=binaries)

    def start(self) -> None:
        is_new = not self.embedded.data.exists()
        if is_new:
            ready_folders.lay(self.embedded.folder, self.binaries)
        self.embedded.start()
        if is_new and self.binaries.major < datafolder.SCRAM_ITERATIONS_SINCE:
            with self.admin() as admin:
                admin.execute(f"alter role {datafolder.USER} password '{_of_one_round(self.embedded.password())}'")

    def stop(self) -> None:
        self.embedded.stop()

    def kill(self) -> None:
        """End the server as a crash would: no shutdown checkpoint, connections cut. `start` brings it back."""
        os.kill(self.embedded.pid, signal.SIGKILL)

    def restart(self) -> None:
        """An orderly restart. The port may change: ask for the `dsn` again."""
        self.embedded.stop()
        self.embedded.start()

    @property
    def running(self) -> bool:
        return postmaster.running(self.embedded.data) is not None

    @property
    def port(self) -> int:
        return self.embedded.port

    @property
    def binaries(self) -> Binaries:
        return self.embedded.binaries

    def dsn(self, database: str = "postgres") -> str:
        return self.embedded.tcp_dsn(database)

    def socket_dsn(self, database: str = "postgres") -> str:
        return self.embedded.dsn(database)

    def admin(self) -> psycopg.Connection[tuple[object, ...]]:
        """A superuser's connection, in autocommit."""
        return psycopg.connect(self.socket_dsn(), autocommit=True)


def _of_one_round(password: str) -> str:
    """The password as a server keeps it, which may be told it so; newer ones make it so themselves."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    client, server = (hmac.digest(salted, f"{whose} Key".encode(), "sha256") for whose in ("Client", "Server"))
    kept = (base64.b64encode(each).decode() for each in (salt, hashlib.sha256(client).digest(), server))
    return "SCRAM-SHA-256$1:{}${}:{}".format(*kept)


@contextmanager
def postgres_server(
    folder: Path, settings: Mapping[str, str] | None = None, *, binaries: Binaries | None = None
) -> Iterator[PostgresServer]:
    """A fresh server in `folder`, for as long as the block lasts."""
    server = PostgresServer(folder, settings, binaries)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def fresh_database(server: PostgresServer) -> Iterator[str]:
    """An empty database of the test's own; its slots and connections go with it."""
    name = f"test_{secrets.token_hex(6)}"
    with server.admin() as admin:
        admin.execute(sql.SQL("create database {} {}").format(sql.Identifier(name), sql.SQL(_strategy(server))))
    try:
        yield server.dsn(name)
    finally:
        drop_database(server, name)


def _strategy(server: PostgresServer) -> str:
    """By copying files, which is a fourth of the work where nothing is synced."""
    return "strategy file_copy" if server.binaries.major >= _STRATEGIES_SINCE else ""


def drop_database(server: PostgresServer, name: str) -> None:
    if not server.running:
        return
    with server.admin() as admin:
        # A slot is free once its reader is gone, which takes it a moment.
        for _ in range(_DROP_TRIES):
            admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
            active = "select 1 from pg_replication_slots where database = %s and active"
            if admin.execute(active, [name]).fetchone() is None:
                break
            admin.execute("select pg_sleep(0.02)")
        admin.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s", [name]
        )
        admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def system_binaries() -> list[Binaries]:
    """The Postgres installations of this machine, oldest first. Often none."""
    found: list[Binaries] = []
    for folder in _SYSTEM_FOLDER.glob("*/bin"):
        try:
            found.append(binaries_in(folder))
        except EvermarkError:  # a leftover folder without a server
            continue
    return sorted(found, key=lambda installed: installed.major)


def free_port() -> int:
    """A port that stays free while a server is down: the system gives none of this range to connections by itself."""
    while True:
        port = random.randint(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
