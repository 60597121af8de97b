"""An outbox as `evermark source install` of version 2 made it: `outbox_v2/` holds its statements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
from tests.contract.outbox_scene import Scene, numbered_place

from evermark.sources.postgres.place import PostgresPlace, TableChoice
from evermark.sources.postgres.source import PostgresOutbox
from evermark.testing.servers import PostgresServer, fresh_database

_FOLDER = Path(__file__).parent / "outbox_v2"


def install_version_2(place: PostgresPlace, tables: Sequence[TableChoice] = ()) -> None:
    with psycopg.connect(place.dsn.open(), autocommit=True) as db:
        for name in ("01_schema", "02_functions", "03_watch"):
            db.execute(_filled(name, place))
        for part in place.parts():
            for name in ("04_publication", "05_reader", "06_slot", "07_registered"):
                db.execute(_filled(name, part))
        for table in tables:
            db.execute("select pgstream.watch(%s::text::regclass)", (table.name,))


def _filled(name: str, place: PostgresPlace) -> bytes:
    text = (_FOLDER / f"{name}.sql").read_text()
    for token, value in (
        ("@schema@", '"pgstream"'),
        ("@schema_name@", "pgstream"),
        ("@publication@", f'"{place.publication}"'),
        ("@publication_literal@", f"'{place.publication}'"),
        ("@slot_literal@", f"'{place.slot}'"),
        ("@version@", "2"),
        ("@row_filter_text@", place.row_filter.replace("'", "''")),
    ):
        text = text.replace(token, value)
    return text.encode()


@contextmanager
def scene_of_version_2(server: PostgresServer, *tables: TableChoice, create: str, slots: int = 1) -> Iterator[Scene]:
    """A database with an outbox of version 2, read by this program."""
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute(create.encode())
        place = numbered_place(dsn, tables, slots=slots)
        install_version_2(place, tables)
        source = PostgresOutbox(place)
        try:
            yield Scene(dsn, place, db, source)
        finally:
            source.close()
