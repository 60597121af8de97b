"""Chunks of a peer's snapshot that are set aside until all are there."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from evermark.replicas.exchange import Chunk, Manifest
from evermark.replicas.ranges import Ranges
from evermark.replicas.snapshots import Snapshots, whole_digest
from evermark.replicas.sqlite import SqliteStore
from evermark.replicas.values import Kind, Table

TABLE = Table("orders", {"id": Kind.INTEGER}, ("id",))


def _manifest(snapshot: str, *data: bytes) -> Manifest:
    chunks = tuple(Chunk(1, len(each), hashlib.sha256(each).hexdigest()) for each in data)
    held = {"a.000000000001aaaaaaaa": Ranges.through(3)}
    made = Manifest(snapshot, "orders", TABLE.as_json(), held, 7, 1, chunks)
    return replace(made, digest=whole_digest(made))


def test_r11_chunks_of_a_snapshot_with_another_digest_are_not_gone_on_with(tmp_path: Path) -> None:
    """GIVEN a chunk that was taken of a snapshot WHEN the peer has another one under the same id THEN none of it is
    there, and what was taken of the first is thrown away; what is taken of the second stays."""
    kept, first, second = Snapshots(tmp_path), _manifest("orders-1", b"1", b"2"), _manifest("orders-1", b"3", b"4")
    assert kept.missing("a", first) == [0, 1]
    kept.take("a", first, 0, b"1")
    assert kept.missing("a", first) == [1]
    assert kept.missing("a", second) == [0, 1]
    kept.take("a", second, 1, b"4")
    assert kept.missing("a", second) == [0]
    assert [path.read_bytes() for path in tmp_path.rglob("*.parquet")] == [b"4"]


def test_r8_what_a_peer_calls_its_snapshot_names_no_folder(tmp_path: Path) -> None:
    """GIVEN a snapshot whose id leads to another folder WHEN its chunks are set aside THEN they are in ours."""
    kept, found = Snapshots(tmp_path / "ours"), _manifest("../../other", b"1")
    assert kept.missing("a", found) == [0]
    kept.take("a", found, 0, b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    assert len(list((tmp_path / "ours").iterdir())) == 1


def test_r11_what_a_dead_process_left_of_a_snapshot_is_removed_with_the_next(tmp_path: Path) -> None:
    """GIVEN drafts of snapshots whose makers died WHEN a snapshot of one of the tables is made THEN the drafts of that
    table are gone, and those of the other, which may be under way, stay."""
    for draft in (".orders-0000000000001-aaaaaaaa", ".orders_2-0000000000001-aaaaaaaa"):
        (tmp_path / draft).mkdir()
        (tmp_path / draft / "000000.parquet").write_bytes(b"half")
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        connection.execute("create table orders (id integer primary key)")
    with closing(SqliteStore(tmp_path / "a.db")) as store:
        store.renew("a.000000000001aaaaaaaa")
        store.install("orders", None, 1)
        made = Snapshots(tmp_path).make(store, "orders", 2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        ".orders_2-0000000000001-aaaaaaaa",
        made.id,
    ]
