"""A database that is put back to a backup, however young the backup is."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from evermark.replicas.auth import new_key
from evermark.replicas.node import ReplicaNode, now_ms
from evermark.replicas.replica import Replica
from evermark.replicas.settings import PeerSettings, ReplicaFolder, ReplicaSettings
from evermark.secrets import Secret
from evermark.testing.contracts.replica_scene import Direct


def _node(folder: Path, name: str, other: str) -> Replica:
    file = folder / f"{name}.db"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("create table notes (id integer primary key, what text)")
    node = ReplicaFolder(folder / name)
    node.save(ReplicaSettings("test", name, Secret(str(file)), peers={other: PeerSettings(new_key())}))
    replica = ReplicaNode(node).claimed()
    replica.store.install("notes", None, now_ms())
    return replica


def _write(folder: Path, name: str, *keys: int) -> None:
    with closing(sqlite3.connect(folder / f"{name}.db")) as connection, connection:
        connection.executemany("insert into notes values (?, ?)", [(key, f"row {key}") for key in keys])


def _keys(folder: Path, name: str) -> list[int]:
    with closing(sqlite3.connect(folder / f"{name}.db")) as connection:
        return [key for (key,) in connection.execute("select id from notes order by id")]


def _back_up(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "a.db")) as source, closing(sqlite3.connect(folder / "backup")) as target:
        source.backup(target)


def _put_back(folder: Path) -> None:
    for path in folder.glob("a.db*"):
        path.unlink()
    shutil.move(folder / "backup", folder / "a.db")


def test_r2_a_backup_that_is_put_back_at_once_goes_on_under_a_new_origin(tmp_path: Path) -> None:
    """GIVEN a backup, then changes that a peer took at once WHEN the backup is put back, and written to as often as the
    original had been, before the node starts THEN the node takes a new origin, and both have all rows."""
    a, b = _node(tmp_path, "a", "b"), _node(tmp_path, "b", "a")
    _write(tmp_path, "a", 1)
    a.meetings.sync(Direct("a", b))
    _back_up(tmp_path)
    _write(tmp_path, "a", 2, 3)
    a.meetings.sync(Direct("a", b))
    before = a.store.identity()[0]
    a.store.close()
    _put_back(tmp_path)
    _write(tmp_path, "a", 4, 5)
    again = ReplicaNode(ReplicaFolder(tmp_path / "a")).claimed()
    assert again.store.identity()[0] != before
    again.meetings.sync(Direct("a", b))
    assert _keys(tmp_path, "a") == _keys(tmp_path, "b") == [1, 2, 3, 4, 5]


def test_r9_a_backup_from_before_an_acknowledgement_is_found_out(tmp_path: Path) -> None:
    """GIVEN a backup, then events taken from a peer and acknowledged WHEN the backup is put back THEN the node takes a
    new origin: nobody goes on collecting by what it said before."""
    a, b = _node(tmp_path, "a", "b"), _node(tmp_path, "b", "a")
    a.meetings.sync(Direct("a", b))
    _back_up(tmp_path)
    _write(tmp_path, "b", 7)
    a.meetings.sync(Direct("a", b))
    before = a.store.identity()[0]
    a.store.close()
    _put_back(tmp_path)
    assert ReplicaNode(ReplicaFolder(tmp_path / "a")).claimed().store.identity()[0] != before
