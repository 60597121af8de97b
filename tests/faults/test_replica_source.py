"""A replica as a source through the real process: the reader killed, and the node that is read."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from evermark.log.read import LogReader
from evermark.replicas.auth import new_key
from evermark.replicas.node import ReplicaNode, now_ms
from evermark.replicas.ranges import Ranges
from evermark.replicas.settings import PeerSettings, ReplicaSettings
from evermark.secrets import Secret
from evermark.testing.chaos_replicas import LiveNode
from evermark.testing.commands import REAL
from evermark.testing.listener import Failing
from evermark.testing.pipeline import PATIENCE_S, Stage, died_by_itself
from evermark.testing.servers import free_port
from evermark.testing.until import until


class ReplicaScene(Stage):
    """A node on a SQLite file, served by a process of its own."""

    source = "orders"
    start = "oldest"
    before = 0  # rows that are there before the table is replicated

    def __init__(self, folder: Path, receivers: Mapping[str, Failing | None]) -> None:
        super().__init__(folder, receivers)
        self.file, self._port, key = folder / "north.db", free_port(), new_key()
        self.env["NORTH_KEY"] = key.reveal()
        with closing(sqlite3.connect(self.file)) as connection:
            connection.execute("create table orders (id integer primary key, n integer)")
            connection.executemany("insert into orders values (?, 0)", ([number] for number in range(self.before)))
            connection.commit()
        self.node = LiveNode("north", folder, str(self.file), self._port)
        peers = {"evermark": PeerSettings(key)}
        self.node.folder.save(ReplicaSettings("shop-1", "north", Secret(str(self.file)), peers=peers))
        replica = ReplicaNode(self.node.folder).claimed()
        replica.store.install("orders", None, now_ms())
        replica.store.close()

    def settings(self) -> str:
        return (
            f"{{type: replica, url: 'http://127.0.0.1:{self._port}', peer: north, node: evermark, cluster: shop-1,"
            f' key: "${{NORTH_KEY}}", tables: [orders], start: {self.start}}}'
        )

    def write(self, first: int, count: int) -> None:
        with closing(sqlite3.connect(self.file, timeout=60)) as connection, connection:
            for number in range(first, first + count):
                connection.execute("insert into orders values (?, 0)", [number])
                connection.execute("update orders set n = n + 1 where id = ?", [number])

    def committed(self) -> list[str]:
        with closing(sqlite3.connect(self.file, timeout=60)) as connection:
            return [row[0] for row in connection.execute('select id from "orders_Events"')]

    def change(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.file, timeout=60)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    def table(self) -> dict[str, Any]:
        with closing(sqlite3.connect(self.file, timeout=60)) as connection:
            return {str(key): {"id": key, "n": n} for key, n in connection.execute("select id, n from orders")}

    def events(self) -> list[dict[str, Any]]:
        """In the order of the log."""
        files = LogReader(self.folder / "data" / "log" / self.source).files_if_any()
        columns = ["event_id", "position", "key", "op", "payload", "flags"]
        rows = [row for file in files for row in pq.read_table(file.path, columns=columns).to_pylist()]
        return sorted(rows, key=lambda row: str(row["position"]))

    def implied(self) -> dict[str, Any]:
        newest = {row["key"]: row for row in self.events()}
        return {key: json.loads(row["payload"]) for key, row in newest.items() if row["op"] != "delete"}


class CopiedReplicaScene(ReplicaScene):
    """Three chunks of rows from before."""

    start = "copy"
    before = 120_000


def test_r5_a_killed_reader_and_a_killed_node_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """GIVEN a deployment that reads a node WHEN it dies before its batch is checkpointed, and the node is killed and
    comes back THEN log and webhook have every event once."""
    with ReplicaScene(tmp_path, {"one": None}) as scene:
        scene.node.start()
        try:
            scene.write(0, 300)
            died_by_itself(scene.up("log.committed"))
            scene.write(300, 100)
            last = scene.up(commands=REAL)
            scene.wait_delivered(300)
            scene.node.kill()
            scene.write(400, 100)
            scene.node.start()
            ledger = scene.check_complete()
            assert ledger.produced == 1000
            assert last.terminate() == 0
        finally:
            scene.node.kill()


def test_r13_a_copy_that_is_killed_on_the_way_goes_on_and_is_exact(tmp_path: Path) -> None:
    """GIVEN a table from before it was replicated, which is written to WHEN the process that copies it dies at several
    steps, and the node throws its snapshot away THEN it goes on: each row that was there is read once, the log implies
    the table, no event is there twice, and nothing was a gap; a backfill is refused with what to do."""
    with CopiedReplicaScene(tmp_path, {}) as scene:
        scene.node.start()
        try:
            for turn, point in enumerate(("copy.planned", "file.written", "log.committed")):
                died_by_itself(scene.up(point))
                scene.write(200_000 + 10 * turn, 10)
                scene.change("update orders set n = n + 1 where id % 1000 = 1", f"delete from orders where id = {turn}")
            assert 0 < sum(row["op"] == "read" for row in scene.events()) < scene.before
            for snapshot in scene.node.folder.snapshots.glob("orders-*"):
                shutil.rmtree(snapshot)
            last = scene.up()
            wanted = scene.table()
            until(lambda: scene.implied() == wanted, "the log implies the table", timeout_s=PATIENCE_S)
            scene.write(300_000, 1)
            until(lambda: "300000" in scene.implied(), "reading goes on", timeout_s=PATIENCE_S)
            rows = scene.events()
            assert len({row["event_id"] for row in rows}) == len(rows)
            reads = [row["key"] for row in rows if row["op"] == "read"]
            assert len(set(reads)) == len(reads) >= scene.before - 3
            assert not any(row["flags"] for row in rows)
            assert not scene.said("the gap is closed")
            refused = scene.run("source", "backfill", "orders", check=False)
            assert refused.returncode != 0 and "`start: copy`" in " ".join(refused.stderr.split())
            assert last.terminate() == 0
        finally:
            scene.node.kill()


def test_r10_a_repair_that_is_killed_on_the_way_is_exact(tmp_path: Path) -> None:
    """GIVEN a deployment that reads a node WHEN the node has rows without events, and the process dies while it
    compares them with the log THEN the next one closes the gap: the log implies the table, and reading goes on."""
    with ReplicaScene(tmp_path, {}) as scene:
        scene.node.start()
        try:
            scene.write(0, 300)
            first = scene.up()
            until(lambda: scene.implied() == scene.table(), "the log has all", timeout_s=PATIENCE_S)
            assert first.terminate() == 0
            scene.node.kill()
            replica = ReplicaNode(scene.node.folder).claimed()
            lost = {"west.00000000000100000000": 5}
            replica.store._raise_floors("orders", lost)  # type: ignore[attr-defined]
            replica.store._save_held("orders", {origin: Ranges.through(n) for origin, n in lost.items()})  # type: ignore[attr-defined]
            replica.store.close()
            scene.node.start()
            scene.change("update orders set n = 7 where id = 1", "delete from orders where id = 2")
            died_by_itself(scene.up("repair.found"))
            died_by_itself(scene.up("repair.closed"))
            last = scene.up()
            until(lambda: scene.implied() == scene.table(), "the log implies the table", timeout_s=PATIENCE_S)
            scene.write(1000, 1)
            until(lambda: "1000" in scene.implied(), "reading goes on", timeout_s=PATIENCE_S)
            assert scene.said("the gap is closed")
            repaired = [(row["key"], row["op"]) for row in scene.events() if row["flags"] == ["repaired"]]
            assert sorted(repaired) == [("1", "update"), ("2", "delete")]
            assert last.terminate() == 0
        finally:
            scene.node.kill()
