"""The table the log implies is the table there is: random changes in a real Postgres, keys among them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from evermark import Log
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.write import BatchWriter
from evermark.sources.base import Slice
from evermark.sources.postgres.admin.install import install
from evermark.sources.postgres.read.outbox_capture import OutboxCapture
from evermark.sources.postgres.read.slot import SlotReader
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.postgres.outbox_scene import numbered_place
from tests.contract.postgres.outbox_v2_scene import install_version_2

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Database = psycopg.Connection[Any]

pytestmark = pytest.mark.usefixtures("interpreted")
TABLES = (TableChoice("public.one"), TableChoice("public.two"), TableChoice("public.late"))
CREATE = """
create table one (id int primary key, name text, again int);
create table two (shop text, nth bigint, name text, primary key (shop, nth));
create table late (id int primary key deferrable initially deferred, name text, again int);
"""
_names = (f"n{n}" for n in itertools.count())


class Taken:
    """The log of an outbox, taken from its slots batch by batch."""

    def __init__(self, target: PostgresTarget, path: Path) -> None:
        self._readers = [SlotReader(OutboxCapture(part)) for part in target.parts()]
        self._at = [reader.earliest() for reader in self._readers]
        self._batches = [0 for _ in self._readers]
        self._folder = path / "shop"
        self._log = DeltaLog(self._folder)

    def take(self, db: Database) -> None:
        for number, reader in enumerate(self._readers):
            db.execute("select pgstream.emit('mark', 'm', '{}')")
            (flushed,) = db.execute("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone() or (0,)
            start = self._at[number]
            end = f"{start[:25]}{int(flushed):016x}:00000000"
            batch = self._batches[number] + 1
            file = BatchWriter(self._folder, "shop", number, batch).write_all(reader.read(Slice(number, start, end)))
            self._at[number] = end
            if file is not None:
                self._batches[number] = batch
                self._log.commit(Append(number, batch, 1, start, end, (file,)))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def changed_one(db: Database, rng: random.Random, table: str) -> None:
    """A row comes, goes, changes, or gets a key that is free; or two rows swap theirs."""
    ids = [row[0] for row in db.execute(f"select id from {table}".encode()).fetchall()]
    free = rng.choice([n for n in range(1, 99) if n not in ids][:3])
    kind = rng.random()
    if not ids or kind < 0.25:
        row = (free, next(_names), rng.randint(1, 11))
        db.execute(f"insert into {table} values (%s, %s, %s)".encode(), row)
    elif kind < 0.4:
        db.execute(f"delete from {table} where id = %s".encode(), (rng.choice(ids),))
    elif kind < 0.55:
        db.execute(f"update {table} set again = %s where id = %s".encode(), (rng.randint(1, 11), rng.choice(ids)))
    elif kind < 0.8 or len(ids) < 2:
        db.execute(f"update {table} set id = %s where id = %s".encode(), (free, rng.choice(ids)))
    else:
        a, b = rng.sample(ids, 2)
        if table == "late":
            swap = "update late set id = case id when %s then %s::int else %s end where id in (%s, %s)"
            db.execute(swap.encode(), (a, b, a, a, b))
        else:
            for old, new in ((a, -1), (b, a), (-1, b)):
                db.execute(f"update {table} set id = %s where id = %s".encode(), (new, old))


def changed_two(db: Database, rng: random.Random, _: str) -> None:
    """The same with a key of two columns."""
    ids = db.execute("select shop, nth from two").fetchall()
    shop, nth = rng.choice(["a", 'b"é', "c d"]), rng.choice([1, 2, 9007199254740993])
    kind = rng.random()
    if not ids or kind < 0.4:
        db.execute("insert into two values (%s, %s, %s) on conflict do nothing", (shop, nth, next(_names)))
        return
    one = rng.choice(ids)
    if kind < 0.5:
        db.execute("delete from two where (shop, nth) = (%s, %s)", one)
    elif kind < 0.6:
        db.execute("update two set name = %s where (shop, nth) = (%s, %s)", (next(_names), *one))
    elif (shop, nth) not in ids:
        db.execute("update two set shop = %s, nth = %s where (shop, nth) = (%s, %s)", (shop, nth, *one))


CHANGES: dict[str, Callable[[Database, random.Random, str], None]] = {
    "one": changed_one,
    "two": changed_two,
    "late": changed_one,
}


@contextmanager
def captured(
    server: PostgresServer, path: Path, *, slots: int = 1, version_2: bool = False
) -> Iterator[tuple[Database, Taken]]:
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute(CREATE.encode())
        target = numbered_place(dsn, TABLES, slots=slots)
        install_version_2(target, TABLES) if version_2 else install(target, TABLES)
        log = Taken(target, path)
        try:
            yield db, log
        finally:
            log.close()


def wander(db: Database, rng: random.Random, log: Taken, transactions: int, tables: tuple[str, ...]) -> None:
    for turn in range(transactions):
        with db.transaction(force_rollback=rng.random() < 0.1):
            for _ in range(rng.choice((1, 1, 2, 4))):
                table = rng.choice(tables)
                if rng.random() < 0.02:
                    # Postgres truncates no table whose deferred checks are still to come.
                    db.execute("set constraints all immediate")
                    db.execute(f"truncate {table}".encode())
                    db.execute("set constraints all deferred")
                else:
                    CHANGES[table](db, rng, table)
        if turn % 25 == 24:
            log.take(db)
    log.take(db)


def there(db: Database, table: str) -> list[str]:
    rows = db.execute(f"select to_jsonb(t) from {table} t".encode()).fetchall()
    return sorted(json.dumps(_as_text(row[0]), sort_keys=True) for row in rows)


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, int) else value for name, value in row.items()}


def implied(spark: SparkSession, path: Path, table: str) -> list[str]:
    rows = Log(path).table(spark, "shop", f"public.{table}").collect()
    return sorted(json.dumps(_as_text(json.loads(row["payload"])), sort_keys=True) for row in rows)


@pytest.mark.parametrize(("slots", "tables"), [(1, ("one", "two", "late")), (3, ("one", "two"))])
def test_the_implied_table_is_the_table_whatever_became_of_its_keys(
    spark: SparkSession, pg_server: PostgresServer, tmp_path: Path, slots: int, tables: tuple[str, ...]
) -> None:
    """GIVEN random changes, of keys too, in transactions WHEN all is logged THEN the log implies the very rows."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    with captured(pg_server, tmp_path, slots=slots) as (db, log):
        wander(db, random.Random(seed), log, 150, tables)
        for table in tables:
            assert implied(spark, tmp_path, table) == there(db, table), f"seed {seed}"


def test_of_an_outbox_of_version_2_the_table_is_implied_where_keys_are_proven(
    spark: SparkSession, pg_server: PostgresServer, tmp_path: Path
) -> None:
    """GIVEN events that name no key that was left WHEN their columns tell it THEN composite keys leave no ghost, and no
    row that is there is missing."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    with captured(pg_server, tmp_path, version_2=True) as (db, log):
        wander(db, random.Random(seed), log, 100, ("one", "two"))
        assert implied(spark, tmp_path, "two") == there(db, "two"), f"seed {seed}"
        assert set(implied(spark, tmp_path, "one")) >= set(there(db, "one")), f"seed {seed}"
