"""Nodes that meet in one process, and who writes to them: what the contracts of replicas are told with."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from evermark.replicas.columns import images_of
from evermark.replicas.digests import Digest, RowDigest, Span
from evermark.replicas.event import Event, Image, Operation, Version
from evermark.replicas.exchange import Hello, Manifest, Page
from evermark.replicas.local_node import Limits, LocalNode
from evermark.replicas.paging import Stretch
from evermark.replicas.ranges import Held
from evermark.replicas.replica import Replica
from evermark.replicas.snapshots import Snapshots
from evermark.replicas.sql_store import SqlStore

FAR = Limits(page=50)
NO_RETENTION = Limits(retention_ms=0, safety_ms=-1, page=50)


class Direct:
    """A peer in this process: what is asked of it is what it answers."""

    def __init__(self, here: str, there: Replica) -> None:
        self.name, self._here, self._there = there.node.name, here, there.answers

    def hello(self, hello: Hello) -> Hello:
        return Hello.from_json(self._there.hello(self._here, Hello.from_json(hello.as_json())).as_json())

    def pull(self, table: str, origin: str, held: Held, limit: int) -> Page:
        return self._there.pull(self._here, table, origin, held, limit)

    def pull_since(self, table: str, timestamp: int, event_id: str, limit: int) -> Sequence[Event]:
        return self._there.pull_since(table, timestamp, event_id, limit)

    def push(self, table: str, origin: str, events: Sequence[Event]) -> Held:
        return self._there.push(self._here, table, origin, events)

    def snapshot(self, table: str, native: str | None = None) -> Manifest:
        return self._there.snapshot(table, native=native)

    def chunk(self, snapshot: str, number: int) -> bytes:
        return self._there.chunk(snapshot, number)

    def digests(self, table: str, spans: Sequence[Span]) -> list[Digest]:
        return self._there.digests(table, spans)

    def rows(self, table: str, spans: Sequence[Span]) -> list[list[RowDigest]]:
        return self._there.rows(table, spans)

    def cuts(self, table: str, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return self._there.cuts(table, spans, pieces)


class ReplicaNode:
    """A node with tables of its own, and somebody who writes to them with plain SQL."""

    def __init__(self, name: str, store: SqlStore, execute: Callable[..., list[tuple[Any, ...]]]) -> None:
        self.name, self.store, self.sql = name, store, execute
        self._folder = tempfile.TemporaryDirectory()
        self.now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self.limit(FAR)
        store.renew(self.replica.node.fresh_origin())

    def limit(self, limits: Limits, **named: Any) -> None:
        self.snapshots = Snapshots(Path(self._folder.name), chunk_rows=3, piece_bytes=32_768)
        node = LocalNode(self.name, self.store, lambda: self.now_ms(), limits, **named)  # noqa: PLW0108 - tests set it
        self.replica = Replica(node, self.snapshots)

    def install(self, table: str = "orders", columns: Sequence[str] | None = None) -> None:
        self.store.install(table, columns, self.now_ms())

    def meet(self, other: ReplicaNode) -> Any:
        return self.replica.meetings.sync(Direct(self.name, other.replica))

    def rows(self, table: str = "orders") -> list[tuple[Any, ...]]:
        spec = self.store.tables()[table]
        found: dict[str, Image] = {}
        with self.store.snapshot(table, 1000) as (_, pieces):
            for piece in pieces:
                found |= images_of(spec, piece.filter(pc.invert(piece["is_deleted"])))
        return [tuple(found[record].values()) for record in sorted(found)]

    def events(self, table: str = "orders") -> list[Event]:
        origin = self.store.identity()[0]
        return self.store.read(table, [Stretch(origin, 1, 10**9)])

    def put(self, key: int, what: str | None) -> None:
        self.sql(
            "insert into orders (id, what) values (?, ?) on conflict (id) do update set what = excluded.what",
            key,
            what,
        )

    def close(self) -> None:
        self.store.close()
        self._folder.cleanup()


Make = Callable[[str], ReplicaNode]


def event_by(origin: str, seq: int, key: int, what: str | None, reading: int) -> Event:
    """An event of the table of these tests, as a peer would send it; without a text it is a delete."""
    image = {"id": str(key), "what": what, "amount": None, "ok": None, "raw": None}
    operation = Operation.DELETE if what is None else Operation.UPDATE
    name = f"{seq:08x}-0000-4000-8000-{int(origin[-8:], 16):012x}"
    return Event(name, "orders", operation, str(key), image if what else None, 1, Version(reading, origin, seq))


class ReplicaContract:
    """`make` is a node with the empty table orders (id, what, amount, ok, raw), not replicated yet."""

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        raise NotImplementedError("override this fixture")

    @pytest.fixture
    def node(self, make: Make) -> ReplicaNode:
        made = make("a")
        made.install()
        made.store.join({})
        return made
