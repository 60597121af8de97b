"""One running Evermark, as the simulator wires it: the product's parts over ports that may fail.

The loops here are those of `evermark.app` without Spark, clocks and threads; everything they call is the product.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from evermark.app.replaying import RequestDesk
from evermark.cluster.base import Holder, Lease
from evermark.cluster.fence import source_lease
from evermark.delivery.base import Cursor, SourcePartition
from evermark.delivery.work import Span
from evermark.error_policy import Action, action_for
from evermark.errors import EvermarkError, StaleError
from evermark.event import Op
from evermark.ingest.dedup import excluded_from
from evermark.ingest.gather import WHOLE_SOURCE, gather
from evermark.ingest.take import Taken, Taker
from evermark.log.read import FileRange
from evermark.observe.metrics import Metrics
from evermark.sources.base import Limit, Slice
from evermark.testing.simulator import ports
from evermark.testing.simulator.baton import Baton, Process, Task
from evermark.testing.simulator.broken import Broken
from evermark.testing.simulator.ports import Port
from evermark.testing.simulator.source import About, Row
from evermark.testing.simulator.world import World

METRICS = Metrics()
TTL_S = 10.0
CALM_TTL_S = 10_000_000.0
CALM_IDLE_S_MAX = 3_600.0

_COLUMNS = ("event_id", "position", "stream", "key", "op", "event_time", "payload", "previous_key")


class Idle:
    """How long a loop that found nothing waits. In the calm it waits longer and longer: retries are hours apart."""

    def __init__(self, world: World, every_s: float) -> None:
        self._world = world
        self._every_s = every_s
        self._next_s = every_s

    def wait(self, *, moved: bool = False) -> None:
        self._next_s = self._every_s if moved or not self._world.calm else min(self._next_s * 2, CALM_IDLE_S_MAX)
        self._world.baton.sleep(self._next_s)


class HeldLease:
    """Renewed by a thread of its own; `lost` when somebody else has it or we cannot know any longer."""

    def __init__(self, instance: Instance, lease: Lease, ttl_s: float) -> None:
        self.lease = lease
        self._ttl_s = ttl_s
        self.lost = False
        self._closed = False
        self._instance = instance
        instance.spawn(f"renew {lease.name}", self._renew)

    def _renew(self) -> None:
        world, missed_s = self._instance.world, 0.0
        while True:
            world.baton.sleep(self._ttl_s / 4)
            if self._closed:
                return
            try:
                self._ttl_s = self._instance.ttl_s()
                self._instance.leases.renew(self.lease, self._ttl_s)
                missed_s = 0.0
            except StaleError:
                break
            except EvermarkError:
                missed_s += TTL_S / 4
                if missed_s >= TTL_S:
                    break
        self.lost = True

    def close(self) -> None:
        self._closed = True
        try:
            self._instance.leases.release(self.lease)
        except EvermarkError:
            self._instance.world.count("leases not released")


class Instance(Process):
    """One process. `on_span` is set while it delivers, `busy` names those who are being caught up."""

    def __init__(self, world: World, name: str, run: int) -> None:
        super().__init__(f"{name}.{run}")
        self.world = world
        self.holder = Holder(name, "host", "boot", run, f"{name}.{run}")
        truth = world.truth
        self.leases = self.port("leases", world.leases, ports.nothing)
        self.heads = self.port("heads", world.heads, ports.heads_landed(truth))
        self.checkpoints = self.port("checkpoints", world.checkpoints, ports.checkpoints_landed(truth))
        self.store = self.port("delivery", world.store, ports.delivery_landed(world.account))
        self.replays = self.port("replays", world.replays, world.replayed.landed)
        self.on_span: Callable[[Span], None] = lambda _: None
        self.busy: dict[str, Task] = {}

    def port(self, name: str, target: object, landed: ports.Landed) -> Any:
        return Port(self.world, self, name, target, landed)

    def spawn(self, name: str, work: Callable[[], None]) -> Task:
        return self.world.baton.spawn(f"{self.name} {name}", self, work)

    def clock(self) -> datetime:
        return self.world.clock()

    def ttl_s(self) -> float:
        return CALM_TTL_S if self.world.calm else TTL_S

    def acquire(self, name: str) -> HeldLease:
        idle = Idle(self.world, 0.5)
        while True:
            ttl_s = self.ttl_s()
            try:
                lease = self.leases.acquire(name, self.holder, ttl_s)
            except EvermarkError:
                lease = None
            if lease is not None:
                return HeldLease(self, cast(Lease, lease), ttl_s)
            idle.wait()


class SourceRunner:
    """Stands by for a source's lease, then reads it."""

    def __init__(self, instance: Instance, name: str) -> None:
        world = instance.world
        self._instance = instance
        self._world = world
        self._name = name
        self._baton: Baton = world.baton
        log = world.logs[name]
        forgetful = ports.ForgetfulLog(log, world.forgets_tail)
        self._log = instance.port(f"log {name}", forgetful, ports.log_landed(world.truth, log))
        self._source = instance.port(
            f"source {name}", world.sources[name], ports.source_landed(world.truth, world.sources[name])
        )

    def run(self) -> None:
        while True:
            held = self._instance.acquire(source_lease(self._name))
            try:
                self._own(held)
            except EvermarkError as error:
                self._decide({WHOLE_SOURCE: error}, held)
            finally:
                held.close()

    def _own(self, held: HeldLease) -> None:
        instance = self._instance
        taker = Taker(
            self._name,
            held.lease.epoch,
            self._source,
            self._log,
            self._log,
            instance.heads,
            instance.checkpoints,
            on_unconfirmed=lambda _: self._world.count("unconfirmed"),
            on_controls=self._on_controls(held.lease.epoch),
        )
        while not held.lost:
            if self._decide(self._read(taker, held), held):
                return

    def _on_controls(self, epoch: int) -> Callable[[int, int, int], None]:
        if not self._world.scenario.replays:
            return lambda _partition, _after, _to: None
        return RequestDesk(self._instance.replays, self._name, self._log, epoch, METRICS)

    def _decide(self, failed: Mapping[int, EvermarkError], held: HeldLease) -> bool:
        """Whether to step down. What would need a person is a bug here, unless it is what a stale owner sees."""
        for error in failed.values():
            if action_for(error) is Action.STOP:
                if not self._is_owner(held):
                    return True
                raise Broken(f"source {self._name} stopped: {type(error).__name__}: {error.message}")
        if any(action_for(error) is Action.STEP_DOWN for error in failed.values()):
            return True
        if failed:
            self._baton.sleep(0.5)
        return False

    def _is_owner(self, held: HeldLease) -> bool:
        try:
            self._instance.leases.require(held.lease)
        except EvermarkError:
            return False
        return True

    def _read(self, taker: Taker, held: HeldLease) -> dict[int, EvermarkError]:
        partitions = self._world.sources[self._name].partitions()
        resumes = {}
        for partition in partitions:
            resumes[partition] = taker.begin(partition)
            place = SourcePartition(self._name, partition)
            self._world.truth.begun[place] = max(taker.epoch, self._world.truth.begun.get(place, 0))
        starts = {p: cast(str, r.position) for p, r in resumes.items()}
        repeats = {p: r.repeats_to for p, r in resumes.items()}
        idle = Idle(self._world, 0.3)
        limit = Limit(rows_max=self._world.scenario.rows_max)
        while not held.lost:
            ends: dict[int, str] = self._source.latest(starts, limit)
            rows = [
                row
                for p in partitions
                if ends[p] != starts[p]
                for row in self._pieces(p, starts[p], ends[p], repeats[p])
            ]
            if rows:
                failed = self._take(taker, rows)
                if failed:
                    return failed
            starts = ends
            idle.wait(moved=bool(rows))
        return {}

    def _take(self, taker: Taker, rows: list[dict[str, Any]]) -> dict[int, EvermarkError]:
        gathered = gather(rows, taker.epoch)
        try:
            for taken in gathered.taken:
                taker.take(taken)
                self._world.ledger.duplicates_dropped += taken.duplicates
                self._on_taken(taken)
                taker.confirm(taken.partition, taken.end)
        except EvermarkError as error:
            return {**gathered.failed, **{t.partition: error for t in gathered.taken}}
        return gathered.failed

    def _pieces(self, partition: int, start: str, end: str, repeats_to: str | None) -> list[dict[str, Any]]:
        """What the tasks of one micro-batch report: a row per slice, errors included."""
        where = {"partition": partition, "start": start, "end": end}
        try:
            batch = next_batch(self._log.tail(partition).batch)
            exclude = excluded_from(start, self._source.may_repeat_from(partition, start), repeats_to)
            slices: list[Slice] = self._source.slices(partition, start, end)
        except EvermarkError as error:
            return [{**where, "batch": 0, "error": _as_row(error)}]
        return [{**where, "batch": batch, **self._write(piece, batch, exclude)} for piece in slices]

    def _write(self, piece: Slice, batch: int, exclude: str | None) -> dict[str, Any]:
        place = SourcePartition(self._name, piece.partition)
        try:
            columns = [b.to_pydict() for b in self._source.read(piece)]
            seen = set() if exclude is None else self._log.ids_from(piece.partition, exclude)
            rows = [
                Row(event_id, place, batch, at, stream, key, op, when.timestamp(), About(**json.loads(about)), left)
                for c in columns
                for event_id, at, stream, key, op, when, about, left in zip(*(c[n] for n in _COLUMNS), strict=True)
            ]
            fresh = [row for row in rows if row.event_id not in seen]
            file = self._log.write(piece.partition, batch, fresh)
        except EvermarkError as error:
            return {"error": _as_row(error)}
        controls = sum(row.op == Op.CONTROL for row in fresh)
        return {
            "file": file.as_dict() if file else None,
            "duplicates": len(rows) - len(fresh),
            "controls": controls,
        }

    def _on_taken(self, taken: Taken) -> None:
        if not taken.append.rows:
            return
        paths = tuple(f.path for f in taken.append.files)
        place = SourcePartition(self._name, taken.partition)
        span = Span(place, Cursor(taken.batch - 1), taken.batch, paths, taken.append.rows, exact=True)
        self._instance.on_span(span)


def next_batch(logged: int) -> int:
    """The number of the next batch comes from the log, never from a counter of ours."""
    return logged + 1


def _as_row(error: EvermarkError) -> dict[str, str]:
    return {"kind": error.kind, "message": error.message, "hint": error.hint}


@dataclass
class SimLogView:
    """`LogView` as the deployment has it: when a head moved is when this instance first saw it there."""

    instance: Instance

    def __post_init__(self) -> None:
        self._seen: dict[SourcePartition, tuple[int, datetime]] = {}

    def heads(self) -> dict[SourcePartition, tuple[int, datetime]]:
        now = self.instance.clock()
        for source in self.instance.world.logs:
            for partition, head in self.instance.heads.load(source).items():
                place = SourcePartition(source, partition)
                if self._seen.get(place, (-1, now))[0] != head.batch:
                    self._seen[place] = (head.batch, now)
        return dict(self._seen)

    def files(self, source: str) -> list[FileRange]:
        return self.instance.world.logs[source].files()
