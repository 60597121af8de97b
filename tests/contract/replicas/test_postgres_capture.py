"""Capture in Postgres under transactions of many users at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from evermark.errors import BusyError, SetupError
from evermark.replicas.paging import Stretch
from evermark.replicas.ranges import Ranges
from evermark.testing.contracts.replica_scene import ReplicaNode, event_by
from evermark.testing.until import until
from tests.contract.replicas.replica_nodes import postgres_node

WRITERS, EACH = 4, 15
ORIGIN = "z.000000000001aaaaaaaa"


@pytest.fixture
def node(pg_dsn: str) -> Iterator[ReplicaNode]:
    made = postgres_node("a", pg_dsn)
    made.sql("create table parts (id bigint primary key, n bigint)")
    for table in ("orders", "parts"):
        made.install(table)
    made.store.join({})
    yield made
    made.close()


def user(node: ReplicaNode, dsn: str) -> psycopg.Connection[tuple[object, ...]]:
    """Somebody who knows nothing of replicas."""
    (schema,) = node.sql("select current_schema()")[0]
    return psycopg.connect(dsn, options=f"-c search_path={schema}")


def test_r2_transactions_that_change_tables_crosswise_do_not_deadlock(node: ReplicaNode, pg_dsn: str) -> None:
    """GIVEN users who change two tables in opposite orders at once WHEN all commit THEN none fails, numbers are dense
    in both tables, and an event is never visible before one with a lower number."""
    failures: list[BaseException] = []
    gaps: list[list[int]] = []
    done = threading.Event()

    def write(number: int) -> None:
        try:
            with user(node, pg_dsn) as connection:
                for turn in range(EACH):
                    key = number * EACH + turn
                    both = [
                        f"insert into orders (id, what) values ({key}, 'x')",
                        f"insert into parts values ({key}, 1)",
                    ]
                    for sql in both if number % 2 else reversed(both):
                        connection.execute(sql)
                    connection.rollback() if turn % 5 == 4 else connection.commit()
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)

    def look() -> None:
        with user(node, pg_dsn) as connection:
            connection.autocommit = True
            while not done.is_set():
                found = [seq for (seq,) in connection.execute('select origin_seq from "orders_Events" order by 1')]
                if found != list(range(1, len(found) + 1)):
                    gaps.append(found)  # type: ignore[arg-type]

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    watching = threading.Thread(target=look)
    for thread in (watching, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watching.join()
    assert failures == [] and gaps == []
    kept = WRITERS * EACH * 4 // 5
    origin = node.store.identity()[0]
    for table in ("orders", "parts"):
        assert [event.version.seq for event in node.store.read(table, [Stretch(origin, 1, 999)])] == [
            *range(1, kept + 1)
        ]
    assert node.sql("select count(*) from replication_pending") == [(0,)]


def test_r6_ingest_gives_way_to_a_users_transaction(node: ReplicaNode, pg_dsn: str) -> None:
    """GIVEN a user's open transaction on a row WHEN an event of that row comes THEN the ingest gives way, the user's
    commit succeeds, and the event is taken afterwards; the newer version has the row."""
    node.put(1, "first")
    ahead = node.events()[0].version.hlc + (1 << 40)
    event = event_by(ORIGIN, 1, 1, "from a peer", ahead)
    with user(node, pg_dsn) as connection:
        connection.execute("update orders set what = 'by a user' where id = 1")
        with pytest.raises(BusyError):
            node.store.ingest("orders", [event], node.now_ms(), 10**12)
        connection.commit()
    assert node.store.ingest("orders", [event], node.now_ms(), 10**12).applied == 1
    assert node.rows() == [("1", "from a peer", None, None, None)]


def test_r7_an_insert_that_races_with_a_peers_row_ends_with_the_newer_one(node: ReplicaNode, pg_dsn: str) -> None:
    """GIVEN a user's uncommitted insert WHEN a peer's older event of the same key is taken meanwhile THEN it waits, and
    the user's row stays."""
    results: list[object] = []

    def take() -> None:
        for _ in range(100):
            try:
                results.append(node.store.ingest("orders", [event_by(ORIGIN, 1, 7, "old", 5)], node.now_ms(), 1000))
            except BusyError:
                continue
            return

    with user(node, pg_dsn) as connection:
        connection.execute("insert into orders (id, what) values (7, 'mine')")
        thread = threading.Thread(target=take)
        thread.start()
        waiting = (
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        )
        with psycopg.connect(pg_dsn, autocommit=True) as watcher:
            until(lambda: watcher.execute(waiting).fetchone() == (1,), "the ingest waits", timeout_s=30)
        connection.commit()
    thread.join()
    assert len(results) == 1
    assert node.sql("select what from orders where id = 7") == [("mine",)]
    assert node.store.held("orders")[ORIGIN] == Ranges.through(1)


def test_r1_a_truncate_and_a_large_transaction_are_captured(node: ReplicaNode) -> None:
    """GIVEN thousands of rows in one transaction WHEN truncated THEN each row's insert and delete is an event."""
    node.sql("insert into orders (id, what) select i, 'x' from generate_series(1, 3000) i")
    node.sql("truncate orders")
    assert len(node.events()) == 6000
    counts = node.store.counts("orders")
    assert (counts.rows, counts.tombstones) == (0, 3000)


def test_capture_is_not_led_astray_by_temporary_tables(node: ReplicaNode, pg_dsn: str) -> None:
    """GIVEN a user with a temporary table of the name that capture writes to WHEN a row changes THEN it is captured."""
    with user(node, pg_dsn) as connection:
        connection.execute("create temporary table replication_pending (like replication_pending including all)")
        connection.execute("insert into orders (id, what) values (1, 'seen')")
    assert [event.record_id for event in node.events()] == ["1"]


@pytest.mark.parametrize(
    ("kind", "fits", "longer"),
    [
        ("varchar(3)", "abc", "abcd"),
        ("char(3)", "abc", "abcd"),
        ("bit(3)", "101", "1011"),
        ("varchar(3)[]", "{a}", "{abcd}"),
    ],
)
def test_r6_a_value_that_is_too_long_for_its_column_is_refused_and_not_cut(
    node: ReplicaNode, kind: str, fits: str, longer: str
) -> None:
    """GIVEN a column that is shorter here than at a peer WHEN a value is too long for it THEN it is refused whole."""
    node.sql(f"alter table orders alter what type {kind} using null")
    node.store.ingest("orders", [event_by(ORIGIN, 1, 1, fits, 5)], node.now_ms(), 1000)
    with pytest.raises(SetupError, match="refuses a row"):
        node.store.ingest("orders", [event_by(ORIGIN, 2, 2, longer, 6)], node.now_ms(), 1000)
    assert node.sql("select id, what::text from orders") == [(1, fits)]
