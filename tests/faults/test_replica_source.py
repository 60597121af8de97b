"""A replica as a source through the real process: the reader killed, and the node that is read."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from evermark.replicas.auth import new_key
from evermark.replicas.node import ReplicaNode, now_ms
from evermark.replicas.settings import PeerSettings, ReplicaSettings
from evermark.secrets import Secret
from evermark.testing.chaos_replicas import LiveNode
from evermark.testing.commands import REAL
from evermark.testing.listener import Failing
from evermark.testing.pipeline import Stage, died_by_itself
from evermark.testing.servers import free_port


class ReplicaScene(Stage):
    """A node on a SQLite file, served by a process of its own."""

    source = "orders"

    def __init__(self, folder: Path, receivers: Mapping[str, Failing | None]) -> None:
        super().__init__(folder, receivers)
        self.file, self._port, key = folder / "north.db", free_port(), new_key()
        self.env["NORTH_KEY"] = key.reveal()
        with closing(sqlite3.connect(self.file)) as connection:
            connection.execute("create table orders (id integer primary key, n integer)")
        self.node = LiveNode("north", folder, str(self.file), self._port)
        peers = {"evermark": PeerSettings(key)}
        self.node.folder.save(ReplicaSettings("shop-1", "north", Secret(str(self.file)), peers=peers))
        replica = ReplicaNode(self.node.folder).claimed()
        replica.store.install("orders", None, now_ms())
        replica.store.close()

    def settings(self) -> str:
        return (
            f"{{type: replica, url: 'http://127.0.0.1:{self._port}', peer: north, node: evermark, cluster: shop-1,"
            ' key: "${NORTH_KEY}", tables: [orders]}'
        )

    def write(self, first: int, count: int) -> None:
        with closing(sqlite3.connect(self.file, timeout=60)) as connection, connection:
            for number in range(first, first + count):
                connection.execute("insert into orders values (?, 0)", [number])
                connection.execute("update orders set n = n + 1 where id = ?", [number])

    def committed(self) -> list[str]:
        with closing(sqlite3.connect(self.file, timeout=60)) as connection:
            return [row[0] for row in connection.execute('select id from "orders_Events"')]


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
