"""A source, a log and their stores in memory, where any effect can be the last one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

import pyarrow as pa

from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.cluster.base import Holder
from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.errors import GapError
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.dedup import looked_up_from
from evermark.log.base import LogFile, Tail
from evermark.log.head import MemoryHeads
from evermark.log.memory import MemoryLog
from evermark.sources.base import Limit, Slice, Source

EFFECTS = ("fence", "commit", "sync", "move", "save", "confirm")


class CrashError(BaseException):
    """The process is gone."""


def position(n: int) -> str:
    return f"{n:06}"


class ListSource(Source):
    """Events at positions of their own. Forgets what is confirmed. `repeats`: gives the one before again."""

    def __init__(self, count: int, *, repeats: bool) -> None:
        self.count = count
        self.repeats = repeats
        self.forgotten = 0

    def partitions(self) -> Sequence[int]:
        return [0]

    def earliest(self, partition: int) -> str:
        return position(0)

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        return {p: position(min(self.count, int(at) + limit.rows_max)) for p, at in after.items()}

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        return [Slice(partition, start, end)]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError("the world reads `rows`, without Arrow")

    def rows(self, start: str, end: str) -> list[tuple[str, str]]:
        first = int(start)
        if first < self.forgotten:
            raise GapError(f"events {first} to {self.forgotten - 1} are gone")
        rows = [(f"event-{n}", position(n)) for n in range(first, int(end))]
        if self.repeats and first:
            rows.insert(0, (f"event-{first - 1}", position(first)))
        return rows

    def may_repeat_from(self, partition: int, at: str) -> str:
        return position(max(0, int(at) - 1)) if self.repeats else at

    def confirm(self, partition: int, end: str) -> None:
        self.forgotten = max(self.forgotten, int(end))


class Frail:
    """Passes every call on; at one effect the process ends, before it happened or after."""

    def __init__(self, world: World, target: Any) -> None:
        self._world = world
        self._target = target

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._target, name)
        if name not in EFFECTS:
            return real

        def effect(*args: Any, **kwargs: Any) -> Any:
            mine = self._world.effects
            self._world.effects += 1
            if mine == self._world.crash_at and not self._world.crash_after:
                raise CrashError
            answer = real(*args, **kwargs)
            if mine == self._world.crash_at:
                raise CrashError
            return answer

        return effect


@dataclass
class World:
    crash_at: int = -1
    crash_after: bool = False
    power_cut: bool = False
    forgets_ends: bool = False
    repeats: bool = False
    taker: type[BatchTaker] = BatchTaker
    count: int = 7
    crash_again: int | None = None  # so many effects into the first restart
    effects: int = 0
    files: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = ListSource(self.count, repeats=self.repeats)
        self.leases = MemoryLeases(is_gone=lambda _: True)
        self.log = MemoryLog()
        self.heads = MemoryHeads(self.leases)
        self.checkpoints = MemoryCheckpoints(self.leases)

    def position_max(self, partition: int) -> str | None:
        last = [a for a in self.log.commits if a.partition == partition][-1:]
        return max((at for a in last for f in a.files for _, at in self.files[f.path]), default=None)

    def logged(self) -> Counter[str]:
        return Counter(name for a in self.log.commits for f in a.files for name, _ in self.files[f.path])

    def run(self) -> None:
        """From the first start to the last event, however often the process ends on the way."""
        for start in range(20):
            try:
                self._own(start)
            except CrashError:
                if self.power_cut:
                    self.log.crash()
                if self.crash_again is not None:
                    self.crash_at, self.crash_after = self.effects + self.crash_again, self.crash_again % 2 == 0
                    self.crash_again = None
                continue
            return
        raise AssertionError("does not come to an end")

    def _own(self, start: int) -> None:
        lease = self.leases.acquire(source_lease("shop"), Holder("i", "h", "b", start, str(start)), 10)
        assert lease is not None
        log: Any = Frail(self, _Forgetful(self.log) if self.forgets_ends else self.log)
        heads: Any = Frail(self, self.heads)
        checkpoints: Any = Frail(self, self.checkpoints)
        source: Any = Frail(self, self.source)
        taker = self.taker("shop", lease.epoch, source, log, self, heads, checkpoints)
        resumed = taker.begin(0)
        at, batch = resumed.position or "", resumed.batch
        while at != position(self.count):
            end = self.source.latest({0: at}, Limit(rows_max=2))[0]
            written = self._read(at, end, batch + 1, lease.epoch, resumed.repeats_to)
            taker.take(written)
            taker.confirm(0, end)
            at, batch = end, batch + bool(written.files)

    def _read(self, start: str, end: str, batch: int, epoch: int, repeats_to: str | None) -> WrittenBatch:
        exclude = looked_up_from(start, self.source.may_repeat_from(0, start), repeats_to)
        seen = {
            name
            for a in self.log.commits
            for f in a.files
            for name, at in self.files[f.path]
            if exclude is not None and at >= exclude
        }
        rows = [(name, at) for name, at in self.source.rows(start, end) if name not in seen]
        file = LogFile(f"file-{len(self.files)}", len(rows), 1)
        self.files[file.path] = rows
        return WrittenBatch(0, batch, epoch, start, end, (file,) if rows else ())


class _Forgetful:
    """A log whose commits were cleaned: it knows its last batch, and not where that ended."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def fence(self, partition: int, epoch: int) -> Tail:
        return replaced(self._log.fence(partition, epoch), end=None)

    def fence_all(self, partitions: Sequence[int], epoch: int) -> dict[int, Tail]:
        return {partition: self.fence(partition, epoch) for partition in partitions}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)
