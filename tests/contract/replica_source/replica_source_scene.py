"""A node that is served over HTTP, another that writes beside it, and a source with its plan in a real Postgres."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from evermark.errors import BusyError
from evermark.replicas.auth import new_key
from evermark.replicas.node import ReplicaNode, ReplicaService, now_ms
from evermark.replicas.replica import Replica
from evermark.replicas.settings import PeerSettings, ReplicaFolder, ReplicaSettings
from evermark.secrets import Plain, Secret
from evermark.sources.base import Limit
from evermark.sources.replica.source import ReplicaTables, open_plans
from evermark.sources.replica.target import ReplicaTarget
from evermark.state.connection import State
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state

TABLE = "create table orders (id bigint primary key, what text, amount double precision)"
ALL = Limit(wait_s=0.0)


class Node:
    """One of the cluster `shop-1`, on a SQLite file or on a Postgres database."""

    def __init__(self, folder: Path, name: str, store: str, others: tuple[str, ...], key: Secret) -> None:
        self.name, self.key, self.store = name, key, store
        self.folder = ReplicaFolder(folder / name)
        peers = {other: PeerSettings(key) for other in others}
        self.folder.save(ReplicaSettings("shop-1", name, Secret(store), peers=peers))
        replica = ReplicaNode(self.folder).claimed()
        replica.store.install("orders", None, now_ms())
        replica.store.close()

    @contextmanager
    def replica(self) -> Iterator[Replica]:
        found = ReplicaNode(self.folder).claimed()
        try:
            yield found
        finally:
            found.store.close()


class SourceScene:
    """`north` is read; `south` is another node, that north meets when it is told to.

    `before`: what is written into north's table before it is replicated.
    """

    def __init__(
        self,
        folder: Path,
        dsn: str,
        state: State,
        stack: ExitStack,
        north: str | None = None,
        before: tuple[str, ...] = (),
    ) -> None:
        self._dsn, self._state, self._stack, key = dsn, state, stack, new_key()
        self.files = {name: folder / f"{name}.db" for name in ("north", "south")}
        for name, path in self.files.items():
            if name == "south" or north is None:
                with closing(sqlite3.connect(path)) as connection:
                    connection.execute(TABLE)
        self._north = north
        self.write("north", *before)
        stores = {"north": north or str(self.files["north"]), "south": str(self.files["south"])}
        self.nodes = {
            name: Node(folder, name, store, tuple({"north", "south", "reader"} - {name}), key)
            for name, store in stores.items()
        }
        self._service = ReplicaService(ReplicaNode(self.nodes["north"].folder), "127.0.0.1", 0, 3600.0)
        self._service.start()
        stack.callback(self._service.stop)
        self.url = f"http://127.0.0.1:{self._service.server.port}"
        self.target = ReplicaTarget(self.url, "shop-1", "reader", "north", Plain(key.reveal()), ("orders",))

    def write(self, name: str, *statements: str) -> None:
        if name == "north" and self._north is not None:
            with psycopg.connect(self._north, autocommit=True) as there:
                for statement in statements:
                    there.execute(statement)
            return
        with closing(sqlite3.connect(self.files[name], timeout=30)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    def insert(self, name: str, first: int, count: int) -> None:
        self.write(name, *(f"insert into orders values ({first + n}, 'of {name}', 0.5)" for n in range(count)))

    def meet(self) -> None:
        """South and north exchange what they have."""
        folder = self.nodes["south"].folder
        folder.add_peer("north", PeerSettings(self.nodes["north"].key, self.url))
        with self.nodes["south"].replica() as south:
            node = ReplicaNode(folder)
            with closing(node.peer("north", south)) as peer:
                south.meetings.sync(peer)

    def source(self) -> ReplicaTables:
        """Each as another process has it."""
        plans = partial(open_plans, Plain(self._dsn), self._state.schema, "shop")
        made: ReplicaTables = pickle.loads(pickle.dumps(ReplicaTables(self.target, plans)))
        self._stack.callback(made.close)
        return made

    def table(self, name: str = "north") -> dict[str, dict[str, Any]]:
        """The rows of a node as they are, by key."""
        asked = "select id, what, amount from orders"
        if name == "north" and self._north is not None:
            with psycopg.connect(self._north) as there:
                rows = there.execute(asked).fetchall()
        else:
            with closing(sqlite3.connect(self.files[name], timeout=30)) as connection:
                rows = connection.execute(asked).fetchall()
        return {str(row[0]): dict(zip(("id", "what", "amount"), row, strict=True)) for row in rows}

    def forget_plan(self) -> None:
        with self._state.connection() as conn:
            conn.execute("delete from replica_plans")


class Crash(Exception):
    pass


class Pipeline:
    """What ingest does with a source, in small: the log survives, the source does not."""

    def __init__(self, scene: SourceScene) -> None:
        self._scene, self.rows, self.end = scene, list[dict[str, Any]](), scene.source().earliest(0)
        self.epoch = 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.source = self._scene.source()
        self.source.owned(self.epoch)
        self.source.check({0: self.end})
        self.source.begin(0, self.end)

    def step(self, limit: Limit = ALL, cut: str = "") -> bool:
        end = self.source.latest({0: self.end}, limit)[0]
        self._cut(cut, "planned")
        if end == self.end:
            return False
        since = self.source.may_repeat_from(0, self.end)
        had = {row["event_id"] for row in self.rows if row["position"] >= since}
        taken = [
            row
            for piece in self.source.slices(0, self.end, end)
            for batch in self.source.read(piece)
            for row in batch.to_pylist()
        ]
        self._cut(cut, "read")
        self.rows += [row for row in taken if row["event_id"] not in had]
        self.end = end
        self._cut(cut, "logged")
        self.source.confirm(0, end)
        self._cut(cut, "confirmed")
        return True

    @staticmethod
    def _cut(wanted: str, here: str) -> None:
        if wanted == here:
            raise Crash(here)

    def drain(self, limit: Limit = ALL) -> None:
        for _ in range(500):
            try:
                if not self.step(limit):
                    return
            except BusyError:
                self.start()
        raise AssertionError("this does not come to an end")

    def implied(self) -> dict[str, dict[str, Any]]:
        """The rows that the newest event of each key tells."""
        newest = {row["key"]: row for row in self.rows}
        return {key: json.loads(row["payload"]) for key, row in newest.items() if row["op"] != "delete"}

    def taken(self) -> list[tuple[str, int]]:
        return [(row["origin"], row["origin_seq"]) for row in self.rows]


@contextmanager
def source_scene(
    folder: Path, server: PostgresServer, north: str | None = None, before: tuple[str, ...] = ()
) -> Iterator[SourceScene]:
    with fresh_state(server.dsn()) as state, ExitStack() as stack:
        yield SourceScene(folder, server.dsn(), state, stack, north, before)
