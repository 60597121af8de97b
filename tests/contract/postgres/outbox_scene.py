"""An outbox on a real server, and the few verbs its tests are told with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from evermark.secrets import Plain
from evermark.sources.base import Limit, Slice
from evermark.sources.postgres.admin.doctor import CapturedFacts
from evermark.sources.postgres.admin.examine import examine
from evermark.sources.postgres.admin.install import install
from evermark.sources.postgres.lsn import Incarnation, Position
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.servers import PostgresServer, fresh_database

Row = dict[str, Any]
_numbers = itertools.count()


def list_tables(target: PostgresTarget) -> list[CapturedFacts]:
    """The tables whose changes are captured now, as `doctor` sees them."""
    outbox = examine(target).outbox
    assert outbox is not None and outbox.captured is not None
    return [table for table in outbox.captured if table.rows not in ("", "D")]


@dataclass
class Scene:
    """One installed outbox, an autocommit connection to its database, and a source that reads it."""

    dsn: str
    target: PostgresTarget
    db: psycopg.Connection[Any]
    source: PostgresOutbox
    incarnation: Incarnation = field(init=False)

    def __post_init__(self) -> None:
        self.incarnation = Position.parse(self.source.earliest(0)).incarnation

    def connection(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn)

    def position(self, lsn: int) -> str:
        return self.incarnation.at(lsn)

    def flush_lsn(self) -> int:
        """Where the WAL is durable, with everything committed before it."""
        self.emit("scene", "marker")  # a synchronous commit flushes the asynchronous ones before it
        return int(self.value("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn"))

    def value(self, query: str, *args: object) -> Any:
        found = self.db.execute(query, args).fetchone()
        return int(found[0]) if found and "pg_lsn" in query else found and found[0]

    def emit(self, stream: str, key: str, payload: str = "{}") -> None:
        emit(self.db, stream, key, payload)

    def read(self, start: str, end: str) -> list[Row]:
        return [row for batch in self.source.read(Slice(0, start, end)) for row in batch.to_pylist()]

    def drain(self, start: str | None = None, limit: Limit | None = None) -> list[Row]:
        """All there is from `start` on, batch by batch, each confirmed."""
        at = start or self.source.earliest(0)
        found: list[Row] = []
        while (end := self.source.latest({0: at}, limit or Limit(wait_s=0.3))[0]) != at:
            found += self.read(at, end)
            self.source.confirm(0, end)
            at = end
        return found


def emit(db: psycopg.Connection[Any], stream: str, key: str, payload: str = "{}") -> None:
    db.execute("select pgstream.emit(%s, %s, %s)", (stream, key, payload))


def numbered_place(dsn: str, tables: tuple[TableChoice, ...], slots: int = 1) -> PostgresTarget:
    """Slots are the server's, not a database's: each scene has names of its own."""
    number = next(_numbers)
    return PostgresTarget(Plain(dsn), f"slot_{number}", f"pub_{number}", tables=tables, slots=slots)


@contextmanager
def scene(
    server: PostgresServer, *tables: TableChoice, create: str = "", big_bytes: int | None = None
) -> Iterator[Scene]:
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        if create:
            db.execute(create.encode())
        target = numbered_place(dsn, tables)
        install(target, tables)
        source = PostgresOutbox(target) if big_bytes is None else PostgresOutbox(target, big_bytes=big_bytes)
        try:
            yield Scene(dsn, target, db, source)
        finally:
            source.close()
