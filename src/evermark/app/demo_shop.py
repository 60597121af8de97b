"""The demo's shop: its table, its trade, and what its people do to their database."""

from __future__ import annotations

import random
import threading
import time
from datetime import datetime

import psycopg

from evermark.errors import EvermarkError

STREAM = "public.orders"
_LOSE_S = 60.0

ORDERS = """
create table public.orders (
  id bigint generated always as identity primary key,
  customer text not null,
  total numeric(10, 2) not null,
  status text not null default 'new',
  placed_at timestamptz not null default now()
)
"""


class Shop(threading.Thread):
    """Places, changes and cancels orders at about this rate, in transactions of different sizes."""

    def __init__(self, dsn: str, rate: float) -> None:
        super().__init__(name="shop", daemon=True)
        self._dsn = dsn
        self._rate = rate
        self._done = threading.Event()
        self._random = random.Random(2026)
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with psycopg.connect(self._dsn) as conn:
                # A slow machine gets fewer orders: made up for, they would keep it busy until the shop closes.
                while not self._done.wait(self._transaction(conn) / self._rate):
                    pass
        except psycopg.Error as error:
            self.error = error

    def finish(self) -> None:
        self._done.set()
        if self.ident:
            self.join()

    def _transaction(self, conn: psycopg.Connection[tuple[object, ...]]) -> int:
        size = self._random.choice((1, 1, 1, 2, 5, 20))
        with conn.transaction(), conn.cursor() as cursor:
            for _ in range(size):
                draw = self._random.random()
                if draw < 0.8:
                    cursor.execute(
                        "insert into public.orders (customer, total) values (%s, %s)",
                        (f"customer {self._random.randrange(1000)}", round(self._random.uniform(1, 100), 2)),
                    )
                else:
                    change = "delete from public.orders" if draw > 0.97 else "update public.orders set status = 'paid'"
                    newest = "(select max(id) from public.orders)"
                    cursor.execute(f"{change} where id = {newest} - %s", (self._random.randrange(50),))
        return size


def throw_slot_away(dsn: str, slot: str) -> None:
    """What a full disk or a careful limit does: an open transaction holds the slot back, and its WAL is removed."""
    with psycopg.connect(dsn) as long, psycopg.connect(dsn, autocommit=True) as admin:
        long.execute("insert into public.orders (customer, total) values ('slow', 99)")
        remove_wal_of(admin, slot)
        long.commit()


def remove_wal_of(admin: psycopg.Connection[tuple[object, ...]], slot: str) -> None:
    """Make the server forget what the slot still needs. It must be held back, by an open transaction or by silence."""
    status = "select wal_status from pg_replication_slots where slot_name = %s"
    admin.execute("alter system set max_slot_wal_keep_size = '1MB'")
    admin.execute("select pg_reload_conf()")
    deadline = time.monotonic() + _LOSE_S
    while admin.execute(status, (slot,)).fetchone() != ("lost",):
        if time.monotonic() > deadline:
            raise EvermarkError(f"slot {slot} could not be thrown away within {_LOSE_S:.0f} s")
        admin.execute("select pg_logical_emit_message(false, 'filler', repeat('x', 1000))")
        admin.execute("select pg_switch_wal()")
        admin.execute("checkpoint")
    admin.execute("alter system reset max_slot_wal_keep_size")
    admin.execute("select pg_reload_conf()")


def ask_for_replay(dsn: str, share: float) -> tuple[datetime, datetime]:
    """One UPDATE: the first `share` of all that happened so far, once more. Returns the window."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "select min(created_at), min(created_at) + (max(created_at) - min(created_at)) * %s"
            " from pgstream.events where stream = %s and op <> 'control'",
            (share, STREAM),
        ).fetchone()
        if row is None or row[0] is None:
            raise EvermarkError("there is nothing to replay yet")
        conn.execute(
            "update pgstream.streams set replay_from_ts = %s, replay_to_ts = %s where name = %s", (*row, STREAM)
        )
        return row[0], row[1]


def replay_is_done(dsn: str) -> bool:
    """The request is cleared when all of it was delivered."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute("select replay_from_ts from pgstream.streams where name = %s", (STREAM,)).fetchone()
        return row == (None,)
