"""Copies of a database server that look like it: taken earlier, and gone their own way since."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from evermark.testing.servers import PostgresServer
from evermark.testing.until import until


def copied(server: PostgresServer, *folders: Path) -> list[PostgresServer]:
    """The server as it is now, in each of these folders, not started. The server itself is started again."""
    binaries = server.binaries
    server.stop()
    for folder in folders:
        shutil.copytree(server.embedded.folder, folder, symlinks=True, copy_function=_with_owner)
        _own(server.embedded.folder, folder)
        for leftover in ("users.lock", "turn.lock"):
            (folder / leftover).unlink(missing_ok=True)
    server.start()
    return [PostgresServer(folder, None, binaries) for folder in folders]


@contextmanager
def started(server: PostgresServer) -> Iterator[PostgresServer]:
    server.start()
    try:
        until(lambda: _may_write(server), "the copy has recovered")
        yield server
    finally:
        server.stop()


def _may_write(server: PostgresServer) -> bool:
    """One that is promoted answers before that: whoever only reads need not wait."""
    with psycopg.connect(server.dsn("postgres")) as conn:
        row = conn.execute("select pg_is_in_recovery()").fetchone()
        return row is not None and not row[0]


def promote(server: PostgresServer) -> None:
    """Before it is started: it recovers as a standby does that becomes the primary, and begins a new timeline."""
    data = server.embedded.data
    signal = data / "recovery.signal"
    signal.touch()
    shutil.chown(signal, data.stat().st_uid, data.stat().st_gid)
    with (data / "postgresql.auto.conf").open("a") as conf:
        conf.write("restore_command = 'false'\n")


def _with_owner(source: str, target: str) -> str:
    shutil.copy2(source, target, follow_symlinks=False)
    _take_owner(Path(source), Path(target))
    return target


def _own(source: Path, target: Path) -> None:
    """Folders keep their owner, too: the server refuses to run over somebody else's."""
    _take_owner(source, target)
    for folder in source.rglob("*"):
        if folder.is_dir():
            _take_owner(folder, target / folder.relative_to(source))


def _take_owner(source: Path, target: Path) -> None:
    found = source.lstat()
    shutil.chown(target, found.st_uid, found.st_gid)
