"""An outbox as version 2 or 3 installed it. `outbox_v2/` and `outbox_v3/` hold their statements as they were; they do
not change any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.postgres.outbox_scene import Scene, numbered_place

_HERE = Path(__file__).parent
_SCHEMA = ("01_schema", "02_functions", "03_watch")
_PUBLISHED_3 = """'id', 'created_at', 'stream_id', 'stream', 'op', 'key', 'payload', 'before', 'schema_version',
                  'previous_key'"""
_PER_SLOT = ("04_publication", "05_reader", "06_slot", "07_registered")


def install_v2(db: psycopg.Connection[Any], slot: str, publication: str, *tables: str) -> None:
    """With one slot, on an autocommit connection."""
    for name in (*_SCHEMA, *_PER_SLOT):
        db.execute(_filled(2, name, slot, publication))
    _watch(db, [TableChoice(name) for name in tables])


def install_version_2(target: PostgresTarget, tables: Sequence[TableChoice] = ()) -> None:
    """With all the slots of the place."""
    _install(2, target, tables)


def _install(version: int, target: PostgresTarget, tables: Sequence[TableChoice]) -> None:
    with psycopg.connect(target.dsn.open(), autocommit=True) as db:
        for name in _SCHEMA:
            db.execute(_filled(version, name, target.slot, target.publication))
        for part in target.parts():
            for name in _PER_SLOT:
                db.execute(_filled(version, name, part.slot, part.publication, part.row_filter))
        _watch(db, tables)


def _watch(db: psycopg.Connection[Any], tables: Sequence[TableChoice]) -> None:
    for table in tables:
        args = (table.name, list(table.exclude), list(table.hash))
        db.execute("select pgstream.watch(%s::text::regclass, %s::text[], %s::text[])", args)


def _filled(version: int, name: str, slot: str, publication: str, row_filter: str = "") -> bytes:
    text = (_HERE / f"outbox_v{version}" / f"{name}.sql").read_text()
    for token, value in (
        ("@schema@", '"pgstream"'),
        ("@schema_name@", "pgstream"),
        ("@publication@", f'"{publication}"'),
        ("@publication_literal@", f"'{publication}'"),
        ("@slot_literal@", f"'{slot}'"),
        ("@version@", str(version)),
        ("@published@", _PUBLISHED_3),
        ("@row_filter_text@", row_filter.replace("'", "''")),
    ):
        text = text.replace(token, value)
    return text.encode()


@contextmanager
def scene_of_version_2(server: PostgresServer, *tables: TableChoice, create: str, slots: int = 1) -> Iterator[Scene]:
    """A database with an outbox of version 2, read by this program."""
    with _scene(2, server, tables, create, slots) as found:
        yield found


@contextmanager
def scene_of_version_3(server: PostgresServer, *tables: TableChoice, create: str) -> Iterator[Scene]:
    """A database with an outbox of version 3, read by this program."""
    with _scene(3, server, tables, create, 1) as found:
        yield found


@contextmanager
def _scene(
    version: int, server: PostgresServer, tables: tuple[TableChoice, ...], create: str, slots: int
) -> Iterator[Scene]:
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute(create.encode())
        target = numbered_place(dsn, tables, slots=slots)
        _install(version, target, tables)
        source = PostgresOutbox(target)
        try:
            yield Scene(dsn, target, db, source)
        finally:
            source.close()
