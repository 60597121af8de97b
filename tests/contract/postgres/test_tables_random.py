"""Tables changed at random: what the events say of them at the end is what the server has (P3)."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from evermark.sources.base import Limit
from evermark.sources.postgres.tables.source import PostgresTables
from evermark.testing.servers import PostgresServer
from evermark.testing.until import until
from tests.contract.postgres.tables_scene import Row, Scene, scene

STEPS = 500
CREATE = """
create table plain (id int primary key, n numeric, t text, at timestamptz);
create table whole (id int primary key, n numeric, t text, at timestamptz);
create table parts (id int primary key, n numeric, t text, at timestamptz) partition by hash (id);
create table parts_0 partition of parts for values with (modulus 2, remainder 0);
create table parts_1 partition of parts for values with (modulus 2, remainder 1);
alter table whole replica identity full;
alter table plain alter t set storage external;
alter table whole alter t set storage external;
"""
NAMES = ("plain", "whole", "parts")


class Writers:
    """Transactions that overlap; two of them that want the same row give way."""

    def __init__(self, at: Scene, rng: random.Random) -> None:
        self.at, self.rng = at, rng
        self.open = [at.connection() for _ in range(3)]
        for conn in self.open:
            conn.execute("set lock_timeout = '50ms'")
            conn.commit()
        self.added = 0

    def step(self) -> None:
        conn, choice = self.rng.choice(self.open), self.rng.random()
        try:
            if choice < 0.6:
                self.change(conn)
            elif choice < 0.68:
                conn.execute("savepoint here")
                self.change(conn)
                conn.execute("rollback to savepoint here")
            elif choice < 0.7:
                self.added += 1
                table = self.rng.choice(NAMES)
                conn.execute(f"alter table {table} add column c{self.added} int".encode())
                self.change(conn)
            else:
                (conn.commit if choice < 0.97 else conn.rollback)()
        except psycopg.Error:
            conn.rollback()

    def change(self, conn: psycopg.Connection[Any]) -> None:
        rng, table, key = self.rng, self.rng.choice(NAMES), self.rng.randint(1, 30)
        text = rng.choice(["short", 'qu"ote\n', "x" * 3000, None])
        kind = rng.random()
        if kind < 0.4:
            values = (key, Decimal(rng.randint(-(10**20), 10**20)).scaleb(-3), text, "2024-01-01 00:00:00.5+00")
            query = f"insert into {table} (id, n, t, at) values (%s, %s, %s, %s) on conflict (id) do update set n = 1"
            conn.execute(query.encode(), values)
        elif kind < 0.6:
            conn.execute(f"update {table} set n = n + 1 where id between %s and %s".encode(), (key, key + 5))
        elif kind < 0.7:
            conn.execute(f"update {table} set t = %s where id = %s".encode(), (text, key))
        elif kind < 0.8:
            conn.execute(f"update {table} set id = %s where id = %s".encode(), (rng.randint(31, 60), key))
        elif kind < 0.97:
            conn.execute(f"delete from {table} where id = %s".encode(), (key,))
        else:
            conn.execute(f"truncate {', '.join(rng.sample(NAMES, 2))}".encode())

    def end(self) -> None:
        for conn in self.open:
            with suppress(psycopg.Error):
                conn.commit()
            conn.close()


class Implied:
    """The tables that events imply."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, dict[str, Any]]] = {f"public.{name}": {} for name in NAMES}

    def apply(self, row: Row) -> None:
        table = self.tables.get(row["stream"], {})
        if row["op"] == "truncate":
            table.clear()
        elif row["op"] == "delete":
            del table[row["key"]]
        elif row["op"] in ("insert", "update"):
            old = table.pop(row["previous_key"] or row["key"], {})
            new = json.loads(row["payload"])
            for flag in row["flags"]:
                column = flag.removeprefix("unknown:")
                new[column] = old[column]
            table[row["key"]] = new


def there(at: Scene, name: str) -> dict[str, dict[str, Any]]:
    rows = at.db.execute(f"select to_jsonb(r.*), n::text from {name} r".encode()).fetchall()
    return {str(row["id"]): {**row, "n": n} for row, n in rows}


def take_some(at: Scene, source: PostgresTables, start: str, rng: random.Random) -> tuple[str, list[Row]]:
    """By asking, in batches of any size."""
    end = source.latest({0: start}, Limit(bytes_max=rng.choice([500, 5_000, 10**6]), wait_s=0.1))[0]
    piece = source.slices(0, start, end)
    return end, [row for each in piece for batch in source.read(each) for row in batch.to_pylist()]


def fed(source: PostgresTables, start: str, least: int) -> tuple[str, list[Row]]:
    """As it is sent, until there is nothing more or enough."""
    feed, rows, end = source.follow(0, start, lambda: None), [], start  # type: ignore[var-annotated]

    def take() -> bool:
        nonlocal end
        found = feed.next()
        if found is not None:
            rows.extend(row for batch in found.batches() for row in batch.to_pylist())
            end = found.end()
        return len(rows) >= least

    try:
        with suppress(AssertionError):
            until(take, "rows are sent", timeout_s=0.5)
        feed.confirm(end)
    finally:
        feed.close()
    return end, rows


@pytest.mark.parametrize("turn", range(2))
def test_the_tables_that_events_imply_are_those_of_the_server(server: PostgresServer, turn: int) -> None:
    """Under overlapping transactions, savepoints, DDL, key changes, truncates and large values; asked for and sent in
    turn, by readers that are made anew, cut anywhere and confirmed late."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    print(f"seed {seed}, turn {turn}")
    with scene(server, *(f"public.{name}" for name in NAMES), create=CREATE) as at:
        implied, ids, source = Implied(), [], at.source
        position = source.earliest(0)
        writers = Writers(at, rng)

        def take(*, by_feed: bool) -> int:
            nonlocal position
            end, rows = fed(source, position, 20) if by_feed else take_some(at, source, position, rng)
            assert all(position <= row["position"] < end for row in rows)
            for row in rows:
                implied.apply(row)
                ids.append(row["event_id"])
            if rng.random() < 0.5:
                source.confirm(0, end)
            position = end
            return len(rows)

        for number in range(STEPS):
            writers.step()
            if number % 25 == 24:
                take(by_feed=rng.random() < 0.4)
                source.close()
                source = PostgresTables(at.settings.target(), at.source._open)
        writers.end()
        at.run("insert into plain (id) values (1000)")
        last = implied.tables["public.plain"]
        until(lambda: not take(by_feed=False) and "1000" in last, "all is taken", timeout_s=60)
        source.close()
        assert len(set(ids)) == len(ids) > 50
        for name in NAMES:
            wanted = there(at, name)
            # A column that was added changes no row: rows from before it do not have it in their events.
            rows = implied.tables[f"public.{name}"].items()
            found = {key: {**dict.fromkeys(wanted.get(key, {})), **row} for key, row in rows}
            assert found == wanted, (seed, name)
