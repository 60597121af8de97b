"""Bad input as a user gives it: a file, `evermark up` as a process of its own, and what it said when it refused."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from evermark.delivery.webhook.guard import closed_because
from evermark.embedded import postmaster
from evermark.testing.commands import Commands
from evermark.testing.pipeline import Instance
from evermark.testing.until import until
from tests.forked import FORKED

PASSWORD = "pw-do-not-show"
SECRET = "whsec_" + "A" * 43 + "="
REFUSED_WITHIN_S = 60.0
SOURCE = 'sources:\n  shop: {type: postgres, dsn: "${SHOP_DSN}", tables: [public.orders]}\n'


class Deployment:
    """A file and the variables it names. State lies in a database of the tests' server."""

    def __init__(self, folder: Path, shop_dsn: str, state_dsn: str, *, listen: str = "127.0.0.1:0") -> None:
        self.file = folder / "evermark.yaml"
        self.env = {**os.environ, "SHOP_DSN": shop_dsn, "STATE_DSN": state_dsn, "SECRET": SECRET}
        self.head = (
            f'version: 1\nname: bad\ndata: {folder / "data"}\nstate: {{dsn: "${{STATE_DSN}}"}}\n'
            f'server: {{listen: "{listen}"}}\n'
        )
        self.write(SOURCE)

    def write(self, rest: str) -> None:
        self.file.write_text(self.head + rest)

    def run(self, *words: str, commands: Commands = FORKED) -> subprocess.CompletedProcess[str]:
        return commands.run([*words, "-c", str(self.file)], self.env, REFUSED_WITHIN_S)

    def refused(self, commands: Commands = FORKED) -> str:
        return what_it_said(self.run("up", commands=commands))


def what_it_said(ran: subprocess.CompletedProcess[str]) -> str:
    """The error of an `up` that could not start: what and where, a hint, no traceback, no secret, not exit code 0."""
    said = ran.stdout + ran.stderr
    assert ran.returncode == 1, said
    assert "Traceback" not in said
    assert PASSWORD not in said and SECRET not in said
    assert ran.stderr.count("error: ") == 1, ran.stderr
    error = ran.stderr[ran.stderr.index("error: ") :]
    assert "\nhint: " in error, error
    return error


def with_password(dsn: str, role: str, port: str | None = None) -> str:
    """The same place, by another role whose password stands in the dsn itself."""
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    return f"postgresql://{role}:{PASSWORD}@{parts['host']}:{port or parts['port']}/{parts['dbname']}"


def name_of_a_private_address() -> str | None:
    """A name that this machine resolves to addresses of its own or of its network, and to nothing else."""
    for name in (socket.gethostname(), "ip6-localhost", "ip6-loopback", "localhost.localdomain", "localhost6"):
        with suppress(OSError):
            found = {ipaddress.ip_address(str(info[4][0])) for info in socket.getaddrinfo(name, 443)}
            if all(closed_because(address) for address in found):
                return name
    return None


def order(dsn: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("insert into public.orders (total) select n from generate_series(1, %s) n", (rows,))


def untouched(dsn: str) -> tuple[Any, ...]:
    """Where the slot stands and what the outbox holds: what a refused start must leave as it is."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        slots = conn.execute(
            "select slot_name, confirmed_flush_lsn, restart_lsn from pg_replication_slots"
            " where database = current_database()"
        ).fetchall()
        events = conn.execute("select count(*), min(id::text), max(id::text) from pgstream.events").fetchall()
    return (*slots, *events)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own at `folder`, which can be filled without hurting anybody. Needs root."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0711", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Take all the room that is left; give it back by removing the file."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1024 * 1024, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def wear_out_state(folder: Path) -> bool:
    """Have the embedded state server want a new WAL segment until it dies of there being no room for one.

    It may come back by itself, if somebody gave back a little room just then: ask again.
    """
    server = postmaster.read(folder / "data")
    if server is None:
        return True
    dsn = psycopg.conninfo.make_conninfo(
        host=str(server.socket_folder),
        port=server.port,
        user="postgres",
        dbname="evermark",
        passfile=str(folder / "pgpass"),
        connect_timeout=10,  # on its way to its end it may take a connection, and never answer
    )
    for _ in range(100):
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("select pg_logical_emit_message(true, 'wear', 'out'), pg_switch_wal()")
        except psycopg.OperationalError:
            return True
    raise AssertionError("the server had room for 100 segments")


def shop_health(instance: Instance) -> dict[str, Any]:
    """What /health says of the source; the address is in the instance's own log."""
    lines = (json.loads(line) for line in instance.log.read_text().splitlines() if line.startswith("{"))
    listen = next((line["listen"] for line in lines if line["event"] == "up"), None)
    if listen is None:
        assert not instance.died(), instance.log.read_text()
        return {}
    try:
        with urllib.request.urlopen(f"http://{listen}/health", timeout=60) as answer:
            told = json.load(answer)
    except urllib.error.HTTPError as unwell:
        told = json.load(unwell)
    found: dict[str, Any] = told["partitions"].get("shop/0", {})
    return found


def wait_for_health(instance: Instance, status: str, timeout_s: float = 300.0) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def seen() -> bool:
        nonlocal found
        found = shop_health(instance)
        return found.get("status") == status

    until(seen, f"/health says {status}", timeout_s=timeout_s)
    return found
