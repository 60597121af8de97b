"""Changes of the user's own tables, from a real server (P3)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evermark.sources.postgres.lsn import Position
from evermark.testing.servers import PostgresServer
from evermark.testing.until import until
from tests.contract.postgres.tables_scene import scene

ORDERS = "create table orders (id bigint primary key, total numeric(10,2), note text)"


def told(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        row["op"], row["key"], row["payload"] and json.loads(row["payload"]),
        row["before"] and json.loads(row["before"]), row["previous_key"],
    )  # fmt: skip


def test_every_kind_of_change_is_an_event(server: PostgresServer) -> None:
    """Insert, update, key change, delete and truncate, with the images that the replica identity gives."""
    with scene(server, "public.orders", create=ORDERS) as at:
        at.run(
            "insert into orders values (1, 9.5, 'first'), (2, null, null)",
            "update orders set total = 10 where id = 1",
            "update orders set id = 3 where id = 2",
            "delete from orders where id = 3",
            "truncate orders",
        )
        assert [told(row) for row in at.changes()] == [
            ("insert", "1", {"id": 1, "total": "9.50", "note": "first"}, None, None),
            ("insert", "2", {"id": 2, "total": None, "note": None}, None, None),
            ("update", "1", {"id": 1, "total": "10.00", "note": "first"}, None, None),
            ("update", "3", {"id": 3, "total": None, "note": None}, {"id": 2}, "2"),
            ("delete", "3", None, {"id": 3}, None),
            ("truncate", None, None, None, None),
        ]


def test_a_whole_old_row_is_the_before_image(server: PostgresServer) -> None:
    """Replica identity full: the old row, and the key from the primary key; large values that did not change, too."""
    create = f"{ORDERS}; alter table orders replica identity full; alter table orders alter note set storage external"
    with scene(server, "public.orders", create=create) as at:
        large = "x" * 10_000
        at.run(
            f"insert into orders values (1, 1, '{large}')",
            "update orders set total = 2",
            "update orders set id = 5",
            "delete from orders",
        )
        first, second, third, last = at.changes()
        assert told(first) == ("insert", "1", {"id": 1, "total": "1.00", "note": large}, None, None)
        before = {"id": 1, "total": "1.00", "note": large}
        assert told(second) == ("update", "1", {"id": 1, "total": "2.00", "note": large}, before, None)
        assert (third["key"], third["previous_key"], third["flags"]) == ("5", "1", [])
        assert told(last)[:4] == ("delete", "5", None, {"id": 5, "total": "2.00", "note": large})


def test_an_unchanged_large_value_is_flagged_and_left_out(server: PostgresServer) -> None:
    """The server does not send it again: the event says which columns are unknown, and does not say null."""
    create = f"{ORDERS}; alter table orders alter note set storage external"
    with scene(server, "public.orders", create=create) as at:
        at.run(
            "insert into orders select i, 0, case when i = 2 then 'small' else repeat('x', 10000) end"
            " from generate_series(1, 3) i",
            "update orders set total = 1",
            "update orders set note = null",
        )
        rows = at.changes()
        updates = [(json.loads(row["payload"]).keys(), row["flags"]) for row in rows[3:6]]
        assert updates == [
            ({"id", "total"}, ["unknown:note"]),
            ({"id", "total", "note"}, []),
            ({"id", "total"}, ["unknown:note"]),
        ]
        assert [json.loads(row["payload"])["note"] for row in rows[6:]] == [None] * 3


def test_keys_are_written_as_the_outbox_writes_them(server: PostgresServer) -> None:
    """One column as its text, several as an object in the order of jsonb; an index that is the identity is the key."""
    create = """
    create table lines (order_id bigint, nth int, what text, primary key (order_id, nth));
    create table tagged (tag text not null, at timestamptz not null);
    create unique index tagged_at on tagged (at);
    alter table tagged replica identity using index tagged_at;
    """
    with scene(server, "public.lines", "public.tagged", create=create) as at:
        at.run(
            "insert into lines values (1, 2, 'a')",
            "update lines set nth = 3",
            "insert into tagged values ('t', '2024-01-02 03:04:05+00')",
            "update tagged set at = '2024-01-02 03:04:06.5+00'",
        )
        rows = at.changes()
        assert [(row["key"], row["previous_key"]) for row in rows] == [
            ('{"nth": 2, "order_id": 1}', None),
            ('{"nth": 3, "order_id": 1}', '{"nth": 2, "order_id": 1}'),
            ("2024-01-02T03:04:05+00:00", None),
            ("2024-01-02T03:04:06.5+00:00", "2024-01-02T03:04:05+00:00"),
        ]


def keys_of(rows: list[dict[str, Any]], *streams: str) -> list[tuple[str, str | None]]:
    return [(row["op"], row["key"]) for row in rows if row["op"] != "schema" and row["stream"] in streams]


def test_rows_inserted_without_an_identity_have_the_key_they_are_changed_under(server: PostgresServer) -> None:
    """A constraint made anew, an index that was the identity and is dropped, `nothing` beside a primary key: no event
    of such a row may lack the key, or the row would be in the table of the log twice."""
    create = """
    create table anew (id int primary key, v int);
    create table tagged (tag text not null, v int);
    create unique index tagged_tag on tagged (tag); alter table tagged replica identity using index tagged_tag;
    create table none (id int primary key, v int);
    """
    with scene(server, "public.anew", "public.tagged", "public.none", create=create) as at:
        at.run(
            "insert into anew values (1, 1)",
            "alter table anew drop constraint anew_pkey",
            "insert into anew values (2, 1)",
            "alter table anew add primary key (id)",
            "update anew set id = 3 where id = 2",
            "delete from anew",
        )
        assert keys_of(at.drain(), "public.anew") == [
            ("insert", "1"), ("insert", "2"), ("update", "3"), ("delete", "1"), ("delete", "3"),
        ]  # fmt: skip
        at.run("insert into tagged values ('a', 1)", "drop index tagged_tag")
        assert keys_of(at.drain(), "public.tagged") == [("insert", "a")]
        # AND in another process, which knows the key from State alone
        at.source.close()
        at.run(
            "insert into tagged values ('b', 1)",
            "create unique index tagged_tag on tagged (tag)",
            "alter table tagged replica identity using index tagged_tag",
            "delete from tagged",
        )
        assert keys_of(at.drain(), "public.tagged")[-3:] == [("insert", "b"), ("delete", "a"), ("delete", "b")]
        # AND where nothing of the table is known yet
        at.run(
            "alter table none replica identity nothing",
            "insert into none values (99001, 1)",
            "alter table none replica identity full",
            "update none set v = 3",
        )
        assert keys_of(at.drain(), "public.none") == [("insert", "99001"), ("update", "99001")]


def test_a_table_that_never_had_a_key_gives_none(server: PostgresServer) -> None:
    """Nor one of which a column of the key is gone: what is left of it tells no rows apart."""
    create = """
    create table bare (v int); alter table bare replica identity full;
    create table pairs (a int, b int, primary key (a, b));
    """
    with scene(server, "public.bare", "public.pairs", create=create) as at:
        at.run(
            "insert into bare values (1), (1)",
            "delete from bare",
            "insert into pairs values (1, 2)",
            "alter table pairs drop column b",
            "insert into pairs values (1)",
        )
        keys = [key for _, key in keys_of(at.drain(), "public.bare", "public.pairs")]
        assert keys == [None] * 4 + ['{"a": 1, "b": 2}', None]


def test_partitions_are_their_table(server: PostgresServer) -> None:
    """Rows of partitions are the stream of the whole table; a row that moves is deleted there and inserted here."""
    create = """
    create table days (id int, day date, primary key (id, day)) partition by range (day);
    create table days_1 partition of days for values from ('2024-01-01') to ('2024-02-01');
    create table days_2 partition of days for values from ('2024-02-01') to ('2024-03-01');
    """
    with scene(server, "public.days", create=create) as at:
        at.run(
            "insert into days values (1, '2024-01-05')",
            "update days set day = '2024-02-05'",
            "truncate days",
            "create table days_3 (day date, id int, primary key (id, day))",
            "alter table days attach partition days_3 for values from ('2024-03-01') to ('2024-04-01')",
            "insert into days values (2, '2024-03-05')",
        )
        assert [(row["stream"], row["op"]) for row in at.changes()] == [
            ("public.days", op) for op in ("insert", "delete", "insert", "truncate", "insert")
        ]
        assert json.loads(at.changes()[-1]["payload"]) == {"id": 2, "day": "2024-03-05"}


def test_a_changed_table_is_told_once_and_counted(server: PostgresServer) -> None:
    """`op = schema` in front of the first row that has the new shape, also in the middle of a transaction."""
    with scene(server, "public.orders", create=ORDERS) as at:
        with at.connection() as conn:
            conn.execute("insert into orders values (1, 1, 'a')")
            conn.execute("alter table orders add column paid boolean not null default false")
            conn.execute("insert into orders values (2, 1, 'b', true)")
        at.run("alter table orders drop column note", "insert into orders values (3, 1, false)")
        rows = at.all()
        told_of = [(row["op"], row["schema_version"]) for row in rows]
        assert told_of == [
            ("schema", 1), ("insert", 1), ("schema", 2), ("insert", 2), ("schema", 3), ("insert", 3),
        ]  # fmt: skip
        columns = json.loads(rows[0]["payload"])["columns"]
        assert columns == [
            {"name": "id", "type": "bigint", "key": True},
            {"name": "total", "type": "numeric(10,2)", "key": False},
            {"name": "note", "type": "text", "key": False},
        ]
        assert json.loads(rows[-1]["payload"]) == {"id": 3, "total": "1.00", "paid": False}
        # WHEN what was taken is confirmed, in another process the table is known
        assert [row["op"] for row in at.drain()] == [row["op"] for row in rows]
        at.run("insert into orders values (4, 1, false)")
        assert [(row["op"], row["schema_version"]) for row in at.drain()] == [("insert", 3)]


def test_logical_messages_are_events(server: PostgresServer) -> None:
    """JSON as it is, other text as a string, bytes as bytea is written; inside a transaction and outside any."""
    with scene(server, "public.orders", create=ORDERS) as at:
        with at.connection() as conn:
            conn.execute("insert into orders values (1, 1, 'a')")
            conn.execute("""select pg_logical_emit_message(true, 'mail', '{"to": 12345678901234567890}')""")
            conn.execute("select pg_logical_emit_message(false, 'alone', 'not json')")
        at.run("select pg_logical_emit_message(false, 'bytes', '\\xff00'::bytea)")
        at.run("select pg_logical_emit_message(false, 'evermark', 'ours')", "insert into orders values (2, 1, 'b')")
        rows = at.changes()
        # THEN the one outside comes first: it stands where it was written, and the rest where its transaction committed
        assert [(row["stream"], row["op"], row["tx"] is None) for row in rows] == [
            ("alone", "message", True),
            ("public.orders", "insert", False),
            ("mail", "message", False),
            ("bytes", "message", True),
            ("public.orders", "insert", False),
        ]
        assert [row["payload"] for row in rows[:4] if row["op"] == "message"] == [
            '"not json"', '{"to": 12345678901234567890}', '"\\\\xff00"',
        ]  # fmt: skip
        assert rows[3]["flags"] == ["binary"]
        assert [row["position"] for row in rows] == sorted(row["position"] for row in rows)


def test_a_look_that_a_reader_ended_is_no_failure(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a look at the slot WHEN a reader comes, which ends it, THEN nothing is said to wait, or to be wrong."""
    with scene(server, "public.orders", create=ORDERS) as at:
        start = at.source.earliest(0)
        at.run("insert into orders values (1, 1, 'waits')")
        look = at.source._look
        link = look._control()

        def end_it_first(start: Position) -> int:
            at.run(f"select pg_terminate_backend({link.connection.info.backend_pid})")
            return start.lsn + 1_000_000

        monkeypatch.setattr(look, "_flush_lsn", end_it_first)
        assert dict(at.source.untaken({0: start})) == {}
        monkeypatch.undo()
        assert set(at.source.untaken({0: start})) == {0}, "the next look sees it"


def test_what_waits_is_seen_without_taking_the_slot_from_its_reader(server: PostgresServer) -> None:
    """While somebody reads the slot, a look says nothing of it, and ends nobody."""
    with scene(server, "public.orders", create=ORDERS) as at:
        start = at.source.earliest(0)
        assert dict(at.source.untaken({0: start})) == {}
        at.run("insert into orders values (1, 1, 'waits')")
        assert set(at.source.untaken({0: start})) == {0}
        feed = at.source.follow(0, start, lambda: None)
        try:
            assert dict(at.source.untaken({0: start})) == {}
            until(feed.next, "the row is sent", timeout_s=30)
        finally:
            feed.close()
