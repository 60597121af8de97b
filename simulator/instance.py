"""One running Evermark, as the simulator wires it: the product's loops and parts over ports that may fail.

What is a model here is the source, the log's files (`SimPieces`), and who is told (`Notes`, `SimSourceObserver`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from evermark.cluster.assignment import assigned
from evermark.cluster.base import Holder, Lease, LeaseRow
from evermark.cluster.fence import deliver_lease, source_lease
from evermark.cluster.holding import LIMITS, Candidate
from evermark.delivery.decide.shards import FIRST
from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.replay.owner import RequestDesk
from evermark.delivery.run.owner import DeliveryOwner
from evermark.delivery.work import Span
from evermark.errors import EvermarkError, StaleError
from evermark.event import Op, Seen
from evermark.ingest.batch_taker import BatchTaker, Fenced, WrittenBatch
from evermark.ingest.dedup import RecentIds
from evermark.ingest.owner import SourceOwner
from evermark.ingest.pieces import Piece, error_fields
from evermark.ingest.reading import ReadPlan, SourceReading
from evermark.ingest.repair.base import Recovery
from evermark.ingest.repair.steps import FoundFile, RepairTarget
from evermark.ingest.resume import Resume
from evermark.log.read import FileRange
from evermark.runtime import Steps, Wake, any_set
from evermark.sources.base import Fed, Gap, Limit, Slice
from simulator import ports
from simulator.baton import BatonRuntime, Process
from simulator.broken import Broken
from simulator.ports import Port
from simulator.source import About, Row
from simulator.world import World

_COLUMNS = ("event_id", "position", "stream", "key", "op", "event_time", "payload", "previous_key")
_CALM_LOOKS = 30  # until nothing changes any more
_CALM_LOOK_S = 3_600.0


@dataclass
class Notes:
    """What loops say. That something failed in a way nobody thought of ends the run: a loop would only try again."""

    world: World

    def debug(self, event: str, **about: object) -> None:
        self._note(event, about)

    info = warning = error = debug

    def _note(self, event: str, about: Mapping[str, object]) -> None:
        self.world.count(event)
        error = about.get("error")
        if isinstance(error, Exception) and not isinstance(error, EvermarkError):
            self.world.fail(error)


@dataclass
class SimLeases:
    """The lease store as one instance sees it. Knows when the instance was told that a lease is lost."""

    instance: Instance
    port: Any
    missed: Counter[Lease] = field(default_factory=Counter)

    def acquire(self, name: str, holder: Holder, ttl_s: float) -> Lease | None:
        lease: Lease | None = self.port.acquire(name, holder, ttl_s)
        if lease is not None and holder == self.instance.holder:
            self.instance.acquired(lease)
            self.missed.pop(lease, None)
        return lease

    def acquire_all(self, names: Sequence[str], holder: Holder, ttl_s: float) -> list[Lease]:
        leases: list[Lease] = self.port.acquire_all(names, holder, ttl_s)
        for lease in leases:
            self.instance.acquired(lease)
            self.missed.pop(lease, None)
        return leases

    def free(self, names: Sequence[str], holder: Holder) -> list[str]:
        found: list[str] = self.port.free(names, holder)
        return found

    def divide(self, first: str, others: Sequence[str], holder: Holder) -> bool:
        done: bool = self.port.divide(first, others, holder)
        return done

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        try:
            renewed_s = float(self.port.renew(leases, ttl_s))
        except StaleError:
            for lease in leases:
                self.instance.told_lost(lease)
            raise
        except EvermarkError:
            for lease in leases:
                self.missed[lease] += 1
                if self.missed[lease] * LIMITS.renew_every_s >= LIMITS.ttl_s:
                    self.instance.told_lost(lease)
            raise
        for lease in leases:
            self.missed.pop(lease, None)
        return renewed_s

    def note_checked(self, leases: Sequence[Lease]) -> None:
        self.port.note_checked(leases)

    def rows(self) -> dict[str, LeaseRow]:
        found: dict[str, LeaseRow] = self.port.rows()
        return found

    def release(self, *leases: Lease) -> None:
        self.port.release(*leases)

    def require(self, lease: Lease) -> None:
        self.port.require(lease)


class Instance(Process):
    """One process. `delivery` has its owners of shards of delivery, whether they have the leases or not."""

    delivery: list[DeliveryOwner]

    def __init__(self, world: World, name: str, run: int) -> None:
        super().__init__(f"{name}.{run}")
        self.world = world
        self.holder = Holder(name, "host", "boot", run, f"{name}.{run}")
        self.runtime = BatonRuntime(world.baton, self, world.stretched)
        self.log = Notes(world)
        self.epochs: dict[str, int] = {}  # by lease: under which it was acquired last
        self._lost: dict[str, tuple[int, int]] = {}  # by lease: the epoch, and how many threads there were until then
        self._late: Counter[tuple[str, int, int]] = Counter()
        truth = world.truth
        self.leases = SimLeases(self, self.port("leases", world.leases, ports.nothing))
        # In the calm waits are longer than they were asked to be: no loop hangs because of that.
        limits = replace(LIMITS, hangs_after_s=math.inf)
        self.candidate = Candidate(self.leases, self.holder, self.runtime, self.log, limits)
        self.heads = self.port("heads", world.heads, ports.heads_landed(truth))
        self.checkpoints = self.port("checkpoints", world.checkpoints, ports.checkpoints_landed(truth))
        self._stores: dict[int, Any] = {}
        self.store = self.store_of(FIRST)
        if world.scenario.shards == 1:
            self.store.spread = lambda _shards, _epoch: None  # has nothing to do, and is no effect
        self.replays: Any = world.replays  # where nobody asks for any, looking for them is no effect
        if world.scenario.replays:
            self.replays = self.port("replays", world.replays, world.replayed.landed)
        self.on_span: Callable[[Span], None] = lambda _: None

    def port(self, name: str, target: object, landed: ports.Landed) -> Any:
        return Port(self.world, self, name, target, landed)

    def store_of(self, shard: int) -> Any:
        if shard not in self._stores:
            store = self.world.store
            landed = ports.delivery_landed(self.world.account, deliver_lease(shard))
            self._stores[shard] = self.port("delivery", store.of_shard(shard) if shard else store, landed)
        return self._stores[shard]

    def share_out(self) -> None:
        """As an instance does that shares the work with others (`app/member.py`)."""
        world, waits = self.world, 0
        mine = [deliver_lease(owner.shard) for owner in self.delivery]
        world.able[self.holder.instance] = {
            *mine,
            *(source_lease(p.source, p.partition) for p in world.scenario.places),
        }
        while True:
            world.beaten[self.holder.instance] = self.runtime.monotonic()
            able = {n: world.able[n] for n, at in world.beaten.items() if self.runtime.monotonic() - at <= LIMITS.ttl_s}
            held = {name: held.holder for name, held in world.leases._held.items()}
            owners = {name: holder.instance for name, holder in held.items() if holder is not None}
            world.account.met["shared"] += (
                len({owners.get(lease) for lease in owners if lease.startswith("source:")}) > 1
            )
            found = assigned(able if not world.calm else world.able, owners)
            self.candidate.share.set([lease for lease, name in found.items() if name == self.holder.instance])
            waits += world.calm
            self.runtime.wait(1.0 if waits < _CALM_LOOKS else _CALM_LOOK_S)

    def serving(self) -> set[str]:
        return {name for owner in self.delivery for name in owner.serving()}

    def hand_over(self, span: Span) -> None:
        for owner in self.delivery:
            owner.hand_over(span)

    def acquired(self, lease: Lease) -> None:
        self.epochs[lease.name] = lease.epoch
        self._lost.pop(lease.name, None)  # what nobody else took meanwhile has the same epoch again

    def told_lost(self, lease: Lease) -> None:
        if self.epochs.get(lease.name) == lease.epoch:
            self._lost.setdefault(lease.name, (lease.epoch, self.world.baton.spawned))

    def begin_work(self, lease: str) -> None:
        """Under a lease. Whoever was told that it is lost ends what it is in the middle of, and begins nothing more."""
        if lease not in self._lost:
            return
        (lost, threads), number = self._lost[lease], self.world.baton.current.number
        self._late[lease, lost, number] += 1
        fine = number <= threads and self._late[lease, lost, number] <= 1
        if not fine:
            self.world.fail(Broken(f"{self.name} goes on with work for {lease}, of which it knows that it is lost"))


class SimTaker(BatchTaker):
    """Tells the truth who began, and remembers whom a batch was taken of."""

    def __init__(self, instance: Instance, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._instance = instance
        self.tried: set[int] = set()

    def begin(self, partition: int, fenced: Fenced | None = None) -> Resume:
        found = super().begin(partition, fenced)
        place, begun = SourcePartition(self.name, partition), self._instance.world.truth.begun
        begun[place] = max(self.epoch, begun.get(place, 0))
        return found

    def take(self, written: WrittenBatch, **how: bool) -> None:
        self.tried.add(written.partition)
        super().take(written, **how)


class SimTools:
    """`SourceTools`: reads a source that is made up, into a log in memory, as Spark does it."""

    def __init__(self, instance: Instance, name: str) -> None:
        world = instance.world
        self.recoveries: Any = world.recoveries  # nothing of it is an effect, where no slot can be lost
        self._instance = instance
        self._world = world
        self._name = name
        log = world.logs[name]
        forgetful = ports.ForgetfulLog(log, world.forgets_tail)
        self.log = instance.port(f"log {name}", forgetful, ports.log_landed(world.truth, log))
        landed = ports.source_landed(world.truth, world.sources[name])
        self.source = instance.port(f"source {name}", world.sources[name], landed)

    def prepare(self) -> None: ...

    def require_room(self) -> None: ...

    def open_log(self, epoch: int) -> tuple[Any, SimTaker]:
        instance, replays = self._instance, self._world.scenario.replays
        desk = RequestDesk(instance.replays, self._name, self.log, epoch, instance.log)
        stores = (self.source, self.log, self.log, instance.heads, instance.checkpoints)
        named: dict[str, Any] = {"on_controls": desk} if replays else {}
        return self.log, SimTaker(instance, self._name, epoch, *stores, **named)

    def newest(self, partitions: Sequence[int]) -> Mapping[int, Seen]:
        return {}

    def find(self, gap: Gap, wanted: RepairTarget) -> list[FoundFile]:
        raise NotImplementedError("no slot can be lost here")

    def read(
        self,
        plan: ReadPlan,
        taker: BatchTaker,
        on_taken: Callable[[WrittenBatch], None],
        ends: Sequence[Wake],
        cuts: Sequence[Wake],
    ) -> Steps[Mapping[int, EvermarkError]]:
        assert isinstance(taker, SimTaker)
        limit = Limit(rows_max=self._world.scenario.rows_max)
        pieces = SimPieces(self._instance, self._name, self.source, self.log, taker, tuple(plan.starts))
        reading = SourceReading(pieces, limit, self._instance.runtime)
        failed = yield from reading.steps(plan, taker, on_taken, ends, cuts)
        if not any_set((*ends, *cuts)):
            pieces.require_all_tried()
        return failed


class SimPieces:
    """`Pieces` of a source that is made up, written into a log in memory. It looks at what the loop does with them."""

    def __init__(
        self, instance: Instance, name: str, source: Any, log: Any, taker: SimTaker, partitions: Sequence[int]
    ) -> None:
        self.name = name
        self._partitions = partitions
        self.source: Any = _Watched(source, self)
        self._instance, self._log, self._taker = instance, log, taker
        self._reports: dict[int, bool] = {}  # of the batch under way, by partition: whether all of it was read

    def written(self, piece: Piece, recent: RecentIds | None = None) -> dict[str, Any]:
        return self._reported(piece, self.source.read, piece.slice)

    def written_fed(self, fed: Fed, piece: Piece, recent: RecentIds | None = None) -> dict[str, Any]:
        report = self._reported(piece, fed.batches)
        return report if "error" in report else {**report, "end": fed.end()}

    def require_all_tried(self) -> None:
        whole = {partition for partition, is_whole in self._reports.items() if is_whole}
        if not whole <= self._taker.tried:
            tried = self._taker.tried
            self._instance.world.fail(Broken(f"of partitions {whole}, read whole, only {tried} were to be taken"))
        self._reports.clear()
        self._taker.tried.clear()

    def begin_batch(self, partitions: Iterable[int]) -> None:
        """The batch before is over, and another one begins."""
        self.require_all_tried()
        for partition in partitions if self._instance.world.scenario.divided else (0,):
            self._instance.begin_work(source_lease(self.name, partition))

    def fed(self, partition: int, feed: Any) -> Fed | None:
        if partition == self._partitions[0]:
            self.begin_batch(self._partitions)
        found: Fed | None = feed.next()
        return found

    def leave(self) -> None:
        """One feed failed: what others have sent is left, too, and the source is asked for all of it."""
        self._reports.clear()

    def feed(self, partition: int, feed: object) -> _WatchedFeed:
        landed = ports.feed_landed(self._instance.world.truth, self.name, partition)
        self._instance.world.account.met["sent"] += 1
        return _WatchedFeed(self, partition, self._instance.port(f"feed {self.name}", feed, landed))

    def _reported(self, piece: Piece, read: Callable[..., Iterable[pa.RecordBatch]], *of: Slice) -> dict[str, Any]:
        partition = piece.slice.partition
        self._reports.setdefault(partition, True)
        try:
            return {**piece.where, **self._write(piece, read(*of))}
        except EvermarkError as error:
            self._reports[partition] = False
            return {**piece.where, "error": error_fields(error)}

    def _write(self, piece: Piece, batches: Iterable[pa.RecordBatch]) -> dict[str, Any]:
        partition, batch = piece.slice.partition, piece.batch
        if batch > (last := self._log.tail(partition).batch) + 1:  # less: another owner goes on, and the log refuses it
            self._instance.world.fail(Broken(f"{self.name}/{partition}: batch {batch} is read after {last}"))
        place = SourcePartition(self.name, partition)
        columns = [b.to_pydict() for b in batches]
        seen = set() if piece.looked_up_from is None else self._log.ids_from(partition, piece.looked_up_from)
        rows = [
            Row(event_id, place, batch, at, stream, key, op, when.timestamp(), About(**json.loads(about)), left)
            for c in columns
            for event_id, at, stream, key, op, when, about, left in zip(*(c[n] for n in _COLUMNS), strict=True)
        ]
        fresh = [row for row in rows if row.event_id not in seen]
        file = self._log.write(partition, batch, fresh)
        controls = sum(row.op == Op.CONTROL for row in fresh)
        return {"files": [vars(file)] if file else [], "duplicates": len(rows) - len(fresh), "controls": controls}


@dataclass
class _WatchedFeed:
    pieces: SimPieces
    partition: int
    feed: Any

    def next(self) -> Fed | None:
        return self.pieces.fed(self.partition, self.feed)

    def confirm(self, end: str) -> None:
        self.feed.confirm(end)

    def close(self) -> None:
        """Not an effect: who is stopped in the middle of it has not even closed it."""
        self.pieces.leave()


class _Watched:
    """A source that tells its pieces when another batch begins."""

    def __init__(self, source: Any, pieces: SimPieces) -> None:
        self._source, self._pieces = source, pieces

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        self._pieces.begin_batch(after)
        found: dict[int, str] = self._source.latest(after, limit)
        return found

    def follow(self, partition: int, position: str, wake: Callable[[], None]) -> _WatchedFeed | None:
        feed = self._source.follow(partition, position, wake)
        return None if feed is None else self._pieces.feed(partition, feed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@dataclass
class SimSourceObserver:
    """`SourceObserver`: what would need a person is a bug here."""

    instance: Instance
    name: str

    def standby(self) -> None: ...

    def unowned(self, error: EvermarkError) -> None: ...

    def owned(self) -> None: ...

    def released(self) -> None: ...

    def reading(self, partitions: Sequence[int]) -> None: ...

    def failed(self, partition: int, error: EvermarkError, again_in_s: float | None) -> None:
        what = f"source {self.name}/{partition} stopped: {type(error).__name__}: {error.message}"
        if type(error) is EvermarkError:
            self.instance.world.fail(AssertionError(what))  # whatever it was, nobody thought of it
        if again_in_s is None and not self.may_stop(partition):
            self.instance.world.fail(Broken(what))

    def may_stop(self, partition: int) -> bool:
        return False

    def taken(self, taken: WrittenBatch) -> None:
        self.instance.world.ledger.duplicates_dropped += taken.duplicates
        if taken.rows:
            place, paths = SourcePartition(self.name, taken.partition), tuple(f.path for f in taken.files)
            self.instance.on_span(Span(place, Cursor(taken.batch - 1), taken.batch, paths, taken.rows, exact=True))

    def opened(self, recovery: Recovery, error: EvermarkError) -> None: ...

    def begun(self, recovery: Recovery) -> None: ...

    def closed(self, recovery: Recovery, gap: Gap, rows: int, ops: Mapping[str, int]) -> None: ...

    def ended(self, recovery: Recovery, error: EvermarkError | None) -> None: ...

    def waits(self, recovery: Recovery, error: EvermarkError) -> None: ...

    def left_behind(self, error: EvermarkError) -> None: ...


def owner_of(instance: Instance, name: str, tools: SimTools, observer: SimSourceObserver) -> SourceOwner:
    return SourceOwner(name, tools.source, tools, observer, instance.candidate, divided=instance.world.scenario.divided)


@dataclass
class SimLogView:
    """`LogView` as the deployment has it: when a head moved is when this instance first saw it there."""

    instance: Instance

    def __post_init__(self) -> None:
        self._seen: dict[SourcePartition, tuple[int, datetime]] = {}

    def heads(self) -> dict[SourcePartition, tuple[int, datetime]]:
        now = self.instance.world.clock()
        for source in self.instance.world.logs:
            for partition, head in self.instance.heads.load(source).items():
                place = SourcePartition(source, partition)
                if head.batch and self._seen.get(place, (-1, now))[0] != head.batch:
                    self._seen[place] = (head.batch, now)
        return dict(self._seen)

    def files(self, source: str) -> list[FileRange]:
        return self.instance.world.logs[source].files()
