"""An outbox that an earlier version installed: read on as it is, and upgraded in place while it is written to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from evermark.observe.finding import Grade
from evermark.secrets import Plain
from evermark.sources.postgres.admin.doctor import judged
from evermark.sources.postgres.admin.examine import examine
from evermark.sources.postgres.admin.install import install
from evermark.sources.postgres.outbox import SCHEMA_VERSION
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.repair.server import repair_of
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.postgres.outbox_scene import Scene
from tests.contract.postgres.outbox_v2_scene import install_v2, scene_of_version_3

CREATE = """
create table orders (id int primary key, total numeric);
create table p (id int primary key) partition by range (id);
create table p1 partition of p for values from (0) to (100);
"""
TABLES = (TableChoice("public.orders"), TableChoice("public.p"))


@pytest.fixture
def at(server: PostgresServer) -> Iterator[Scene]:
    """An outbox of version 2 with two captured tables, and an event in it."""
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute(CREATE.encode())
        install_v2(db, "old_slot", "old_pub", "public.orders", "public.p")
        db.execute("insert into orders values (1, 1.5)")
        target = PostgresTarget(Plain(dsn), "old_slot", "old_pub", tables=TABLES)
        source = PostgresOutbox(target)
        try:
            yield Scene(dsn, target, db, source)
        finally:
            source.close()


def keys(at: Scene, start: str | None = None) -> list[str]:
    return [row["key"] for row in at.drain(start) if row["stream"] != "scene"]


def test_an_outbox_of_version_2_is_read_on_and_what_to_run_is_said(at: Scene) -> None:
    """GIVEN an installed version 2 WHEN the program is newer THEN it reads, keeps up, repairs, and warns by name."""
    at.source.check({})
    start = at.source.earliest(0)
    at.db.execute("insert into orders values (2, 2.5); delete from orders where id = 1")
    assert keys(at) == ["1", "2", "1"]
    at.source.upkeep()
    condition = at.source.condition()
    assert "evermark source install" in condition.warnings["outbox_version"].hint and not condition.upkeep_due
    found = {f.check: f for f in judged(examine(at.target), at.target, None)}
    assert found["outbox"].grade is Grade.WARNING and "evermark source install" in found["outbox"].mend
    assert not [f for f in found.values() if f.grade is Grade.WRONG]
    # AND a lost slot is repaired
    at.source.close()
    at.db.execute("select pg_drop_replication_slot('old_slot')")
    repair = repair_of(at.target)
    gap = repair.begin(lambda: False, start)
    rows = [row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist()]
    repair.finish(gap.position)
    assert [row["key"] for row in rows] == ["1", "2", "1"]
    at.source.check({0: gap.position})


@contextmanager
def written_to(dsn: str) -> Iterator[list[int]]:
    """Orders are written by two sessions, in transactions of several, until the block ends; all that were committed."""
    done = threading.Event()
    committed: list[int] = []

    def write(first: int) -> None:
        with psycopg.connect(dsn) as conn:
            number = first
            while not done.is_set():
                conn.execute("insert into orders values (%s, 1)", (number,))
                conn.execute("insert into orders values (%s, 2)", (number + 1,))
                conn.commit()
                committed.extend((number, number + 1))
                number += 4

    writers = [threading.Thread(target=write, args=(first,)) for first in (1000, 1002)]
    for writer in writers:
        writer.start()
    try:
        yield committed
    finally:
        done.set()
        for writer in writers:
            writer.join()


def test_install_upgrades_in_place_under_load_and_loses_nothing(at: Scene) -> None:
    """GIVEN version 2 under load WHEN installed again THEN it is of the next version, and every row is read once."""
    start = at.source.earliest(0)
    with written_to(at.dsn) as committed:
        before = len(committed)
        assert install(at.target, TABLES) == ["public.orders unchanged", "public.p unchanged"]
        assert at.value("select version from pgstream.meta") == SCHEMA_VERSION
        at.db.execute("insert into orders values (2, 2)")
    assert len(committed) > before
    at.source.check({0: start})
    rows = at.drain(start)
    assert sorted(int(row["key"]) for row in rows) == sorted([1, 2, *committed])
    assert {json.loads(row["payload"])["total"] for row in rows} <= {"1", "2", "1.5"}
    assert "outbox_version" not in at.source.condition().warnings
    # AND what only the next version captures is captured
    at.db.execute("insert into p values (5)")
    start = at.position(at.flush_lsn())
    at.db.execute("truncate p1")
    assert [(row["op"], row["key"]) for row in at.drain(start)] == [("delete", "5")]


def test_the_upgrade_waits_for_a_transaction_that_has_written_to_the_outbox(at: Scene) -> None:
    """GIVEN a transaction open in the outbox WHEN upgraded THEN it ends, the upgrade comes after it, nobody fails."""
    with psycopg.connect(at.dsn) as other:
        other.execute("insert into orders values (7, 7)")
        done: list[str] = []
        thread = threading.Thread(target=lambda: done.extend(install(at.target, TABLES, wait_s=30)))
        thread.start()
        at.db.execute("insert into orders values (8, 8)")
        other.commit()
        thread.join(40)
    assert done == ["public.orders unchanged", "public.p unchanged"]
    assert sorted(keys(at)) == ["1", "7", "8"]


def test_triggers_of_version_3_get_the_name_that_comes_first(server: PostgresServer) -> None:
    """GIVEN version 3 under load, a table of it not in the file WHEN installed again THEN all have the new triggers."""
    create = f"{CREATE} create table more (id int primary key, secret text)"
    with scene_of_version_3(server, *TABLES, TableChoice("public.more", exclude=("secret",)), create=create) as at:
        found = {f.check: f for f in judged(examine(at.target), at.target, None)}
        assert found["triggers"].grade is Grade.OK if "triggers" in found else found["tables"].grade is Grade.OK
        start = at.source.earliest(0)
        with written_to(at.dsn) as committed:
            assert install(at.target, TABLES) == ["public.orders unchanged", "public.p unchanged"]
        at.db.execute(
            "insert into p values (5); truncate p1; insert into p values (6); insert into more values (1, 'x')"
        )
        at.db.execute("truncate p")
        rows = at.drain(start)
        assert sorted(int(row["key"]) for row in rows if row["stream"] == "public.orders") == sorted(committed)
        told = [(row["op"], row["key"]) for row in rows if row["stream"] == "public.p"]
        assert told == [("insert", "5"), ("delete", "5"), ("insert", "6"), ("truncate", None)]
        assert [json.loads(row["payload"]) for row in rows if row["stream"] == "public.more"] == [{"id": 1}]
        names = at.db.execute("select distinct tgname from pg_trigger where tgname ~ 'pgstream_capture'").fetchall()
        assert names == [("!pgstream_capture",)]
        # AND a table whose triggers could not be renewed is named
        at.db.execute('alter trigger "!pgstream_capture" on more rename to pgstream_capture')
        named = [f for f in judged(examine(at.target), at.target, None) if f.check == "triggers"]
        assert [(f.grade, "public.more" in f.found) for f in named] == [(Grade.WARNING, True)]
        at.db.execute("insert into more values (2, 'x')")
        assert [json.loads(row["payload"]) for row in at.drain()][-1] == {"id": 2}


def test_virtual_generated_columns_are_left_out(server: PostgresServer) -> None:
    """GIVEN version 3, which logs them as null WHEN installed again THEN they are in no event, and new columns are."""
    if server.binaries.major < 18:
        pytest.skip("no virtual generated columns before 18")
    create = "create table v (id int primary key, price int, total int generated always as (price * 2))"
    table = TableChoice("public.v", hash=("price",))
    with scene_of_version_3(server, TableChoice("public.v"), create=create) as at:
        at.db.execute("insert into v values (1, 3)")
        assert install(at.target, [TableChoice("public.v")]) == ["public.v captured"]
        at.db.execute("update v set price = 4")
        at.db.execute("alter table v drop column total, add column note text default 'n', add column p2 int")
        at.db.execute("delete from v")
        rows = [(json.loads(row["payload"] or "{}"), json.loads(row["before"] or "{}")) for row in at.drain()]
        assert rows[1] == ({"id": 1, "price": 4}, {"id": 1, "price": 3})
        assert rows[2] == ({}, {"id": 1, "price": 4, "note": "n", "p2": None})
        # AND what is hidden beside them is hidden by number still
        at.db.execute("alter table v drop column p2, add column total int generated always as (price * 2)")
        assert install(at.target, [table]) == ["public.v captured"]
        at.db.execute("insert into v values (5, 6); alter table v rename total to twice; insert into v values (7, 8)")
        told = [json.loads(row["payload"]) for row in at.drain()]
        assert [image.keys() for image in told] == [{"id", "price", "note"}, {"id", "price", "note", "twice"}]
        assert told[0]["price"].startswith("sha256:") and told[1]["price"].startswith("sha256:")


def test_an_outbox_of_version_3_hides_columns_by_number_once_it_is_upgraded(server: PostgresServer) -> None:
    """GIVEN version 3 with hidden columns WHEN installed again THEN a rename hides them still."""
    create = "create table users (id int primary key, password text, email text, n int)"
    table = TableChoice("public.users", exclude=("password",), hash=("email",))
    with scene_of_version_3(server, table, create=create) as at:
        at.db.execute("insert into users values (1, 'secret', 'a@b', 1)")
        at.source.check({})
        assert "evermark source install" in at.source.condition().warnings["outbox_version"].hint
        assert install(at.target, [table]) == ["public.users captured"]
        assert install(at.target, [table]) == ["public.users unchanged"]
        at.db.execute("alter table users rename password to old; alter table users add column password text")
        at.db.execute("insert into users values (2, 'secret', 'a@b', 2)")
        first, second = (json.loads(row["payload"]) for row in at.drain())
        assert first == {"id": 1, "n": 1, "email": second["email"]} and second["email"].startswith("sha256:")
        assert second == {"id": 2, "n": 2, "email": first["email"]}
        assert "outbox_version" not in at.source.condition().warnings
