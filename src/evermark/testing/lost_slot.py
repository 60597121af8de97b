"""A replication slot thrown away under a running pipeline, with long transactions open; the pipeline killed on its way
back. What is checked at the end is what is always checked: the log equals `events`, and receivers are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from evermark.app.demo_shop import remove_wal_of
from evermark.testing.pipeline import Instance, Scene, Writer, died_by_itself
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


@contextmanager
def losing_scene(folder: Path, server: PostgresServer, slots: int = 1) -> Iterator[Scene]:
    """A shop on a server that may lose its slots."""
    with fresh_database(server) as dsn, Scene(folder, dsn, {"steady": None}, slots, steady="bundle: 50") as scene:
        yield scene


def repaired(scene: Scene, server: PostgresServer, events: int, kills: Sequence[str] = (), then: str = "") -> Instance:
    """Lose the slot while five transactions are open and `events` are written; die at each of `kills` while it is
    repaired; the instance that ended the repair, with everything delivered. It was started with the failpoint `then`.
    """
    writer = Writer(scene.dsn)
    writer.start()
    failpoints = [*(f"{name}@1" for name in kills), then or None]
    try:
        running = scene.up(failpoints[0])
        scene.wait_delivered(20)
        with long_transactions(scene.dsn) as opened:
            write_many(scene.dsn, events)
            lose(server)
            _noticed(running)
            for conn in opened:
                conn.execute("insert into public.orders (total) values (-1)")
                conn.commit()
        for name in failpoints[1:]:
            died_by_itself(running)
            running = scene.up(name)
        _closed(running)
    finally:
        writer.finish()
    scene.check_complete()
    return running


def repaired_twice(scene: Scene, server: PostgresServer, events: int, running: Instance) -> Instance:
    """The new slot is lost as well, after the gap was closed and before it took the old slot's place; the instance
    that brought it to an end. `running` was started with the failpoint repair.closed@1."""
    write_many(scene.dsn, 100)
    scene.wait_delivered(scene.delivered("steady") + 50)
    with long_transactions(scene.dsn) as opened:
        write_many(scene.dsn, events)
        lose(server)
        for conn in opened:
            conn.commit()
    died_by_itself(running)
    write_many(scene.dsn, events)
    lose(server, f"{SLOT}_mend")
    last = scene.up()
    _closed(last)
    write_many(scene.dsn, 100)
    scene.check_complete()
    assert last.said("was lost too")
    return last


def repaired_while_idle(scene: Scene, server: PostgresServer, running: Instance) -> None:
    """Lose the slot of a process that has taken everything: the loss is noticed and repaired without an event."""
    running.forget()
    lose(server)
    until(lambda: running.said("the gap is closed"), "the gap is closed without an event")
    write_many(scene.dsn, 10)
    scene.check_complete()


def _closed(running: Instance) -> None:
    until(lambda: running.said("the gap is closed"), "the gap is closed")


def _noticed(running: Instance) -> None:
    until(lambda: running.died() or running.said("a gap was found"), "the loss was noticed")


def one_of_several_repaired(scene: Scene, events: int) -> Instance:
    """Three slots share the events; one of them is dropped by hand. The others go on, and nothing is missing."""
    writer = Writer(scene.dsn)
    writer.start()
    try:
        running = scene.up()
        scene.wait_delivered(20)
        write_many(scene.dsn, events)
        with psycopg.connect(scene.dsn, autocommit=True) as conn:
            until(lambda: slot_is_dropped(conn, f"{SLOT}_p1"), "the slot is dropped")
        _closed(running)
    finally:
        writer.finish()
    scene.check_complete()
    assert not running.said('"partition": 0, "error"'), "a slot that was well was blamed"
    return running


def slot_is_dropped(conn: psycopg.Connection[tuple[object, ...]], slot: str) -> bool:
    """A slot in use cannot be dropped: its reader is ended first, and may be quicker to come back."""
    reader = "select pg_terminate_backend(active_pid, 1000) from pg_replication_slots where slot_name = %s"
    conn.execute(reader, (slot,))
    try:
        conn.execute("select pg_drop_replication_slot(%s)", (slot,))
    except psycopg.errors.ObjectInUse:
        return False
    return True
