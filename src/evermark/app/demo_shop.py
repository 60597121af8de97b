"""The demo's shop: its table, its trade, and what its people do to their database."""

from __future__ import annotations

import itertools
import random
import threading
import time

import psycopg

from evermark.app.demo_book import Change
from evermark.errors import EvermarkError
from evermark.event import Op

STREAM = "public.orders"
_LOSE_S = 60.0

ORDERS = """
create table public.orders (
  id bigint generated always as identity primary key,
  customer text not null,
  total numeric(10, 2) not null,
  status text not null default 'new',
  change bigint not null,  -- the number of the newest change of this order
  placed_at timestamptz not null default now()
)
"""


class Shop(threading.Thread):
    """Places, changes and cancels orders at about this rate, in transactions of different sizes, and keeps a book of
    what it committed, in that order."""

    def __init__(self, dsn: str, rate: float) -> None:
        super().__init__(name="shop", daemon=True)
        self._dsn = dsn
        self._rate = rate
        self._done = threading.Event()
        self._random = random.Random(2026)
        self._numbers = itertools.count(1)
        self._committing = threading.Lock()  # so that the book has the order of the commits
        self.book: list[Change] = []
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

    def place(self, conn: psycopg.Connection[tuple[object, ...]], customer: str, total: float) -> Change:
        """An order in the connection's transaction, which is not in the book before `commit`."""
        number = next(self._numbers)
        sql = "insert into public.orders (customer, total, change) values (%s, %s, %s) returning id"
        row = conn.execute(sql, (customer, total, number)).fetchone()
        if row is None:
            raise EvermarkError("the shop's database took an order and gave it no number")
        return Change(Op.INSERT, int(str(row[0])), number)

    def commit(self, conn: psycopg.Connection[tuple[object, ...]], made: list[Change]) -> None:
        with self._committing:
            conn.commit()
            self.book += made

    def _transaction(self, conn: psycopg.Connection[tuple[object, ...]]) -> int:
        size = self._random.choice((1, 1, 1, 2, 5, 20))
        made: list[Change] = []
        for _ in range(size):
            draw = self._random.random()
            if draw < 0.8:
                customer = f"customer {self._random.randrange(1000)}"
                made.append(self.place(conn, customer, round(self._random.uniform(1, 100), 2)))
            else:
                made += self._alter(conn, Op.DELETE if draw > 0.97 else Op.UPDATE)
        self.commit(conn, made)
        return size

    def _alter(self, conn: psycopg.Connection[tuple[object, ...]], op: Op) -> list[Change]:
        """One of the newest orders is paid or cancelled, unless it was cancelled before."""
        number = next(self._numbers)
        newest = "where id = (select max(id) from public.orders) - %s returning id"
        back = self._random.randrange(50)
        if op == Op.DELETE:
            rows = conn.execute(f"delete from public.orders {newest}", (back,)).fetchall()
        else:
            pay = f"update public.orders set status = 'paid', change = %s {newest}"
            rows = conn.execute(pay, (number, back)).fetchall()
        return [Change(op, int(str(row[0])), number) for row in rows]


def throw_slot_away(dsn: str, slot: str, shop: Shop) -> None:
    """What a full disk or a careful limit does: an open transaction holds the slot back, and its WAL is removed."""
    with psycopg.connect(dsn) as long, psycopg.connect(dsn, autocommit=True) as admin:
        made = shop.place(long, "slow", 99)
        remove_wal_of(admin, slot)
        shop.commit(long, [made])


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
