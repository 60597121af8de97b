"""Tables on a real server, captured without a trigger, and the few verbs their tests are told with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from evermark.event_file import as_batches
from evermark.secrets import Plain
from evermark.sources.base import Limit, Slice
from evermark.sources.postgres.settings import PostgresSettings
from evermark.sources.postgres.tables.install import TablesInstallation
from evermark.sources.postgres.tables.source import PostgresTables, versions_in_state
from evermark.testing.servers import PostgresServer, fresh_database
from evermark.testing.states import fresh_state
from evermark.testing.until import until

Row = dict[str, Any]
_numbers = itertools.count()
SOURCE = "shop"


@dataclass
class Scene:
    """Installed tables, an autocommit connection to their database, and a source that reads them."""

    dsn: str
    settings: PostgresSettings
    db: psycopg.Connection[Any]
    source: PostgresTables

    @property
    def installation(self) -> TablesInstallation:
        return TablesInstallation(self.settings)

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.db.execute(statement.encode())

    def connection(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn)

    def read(self, start: str, end: str) -> list[Row]:
        return [row for batch in as_batches(self.source.read(Slice(0, start, end))) for row in batch.to_pylist()]

    def all(self, start: str | None = None) -> list[Row]:
        """All there is from `start` on, by peek; nothing is confirmed."""
        at = start or self.source.earliest(0)
        (flush,) = self.db.execute("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone() or (0,)
        return self.read(at, f"{at[:25]}{int(flush):016x}:{0:08x}")

    def changes(self) -> list[Row]:
        """The same, without what tells how tables look."""
        return [row for row in self.all() if row["op"] != "schema"]

    def drain(self) -> list[Row]:
        """All there is, batch by batch, each confirmed."""
        at = self.source.earliest(0)
        found: list[Row] = []
        while (end := self.source.latest({0: at}, Limit(wait_s=0.3))[0]) != at:
            found += self.read(at, end)
            self.source.confirm(0, end)
            at = end
        return found

    def sent(self, start: str, count: int) -> tuple[list[Row], list[str]]:
        """As many rows as the server sends from `start` on, and where its batches end."""
        feed = self.source.follow(0, start, lambda: None)
        rows: list[Row] = []
        ends: list[str] = []

        def take() -> bool:
            fed = feed.next()
            if fed is not None:
                rows.extend(row for batch in as_batches(fed.batches()) for row in batch.to_pylist())
                ends.append(fed.end())
            return len(rows) >= count

        try:
            until(take, f"{count} rows are sent", timeout_s=30)
        finally:
            feed.close()
        return rows, ends


def tables_settings(dsn: str, *tables: Any) -> PostgresSettings:
    """Slots are the server's, not a database's: each scene has names of its own."""
    number = next(_numbers)
    names = {"slot": f"tables_{number}", "publication": f"tables_{number}"}
    return PostgresSettings.model_validate({"dsn": dsn, "mode": "tables", "tables": list(tables), **names})


@contextmanager
def scene(server: PostgresServer, *tables: Any, create: str = "") -> Iterator[Scene]:
    with fresh_database(server) as dsn, made(dsn, server.dsn(), *tables, create=create) as found:
        yield found


@contextmanager
def made(dsn: str, state_dsn: str, *tables: Any, create: str = "") -> Iterator[Scene]:
    """In a database that is there."""
    with psycopg.connect(dsn, autocommit=True) as db, fresh_state(state_dsn) as state:
        if create:
            db.execute(create.encode())
        settings = tables_settings(dsn, *tables)
        TablesInstallation(settings).install([], wait_s=10.0, say=lambda line: None, goes_on=False)
        source = PostgresTables(settings.target(), partial(versions_in_state, Plain(state_dsn), state.schema, SOURCE))
        try:
            yield Scene(dsn, settings, db, source)
        finally:
            source.close()
