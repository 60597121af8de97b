"""An owner of the source: it reads, and mends what was lost beside that. The loops are those of `evermark.app`."""

from __future__ import annotations

from typing import Any, cast

from evermark.cluster.fence import source_lease
from evermark.delivery.base import SourcePartition
from evermark.error_policy import Action, action_for, backoff_s
from evermark.errors import EvermarkError
from evermark.ingest.gather import WHOLE_SOURCE, gather
from evermark.ingest.mender import FoundFile, Mender, RepairTarget
from evermark.ingest.recovery import Choice, Recovery
from evermark.ingest.take import Taken, Taker
from evermark.log.read import within
from evermark.sources.base import Hole, Limit
from evermark.testing.simulator.baton import Task
from evermark.testing.simulator.broken import Broken
from evermark.testing.simulator.instance import HeldLease, Idle, Instance, SourceRunner
from evermark.testing.simulator.mending.outbox import ModelOutbox
from evermark.testing.simulator.mending.world import MendWorld
from evermark.testing.simulator.source import Row

NAME = "shop"
_LOOK_EVERY_S = 1.0


class MendingRunner(SourceRunner):
    """Stands by for the lease, then reads those partitions that have no hole, and closes the holes of the others."""

    def __init__(self, instance: Instance, world: MendWorld) -> None:
        super().__init__(instance, NAME)
        self._mended = world
        self._server = instance.port("server", world.server, world.landed_at_server)
        self._recoveries = instance.port("recoveries", world.recoveries, world.landed_at_recoveries)
        self._held: HeldLease | None = None
        self._reading: frozenset[int] = frozenset()
        self._end_query = self._stepped_down = self._stopping = False
        self._stopped: set[int] = set()
        self._left_at: dict[int, str] = {}
        self._returned = 0

    def run(self) -> None:
        while True:
            held = self._instance.acquire(source_lease(NAME))
            try:
                self._own(held)
            except EvermarkError as error:
                self._decide({WHOLE_SOURCE: error}, held)
            finally:
                held.close()

    def _own(self, held: HeldLease) -> None:
        world, baton = self._mended, self._baton
        place = world.server.place
        source = ModelOutbox(place, self._server, world.server, self._instance, baton.sleep, lambda: baton.now)
        self._source = source
        self._stopping = self._stepped_down = False
        mender = Mender(
            NAME,
            held.lease.epoch,
            source,
            self._recoveries,
            lambda: (self._log, self._taker(held)),
            self._find,
            self._let_go,
            lambda: self._stopping,
            self._instance.clock,
            self,
        )
        task = self._instance.spawn("mend", lambda: self._mend(mender))
        try:
            self._read_on(held, self._taker(held), mender)
        finally:
            self._stopping = True
            self._wait_for(task)

    def _wait_for(self, task: Task) -> None:
        while not (task.done or self._instance.dead):
            self._baton.sleep(0.2)

    def _taker(self, held: HeldLease) -> Taker:
        instance = self._instance
        stores = (instance.heads, instance.checkpoints)
        return Taker(NAME, held.lease.epoch, self._source, self._log, self._log, *stores)

    # reading

    def _read_on(self, held: HeldLease, taker: Taker, mender: Mender) -> None:
        while not (held.lost or self._stepped_down):
            returned = self._returned
            active = [p for p in self._source.partitions() if p not in mender.partitions() | self._stopped]
            if not active:
                self._baton.sleep(0.5)
                continue
            self._reading, self._end_query = frozenset(active), False
            failed: dict[int, EvermarkError] = {}
            try:
                if not self._reading & mender.partitions() and returned == self._returned:
                    failed = self._read_these(taker, held, active)
            finally:
                self._reading = frozenset()
            if any(action_for(error) is Action.STEP_DOWN for error in failed.values()):
                return
            if failed and not self._is_owner(held):
                return
            for partition, error in failed.items():
                for each in active if partition == WHOLE_SOURCE else [partition]:
                    said = mender.found(each, error, self._left_at.get(each, ""))
                    if said is not None:
                        self._note_failure(each, said)

    def _read_these(self, taker: Taker, held: HeldLease, active: list[int]) -> dict[int, EvermarkError]:
        try:
            resumes = {p: taker.begin(p) for p in active}
            starts = {p: cast(str, r.position) for p, r in resumes.items()}
            self._left_at = starts
            self._source.check(starts)
        except EvermarkError as error:
            return {error.partition if error.partition is not None else WHOLE_SOURCE: error}
        for partition, position in starts.items():
            self._mended.reading_begins(partition, position)
        repeats = {p: r.repeats_to for p, r in resumes.items()}
        idle, limit = Idle(self._world, 0.3), Limit(rows_max=self._world.scenario.rows_max)
        while not (held.lost or self._end_query or self._stepped_down):
            try:
                ends: dict[int, str] = self._source.latest(starts, limit)
            except EvermarkError as error:
                return {error.partition if error.partition is not None else WHOLE_SOURCE: error}
            moved = [p for p in active if ends[p] != starts[p]]
            rows = [row for p in moved for row in self._pieces(p, starts[p], ends[p], repeats[p])]
            failed = self._take(taker, rows) if rows else {}
            if failed:
                return failed
            starts = ends
            idle.wait(moved=bool(rows))
        return {}

    def _take(self, taker: Taker, rows: list[dict[str, Any]]) -> dict[int, EvermarkError]:
        """One partition's failure is not the others', as in `evermark.spark.ingest`."""
        gathered = gather(rows, taker.epoch)
        failed = dict(gathered.failed)
        for taken in gathered.taken:
            try:
                taker.take(taken)
                taker.confirm(taken.partition, taken.end)
            except EvermarkError as error:
                failed[taken.partition] = error
        return failed

    def _note_failure(self, partition: int, error: EvermarkError) -> None:
        if action_for(error) is Action.RETRY:
            self._baton.sleep(0.5)
            return
        if not self._mended.may_give_up(partition):
            raise Broken(f"partition {partition} stopped: {type(error).__name__}: {error.message}")
        self._stopped.add(partition)

    def _decide(self, failed: Any, held: HeldLease) -> bool:
        for error in failed.values():
            if action_for(error) is Action.STOP and self._is_owner(held):
                raise Broken(f"the source stopped: {type(error).__name__}: {error.message}")
        return True

    # mending

    def _mend(self, mender: Mender) -> None:
        failures = 0
        while not self._stopping:
            wait_s = _LOOK_EVERY_S
            try:
                mender.carry_out_all()
                failures = 0
            except EvermarkError as error:
                if action_for(error) is Action.STEP_DOWN:
                    self._stepped_down = self._end_query = True
                    return
                wait_s = backoff_s(failures, base_s=1.0)
                failures += 1
            self._baton.sleep(wait_s)

    def _let_go(self, partition: int) -> None:
        while partition in self._reading and not self._stopping:
            self._end_query = True
            self._baton.sleep(0.1)

    def _find(self, hole: Hole, wanted: RepairTarget) -> list[FoundFile]:
        """What `evermark.spark.repair` does: all candidates without those in the log, in order, cut into batches."""
        rows = [row for piece in hole.pieces for batch in hole.read(piece) for row in batch.to_pylist()]
        files = [f for f in self._log.files() if f.timeless != 0 or within(f, hole.since, None)] if rows else []
        logged = {row.event_id for f in files for row in self._world.logs[NAME].contents[f.path]}
        missing = sorted((r for r in rows if r["event_id"] not in logged), key=lambda r: (r["position"], r["event_id"]))
        place, size = SourcePartition(NAME, wanted.partition), self._mended.scenario.rows_max
        found: list[FoundFile] = []
        for first in range(0, len(missing), size):
            some = missing[first : first + size]
            batch, places = wanted.batch + 1 + len(found), hole.positions(first, len(some)).to_pylist()
            written = [
                Row(r["event_id"], place, batch, at, r["stream"], r["key"], r["op"], r["event_time"].timestamp())
                for r, at in zip(some, places, strict=True)
            ]
            file = self._log.write(wanted.partition, batch, written)
            found.append(FoundFile(file, hole.positions(first + len(some), 1)[0].as_py()))
        return found

    # news

    def opened(self, recovery: Recovery, error: EvermarkError) -> None: ...

    def begun(self, recovery: Recovery) -> None: ...

    def left_behind(self, error: EvermarkError) -> None: ...

    def taken(self, taken: Taken) -> None:
        self._mended.met["recovered"] += taken.append.rows

    def closed(self, recovery: Recovery, hole: Hole, rows: int) -> None:
        if recovery.choice is Choice.SKIP:
            self._mended.skip(recovery.partition, hole.position)

    def ended(self, recovery: Recovery, error: EvermarkError | None) -> None:
        if error is not None:
            self._note_failure(recovery.partition, error)
            return
        self._stopped.discard(recovery.partition)
        self._returned += 1
        self._end_query = True
