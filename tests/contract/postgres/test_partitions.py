"""Captured tables that are partitioned: what is truncated, in whole or in part, whenever the partition came to be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest

from evermark.errors import SetupError
from evermark.secrets import Plain
from evermark.sources.postgres.admin.install import install, install_sql, uninstall, unwatch
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.postgres.outbox_scene import Row, Scene, scene

CREATE = """
create table p (id int primary key, total numeric) partition by range (id);
create table p1 partition of p for values from (0) to (10);
create table p2 partition of p for values from (10) to (30) partition by range (id);
create table p2a partition of p2 for values from (10) to (20);
create table p2b partition of p2 for values from (20) to (30);
"""
P = TableChoice("public.p")
FILLED = "insert into p select n, n + 0.5 from generate_series(1, 29, 4) n"  # 1 5 9 | 13 17 | 21 25 29


@pytest.fixture
def at(server: PostgresServer) -> Iterator[Scene]:
    """A partitioned table, two levels deep, captured and filled; its inserts are read already."""
    with scene(server, P, create=CREATE) as found:
        found.db.execute(FILLED)
        assert len(found.drain()) == 8
        yield found


def seen(rows: list[Row]) -> list[tuple[str, str, str | None]]:
    return [(row["op"], row["stream"], row["key"]) for row in rows]


def after(at: Scene, statements: str) -> list[tuple[str, str, str | None]]:
    """What is seen of these statements alone."""
    start = at.position(at.flush_lsn())
    at.db.execute(statements.encode())
    return seen(at.drain(start))


def deletes(*keys: int) -> list[tuple[str, str, str | None]]:
    return [("delete", "public.p", str(key)) for key in keys]


TRUNCATE = ("truncate", "public.p", None)


def implied(rows: list[Row]) -> set[str]:
    """The keys that a receiver who keeps state by key has after these events."""
    keys: set[str] = set()
    for row in rows:
        if row["op"] == "truncate":
            keys.clear()
        elif row["op"] == "delete":
            keys.discard(row["key"])
        else:
            keys.add(row["key"])
    return keys


def test_truncating_one_partition_deletes_exactly_its_rows(at: Scene) -> None:
    """GIVEN a captured partitioned table WHEN one partition is truncated THEN each of its rows is a delete."""
    start = at.position(at.flush_lsn())
    at.db.execute("truncate p1")
    rows = at.drain(start)
    assert seen(rows) == deletes(1, 5, 9)
    assert json.loads(rows[0]["before"]) == {"id": 1, "total": "1.5"}
    assert {row["schema_version"] for row in rows} == {1}


def test_truncating_a_partition_that_has_partitions_deletes_the_rows_of_all_of_them(at: Scene) -> None:
    """GIVEN nested partitions WHEN the one in the middle is truncated THEN every row below it is a delete, once."""
    assert sorted(after(at, "truncate p2")) == sorted(deletes(13, 17, 21, 25, 29))


def test_truncating_the_whole_table_is_one_event(at: Scene) -> None:
    """Postgres fires the triggers of all partitions, too; a receiver sees one truncate and nothing else."""
    assert after(at, "truncate p") == [TRUNCATE]


@pytest.mark.parametrize(
    "statements",
    [
        "truncate p1, p",
        "truncate p, p1",
        "begin; truncate p; insert into p values (3), (13); truncate p1; commit",
        "begin; truncate p1; insert into p values (4); savepoint s; truncate p; rollback to s; truncate p2a; commit",
        "begin; lock table p; truncate p2b; commit",
        "set session_replication_role = replica; truncate p1; reset session_replication_role",
    ],
)
def test_whatever_is_truncated_receivers_are_left_with_the_rows_of_the_table(at: Scene, statements: str) -> None:
    """GIVEN any order of truncates of parts and of the whole THEN the events add up to what is in the table."""
    start = at.position(at.flush_lsn())
    at.db.execute("update p set total = 0")  # so that the events that follow know every row
    at.db.execute(statements.encode())
    left = {str(row[0]) for row in at.db.execute("select id from p").fetchall()}
    assert implied([row for row in at.drain(start) if row["stream"] == "public.p"]) == left


def test_failing_truncate_leaves_no_mark_behind(at: Scene) -> None:
    """GIVEN a truncate of the whole table that fails WHEN a partition is truncated after it THEN rows are deletes."""
    at.db.execute("create table child (id int references p)")
    start = at.position(at.flush_lsn())
    with at.db.transaction():
        with pytest.raises(psycopg.errors.FeatureNotSupported), at.db.transaction():
            at.db.execute("truncate p")
        at.db.execute("alter table child drop constraint child_id_fkey")
        at.db.execute("truncate p1")
    assert seen(at.drain(start)) == deletes(1, 5, 9)


def test_hidden_columns_of_a_truncated_partition_stay_hidden(server: PostgresServer) -> None:
    """GIVEN excluded and hashed columns WHEN a partition is truncated THEN its deletes hide them as all events do."""
    create = """create table h (id int, k text, secret text, mail text, primary key (id, k)) partition by range (id);
                create table h1 partition of h default"""
    with scene(server, TableChoice("public.h", exclude=("secret",), hash=("mail",)), create=create) as at:
        at.db.execute("insert into h values (1, 'a', 'geheim', 'a@b')")
        at.db.execute("truncate h1")
        insert, delete = at.drain()
        assert (delete["op"], delete["key"]) == ("delete", insert["key"])
        assert json.loads(delete["before"]) == json.loads(insert["payload"])
        assert "geheim" not in str(at.db.execute("select * from pgstream.events").fetchall())


@pytest.mark.parametrize("columns", ["id int, r text, i text", "id int, r text, i numeric, image jsonb, top int"])
def test_columns_may_be_called_as_in_our_own_statements(server: PostgresServer, columns: str) -> None:
    """GIVEN columns with the names that our trigger uses WHEN a partition is truncated THEN rows are what they were."""
    create = f"""create table h ({columns}, primary key (id, r)) partition by list (r);
                 create table h1 partition of h for values in ('e')"""
    with scene(server, TableChoice("public.h"), create=create) as at:
        at.db.execute("insert into h (id, r) values (1, 'e'), (2, 'e')")
        at.db.execute("truncate h1")
        rows = at.drain()
        inserts, gone = rows[:2], rows[2:]
        assert [row["op"] for row in gone] == ["delete", "delete"]
        assert {(row["key"], row["before"]) for row in gone} == {(row["key"], row["payload"]) for row in inserts}


def test_partition_made_or_attached_later_is_captured_at_once(at: Scene) -> None:
    """GIVEN an outbox installed by a superuser WHEN a partition is made or attached THEN its truncate is captured."""
    at.db.execute("create table p3 partition of p for values from (30) to (40)")
    at.db.execute("create table p4 (id int primary key, total numeric)")
    at.db.execute("alter table p attach partition p4 for values from (40) to (50)")
    at.db.execute("insert into p values (31), (41)")
    assert after(at, "truncate p3; truncate p4") == deletes(31, 41)


def test_detached_partition_is_nobodys_stream(at: Scene) -> None:
    """GIVEN a partition that was detached WHEN it is changed and truncated THEN the old stream says nothing of it."""
    at.db.execute("alter table p detach partition p1")
    assert after(at, "insert into p1 values (2); truncate p1") == []
    at.source.upkeep()
    assert at.value("select count(*) from pg_trigger where tgrelid = 'p1'::regclass and tgname ~ '^!?pgstream'") == 0


def test_released_table_has_no_trigger_left_on_any_partition(at: Scene) -> None:
    """GIVEN a captured partitioned table WHEN it is released THEN truncates are no events, and no trigger is left."""
    unwatch(at.target, ["public.p"])
    assert after(at, "truncate p1; truncate p") == []
    assert at.value("select count(*) from pg_trigger where tgname ~ '^!?pgstream_' and tgname !~ 'replay'") == 0


@contextmanager
def owned_by_a_plain_role(server: PostgresServer) -> Iterator[Scene]:
    """The outbox of an owner who is no superuser: no event trigger can be had."""
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("drop role if exists plain_owner")
        admin.execute("create role plain_owner login replication password 'x'")
        admin.execute(
            "do $$ begin execute format('grant create on database %I to plain_owner', current_database()); end $$"
        )
        admin.execute("grant all on schema public to plain_owner")
        info = psycopg.conninfo.make_conninfo(dsn, user="plain_owner", password="x", passfile="")
        with psycopg.connect(info, autocommit=True) as db:
            db.execute(CREATE.encode())
            target = PostgresTarget(Plain(info), "plain_slot", "plain_pub", tables=(P,))
            install(target, [P])
            with closing(PostgresOutbox(target)) as source:
                yield Scene(info, target, db, source)
            uninstall(target)
        admin.execute("drop owned by plain_owner cascade")
        admin.execute("drop role plain_owner")


def test_without_a_superuser_upkeep_captures_partitions_made_later(server: PostgresServer) -> None:
    """GIVEN an owner without an event trigger WHEN a partition is made THEN the source asks for upkeep."""
    with owned_by_a_plain_role(server) as at:
        assert at.value("select count(*) from pg_event_trigger") == 0
        at.db.execute("create table p3 partition of p for values from (30) to (40)")
        assert at.source.condition().upkeep_due
        at.source.upkeep()
        assert not at.source.condition().upkeep_due
        at.db.execute("insert into p values (31)")
        assert after(at, "truncate p3") == deletes(31)


def test_installing_again_leaves_partition_triggers_as_they_are(at: Scene) -> None:
    """Nothing is dropped and made again; printed SQL does the same."""
    triggers = "select array_agg(oid order by oid) from pg_trigger where tgname ~ '^!?pgstream'"
    before = at.value(triggers)
    assert install(at.target, [P]) == ["public.p unchanged"]
    assert at.value(triggers) == before
    assert "capture_partition_truncate" in install_sql(at.target, [P])


def test_partition_of_a_plain_owner_is_captured_at_once_in_the_outbox_of_a_superuser(server: PostgresServer) -> None:
    """GIVEN a superuser's outbox WHEN the table's owner makes a partition THEN nothing fails, and it is captured."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("drop role if exists modest_owner; create role modest_owner")
    create = f"{CREATE}; grant all on schema public to modest_owner; alter table p owner to modest_owner"
    with scene(server, P, create=create) as at:
        at.db.execute("set role modest_owner")
        at.db.execute("create table p3 partition of p for values from (30) to (40); create table other (id int)")
        at.db.execute("insert into p values (31); truncate p3; reset role")
        assert seen(at.drain()) == [("insert", "public.p", "31"), *deletes(31)]
        # AND so may an owner that the table got later
        at.db.execute(
            "drop role if exists later_owner; create role later_owner; grant all on schema public to later_owner"
        )
        at.db.execute("alter table p owner to later_owner; set role later_owner")
        at.db.execute("create table p4 partition of p for values from (40) to (50); reset role")
        at.db.execute("drop owned by modest_owner, later_owner cascade; drop role modest_owner, later_owner")


def test_truncate_in_an_older_snapshot_is_done_and_warned_of(at: Scene) -> None:
    """GIVEN a transaction that cannot see newer rows WHEN it truncates a partition THEN it is told, and not refused."""
    said: list[str] = []
    with at.connection() as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.add_notice_handler(lambda notice: said.append(str(notice.message_primary)))
        conn.execute("truncate p1")
    assert "not captured" in said[0]
    assert at.value("select count(*) from p1") == 0


def test_a_partition_is_not_captured_twice(at: Scene) -> None:
    """GIVEN a captured table WHEN one of its partitions is to be captured for itself THEN it is refused by name."""
    with pytest.raises(SetupError, match=r"public\.p1 is a partition of a table that is captured"):
        install(at.target, [TableChoice("public.p1")])
    at.db.execute("create table q (id int primary key) partition by range (id)")
    at.db.execute("create table q1 partition of q default")
    install(at.target, [TableChoice("public.q1")])
    with pytest.raises(SetupError, match=r"public\.q1, a partition of public\.q, is captured for itself"):
        install(at.target, [TableChoice("public.q")])
