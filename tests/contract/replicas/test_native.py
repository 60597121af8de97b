"""Snapshots between SQLite nodes as files: as good as columns, and refused when they are not what they should be."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from evermark.errors import FormatError, UnreachableError
from evermark.replicas import native
from evermark.replicas.base import Cut
from evermark.replicas.diff import differences
from evermark.replicas.exchange import Manifest
from evermark.replicas.native import NotNative
from evermark.replicas.sqlite import SqliteStore
from evermark.testing.contracts.replica_scene import Direct, ReplicaNode
from tests.contract.replicas.replica_nodes import sqlite_node

Make = Callable[[str], ReplicaNode]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(name: str) -> ReplicaNode:
            node = sqlite_node(name, tmp_path / f"{name}.db")
            stack.callback(node.close)
            return node

        yield made


class Noting(Direct):
    """Notes of which kind the snapshots were."""

    kinds: list[str]

    def snapshot(self, table: str, native: str | None = None) -> Manifest:
        made = super().snapshot(table, native)
        self.kinds = [*getattr(self, "kinds", []), "files" if made.files else "columns"]
        return made


def _bootstrapped(a: ReplicaNode, b: ReplicaNode) -> list[str]:
    a.install()
    b.install()
    peer = Noting("b", a.replica)
    b.replica.meetings.sync(peer)
    assert differences(b.replica.node, peer, "orders") == ([], True)
    return peer.kinds


def test_r11_nodes_whose_tables_are_alike_bootstrap_by_files(make: Make) -> None:
    """GIVEN two SQLite nodes with one form of a table, one with rows and tombstones, WHEN the empty one bootstraps THEN
    files are moved, rows and versions are equal, and what is written there then is captured and moves back."""
    a, b = make("a"), make("b")
    a.install()
    for key in range(50):
        a.put(key, f"row {key}")
    a.sql("update orders set ok = true, raw = x'00ff', what = null where id % 2 = 0")
    a.sql("delete from orders where id < 5")
    a.sql('delete from "orders_Events"')
    for origin, ranges in a.store.held("orders").items():
        a.store._raise_floors("orders", {origin: ranges.highest})
    assert _bootstrapped(a, b) == ["files"]
    assert b.store.counts("orders").rows == 45
    assert b.store.counts("orders").tombstones == 5
    b.sql("update orders set what = 'changed' where id = 7")
    b.replica.meetings.sync(Direct("b", a.replica))
    assert a.sql("select what from orders where id = 7") == [("changed",)]


@pytest.mark.parametrize(
    ("spoil", "is_value"),
    [
        ("insert into orders (id, what, amount, ok, raw) values (900, x'41', 1, true, null)", True),
        ("insert into orders (id, what, amount, ok, raw) values (901, 'x', 1, 7, null)", False),
    ],
    ids=["bytes among texts", "no boolean"],
)
def test_r11_values_that_are_not_in_canonical_form_travel_as_columns(make: Make, spoil: str, is_value: bool) -> None:
    """GIVEN a row with a value of another kind, WHEN files are asked for THEN they are refused, and the columns have it
    in its form, or say what is wrong with the row."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    a.sql(spoil)
    a.install()
    b.install()
    peer = Noting("b", a.replica)
    if is_value:
        b.replica.meetings.sync(peer)
        assert peer.kinds == ["files", "columns"]
    else:
        with pytest.raises(FormatError, match="row '901'"):
            b.replica.meetings.sync(peer)
        assert set(peer.kinds) == {"files"}


def test_r11_a_row_without_a_version_is_left_out_as_ever(make: Make) -> None:
    """GIVEN a row that was written with capture switched off THEN it is in no snapshot, of whichever kind."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    a.install()
    a.sql("update replication_meta set value = '1' where key = 'applying'")
    a.put(2, "not captured")
    a.sql("update replication_meta set value = '0' where key = 'applying'")
    assert _bootstrapped(a, b) == ["files", "columns"]
    assert b.sql("select id from orders") == [(1,)]


def test_r11_tables_of_another_form_travel_as_columns(make: Make) -> None:
    """GIVEN a table that has an index on one side alone THEN its rows travel as columns."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    b.sql("create index by_what on orders (what)")
    assert _bootstrapped(a, b) == ["columns"]


@pytest.mark.parametrize(
    "spoil",
    [
        "create trigger t after insert on orders begin delete from orders; end",
        "create view v as select 1",
        "update orders set what = x'ff'",
        "delete from orders",
    ],
)
def test_r8_files_that_are_not_what_they_should_be_change_nothing(make: Make, tmp_path: Path, spoil: str) -> None:
    """GIVEN files with a peer's SQL in them, or rows that do not fit their versions THEN nothing of them is taken."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    a.install()
    b.install()
    folder = tmp_path / "dumped"
    folder.mkdir()
    cut, files = a.store.dump("orders", folder)
    with closing(sqlite3.connect(files[0])) as file:
        file.execute(spoil)
        file.commit()
    with pytest.raises(NotNative):
        b.store.take_dump("orders", cut, files, 0)
    assert b.store.is_empty("orders")
    b.put(5, "captured")
    assert b.store.counts("orders").events == 1


def test_r11_writers_go_on_while_files_are_made_and_are_in_them_whole_or_not_at_all(make: Make, tmp_path: Path) -> None:
    """GIVEN a dump of which both connections see one moment, WHEN somebody writes before it has copied anything THEN
    neither rows nor versions have that."""
    a = make("a")
    a.put(1, "one")
    a.install()
    store = a.store
    assert isinstance(store, SqliteStore)
    form = native.form_of(store.connection, "orders")
    folder = tmp_path / "dumped"
    folder.mkdir()
    with native.dumping(tmp_path / "a.db", folder, "orders", form) as dumped:
        a.put(2, "later")
        files = dumped()
    assert native.check(store.tables()["orders"], files, form, 'cast(b."id" as text)') == 1


def test_r11_a_bootstrap_by_files_goes_on_with_what_is_missing(make: Make) -> None:
    """GIVEN a peer that goes away after the first piece of a file THEN that piece is not asked for again."""

    class Cut(Direct):
        asked: list[int] = []  # noqa: RUF012 - of one test

        def chunk(self, snapshot: str, number: int) -> bytes:
            self.asked.append(number)
            if self.asked == [0, 1]:
                raise UnreachableError("cut", hint="a test")
            return super().chunk(snapshot, number)

    a, b = make("a"), make("b")
    a.put(1, "one")
    a.install()
    b.install()
    peer = Cut("b", a.replica)
    with pytest.raises(UnreachableError, match="cut"):
        b.replica.meetings.sync(peer)
    assert b.store.is_empty("orders")
    b.replica.meetings.sync(peer)
    assert peer.asked.count(0) == 1
    assert b.sql("select id from orders") == [(1,)]


def test_r11_a_table_that_has_rows_takes_no_files(make: Make, tmp_path: Path) -> None:
    """GIVEN rows of its own THEN files are refused, and columns are merged."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    b.put(2, "two")
    a.install()
    b.install()
    peer = Noting("b", a.replica)
    b.replica.meetings.sync(peer)
    assert peer.kinds == ["columns"]
    assert b.sql("select id from orders order by id") == [(1,), (2,)]
    folder = tmp_path / "dumped"
    folder.mkdir()
    _, files = a.store.dump("orders", folder)
    with pytest.raises(NotNative, match="has rows"):
        b.store.take_dump("orders", Cut({}, 0), files, 0)
