"""Ids and positions of changes of tables: the same by peek and by stream, whatever a transaction does (P2, P3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import psycopg
import pytest

import evermark as em
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.read import feed as feed_module
from evermark.sources.postgres.read.pgoutput import MESSAGE_LATE_MAX
from evermark.sources.postgres.read.slot import SlotReader
from evermark.testing.servers import PostgresServer, postgres_server, system_binaries
from tests.contract.postgres.tables_scene import Scene, scene

CREATE = """
create table orders (id bigint primary key, total numeric, note text);
create table lines (order_id bigint references orders on delete cascade, nth int, primary key (order_id, nth));
create table days (id int, day date, primary key (id, day)) partition by range (day);
create table days_1 partition of days for values from ('2024-01-01') to ('2024-02-01');
alter table orders alter note set storage external;
"""
BEGIN_AND_EMIT = """
select pg_current_wal_insert_lsn() - '0/0'::pg_lsn, pg_logical_emit_message(false, 'm', repeat('x', %s))
"""
TABLES = ("public.orders", "public.lines", "public.days")


@pytest.fixture(scope="module", params=[None, *system_binaries()], ids=lambda b: f"pg{b.major}" if b else "bundled")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """With prepared transactions, which are off by default."""
    settings = {"max_prepared_transactions": "10"}
    with postgres_server(tmp_path_factory.mktemp("prepared"), settings=settings, binaries=request.param) as found:
        yield found


@pytest.fixture
def at(server: PostgresServer) -> Iterator[Scene]:
    with scene(server, *TABLES, create=CREATE) as found:
        yield found


class TestPostgresTables(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def filled(self, at: Scene) -> None:
        """Transactions of one and of several changes, with one in between that was rolled back."""
        at.run("insert into orders values (1, 1, 'first')", "truncate orders, lines")
        with at.connection() as conn:
            conn.execute("insert into orders select i, i, 'several' from generate_series(1, 5) i")
            conn.execute("select pg_logical_emit_message(false, 'alone', '{}')")
            conn.execute("alter table orders add column more int")
            conn.execute("update orders set more = id")
            conn.commit()
            conn.execute("delete from orders")
            conn.rollback()
        at.run("insert into orders values (100, 1, 'last')")
        self.source = at.source


def difficult(at: Scene) -> None:
    """All that changes how a transaction is decoded."""
    with at.connection() as one, at.connection() as other:
        one.execute("insert into orders select i, i, repeat('x', 5000) from generate_series(1, 20) i")
        other.execute("insert into orders select i, i, 'o' from generate_series(21, 30) i")
        one.execute("savepoint here")
        one.execute("update orders set total = 0 where id < 5")
        one.execute("select pg_logical_emit_message(true, 'undone', 'x')")
        one.execute("select pg_logical_emit_message(false, 'kept', 'x')")
        one.execute("rollback to savepoint here")
        one.execute("savepoint here")
        one.execute("update orders set total = 7 where id < 5")
        one.execute("release savepoint here")
        other.commit()
        one.execute("select pg_logical_emit_message(true, 'within', '{}')")
        one.execute("insert into lines values (1, 1), (1, 2); insert into days values (1, '2024-01-01')")
        one.commit()
        other.execute("truncate orders, lines, days")
        other.execute("insert into orders values (1, 1, 'again')")
        other.commit()
        one.execute("alter table orders add column more int")
        one.execute("insert into orders values (2, 2, 'more', 3)")
        one.commit()
        other.execute("insert into orders values (3, 3, 'never')")
        other.rollback()
    prepared(
        at, "first", "insert into orders values (41, 1, 'prepared', 1); insert into lines values (41, 1)", "commit"
    )
    prepared(at, "second", "insert into orders values (42, 1, 'never', 1)", "rollback")
    at.run("insert into orders select i, i, 'many', i from generate_series(1000, 6000) i")


def prepared(at: Scene, name: str, statements: str, end: str) -> None:
    """What happens between the two commands is decoded in between."""
    with closing(psycopg.connect(at.dsn, autocommit=True)) as conn:
        conn.execute(f"begin; {statements}; prepare transaction '{name}'".encode())
        at.run("insert into days values (2, '2024-01-02') on conflict do nothing", "delete from days where id = 2")
        conn.execute(f"{end} prepared '{name}'".encode())


def test_ids_are_the_same_by_peek_and_by_stream(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over savepoints, rolled back or not, truncates, messages, prepared transactions, DDL and large transactions."""
    start = at.source.earliest(0)
    difficult(at)
    peeked = at.all(start)
    streamed, ends = at.sent(start, len(peeked))
    assert streamed == peeked
    # AND in small pieces, a large transaction given out as it comes
    monkeypatch.setattr(feed_module, "PIECE_BYTES", 64 * 1024)
    monkeypatch.setattr(feed_module, "BUFFER_BYTES", 128 * 1024)
    again, _ = at.sent(start, len(peeked))
    assert again == peeked
    ids = [row["event_id"] for row in peeked]
    assert len(set(ids)) == len(ids)
    assert all(a < b for a, b in pairwise(row["position"] for row in peeked))
    streams = {row["stream"] for row in peeked}
    assert "undone" not in streams and {"kept", "within"} <= streams
    notes = {row["payload"] and '"prepared"' in row["payload"] for row in peeked}
    assert True in notes and not any(row["payload"] and '"never"' in row["payload"] for row in peeked)
    truncated = [row["stream"] for row in peeked if row["op"] == "truncate"]
    assert sorted(truncated) == sorted(TABLES)
    # AND from wherever it goes on, what follows is the same
    for end in ends[:5]:
        rest = [row for row in peeked if row["position"] >= end]
        assert at.all(end) == rest


def test_a_message_outside_a_transaction_is_taken_once_at_any_boundary(at: Scene) -> None:
    """It stands where its record begins, as the slot has it: confirmed in the middle of the record, that is past."""
    with at.connection() as open_one:
        open_one.execute("insert into orders values (1, 1, 'open')")
        at.run("select pg_logical_emit_message(false, 'alone', '1')")
        open_one.commit()
    at.run(f"select pg_logical_emit_message(false, 'alone', '{'2' * 300}')")
    at.run("insert into orders values (2, 1, 'flushed')")
    start = at.source.earliest(0)
    whole = at.all(start)
    assert [row["op"] for row in whole] == ["message", "schema", "insert", "message", "insert"]
    for row in (whole[0], whole[3]):
        lsn = int(row["position"][25:41], 16)
        for cut in range(lsn - 8, lsn + 64, 4):
            middle = f"{row['position'][:25]}{cut:016x}:{0:08x}"
            first = at.read(start, middle)
            at.source.confirm(0, middle)
            SlotReader(at.source._capture).advance(Position.parse(middle))
            assert first == [each for each in whole if start <= each["position"] < middle]
            rest = [each for each in whole if each["position"] >= middle]
            assert at.all(middle) == rest
            streamed, ends = at.sent(middle, len(rest))
            assert streamed == rest
            assert all(end > each["position"] for end in ends[-1:] for each in rest)
            start = middle


def test_a_message_outside_a_transaction_is_sent_without_waiting_for_one(at: Scene) -> None:
    """No commit follows it."""
    start = at.source.earliest(0)
    at.run("select pg_logical_emit_message(false, 'alone', '1')")
    rows, ends = at.sent(start, 1)
    assert [row["stream"] for row in rows] == ["alone"] and ends[-1] > rows[0]["position"]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a subtransaction"])
def test_messages_are_placed_where_their_records_begin(at: Scene, inside: bool) -> None:
    """From where a record ends follows where it begins, across pages and segments, for every size."""
    begins: list[int] = []
    start = at.source.earliest(0)
    for size in [*range(0, 600, 3), 8_000, 8_168, 8_200, 20_000, 1_000_000, 17_000_000]:
        with at.connection() as conn:
            if inside:
                conn.execute("savepoint here")
                conn.execute("select pg_current_xact_id()")
            found = conn.execute(BEGIN_AND_EMIT, (size,)).fetchone()
            begins.append(int(found[0]) if found else 0)
    at.run("insert into orders values (1, 1, 'flushed')")
    placed = [int(row["position"][25:41], 16) for row in at.all(start) if row["op"] == "message"]
    assert len(placed) == len(begins)
    late = {at_ - begin for begin, at_ in zip(begins, placed, strict=True)}
    assert min(late) == 0 and max(late) <= (MESSAGE_LATE_MAX if inside else 0), late
