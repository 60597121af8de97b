"""Brings the schema of a deployment up to this program: numbered files, forward only, each in its own transaction.

A state written by a newer program, or by other files under the same numbers, is refused with `FormatError`: guessing
what it means could lose events.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from psycopg import sql

from evermark.errors import FormatError, SetupError
from evermark.state.connection import Connection, State

_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")

_LEDGER = """
create table if not exists migrations (
    number     integer primary key,
    name       text not null,
    checksum   text not null,
    applied_at timestamptz not null default clock_timestamp()
)
"""


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def migrations() -> list[Migration]:
    """The migrations this program knows, in order and without gaps."""
    found = [
        Migration(int(match[1]), match[2], entry.read_text(encoding="utf-8"))
        for entry in sorted(resources.files("evermark.state.migrations").iterdir(), key=lambda entry: entry.name)
        if (match := _FILE.fullmatch(entry.name))
    ]
    if [m.number for m in found] != list(range(1, len(found) + 1)):
        raise FormatError("state migrations are not numbered 1, 2, 3 …", hint="this installation is damaged: reinstall")
    return found


def pending(known: Sequence[Migration], applied: Sequence[tuple[Any, ...]]) -> list[Migration]:
    """Which of `known` are still to be applied, given (number, checksum) of the applied ones. Pure."""
    checksums = {m.number: m.checksum for m in known}
    done = {number for number, _ in applied}
    for number, checksum in applied:
        if number not in checksums:
            raise FormatError(
                f"state is at version {max(done)}, and this program knows up to {len(known)}",
                hint="a newer Evermark wrote it: upgrade this installation",
            )
        if checksums[number] != checksum:
            raise FormatError(
                f"state migration {number} is not the one this program carries",
                hint="it was made by a changed or different build: restore the state, or use that build",
            )
    todo = [m for m in known if m.number not in done]
    if todo and done and todo[0].number < max(done):
        raise FormatError(f"state migration {todo[0].number} was left out", hint="restore the state from a backup")
    return todo


def migrate(state: State, known: Sequence[Migration] | None = None) -> list[int]:
    """Apply what is missing and return its numbers. Safe to call from several processes at once."""
    known = migrations() if known is None else known
    with state.connection() as conn:
        digest = hashlib.sha256(f"evermark.migrate:{state.schema}".encode()).digest()
        key = int.from_bytes(digest[:8], "big", signed=True)
        conn.execute("select pg_advisory_lock(%s)", (key,))
        try:
            _make_schema(conn, state.schema)
            done = []
            for migration in pending(known, _applied(conn)):
                with conn.transaction():
                    # It takes as long as its tables are large: given up, it would take as long again the next time.
                    conn.execute("set local statement_timeout = 0")
                    conn.execute(migration.text.encode())
                    conn.execute(
                        "insert into migrations (number, name, checksum) values (%s, %s, %s)",
                        (migration.number, migration.name, migration.checksum),
                    )
                done.append(migration.number)
            return done
        finally:
            if not conn.broken:
                conn.execute("select pg_advisory_unlock(%s)", (key,))


def require_current(state: State, known: Sequence[Migration] | None = None) -> None:
    """Raise unless the state is exactly at this program's version. Writes nothing."""
    known = migrations() if known is None else known
    with state.connection() as conn:
        there = conn.execute("select to_regclass(%s)", (f"{state.schema}.migrations",)).fetchone()
        todo = pending(known, _applied(conn) if there and there[0] else [])
    if todo:
        raise SetupError(
            f"state is at version {todo[0].number - 1}, and this program needs {len(known)}",
            hint="run `evermark migrate`",
        )


def _make_schema(conn: Connection, schema: str) -> None:
    # `create schema if not exists` asks for the right to create even when it exists.
    if conn.execute("select 1 from pg_namespace where nspname = %s", (schema,)).fetchone() is None:
        conn.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
    if conn.execute("select to_regclass(%s)", (f"{schema}.migrations",)).fetchone() == (None,):
        conn.execute(_LEDGER)


def _applied(conn: Connection) -> list[tuple[Any, ...]]:
    return conn.execute("select number, checksum from migrations order by number").fetchall()
