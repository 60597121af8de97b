"""A database with an outbox, and writers: what the benches have in common."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from evermark.embedded.postgres import EmbeddedPostgres
from evermark.secrets import Plain
from evermark.sources.postgres.admin.install import install
from evermark.sources.postgres.target import PostgresTarget

_WRITERS = 4
_TRANSACTION_ROWS = 1_000
_INSERT = """
insert into pgstream.events (stream, op, key, payload)
select 'public.orders', 'insert', n::text,
       jsonb_build_object('id', n, 'customer', 'customer ' || n %% 1000, 'note', repeat('x', 40))
from generate_series(%s::bigint, %s::bigint) n
"""


@contextmanager
def shop(folder: Path, *, tcp: bool = False) -> Iterator[EmbeddedPostgres]:
    """A server of its own, as a user's would be: defaults, fsync on; only WAL may grow so that a backlog fits.

    `tcp`: on loopback, too, for whoever knows no sockets.
    """
    settings = {"max_wal_size": "8GB", "max_replication_slots": "40", "max_wal_senders": "20"}
    with EmbeddedPostgres(folder / "shop", settings=settings, tcp=tcp) as server:
        yield server


def place(dsn: str, name: str) -> PostgresTarget:
    return PostgresTarget(Plain(dsn), slot=name, publication=name)


def prepare(dsn: str, name: str) -> PostgresTarget:
    """An installed source with a slot of its own, from here on."""
    made = place(dsn, name)
    install(made)
    return made


def write(dsn: str, events: int) -> None:
    """`events` rows in 1 000-row transactions from four interleaved writers."""
    share = events // _WRITERS

    def writer(index: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for first in range(index * share, (index + 1) * share, _TRANSACTION_ROWS):
                conn.execute(_INSERT, (first, min(first + _TRANSACTION_ROWS, (index + 1) * share) - 1))

    threads = [threading.Thread(target=writer, args=(i,)) for i in range(_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def flush_lsn(dsn: str) -> str:
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute("select pg_current_wal_flush_lsn()").fetchone()
        assert row is not None
        return str(row[0])


def event_ids(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as conn:
        return {str(row[0]) for row in conn.execute("select id from pgstream.events")}
