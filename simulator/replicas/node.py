"""A replica whose database lives in memory, whose clock has an error of its own, and that may crash."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from evermark.errors import NotFoundError, UnreachableError
from evermark.replicas.base import ReplicaStore
from evermark.replicas.digests import Digest, RowDigest, Span
from evermark.replicas.event import Event
from evermark.replicas.exchange import Chunk, Hello, Manifest, Page
from evermark.replicas.identity import Tokens, claim
from evermark.replicas.local_node import Limits, LocalNode
from evermark.replicas.ranges import NOTHING, Held
from evermark.replicas.replica import Replica
from evermark.replicas.snapshots import Snapshots, decoded, encoded, whole_digest
from evermark.replicas.sqlite import SqliteStore
from evermark.replicas.values import Table

TABLE = "notes"
HOUR_MS = 3_600_000
OFF_MS = (0, -200_000, 100_000, 200_000, 1_000_000, -HOUR_MS // 2)  # what a clock may be wrong by
LIMITS = Limits(
    skew_ms=300_000,
    retention_ms=HOUR_MS,
    safety_ms=HOUR_MS // 4,
    dead_ms=24 * HOUR_MS,
    snapshot_age_ms=60_000,
    collect_batch=3,
    page=4,
)
# docs/replicas.md names this limit: what a node had not told yet when it was backed up may bring back a row whose
# tombstone is gone. A tombstone goes this long after its row did, or earlier by what two clocks are wrong by.
_OLD_MS = LIMITS.retention_ms + LIMITS.safety_ms - (max(OFF_MS) - min(OFF_MS))


class Crash(UnreachableError):
    """The process died here."""


class CrashingStore(SqliteStore):
    """Dies at any statement if it is told to; what was not committed is gone."""

    def __init__(self, crash: Callable[[], bool]) -> None:
        self._crash: Callable[[], bool] = lambda: False
        super().__init__(":memory:")
        self._crash = crash

    def _run(self, sql: str, params: Sequence[Any] = ()) -> int:
        self._perhaps(sql)
        return super()._run(sql, params)

    def _many(self, sql: str, params: Iterable[Sequence[Any]]) -> None:
        self._perhaps(sql)
        super()._many(sql, params)

    def _perhaps(self, sql: str) -> None:
        if self._crash():
            raise Crash(f"died before: {sql[:60]}")


class MemorySnapshots(Snapshots):
    def __init__(self) -> None:
        super().__init__(Path())
        self._kept: dict[str, tuple[Manifest, list[bytes]]] = {}
        self._set_aside: dict[tuple[str, str], dict[int, bytes]] = {}

    def make(self, store: ReplicaStore, table: str, now_ms: int) -> Manifest:
        files = []
        with store.snapshot(table, 5) as (cut, lists):
            for rows in lists:
                files.append((rows.num_rows, encoded(rows)))  # noqa: PERF401 - read inside the transaction
        chunks = tuple(Chunk(count, len(data), _sha(data)) for count, data in files)
        form = store.tables()[table].as_json()
        made = Manifest(f"s{len(self._kept)}-{now_ms}", table, form, cut.held, cut.clock, now_ms, chunks)
        made = replace(made, digest=whole_digest(made))
        self._kept[made.id] = (made, [data for _, data in files])
        return made

    def newest(self, table: str, *, is_native: bool = False) -> Manifest | None:
        return list(self._kept.values())[-1][0] if self._kept else None

    def note_finished(self, manifest: Manifest, now_ms: int) -> None: ...

    def is_offered(self, manifest: Manifest) -> bool:
        return True

    def chunk(self, snapshot: str, number: int) -> bytes:
        if snapshot not in self._kept:
            raise NotFoundError("no such snapshot")
        return self._kept[snapshot][1][number]

    def missing(self, peer: str, manifest: Manifest) -> Sequence[int]:
        there = self._set_aside.setdefault((peer, manifest.digest), {})
        return [number for number in range(len(manifest.chunks)) if number not in there]

    def take(self, peer: str, manifest: Manifest, number: int, data: bytes) -> None:
        self._set_aside[peer, manifest.digest][number] = data

    def taken(self, peer: str, manifest: Manifest, table: Table) -> Iterator[pa.Table]:
        for number, data in sorted(self._set_aside[peer, manifest.digest].items()):
            yield decoded(table, manifest, number, data)

    def done_with(self, peer: str, manifest: Manifest) -> None:
        del self._set_aside[peer, manifest.digest]


def _sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Backup:
    data: bytes
    at_ms: int
    is_told: bool  # nothing that the node itself had made was still to be told


class Node:
    def __init__(self, name: str, now_ms: Callable[[], int], rng: random.Random) -> None:
        self.name, self._world_ms, self._rng = name, now_ms, rng
        self.off_ms = 0
        self.crash_chance = 0.0
        self.tokens = Tokens()
        self.backups: list[Backup] = []
        self.snapshots = MemorySnapshots()
        self.store = CrashingStore(lambda: rng.random() < self.crash_chance)
        self._set_time()
        self.store.connection.execute(f"create table {TABLE} (id integer primary key, text text, n integer)")
        self.replica = self._replica()
        self.claim()

    def now_ms(self) -> int:
        return self._world_ms() + self.off_ms

    def claim(self) -> bool:
        def keep(tokens: Tokens) -> None:
            self.tokens = tokens

        return claim(self.store, self.tokens, keep, self.replica.node.fresh_origin)

    def install(self) -> None:
        self.store.install(TABLE, None, self.now_ms())

    def back_up(self) -> None:
        made = self.store.held(TABLE).get(self.store.identity()[0], NOTHING).highest
        is_told = made <= self.store.noted(TABLE)
        self.backups.append(Backup(self.store.connection.serialize(), self._world_ms(), is_told))

    def may_restore(self, backup: Backup) -> bool:
        return backup.is_told or self._world_ms() - backup.at_ms < _OLD_MS

    def restore(self, backup: Backup) -> None:
        """The database as it was; the node's folder as it is."""
        self.store.connection.close()
        self.store = CrashingStore(lambda: self._rng.random() < self.crash_chance)
        self.store.connection.deserialize(backup.data)
        self._set_time()
        self.snapshots = MemorySnapshots()
        self.replica = self._replica()
        self.claim()

    def rows(self) -> list[tuple[Any, ...]]:
        return self.store.connection.execute(f"select id, text, n from {TABLE} order by id").fetchall()

    def _replica(self) -> Replica:
        node = LocalNode(
            self.name,
            self.store,
            self.now_ms,
            LIMITS,
            chance=self._chance,
            renewed=self._renewed,
            note=lambda _: self._claimed(),
        )
        return Replica(node, self.snapshots)

    def _claimed(self) -> None:
        self.claim()

    def _chance(self) -> str:
        return f"{self._rng.getrandbits(32):08x}"

    def _renewed(self, origin: str) -> None:
        self.tokens = replace(self.tokens, origin=origin)

    def _set_time(self) -> None:
        """Triggers ask SQLite for the time; here it is the node's."""

        def strftime(form: str, _: str) -> str:
            seconds, rest = divmod(self.now_ms(), 1000)
            return str(seconds) if form == "%s" else f"{seconds % 60:02d}.{rest:03d}"

        self.store.connection.create_function("strftime", 2, strftime)


class Link:
    """From one node to another. What is lost on the way may have had its effect; what is pushed may come in pieces."""

    def __init__(self, here: Node, there: Node, rng: random.Random, trouble: float) -> None:
        self.name, self._here, self._there = there.name, here, there
        self._rng, self._trouble = rng, trouble

    def _through(self, call: Callable[[], Any]) -> Any:
        if self._rng.random() < self._trouble:
            raise UnreachableError("lost on the way there")
        answer = call()
        if self._rng.random() < self._trouble / 2:
            answer = call()
        if self._rng.random() < self._trouble:
            raise UnreachableError("lost on the way back")
        return answer

    def hello(self, hello: Hello) -> Hello:
        here = self._here.name
        said = Hello.from_json(hello.as_json())
        return self._through(lambda: self._there.replica.answers.hello(here, said))  # type: ignore[no-any-return]

    def pull(self, table: str, origin: str, held: Held, limit: int) -> Page:
        here = self._here.name
        return self._through(lambda: self._there.replica.answers.pull(here, table, origin, held, limit))  # type: ignore[no-any-return]

    def pull_since(self, table: str, timestamp: int, event_id: str, limit: int) -> Sequence[Event]:
        return self._through(lambda: self._there.replica.answers.pull_since(table, timestamp, event_id, limit))  # type: ignore[no-any-return]

    def push(self, table: str, origin: str, events: Sequence[Event]) -> Held:
        sent = list(events)
        if self._rng.random() < 4 * self._trouble:
            self._rng.shuffle(sent)
            del sent[: self._rng.randrange(len(sent) + 1)]
        here = self._here.name
        return self._through(lambda: self._there.replica.answers.push(here, table, origin, sent))  # type: ignore[no-any-return]

    def snapshot(self, table: str, native: str | None = None) -> Manifest:
        return self._through(lambda: self._there.replica.answers.snapshot(table, native=native))  # type: ignore[no-any-return]

    def chunk(self, snapshot: str, number: int) -> bytes:
        return self._through(lambda: self._there.replica.answers.chunk(snapshot, number))  # type: ignore[no-any-return]

    def digests(self, table: str, spans: Sequence[Span]) -> list[Digest]:
        return self._there.replica.answers.digests(table, spans)

    def rows(self, table: str, spans: Sequence[Span]) -> list[list[RowDigest]]:
        return self._there.replica.answers.rows(table, spans)

    def cuts(self, table: str, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return self._there.replica.answers.cuts(table, spans, pieces)
