"""Collections of a real MongoDB that are copied beside their change stream: what an owner and its tasks do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.event import TAKEN
from evermark.ingest.copying.memory import MemoryCopies
from evermark.ingest.copying.steps import Copier
from evermark.ingest.repair.memory import MemoryRecoveries
from evermark.observe.logging import get_logger
from evermark.runtime import Threads
from evermark.secrets import Plain
from evermark.sources.base import Feed, Limit
from evermark.sources.copies import ChunkState, ChunkWork, Copy, Copying, CopyPlace, CopyState
from evermark.sources.mongo.copying import ChunkWriter, DocumentsCopying
from evermark.sources.mongo.source import MongoChanges
from evermark.sources.mongo.target import MongoTarget
from evermark.sources.mongo.values import as_json, decoded, key_text
from evermark.testing.mongods import MongoReplicaSet
from evermark.testing.states import owners
from evermark.testing.until import until
from tests.contract.mongo.mongo_scene import Row

SOURCE = "shop"


@dataclass
class CopyScene:
    """`log` and `at` are what an owner has taken: rows and positions, by partition."""

    target: MongoTarget
    place: CopyPlace
    copies: MemoryCopies
    leases: MemoryLeases
    take_over: Callable[[str], int]
    epoch: int
    source: MongoChanges
    copying: DocumentsCopying
    at: dict[int, str]
    log: dict[int, list[Row]] = field(default_factory=dict)
    feeds: dict[int, Feed] = field(default_factory=dict)

    def own(self) -> None:
        """As another owner, which has only what was taken."""
        self.unfeed()
        self.source.close()
        self.epoch = self.take_over(source_lease(SOURCE))
        self.copies.give_up_all(SOURCE, self.epoch)
        self.source = MongoChanges(self.target, self.place)
        copying = self.source.copying()
        assert isinstance(copying, DocumentsCopying)
        self.copying = copying
        for partition, position in self.at.items():
            self.source.begin(partition, position)

    def ask(self, collection: str = "orders", condition: str = "") -> list[ChunkWork]:
        """A copy that is planned, and its chunks."""
        stream = self.copying.stream(collection)
        copy = self.copies.request(SOURCE, stream, condition)
        self.copies.plan(copy.id, self.copying.plan(stream), self.epoch)
        assert self.copying.watch(self.epoch)
        return self.works(copy)

    def works(self, copy: Copy) -> list[ChunkWork]:
        found = self.copies.chunks(copy.id, [ChunkState.OPEN, ChunkState.WRITING])
        return [ChunkWork(copy.id, chunk.number, copy.stream, chunk.bounds, copy.condition) for chunk in found]

    def write(self, works: Sequence[ChunkWork]) -> int:
        """How many are ready then."""
        for _ in self.copying.write(works, self.epoch, 60.0):
            pass
        found = [self.copies.chunk(work.copy, work.number) for work in works]
        return sum(chunk is not None and chunk.state is ChunkState.READY for chunk in found)

    def writer(self) -> ChunkWriter:
        self.place.folder.mkdir(parents=True, exist_ok=True)
        return ChunkWriter(self.source.client, self.target, self.copies, self.place.folder, self.epoch)

    # reading

    def take(self, *, fed: bool) -> int:
        """One round of what an owner reads; how many rows."""
        before = self.rows()
        if fed:
            self._take_fed()
        else:
            self.unfeed()
            ends = self.source.latest(self.at, Limit(rows_max=5000, wait_s=0.05))
            for partition, end in ends.items():
                self._took(partition, self.read(partition, self.at[partition], end), end)
        return self.rows() - before

    def rows(self) -> int:
        return sum(map(len, self.log.values()))

    def read(self, partition: int, start: str, end: str) -> list[Row]:
        rows: list[Row] = []
        for piece in self.source.slices(partition, start, end):
            rows += pa.Table.from_batches(self.source.read(piece), TAKEN).to_pylist()
        return rows

    def _take_fed(self) -> None:
        if not self.feeds:
            follow = self.source.follow
            self.feeds = {partition: follow(partition, at, lambda: None) for partition, at in self.at.items()}
        for partition, feed in self.feeds.items():
            some = feed.next()
            if some is not None:
                rows = pa.Table.from_batches(some.batches(), TAKEN).to_pylist()
                self._took(partition, rows, some.end())

    def _took(self, partition: int, rows: list[Row], end: str) -> None:
        assert all(self.at[partition] <= row["position"] < end for row in rows)
        assert end >= self.at[partition]
        self.log.setdefault(partition, []).extend(rows)
        self.at[partition] = end

    def unfeed(self) -> None:
        for feed in self.feeds.values():
            feed.close()
        self.feeds = {}

    def take_all(self, wanted: Callable[[], bool], *, fed: bool = True) -> None:
        def is_there() -> bool:
            while self.take(fed=fed):  # `wanted` may look at all of it
                pass
            return wanted()

        until(is_there, "what was copied is taken", timeout_s=60)

    # what came of it

    def reads(self, stream: str | None = None) -> list[Row]:
        return [
            row for rows in self.log.values() for row in rows if row["op"] == "read" and stream in (None, row["stream"])
        ]

    def implied(self, stream: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rows in self.log.values():
            for row in rows:
                if row["stream"] != stream or row["op"] == "schema":
                    continue
                if row["op"] == "truncate":
                    found.clear()
                    continue
                old = found.pop(row["key"], None)
                if row["op"] == "delete":
                    continue
                payload = json.loads(row["payload"])
                if "partial" in (row["flags"] or ()):
                    payload = {**(old or {"lost": True}), **payload["updatedFields"]}
                found[row["key"]] = payload
        return found

    def documents(self, stream: str) -> dict[str, Any]:
        database, _, collection = stream.partition(".")
        found = [decoded(each.sent) for each in self.source.client[database][collection].find()]
        return {key_text(each["_id"]): json.loads(as_json(each)) for each in found}

    def check(self, since: Mapping[int, str]) -> None:
        """Each id once, in order, and all of it the same when it is read once more."""
        for partition, rows in self.log.items():
            positions = [row["position"] for row in rows]
            assert positions == sorted(set(positions))
            ids = [row["event_id"] for row in rows]
            assert len(set(ids)) == len(ids)
            assert self.read(partition, since[partition], self.at[partition]) == rows


@contextmanager
def copy_scene(servers: MongoReplicaSet, database: str, folder: Path, **more: Any) -> Iterator[CopyScene]:
    more.setdefault("collections", (f"{database}.orders",))
    target = MongoTarget(Plain(servers.url), database, **more)
    leases = MemoryLeases(is_gone=lambda holder: True)
    copies = MemoryCopies(leases)
    place = CopyPlace(lambda: copies, folder / "copies", SOURCE, all_wanted=True, chunk_rows_max=20_000)
    source = MongoChanges(target, place)
    copying = source.copying()
    assert isinstance(copying, DocumentsCopying)
    at = {partition: source.earliest(partition) for partition in source.partitions()}
    scene = CopyScene(target, place, copies, leases, owners(leases), 0, source, copying, at)
    try:
        scene.own()
        yield scene
    finally:
        scene.unfeed()
        scene.source.close()


@dataclass
class Tools:
    """Tasks of a copier, one after another, in its own thread."""

    scene: CopyScene
    copies: MemoryCopies
    recoveries: MemoryRecoveries
    errors: list[str] = field(default_factory=list)

    def checkpoint(self, partition: int) -> str | None:
        return self.scene.at[partition]

    def holds(self, partition: int, position: str) -> bool:
        return any(row["position"] == position for row in self.scene.log.get(partition, ()))

    def write_chunks(
        self, copying: Copying, works: Sequence[Sequence[ChunkWork]], epoch: int, until_s: float
    ) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = []
        for task in works:
            try:
                for _ in copying.write(task, epoch, until_s):
                    pass
            except Exception as error:  # noqa: BLE001 - as a task's report
                self.errors.append(str(error))
                reports.append(
                    {"copies": [each.copy for each in task], "error": {"kind": "busy", "message": str(error)}}
                )
            else:
                reports.append({"copies": [each.copy for each in task]})
        return reports


class Silent:
    def copy_began(self, copy: Copy, chunks: int) -> None: ...

    def copy_went_on(self, source: str, rows: int, chunks_left: int) -> None: ...

    def copy_ended(self, copy: Copy, error: Exception | None) -> None: ...

    def copy_failed(self, copy: Copy, error: Exception) -> None: ...


@contextmanager
def copier(scene: CopyScene) -> Iterator[Tools]:
    """The loop of copies, beside whatever the block does."""
    tools = Tools(scene, scene.copies, MemoryRecoveries(scene.leases))
    loop = Copier(
        SOURCE, scene.epoch, scene.copying, tools, Silent(), Threads(), get_logger(), 0.02, lambda: False, lambda: None
    )
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield tools
    finally:
        loop.stopped.set()
        thread.join()


def is_done(scene: CopyScene) -> bool:
    found = scene.copies.listed(SOURCE)
    return bool(found) and all(copy.state is CopyState.DONE for copy in found)
