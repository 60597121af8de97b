"""A replication slot thrown away under a running pipeline, with long transactions open; the pipeline killed on its way
back. What is checked at the end is what is always checked: the log equals `events`, and receivers are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from evermark.app.demo_shop import remove_wal_of
from evermark.testing.pipeline import Instance, Ledger, Scene, Writer, died_by_itself
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server
from evermark.testing.until import until

SLOT = "evermark_scene_shop"
_LONG = 5


@contextmanager
def forgetful_server(folder: Path) -> Iterator[PostgresServer]:
    """A server whose slots can be lost on demand, by `lose`."""
    with postgres_server(folder, {"max_wal_size": "64MB", "wal_keep_size": "0"}) as server:
        yield server


def lose(server: PostgresServer, slot: str = SLOT) -> None:
    """Make the server throw the slot's WAL away. The slot must be held back, by an open transaction or by silence."""
    with server.admin() as admin:
        remove_wal_of(admin, slot)


@contextmanager
def long_transactions(dsn: str) -> Iterator[list[psycopg.Connection[tuple[object, ...]]]]:
    """Open transactions that have written events already, and hold every slot back."""
    with ExitStack() as stack:
        opened = [stack.enter_context(psycopg.connect(dsn)) for _ in range(_LONG)]
        for n, conn in enumerate(opened):
            conn.execute("insert into public.orders (total) select %s from generate_series(1, 10)", (n,))
        yield opened


def write_many(dsn: str, events: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for first in range(0, events, 1000):
            rows = min(1000, events - first)
            conn.execute("insert into public.orders (total) select n from generate_series(1, %s) n", (rows,))


def mended(
    folder: Path, server: PostgresServer, events: int, kills: Sequence[str] = (), *, once_more_while_idle: bool = False
) -> Ledger:
    """Lose the slot while five transactions are open and `events` are written; die at each of `kills` while it is
    mended; perhaps lose the slot a second time, when nothing is written any more; what was counted in the end."""
    with fresh_database(server) as dsn, Scene(folder, dsn, {"steady": None}, steady="bundle: 50") as scene:
        writer = Writer(dsn)
        writer.start()
        try:
            running = scene.up(f"{kills[0]}@1" if kills else None)
            scene.wait_delivered(20)
            with long_transactions(dsn) as opened:
                write_many(dsn, events)
                lose(server)
                _noticed(running)
                for conn in opened:
                    conn.execute("insert into public.orders (total) values (-1)")
                    conn.commit()
            for name in kills[1:]:
                died_by_itself(running)
                running = scene.up(f"{name}@1")
            if kills:
                died_by_itself(running)
                running = scene.up()
            else:
                _closed(running)
        finally:
            writer.finish()
        ledger = scene.check_complete(timeout_s=300)
        if once_more_while_idle:
            _mended_while_idle(server, running)
            write_many(dsn, 10)
            ledger = scene.check_complete()
        assert running.terminate() == 0
        return ledger


def _mended_while_idle(server: PostgresServer, running: Instance) -> None:
    """Lose the slot of a process that has taken everything: the loss is noticed and mended, and no event is needed."""
    _closed(running)  # everything may have arrived before the first repair has put the new slot in its place
    before = running.log.read_text().count("the hole is closed")
    lose(server)
    until(
        lambda: running.log.read_text().count("the hole is closed") > before,
        "the hole is closed without an event",
        timeout_s=120,
    )


def mended_twice(folder: Path, server: PostgresServer, events: int) -> Ledger:
    """The new slot is lost as well, after the hole was closed and before it took the old one's place."""
    with fresh_database(server) as dsn, Scene(folder, dsn, {"steady": None}, steady="bundle: 50") as scene:
        running = scene.up("mend.closed@1")
        write_many(dsn, 100)
        scene.wait_delivered(50)
        with long_transactions(dsn) as opened:
            write_many(dsn, events)
            lose(server)
            for conn in opened:
                conn.commit()
        died_by_itself(running)
        write_many(dsn, events)
        lose(server, f"{SLOT}_mend")
        running = scene.up()
        _closed(running)
        write_many(dsn, 100)
        ledger = scene.check_complete(timeout_s=300)
        assert running.said("was lost too")
        assert running.terminate() == 0
        return ledger


def _closed(running: Instance) -> None:
    until(lambda: running.said("the hole is closed"), "the hole is closed", timeout_s=180)


def _noticed(running: Instance) -> None:
    until(lambda: running.died() or running.said("a hole was found"), "the loss was noticed", timeout_s=60)


def one_of_several_mended(folder: Path, server: PostgresServer, events: int) -> Ledger:
    """Three slots share the events; one of them is dropped by hand. The others go on, and nothing is missing."""
    with fresh_database(server) as dsn, Scene(folder, dsn, {"steady": None}, slots=3, steady="bundle: 50") as scene:
        writer = Writer(dsn)
        writer.start()
        try:
            running = scene.up()
            scene.wait_delivered(20)
            write_many(dsn, events)
            with psycopg.connect(dsn, autocommit=True) as conn:
                until(lambda: _dropped(conn, f"{SLOT}_p1"), "the slot is dropped")
            _closed(running)
        finally:
            writer.finish()
        ledger = scene.check_complete()
        assert not running.said('"partition": 0, "error"'), "a slot that was well was blamed"
        assert running.terminate() == 0
        return ledger


def _dropped(conn: psycopg.Connection[tuple[object, ...]], slot: str) -> bool:
    """Between two reads: a slot in use cannot be dropped."""
    try:
        conn.execute("select pg_drop_replication_slot(%s)", (slot,))
    except psycopg.errors.ObjectInUse:
        return False
    return True
