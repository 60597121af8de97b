"""What an owner of the source works with: the product's loops read and repair over a server in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evermark.delivery.model import SourcePartition
from evermark.errors import EvermarkError
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.reading import ReadPlan
from evermark.ingest.repair.base import Choice, Recovery
from evermark.ingest.repair.steps import FoundFile, RepairTarget
from evermark.log.read import within
from evermark.runtime import Steps, Wake
from evermark.sources.base import Gap
from simulator.instance import Instance, SimSourceObserver, SimTools
from simulator.repair.outbox import ModelOutbox
from simulator.repair.world import NAME, MendWorld
from simulator.source import Row


class RepairTools(SimTools):
    """`SourceTools` of an outbox whose slots may be lost."""

    def __init__(self, instance: Instance, world: MendWorld) -> None:
        super().__init__(instance, NAME)
        self._repaired = world
        self.recoveries: Any = instance.port("recoveries", world.recoveries, world.landed_at_recoveries)
        server = instance.port("server", world.server, world.landed_at_server)
        baton = world.baton
        self.source = ModelOutbox(world.server.place, server, world.server, instance, baton.sleep, lambda: baton.now)

    def read(
        self,
        plan: ReadPlan,
        taker: BatchTaker,
        on_taken: Callable[[WrittenBatch], None],
        ends: Sequence[Wake],
        cuts: Sequence[Wake],
    ) -> Steps[Mapping[int, EvermarkError]]:
        with self._repaired.judged():
            for partition, position in plan.starts.items():
                self._repaired.reading_begins(partition, position)
        self._repaired.reading[self._instance.name] = set(plan.starts)
        try:
            return (yield from super().read(plan, taker, on_taken, ends, cuts))
        finally:
            del self._repaired.reading[self._instance.name]

    def find(self, gap: Gap, wanted: RepairTarget) -> list[FoundFile]:
        """What `evermark.spark.repair` does: all candidates without those in the log, in order, cut into batches."""
        rows = [row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist()]
        files = [f for f in self.log.files() if f.timeless != 0 or within(f, gap.since, None)] if rows else []
        logged = {row.event_id for f in files for row in self._repaired.logs[NAME].contents[f.path]}
        missing = sorted((r for r in rows if r["event_id"] not in logged), key=lambda r: (r["position"], r["event_id"]))
        place, size = SourcePartition(NAME, wanted.partition), self._repaired.scenario.rows_max
        found: list[FoundFile] = []
        for first in range(0, len(missing), size):
            some = missing[first : first + size]
            batch, places = wanted.batch + 1 + len(found), gap.positions(first, len(some)).to_pylist()
            written = [
                Row(r["event_id"], place, batch, at, r["stream"], r["key"], r["op"], r["event_time"].timestamp())
                for r, at in zip(some, places, strict=True)
            ]
            file = self.log.write(wanted.partition, batch, written)
            self._repaired.repaired.add(file.path)
            found.append(FoundFile(file, gap.positions(first + len(some), 1)[0].as_py()))
        return found


class RepairedObserver(SimSourceObserver):
    """A partition may stop when its gap was given up."""

    def __init__(self, instance: Instance, world: MendWorld) -> None:
        super().__init__(instance, NAME)
        self._repaired = world

    def may_stop(self, partition: int) -> bool:
        return self._repaired.may_give_up(partition)

    def taken(self, taken: WrittenBatch) -> None: ...

    def closed(self, recovery: Recovery, gap: Gap, rows: int, ops: Mapping[str, int]) -> None:
        self._repaired.met["recovered"] += rows
        if recovery.choice is Choice.SKIP:
            self._repaired.skip(recovery.partition, gap.position)
