"""Snapshots between SQLite nodes as files: as good as columns, and refused when they are not what they should be."""

from __future__ import annotations

import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from evermark.errors import FormatError, UnreachableError
from evermark.replicas import native, sqlite
from evermark.replicas.base import Cut
from evermark.replicas.diff import differences
from evermark.replicas.exchange import Manifest
from evermark.replicas.native import NotNative
from evermark.replicas.snapshots import Snapshots
from evermark.replicas.sqlite import SqliteStore
from evermark.replicas.values import VALUE_CHARS_MAX
from evermark.testing.contracts.replica_scene import Direct, Make, ReplicaNode
from tests.contract.replicas.replica_nodes import closed_at_the_end, sqlite_node


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with closed_at_the_end(lambda name: sqlite_node(name, tmp_path / f"{name}.db")) as made:
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
    """GIVEN two SQLite nodes with one form of a table and its index, one with rows and tombstones, WHEN the empty one
    bootstraps THEN files are moved, rows and versions are equal, and what is written there then is captured and moves
    back."""
    a, b = make("a"), make("b")
    for node in (a, b):
        node.sql("create index by_what on orders (what)")
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
    assert b.sql("pragma integrity_check") == [("ok",)]
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


def _dumped(a: ReplicaNode, b: ReplicaNode, folder: Path, table: str = "orders") -> tuple[Cut, Sequence[Path]]:
    a.install(table)
    b.install(table)
    folder.mkdir()
    return a.store.dump(table, folder)


def _spoil(file: Path, script: str, *, is_hidden: bool = True) -> None:
    """What a peer may do that writes pages of its own; hidden, it says that tables and indexes are as they were."""
    with closing(sqlite3.connect(file, isolation_level=None)) as there:
        forms = there.execute("select name, sql from sqlite_master").fetchall() if is_hidden else []
        there.executescript(script)
        there.execute("pragma writable_schema = on")
        there.executemany("update sqlite_master set sql = ? where name = ?", [(sql, name) for name, sql in forms])


def _rebuilt(name: str, columns: str, rest: str, change: str) -> str:
    """Types keep another program from writing what it likes; so it makes the table without them for a while."""
    return (
        f"create table other as select * from {name}; drop table {name}; create table {name} ({columns}){rest}; "
        f"insert into {name} select * from other; drop table other; update {name} set {change};"
    )


def _rows(change: str) -> str:
    columns = "id primary key, what, amount, ok, raw"
    return _rebuilt("orders", columns, "; create index by_what on orders (what)", change)


_OF_DELETED = 'create index "orders_Versions_deleted" on "orders_Versions" (hlc) where is_deleted'


def _versions(change: str) -> str:
    columns = "record_id text primary key, hlc not null, origin_node_id, origin_seq not null, is_deleted not null"
    return _rebuilt('"orders_Versions"', columns, f" without rowid; {_OF_DELETED}", change)


_ROW_TWICE = """
create table other as select * from orders; drop table orders;
create table orders (id bigint, what text, amount double precision, ok boolean, raw blob, primary key (id, what));
insert into orders select * from other; update orders set id = 1; drop table other;
create index by_what on orders (what);
"""
_VERSION_TWICE = f"""
create table other as select * from "orders_Versions"; drop table "orders_Versions";
create table "orders_Versions" (record_id text, hlc integer not null, origin_node_id text not null,
  origin_seq integer not null, is_deleted boolean not null, primary key (record_id, hlc)) without rowid;
{_OF_DELETED};
insert into "orders_Versions" select * from other where record_id <> '2';
insert into "orders_Versions" select record_id, hlc + 1, origin_node_id, origin_seq, 0 from other where record_id = '1';
drop table other;
"""
_MORE_VERSIONS = """
insert into "orders_Versions" select '{}', hlc, origin_node_id, origin_seq, {} from "orders_Versions" limit 1
"""
_DISGUISED = """
pragma writable_schema = on; insert into sqlite_master values ('trigger', 'sqlite_sequence', 'orders', 0,
  'create trigger sqlite_sequence after insert on orders begin delete from orders; end');
"""
_NO_TEXT = "pragma writable_schema = on; update sqlite_master set type = cast(type as blob) where type = 'index'"
_APART, _OF_A_REAL, _FIELD = "belong together", "a real is among integers", "a version has a field that is none"

Spoilt = Callable[..., None]


@pytest.fixture
def spoilt(make: Make, tmp_path: Path) -> Spoilt:
    """Refused with these words, and nothing of them taken, are files of two rows and a deleted one after such scripts
    over the files of rows (0) and versions (1)."""

    def take(scripts: Mapping[int, str], why: str, *, is_hidden: bool = True) -> None:
        a, b = make("a"), make("b")
        for node in (a, b):
            node.sql("create index by_what on orders (what)")
        a.install()
        for key, what in ((1, "one"), (2, "two"), (3, "three")):
            a.put(key, what)
        a.sql("delete from orders where id = 3")
        cut, files = _dumped(a, b, tmp_path / "dumped")
        for file, script in scripts.items():
            _spoil(files[file], script, is_hidden=is_hidden)
        try:
            with pytest.raises(NotNative, match=why):
                b.store.take_dump("orders", cut, files, 0)
        finally:
            assert b.store.is_empty("orders")
            b.put(5, "captured")
            assert b.store.counts("orders").events == 1

    return take


@pytest.mark.parametrize(
    ("file", "script"),
    [
        (0, "create trigger t after insert on orders begin delete from orders; end"),
        (0, "create view v as select 1"),
        (0, "drop table orders; create view orders as select 1 as id"),
        (0, "create table another (id)"),
        (0, "drop index by_what"),
        (1, 'create index another on "orders_Versions" (hlc)'),
        (0, _DISGUISED),
        (0, _NO_TEXT),
    ],
    ids=[
        "a trigger",
        "a view",
        "a view for a table",
        "another table",
        "no index",
        "another index",
        "a trigger that is called like a table of SQLite's",
        "a name that is no text",
    ],
)
def test_r8_of_files_with_a_peers_sql_in_them_nothing_is_read(
    spoilt: Spoilt, monkeypatch: pytest.MonkeyPatch, file: int, script: str
) -> None:
    """GIVEN files that were made by other statements than ours THEN they are refused before anything is copied, and
    before any other check."""
    monkeypatch.setattr(native, "load", lambda *_: pytest.fail("it was copied"))
    monkeypatch.setattr(native, "check", lambda *_: pytest.fail("it was checked"))
    spoilt({file: script}, "its tables are others", is_hidden=False)


@pytest.mark.parametrize(
    ("file", "script", "why"),
    [
        (0, "drop index by_what; create index by_what on orders (what) where id > 1", "missing from index by_what"),
        (0, _ROW_TWICE, "index sqlite_autoindex_orders_1"),
        (1, _VERSION_TWICE, "order|non-unique|out of"),
    ],
    ids=["an index without a row", "a row twice", "a version twice"],
)
def test_r8_pages_that_are_not_in_order_change_nothing(
    spoilt: Spoilt, monkeypatch: pytest.MonkeyPatch, file: int, script: str, why: str
) -> None:
    """GIVEN pages that a peer wrote itself THEN the check of pages finds it, whatever the next one might."""
    monkeypatch.setattr(native, "_check_pairs", lambda *_: 3)
    monkeypatch.setattr(native, "load", lambda *_: None)
    spoilt({file: script}, why)


@pytest.mark.parametrize(
    ("scripts", "why"),
    [
        ({0: _rows("what = x'ff' where id = 1")}, _APART),
        ({0: _rows("what = 7 where id = 1")}, _APART),
        ({0: _rows("amount = '1.5' where id = 1")}, _APART),
        ({0: _rows("ok = 7 where id = 1")}, _APART),
        ({0: _rows("ok = '1' where id = 1")}, _APART),
        ({0: _rows("ok = 1.0 where id = 1")}, _OF_A_REAL),
        ({0: _rows("raw = 'text' where id = 1")}, _APART),
        ({0: _rows("id = 1.0 where id = 1"), 1: _versions("record_id = '1.0' where record_id = '1'")}, _OF_A_REAL),
        ({0: "delete from orders"}, _APART),
        ({0: "delete from orders where id = 1"}, _APART),
        ({0: "insert into orders (id) values (4)"}, _APART),
        ({1: _MORE_VERSIONS.format(4, 0)}, _APART),
        ({1: _versions("record_id = '9' where record_id = '1'")}, _APART),
        ({1: _versions("record_id = '01' where record_id = '1'")}, _APART),
        ({1: _versions("is_deleted = 1 where record_id = '1'")}, _APART),
        ({1: _versions("is_deleted = 1 where record_id = '1'"), 0: "insert into orders (id) values (3)"}, _APART),
        ({1: _versions("is_deleted = 0.0 where record_id = '1'")}, _OF_A_REAL),
        ({1: _versions("is_deleted = '0' where record_id = '1'")}, _APART),
        ({1: _versions("is_deleted = 7 where record_id = '1'")}, _FIELD),
        ({1: _versions("hlc = '5' where record_id = '1'")}, _APART),
        ({1: _versions("hlc = 5.0 where record_id = '1'")}, _OF_A_REAL),
        ({1: _versions("hlc = 0 where record_id = '1'")}, _APART),
        ({1: _versions(f"hlc = {2**62} where record_id = '1'")}, _APART),
        ({1: _versions("hlc = hlc + (1 << 40) where record_id = '1'")}, _APART),
        ({1: _versions("hlc = hlc + (1 << 40) where record_id = '3'")}, _FIELD),
        ({1: _versions("origin_seq = '5' where record_id = '1'")}, _APART),
        ({1: _versions("origin_seq = 5.0 where record_id = '1'")}, _OF_A_REAL),
        ({1: _versions("origin_seq = 0 where record_id = '1'")}, _APART),
        ({1: _versions(f"origin_seq = {2**62} where record_id = '1'")}, _APART),
        ({1: _versions("origin_node_id = 'nobody' where record_id = '1'")}, "an origin is none"),
        ({1: _versions("origin_node_id = origin_node_id || ' ' where record_id = '1'")}, "an origin is none"),
        ({1: _versions("origin_node_id = cast(origin_node_id as blob) where record_id = '1'")}, "an origin is none"),
        ({1: _versions("record_id = x'33' where record_id = '3'")}, "a deleted row has no record id"),
        ({1: _versions("is_deleted = 2 where record_id = '3'")}, _FIELD),
        ({1: _versions("is_deleted = 1.0 where record_id = '3'")}, _FIELD),
        ({1: _versions("hlc = 5.0 where record_id = '3'")}, _FIELD),
        ({1: _versions("hlc = 0 where record_id = '3'")}, _FIELD),
        ({1: _versions(f"hlc = {2**62} where record_id = '3'")}, _FIELD),
        ({1: _versions("origin_seq = '5' where record_id = '3'")}, _FIELD),
    ],
    ids=[
        "bytes among texts",
        "a text as number",
        "a number as text",
        "no boolean",
        "a boolean as text",
        "a boolean as real",
        "bytes as text",
        "a key as real",
        "no rows",
        "a version without a row",
        "a row without a version",
        "a version more",
        "another row's version",
        "a version with another text of the key",
        "a deleted row that is there",
        "a deleted row that is there, and one that is not deleted",
        "a flag as real",
        "a flag as text",
        "neither deleted nor not",
        "a reading as text",
        "a reading as real",
        "no reading",
        "a reading that is too large",
        "a reading beyond the clock",
        "a reading of a deleted row beyond the clock",
        "a number of an event as text",
        "a number of an event as real",
        "no number",
        "a number that is too large",
        "no origin",
        "an origin with something behind it",
        "an origin as bytes",
        "a deleted row with bytes for its key",
        "more than deleted",
        "deleted as real",
        "a reading of a deleted row as real",
        "no reading of a deleted row",
        "a reading of a deleted row that is too large",
        "a number of a deleted row as text",
    ],
)
def test_r8_rows_that_do_not_fit_their_versions_change_nothing(
    spoilt: Spoilt, monkeypatch: pytest.MonkeyPatch, scripts: Mapping[int, str], why: str
) -> None:
    """GIVEN values of another kind, versions that are none, or rows without one THEN the check of pairs finds it,
    though SQLite's own check of the file were not there: it finds more with each version of SQLite."""
    monkeypatch.setattr(native, "_check_pages", lambda *_: None)
    spoilt(scripts, why)


def test_r8_a_deleted_row_whose_record_is_no_key_changes_nothing(spoilt: Spoilt) -> None:
    """GIVEN the version of a deleted row whose record id is no key of the table THEN the file is refused."""
    with pytest.raises(FormatError, match="is no integer"):
        spoilt({1: _versions("record_id = 'x' where record_id = '3'")}, "^$")


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        (0, "n = null where id = 1", "NULL value in things.n"),
        (0, "n = -1 where id = 1", "CHECK constraint failed in things"),
        (0, "one = 1.0 where id = 1", _OF_A_REAL),
        (0, "two = 1.0 where id = 2", _OF_A_REAL),
        (0, "one = 9e999 where id = 1", _APART),
    ],
    ids=["a null", "a value that a rule forbids", "a real in one of two", "a real in the other", "infinity"],
)
def test_r8_values_that_rules_of_the_table_forbid_change_nothing(
    make: Make, tmp_path: Path, file: int, change: str, why: str
) -> None:
    """GIVEN rows that break a rule of the table, or a real among integers, beside which another integer is null THEN
    nothing of the file is taken; and without that all is."""
    a, b = make("a"), make("b")
    for node in (a, b):
        node.sql("create table things (id integer primary key, n integer not null check (n > 0), one int, two int)")
    a.sql("insert into things values (1, 1, 1, null), (2, 1, null, 1)")
    cut, files = _dumped(a, b, tmp_path / "dumped", "things")
    good = [file.read_bytes() for file in files]
    _spoil(files[file], _rebuilt("things", "id integer primary key, n, one, two", "", change))
    with pytest.raises(NotNative, match=why):
        b.store.take_dump("things", cut, files, 0)
    assert b.store.is_empty("things")
    for path, data in zip(files, good, strict=True):
        path.write_bytes(data)
    assert b.store.take_dump("things", cut, files, 0) == 2


@pytest.mark.parametrize("record", ["a|2", "b|1", "a"])
def test_r8_a_version_under_a_key_of_two_columns_is_of_its_row(make: Make, tmp_path: Path, record: str) -> None:
    """GIVEN a table with a key of two columns, and a version of another one THEN nothing of the file is taken; without
    it all is."""
    a, b = make("a"), make("b")
    for node in (a, b):
        node.sql("create table things (one text, two integer, primary key (one, two))")
    a.sql("insert into things values ('a', 1), ('a|', 1)")
    cut, files = _dumped(a, b, tmp_path / "dumped", "things")
    good = files[1].read_bytes()
    _spoil(files[1], f"update \"things_Versions\" set record_id = '{record}' where record_id = 'a|1'")
    with pytest.raises(NotNative, match=_APART):
        b.store.take_dump("things", cut, files, 0)
    assert b.store.is_empty("things")
    files[1].write_bytes(good)
    assert b.store.take_dump("things", cut, files, 0) == 2


def test_r11_a_table_that_numbers_its_rows_itself_travels_as_files(make: Make, tmp_path: Path) -> None:
    """GIVEN a table with AUTOINCREMENT, for which SQLite makes a table of its own in the file THEN it is taken."""
    a, b = make("a"), make("b")
    for node in (a, b):
        node.sql("create table things (id integer primary key autoincrement, what text)")
    a.sql("insert into things (what) values ('one')")
    cut, files = _dumped(a, b, tmp_path / "dumped", "things")
    assert b.store.take_dump("things", cut, files, 0) == 1
    assert b.sql("select * from things") == [(1, "one")]


def test_r8_values_of_every_kind_are_taken_from_a_file_that_another_program_wrote(make: Make, tmp_path: Path) -> None:
    """GIVEN files as those that are refused, but with values as they should be THEN they are taken."""
    a, b = make("a"), make("b")
    for node in (a, b):
        node.sql("create index by_what on orders (what)")
    a.put(1, "one")
    a.put(2, None)
    cut, files = _dumped(a, b, tmp_path / "dumped")
    _spoil(files[0], _rows("amount = 1.5, ok = 1, raw = x'00' where id = 1"))
    _spoil(files[1], _versions("hlc = 5"))
    assert b.store.take_dump("orders", cut, files, 0) == 2
    assert b.sql("select * from orders order by id") == [(1, "one", 1.5, 1, b"\0"), (2, None, None, None, None)]


def test_r8_a_check_changes_nothing_of_a_file(make: Make, tmp_path: Path) -> None:
    """GIVEN files that are opened to be checked THEN neither can be written to."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    _, files = _dumped(a, b, tmp_path / "dumped")
    for written in ("orders", 'versions."orders_Versions"'):
        with (
            pytest.raises(NotNative, match="readonly"),
            native._opened(a.store.tables()["orders"], files) as connection,
        ):
            connection.execute(f"delete from {written}")


def test_r8_a_file_that_is_no_database_changes_nothing(make: Make, tmp_path: Path) -> None:
    """GIVEN bytes that are no pages, in the middle of a file or at its beginning THEN nothing of it is taken."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    cut, files = _dumped(a, b, tmp_path / "dumped")
    for start, end in ((65536, 131072), (0, 100)):
        data = bytearray(files[0].read_bytes())
        data[start:end] = b"\xff" * (end - start)
        files[0].write_bytes(data)
        with pytest.raises(NotNative):
            b.store.take_dump("orders", cut, files, 0)
    assert b.store.is_empty("orders")


def test_r8_a_copy_that_would_never_end_is_broken_off(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN files whose pages lead round in circles, which the check refuses at once THEN the copy does not go on, and
    nothing of it is kept: others can write again."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    cut, files = _dumped(a, b, tmp_path / "dumped")

    def load(connection: sqlite3.Connection, *_: object) -> None:
        connection.execute("insert into orders (id) values (9)")
        begun.set()
        connection.execute("with recursive n(i) as (select 1 union all select i from n) select count(*) from n")

    def refuse(*_: object) -> int:
        assert begun.wait(30)
        raise NotNative("round in circles", hint="a test")

    begun = threading.Event()
    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(native, "check", refuse)
    with pytest.raises(NotNative, match="circles"):
        b.store.take_dump("orders", cut, files, 0)
    assert b.store.is_empty("orders")
    b.put(5, "written")


Offered = tuple[Manifest, Callable[[int], bytes]]


@pytest.fixture
def offered(make: Make) -> Offered:
    """A snapshot by files, and its chunks."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    a.install()
    b.install()
    b.replica.meetings.sync(Direct("b", a.replica))
    manifest = a.replica.answers.snapshot("orders", native=a.store.native_form("orders"))
    assert manifest.files and len(manifest.chunks) > 1
    return manifest, partial(a.replica.answers.chunk, manifest.id)


def _take_all(kept: Snapshots, offered: Offered) -> list[bytes]:
    manifest, chunk = offered
    for number in kept.missing("a", manifest):
        kept.take("a", manifest, number, chunk(number))
    return [path.read_bytes() for path in kept.taken_files("a", manifest)]


def test_r11_a_busy_store_and_a_dead_process_leave_no_files_behind(offered: Offered, tmp_path: Path) -> None:
    """GIVEN files that are asked for again and again, and those of a process that died THEN there is one of each."""
    manifest, kept = offered[0], Snapshots(tmp_path)
    kept.missing("a", manifest)
    folder = next(tmp_path.glob(".taken.*"))
    (folder / "000000.dead.db").write_bytes(b"left")
    first = _take_all(kept, offered)
    files = kept.taken_files("a", manifest)
    assert sorted(files) == sorted(folder.glob("*.db"))
    other = Snapshots(tmp_path)
    assert _take_all(other, offered) == first
    assert not set(other.taken_files("a", manifest)) & set(files), "another process has its own"
    assert all(path.exists() for path in files)


def test_r11_a_file_is_whole_though_the_disk_was_full_for_a_while(offered: Offered, tmp_path: Path) -> None:
    """GIVEN a disk with room for a part of a piece WHEN there is room again THEN the file is as it should be."""
    whole = _take_all(Snapshots(tmp_path / "other"), offered)
    kept = Snapshots(tmp_path / "kept")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole[0]) - 1, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            _take_all(kept, offered)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _take_all(kept, offered) == whole


def test_r11_a_file_begins_anew_when_another_process_was_done_with_its_folder(offered: Offered, tmp_path: Path) -> None:
    """GIVEN a process that has some of a file WHEN another ends with the same snapshot THEN all of it is taken anew."""
    whole = _take_all(Snapshots(tmp_path / "other"), offered)
    kept, (manifest, chunk) = Snapshots(tmp_path / "kept"), offered
    kept.missing("a", manifest)
    kept.take("a", manifest, 0, chunk(0))
    Snapshots(tmp_path / "kept").done_with("a", manifest)
    assert list(kept.missing("a", manifest)) == list(range(len(manifest.chunks)))
    assert _take_all(kept, offered) == whole


def test_r11_a_store_that_is_closed_has_carried_its_wal_into_the_file(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a table that was taken by files, and a thread that carries the WAL WHEN the store is closed THEN that has
    ended: nobody opens the file later."""
    a, b = make("a"), make("b")
    a.put(1, "one")
    cut, files = _dumped(a, b, tmp_path / "dumped")
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def checkpoint(_: Path) -> None:
        begun.set()
        assert goes_on.wait(30)
        ended.set()

    monkeypatch.setattr(sqlite, "_checkpoint", checkpoint)
    assert b.store.take_dump("orders", cut, files, 0) == 1
    assert begun.wait(30) and b.sql("select id from orders") == [(1,)]
    closing_thread = threading.Thread(target=b.store.close)
    closing_thread.start()
    goes_on.set()
    closing_thread.join(30)
    assert ended.is_set()


@pytest.mark.parametrize(
    "long", [f"printf('%.{VALUE_CHARS_MAX + 1}c', 'x')", f"zeroblob({VALUE_CHARS_MAX // 2 + 1})"], ids=["text", "bytes"]
)
def test_r8_a_value_that_is_too_long_is_not_taken(make: Make, tmp_path: Path, long: str) -> None:
    """GIVEN a row with a value that is longer than any may be THEN files with it are refused, and later ones are not:
    the store takes long rows as before."""
    a, b = make("a"), make("b")
    a.sql(f"insert into orders (id, {'raw' if 'blob' in long else 'what'}) values (1, {long})")
    cut, files = _dumped(a, b, tmp_path / "dumped")
    with pytest.raises(NotNative, match="too big"):
        b.store.take_dump("orders", cut, files, 0)
    assert b.store.is_empty("orders")
    assert b.sql("select length(?)", "y" * (VALUE_CHARS_MAX + 1)) == [(VALUE_CHARS_MAX + 1,)]


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
    with native.dumping(tmp_path / "a.db", folder, "orders", form, lambda _: None) as dumped:
        a.put(2, "later")
        files = dumped()
    assert native.check(store.tables()["orders"], files, 'cast(b."id" as text)', store.clocks()["orders"]) == 1


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


def test_r11_what_a_power_cut_left_empty_is_asked_for_again_at_once(offered: Offered, tmp_path: Path) -> None:
    """GIVEN pieces that were set aside, and lost their contents with the power THEN they are taken anew."""
    manifest, kept = offered[0], Snapshots(tmp_path)
    _take_all(kept, offered)
    assert kept.missing("a", manifest) == []
    for path in tmp_path.glob(".taken.*/*.lz4"):
        path.write_bytes(b"")
    assert list(kept.missing("a", manifest)) == list(range(len(manifest.chunks)))


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
