"""An outbox as version 2 installed it. `outbox_v2/` holds its statements as they were; they do not change any more."""

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

_FOLDER = Path(__file__).parent / "outbox_v2"
_SCHEMA = ("01_schema", "02_functions", "03_watch")
_PER_SLOT = ("04_publication", "05_reader", "06_slot", "07_registered")


def install_v2(db: psycopg.Connection[Any], slot: str, publication: str, *tables: str) -> None:
    """With one slot, on an autocommit connection."""
    for name in (*_SCHEMA, *_PER_SLOT):
        db.execute(_filled(name, slot, publication))
    _watch(db, tables)


def install_version_2(target: PostgresTarget, tables: Sequence[TableChoice] = ()) -> None:
    """With all the slots of the place."""
    with psycopg.connect(target.dsn.open(), autocommit=True) as db:
        for name in _SCHEMA:
            db.execute(_filled(name, target.slot, target.publication))
        for part in target.parts():
            for name in _PER_SLOT:
                db.execute(_filled(name, part.slot, part.publication, part.row_filter))
        _watch(db, [table.name for table in tables])


def _watch(db: psycopg.Connection[Any], tables: Sequence[str]) -> None:
    for table in tables:
        db.execute("select pgstream.watch(%s::text::regclass)", (table,))


def _filled(name: str, slot: str, publication: str, row_filter: str = "") -> bytes:
    text = (_FOLDER / f"{name}.sql").read_text()
    for token, value in (
        ("@schema@", '"pgstream"'),
        ("@schema_name@", "pgstream"),
        ("@publication@", f'"{publication}"'),
        ("@publication_literal@", f"'{publication}'"),
        ("@slot_literal@", f"'{slot}'"),
        ("@version@", "2"),
        ("@row_filter_text@", row_filter.replace("'", "''")),
    ):
        text = text.replace(token, value)
    return text.encode()


@contextmanager
def scene_of_version_2(server: PostgresServer, *tables: TableChoice, create: str, slots: int = 1) -> Iterator[Scene]:
    """A database with an outbox of version 2, read by this program."""
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute(create.encode())
        target = numbered_place(dsn, tables, slots=slots)
        install_version_2(target, tables)
        source = PostgresOutbox(target)
        try:
            yield Scene(dsn, target, db, source)
        finally:
            source.close()
