"""`evermark source install`: what it puts into the user's database, and what it never does there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from evermark.errors import BusyError, FormatError, SetupError
from evermark.secrets import Plain
from evermark.sources.postgres.admin.install import install, install_sql, uninstall
from evermark.sources.postgres.outbox import maintain
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server
from tests.contract.postgres.outbox_scene import Row, Scene, emit, list_tables, scene

ORDERS = """
create table public.orders (
    id int primary key, total numeric(10, 2), big bigint, tags numeric[], note text,
    at timestamptz default '2026-01-02 03:04:05.678+00', raw bytea default '\\xdeadbeef', span interval default '1 day')
"""
ORDERS_TABLE = TableChoice("public.orders")


@pytest.fixture
def at(server: PostgresServer) -> Iterator[Scene]:
    """A database with a captured table."""
    with scene(server, ORDERS_TABLE, create=ORDERS) as found:
        yield found


def payloads(rows: list[Row]) -> list[dict[str, Any]]:
    return [json.loads(row["payload"]) for row in rows]


def test_every_change_of_a_captured_table_is_an_event(at: Scene) -> None:
    """Insert, update, delete and truncate, with images before and after."""
    # WHEN a row lives and dies
    at.db.execute("insert into orders values (1, 99.50, 7)")
    at.db.execute("update orders set total = 1 where id = 1")
    at.db.execute("delete from orders")
    at.db.execute("truncate orders")
    # THEN each change is an event of its stream, in order
    rows = at.drain()
    assert [(r["op"], r["key"], r["stream"], r["schema_version"]) for r in rows] == [
        ("insert", "1", "public.orders", 1),
        ("update", "1", "public.orders", 1),
        ("delete", "1", "public.orders", 1),
        ("truncate", None, "public.orders", 1),
    ]
    assert [bool(r["payload"]) for r in rows] == [True, True, False, False]
    assert [json.loads(r["before"])["total"] if r["before"] else None for r in rows] == [None, "99.50", "1.00", None]


AWKWARD = (r'{"a": "\u0000"}', r'"\ud800"', "1e400000")


def test_json_that_jsonb_cannot_hold_is_text_and_no_transaction_fails(server: PostgresServer) -> None:
    """GIVEN columns of type json WHEN they hold what jsonb cannot THEN the row is written, and they are text in it."""
    create = """create table j (id int primary key, doc json, total numeric, "a b" text, docs json[], secret text);
                create table p (id int primary key, doc json) partition by range (id);
                create table p1 partition of p for values from (0) to (10)"""
    tables = (TableChoice("public.j", exclude=("secret",)), TableChoice("public.p"))
    with scene(server, *tables, create=create) as at:
        for number, text in enumerate(AWKWARD):
            at.db.execute("insert into j values (%s, %s, 1.50, 'x', array[%s::json], 's')", (number, text, text))
        at.db.execute("update j set doc = '{}', docs = null; delete from j")
        at.db.execute("insert into p values (1, %s), (2, '{}')", (AWKWARD[0],))
        at.db.execute("truncate p1")
        rows = at.drain()
        for number, text in enumerate(AWKWARD):
            inserted, before = json.loads(rows[number]["payload"]), json.loads(rows[3 + number]["before"])
            assert inserted == before and inserted.pop("docs").startswith("{")
            assert inserted == {"id": number, "doc": text, "total": "1.50", "a b": "x"}
            assert json.loads(rows[3 + number]["payload"])["doc"] == {}
        truncated = [row for row in rows if row["stream"] == "public.p" and row["op"] == "delete"]
        gone = sorted((row["key"], json.loads(row["before"])["doc"]) for row in truncated)
        assert gone == [("1", AWKWARD[0]), ("2", {})]


def test_a_value_too_large_for_jsonb_is_left_out_and_no_transaction_fails(server: PostgresServer) -> None:
    """GIVEN a value of which jsonb has no room WHEN its row is changed THEN all of the row but that value is told."""
    create = """create table big (id int primary key, raw bytea, note text);
                insert into big select 1, decode(repeat('00', 140 * 1024 * 1024), 'hex'), 'n'"""
    with scene(server, TableChoice("public.big"), create=create) as at:
        at.db.execute("delete from big")
        (row,) = at.drain()
        assert (row["op"], row["key"], json.loads(row["before"])) == ("delete", "1", {"id": 1, "note": "n"})


def test_a_stream_that_another_session_began_is_no_conflict_in_repeatable_read(at: Scene) -> None:
    """GIVEN an older snapshot WHEN the same new stream gets its first event from it, too THEN both events are there."""
    with at.connection() as older:
        older.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        older.execute("select 1 from orders")
        at.emit("fresh", "1")
        emit(older, "fresh", "2")
        older.commit()
    assert [(row["stream"], row["key"]) for row in at.drain()] == [("fresh", "1"), ("fresh", "2")]


def test_changes_that_another_trigger_makes_come_after_the_change_that_fired_it(server: PostgresServer) -> None:
    """GIVEN triggers, and a key on the table itself, that change the row again WHEN changed THEN the last
    event of a record is what the table has."""
    create = """
        create table t (id int primary key, n int, total int, up int references t on update cascade);
        create function set_total() returns trigger language plpgsql as $$ begin
            update t set total = new.n * 2 where id = new.id and total is distinct from new.n * 2; return null; end $$;
        create function sweep() returns trigger language plpgsql as $$ begin
            delete from t where id = new.id and n < 0; return null; end $$;
        create trigger after_change after insert or update of n on t for each row execute function set_total();
        create trigger "Clean" after update on t for each row execute function sweep()"""
    with scene(server, TableChoice("public.t"), create=create) as at:
        at.db.execute("insert into t values (1, 1, 0, 1), (2, 1, 0, 2), (3, 1, 0, 3); update t set n = 5 where id = 1")
        at.db.execute("update t set n = -1 where id = 2; update t set id = 4 where id = 3")
        rows = at.drain()
        told = {key: [(r["op"], json.loads(r["payload"] or "{}")) for r in rows if r["key"] == key] for key in "124"}
        assert [op for op, _ in told["1"]] == ["insert", "update", "update", "update"]
        assert [image["total"] for _, image in told["1"]] == [0, 2, 2, 10]
        assert [op for op, _ in told["2"]] == ["insert", "update", "update", "delete"]
        assert [image["up"] for _, image in told["4"]] == [3, 4]


def test_numbers_a_double_cannot_hold_are_strings(at: Scene) -> None:
    """Numerics always, whole numbers beyond 2^53, in arrays too; small whole numbers stay numbers."""
    at.db.execute("insert into orders values (1, 99.50, 9007199254740993, '{1.10, 2}'), (2, 'NaN', -5, null)")
    first, second = payloads(at.drain())
    assert (first["total"], first["big"], first["tags"]) == ("99.50", "9007199254740993", ["1.10", "2"])
    assert (second["total"], second["big"], second["tags"]) == ("NaN", -5, None)


def test_session_settings_do_not_change_what_is_captured(at: Scene) -> None:
    """Time zone, date style and the like are the writer's business; the event is the same."""
    at.db.execute("insert into orders values (1)")
    for setting in (
        "timezone = 'Asia/Tokyo'",
        "datestyle = 'German'",
        "bytea_output = 'escape'",
        "intervalstyle = 'sql_standard'",
    ):
        at.db.execute(f"set {setting}".encode())
    at.db.execute("insert into orders values (2)")
    first, second = payloads(at.drain())
    assert first | {"id": 0} == second | {"id": 0}
    assert first["at"] == "2026-01-02T03:04:05.678+00:00"


def test_writer_needs_no_right_on_the_outbox(at: Scene, server: PostgresServer) -> None:
    """The trigger writes as its owner; the application's role cannot even see the schema."""
    at.db.execute("drop role if exists app")
    at.db.execute("create role app")
    at.db.execute("grant insert on orders to app")
    at.db.execute("set role app")
    at.db.execute("insert into orders values (1)")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        at.db.execute("select * from pgstream.events")
    at.db.execute("reset role")
    at.db.execute("drop owned by app")
    at.db.execute("drop role app")
    assert [r["key"] for r in at.drain()] == ["1"]


def test_change_applied_by_replication_is_captured_too(at: Scene) -> None:
    """`session_replication_role = replica` silences ordinary triggers, not these."""
    at.db.execute("set session_replication_role = replica")
    at.db.execute("insert into orders values (1)")
    assert [r["key"] for r in at.drain()] == ["1"]


def test_composite_key_is_json_and_no_key_is_null(server: PostgresServer) -> None:
    """The record id of any table."""
    create = "create table a (x int, y text, primary key (y, x)); create table b (v int); create table c (v int unique)"
    tables = [TableChoice(f"public.{name}") for name in "abc"]
    with scene(server, *tables, create=create) as at:
        at.db.execute("insert into a values (1, 'k'); insert into b values (1); insert into c values (1)")
        rows = at.drain()
        assert json.loads(rows[0]["key"]) == {"x": 1, "y": "k"}
        assert [r["key"] for r in rows[1:]] == [None, None]


def test_row_written_into_a_partition_belongs_to_its_root(server: PostgresServer) -> None:
    """However the row gets in, the stream is the table people know; partitions made later count."""
    create = """create table p (id int primary key, v text) partition by range (id);
                create table p1 partition of p for values from (0) to (10)"""
    with scene(server, TableChoice("public.p"), create=create) as at:
        at.db.execute("create table p2 partition of p for values from (10) to (20)")
        at.db.execute("insert into p values (1); insert into p1 values (2); insert into p2 values (11)")
        assert [(r["stream"], r["key"]) for r in at.drain()] == [("public.p", k) for k in ("1", "2", "11")]


def test_excluded_columns_never_leave_even_when_renamed(server: PostgresServer) -> None:
    """Excluded columns are absent, hashed ones are hashes; a rename publishes nothing that was hidden."""
    table = TableChoice("public.users", exclude=("password",), hash=("email",))
    with scene(server, table, create="create table users (id int primary key, email text, password text, n int)") as at:
        at.db.execute("insert into users values (1, 'a@b', 'secret', 1), (2, null, 'secret', 2)")
        at.db.execute("alter table users rename password to passphrase")
        at.db.execute("insert into users values (3, 'a@b', 'secret', 3)")
        first, second, third = payloads(at.drain())
        assert first == {"id": 1, "n": 1, "email": third["email"]}
        assert str(first["email"]).startswith("sha256:")
        assert second == {"id": 2, "n": 2, "email": None}
        assert set(third) == {"id", "n", "email"}
        assert "secret" not in str(at.db.execute("select payload, before from pgstream.events").fetchall())


@pytest.mark.parametrize(
    "table", [TableChoice("public.users", exclude=("email",)), TableChoice("public.users", hash=("email",))]
)
@pytest.mark.parametrize(
    "moves",
    [
        "rename email to email_old; alter table users add column email text",
        "rename email to x; alter table users rename n to email; alter table users rename x to n",
        "rename email to n2; alter table users drop column n, add column n text",
    ],
)
def test_a_hidden_column_stays_hidden_when_another_takes_its_name(
    server: PostgresServer, table: TableChoice, moves: str
) -> None:
    """GIVEN a hidden column WHEN it is renamed and its name given away, in whatever session THEN no event has it."""
    create = "create table users (id int primary key, email text, n text)"
    with scene(server, table, create=create) as at, at.connection() as older:
        older.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        older.execute("select count(*) from pg_attribute")
        at.db.execute("insert into users values (1, 'secret', 'x')")
        at.db.execute(f"alter table users {moves}".encode())
        at.db.execute("update users set id = 2")
        at.db.execute("delete from users")
        # AND in a transaction that sees the catalog as it was
        older.execute("insert into users values (3, 'secret', 'x')")
        older.commit()
        rows = at.drain()
        assert [row["key"] for row in rows] == ["1", "2", "2", "3"]
        assert "secret" not in str(at.db.execute("select payload, before from pgstream.events").fetchall())
        # AND to install again says so, where the file still has the old name alone
        if "email text" in moves:
            with pytest.raises(Exception, match='is called "email_old" now'):
                install(at.target, [table])
            both = TableChoice(table.name, exclude=("email_old", *table.exclude), hash=table.hash)
            assert install(at.target, [both]) == ["public.users captured"]
            at.db.execute(
                "insert into users values (4, 'secret', 'x', 'secret'); alter table users add column more int"
            )
            at.db.execute("insert into users values (5, 'secret', 'x', 'secret', 7)")
            assert payloads(at.drain())[-1].items() >= {"id": 5, "n": "x", "more": 7}.items()
        assert "secret" not in str(at.db.execute("select payload, before from pgstream.events").fetchall())


def test_hidden_columns_stay_hidden_in_partitions_with_other_column_numbers(server: PostgresServer) -> None:
    """GIVEN partitions whose columns stand elsewhere WHEN columns are renamed THEN all hide what was to be hidden."""
    create = """create table h (id int primary key, mail text, n text) partition by range (id);
                create table h1 (gone int, n text, id int primary key, mail text);
                alter table h1 drop column gone;
                alter table h attach partition h1 for values from (0) to (10)"""
    with scene(server, TableChoice("public.h", hash=("mail",)), create=create) as at:
        at.db.execute("insert into h values (1, 'secret', 'x')")
        at.db.execute("alter table h add column more int; insert into h values (2, 'secret', 'x', 7)")
        at.db.execute("alter table h rename mail to mail_old; alter table h add column mail text")
        at.db.execute("insert into h values (3, 'secret', 'x', 7); truncate h1")
        first, second, third, *gone = at.drain()
        assert json.loads(first["payload"]).keys() == {"id", "mail", "n"}
        assert json.loads(second["payload"]).items() >= {"n": "x", "more": 7}.items()
        assert json.loads(third["payload"]) == {"id": 3, "n": "x"}
        assert [json.loads(row["before"]) for row in gone] == [{"id": n, "n": "x"} for n in (1, 2, 3)]


def test_hidden_columns_stay_hidden_in_a_copy_of_the_database(server: PostgresServer) -> None:
    """GIVEN triggers whose table has another number, as a dump leaves them WHEN changed THEN names tell what passes."""
    table = TableChoice("public.users", exclude=("email",))
    with scene(server, table, create="create table users (gone int, id int primary key, email text, n text)") as at:
        (arguments,) = at.db.execute(
            "select args from pgstream.captured_root('users'::regclass)"
        ).fetchone() or pytest.fail("not captured")
        listed = ", ".join(f"'{each}'" for each in (*arguments[:8], "1", arguments[9]))
        at.db.execute("alter table users drop column gone")
        at.db.execute(
            f'create or replace trigger "{capture_trigger(at)}" after insert or update or delete on users'
            f" for each row execute function pgstream.capture({listed})".encode()
        )
        at.db.execute("insert into users values (1, 'secret', 'x')")
        at.db.execute("alter table users rename email to email_old; alter table users add column email text")
        at.db.execute("insert into users values (2, 'secret', 'x', 'secret')")
        assert payloads(at.drain()) == [{"id": 1, "n": "x"}, {"id": 2, "n": "x"}]


def capture_trigger(at: Scene) -> str:
    query = "select tgname from pg_trigger where tgrelid = 'users'::regclass and tgname like '%%_capture'"
    return str(at.value(query))


def test_excluding_a_column_that_is_not_there_is_refused(at: Scene) -> None:
    """A typing error must not publish the column that was meant."""
    with pytest.raises(Exception, match='no column "pasword"'):
        install(at.target, [TableChoice("public.orders", exclude=("pasword",))])


def test_column_added_later_flows_and_install_raises_the_schema_version(at: Scene) -> None:
    """A schema change needs nobody; running install again only makes it known."""
    at.db.execute("alter table orders add column colour text default 'red'")
    at.db.execute("insert into orders values (1)")
    assert [t.stale for t in list_tables(at.target)] == [True]
    # WHEN install runs again
    assert install(at.target, [ORDERS_TABLE]) == ["public.orders captured"]
    at.db.execute("insert into orders values (2)")
    # THEN both rows have the column, and the second the next version
    rows = at.drain()
    assert [p["colour"] for p in payloads(rows)] == ["red", "red"]
    assert [r["schema_version"] for r in rows] == [1, 2]
    assert [t.stale for t in list_tables(at.target)] == [False]


def test_installing_again_makes_and_drops_nothing(at: Scene) -> None:
    """Publication, slot and triggers are the same objects as before, and events in between are kept."""

    def objects() -> list[object]:
        return at.db.execute(
            """select oid::text from pg_publication union all select oid::text from pg_publication_rel union all
               select oid::text from pg_trigger union all select confirmed_flush_lsn::text from pg_replication_slots
               where slot_name = %s union all select fingerprint from pgstream.readers order by 1""",
            (at.target.slot,),
        ).fetchall()

    at.db.execute("insert into orders values (1)")
    before = objects()
    assert install(at.target, [ORDERS_TABLE]) == ["public.orders unchanged"]
    assert objects() == before
    assert [r["key"] for r in at.drain()] == ["1"]


def test_printed_sql_does_the_same_as_install(server: PostgresServer) -> None:
    """A DBA runs it with psql, twice, and a role with only the printed rights reads the outbox."""
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute(ORDERS.encode())
        db.execute("drop role if exists evermark_printed")
        db.execute("create role evermark_printed login replication password 'x'")
        target = PostgresTarget(Plain(dsn), "printed_slot", "printed_pub")
        script = install_sql(target, [ORDERS_TABLE], role="evermark_printed")
        assert 'create role "evermark_printed" login' in script and "create role evermark " not in script
        psql = server.binaries.folder / "psql"
        for _ in range(2):
            done = subprocess.run(
                [psql, dsn, "-v", "ON_ERROR_STOP=1", "-q"], input=script, text=True, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr
        db.execute("insert into orders values (1)")
        info = psycopg.conninfo.make_conninfo(dsn, user="evermark_printed", password="x", passfile="")
        printed = PostgresTarget(Plain(info), target.slot, target.publication)
        source = PostgresOutbox(printed)
        reader = Scene(dsn, target, db, source)
        assert [r["key"] for r in reader.drain()] == ["1"]
        assert maintain(printed)[2] == 0
        source.close()
        uninstall(target)
        db.execute("drop owned by evermark_printed")
        db.execute("drop role evermark_printed")


def test_uninstall_leaves_nothing_behind(at: Scene) -> None:
    """Slot, publication, triggers, tables: all gone; the user's table stays and works."""
    at.source.close()
    uninstall(at.target)
    uninstall(at.target)
    left = at.value(
        """select count(*) from (select 1 from pg_publication union all
           select 1 from pg_replication_slots where slot_name = %s union all
           select 1 from pg_trigger where tgname ~ '^!?pgstream' union all
           select 1 from pg_namespace where nspname = 'pgstream') x""",
        at.target.slot,
    )
    assert left == 0
    at.db.execute("insert into orders values (1)")


def test_uninstall_of_one_reader_leaves_the_other_reading(at: Scene) -> None:
    """Two deployments share the outbox; one goes."""
    other = PostgresTarget(at.target.dsn, at.target.slot + "_other", at.target.publication + "_other")
    install(other)
    uninstall(other)
    at.db.execute("insert into orders values (1)")
    assert [r["key"] for r in at.drain()] == ["1"]


def test_insert_without_a_partition_for_its_day_does_not_fail(at: Scene) -> None:
    """The default partition takes it, it is read, and partitions are made around it."""
    names = [
        r[0]
        for r in at.db.execute(
            "select inhrelid::regclass::text from pg_inherits where inhparent = 'pgstream.events'::regclass"
        )
    ]
    for name in names:
        if "default" not in name:
            at.db.execute(f"drop table {name}".encode())
    at.db.execute("insert into orders values (1)")
    created, dropped, waiting = maintain(at.target)
    at.db.execute("insert into orders values (2)")
    assert (created, dropped, waiting) == (len(names) - 2, 0, 0)  # all but today's: its rows are in the default one
    assert [r["key"] for r in at.drain()] == ["1", "2"]


def test_retention_never_drops_what_is_not_confirmed(at: Scene) -> None:
    """An old partition goes only when every reader confirmed its last row, late rows included."""
    old = "2020-01-01 12:00+00"
    at.db.execute(
        "create table pgstream.events_p20200101 partition of pgstream.events"
        " for values from ('2020-01-01') to ('2020-01-02')"
    )
    insert = "insert into pgstream.events (stream, key, created_at) values ('s', %s, %s)"
    at.db.execute(insert, ("1", old))
    there = "select to_regclass('pgstream.events_p20200101') is not null"
    # GIVEN a slot that has not confirmed the row, however often maintenance runs
    start = at.source.earliest(0)
    assert [maintain(at.target)[1] for _ in range(3)] == [0, 0, 0]
    # WHEN all is confirmed, but another row came in late
    at.db.execute(insert, ("2", old))
    assert [r["key"] for r in at.drain(start)] == ["1", "2"]
    at.source.close()  # confirms what was held back
    # THEN it is sealed anew, and goes when that is confirmed as well
    assert maintain(at.target)[1] == 0
    assert at.value(there) is True
    for _ in range(3):
        at.emit("s", "more")
        at.drain()
        at.source.close()
        maintain(at.target)
    assert at.value(there) is False


def test_replay_request_becomes_a_control_event_every_time(at: Scene) -> None:
    """Asking for the same window again asks again; clearing it asks for nothing."""
    ask = """update pgstream.streams set replay_from_ts = '2026-01-01', replay_to_ts = '2026-01-02'
             where name = 'public.orders'"""
    at.db.execute(ask)
    at.db.execute(ask)
    at.db.execute("update pgstream.streams set replay_from_ts = null, replay_to_ts = null")
    rows = at.drain()
    assert [(r["op"], r["stream"]) for r in rows] == [("control", "public.orders")] * 2
    assert payloads(rows)[0] == payloads(rows)[1]
    assert payloads(rows)[0]["action"] == "replay"


def test_new_stream_in_an_open_transaction_blocks_nobody(at: Scene) -> None:
    """Its first user has not committed; the second goes on."""
    with at.connection() as first:
        emit(first, "fresh", "1")
        at.db.execute("set statement_timeout = '5s'")
        at.emit("fresh", "2")
        first.commit()
    at.emit("fresh", "3")
    assert [r["key"] for r in at.drain()] == ["2", "1", "3"]


def test_ids_rise_with_time_and_are_version_7(at: Scene) -> None:
    """Replays order by (created_at, id)."""
    for number in range(50):
        at.emit("s", str(number))
    ids = [r["event_id"] for r in at.drain()]
    assert ids == sorted(ids)
    assert {i[14] for i in ids} == {"7"}


def test_table_that_is_not_there_is_named(at: Scene) -> None:
    """With the hint how to write it."""
    with pytest.raises(SetupError, match=r"public\.nothing does not exist"):
        install(at.target, [TableChoice("public.nothing")])


def test_table_locked_by_a_long_transaction_is_reported_not_waited_for(at: Scene) -> None:
    """A trigger needs a short lock; waiting long for it would hold up every writer behind us."""
    at.db.execute("create table busy (id int primary key)")
    with at.connection() as other:
        other.execute("lock table busy")
        with pytest.raises(BusyError):
            install(at.target, [TableChoice("public.busy")], wait_s=0)


def test_newer_schema_is_refused(at: Scene) -> None:
    """An older program must not guess at it."""
    at.db.execute("update pgstream.meta set version = 99")
    with pytest.raises(FormatError, match="99"):
        install(at.target)


def test_slot_of_another_database_is_refused(at: Scene, server: PostgresServer) -> None:
    """Two deployments with one name would share a slot, each getting half."""
    with fresh_database(server) as other, pytest.raises(SetupError, match="belongs to database"):
        install(PostgresTarget(Plain(other), at.target.slot, at.target.publication))


def test_server_without_logical_wal_says_what_to_set(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before anything is created."""
    with postgres_server(tmp_path_factory.mktemp("replica"), {"wal_level": "replica"}) as server:
        target = PostgresTarget(Plain(server.dsn()), "s", "p")
        with pytest.raises(SetupError, match="wal_level") as refused:
            install(target)
        assert "alter system set wal_level" in refused.value.hint
