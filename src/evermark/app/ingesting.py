"""One source of a deployment: its owner (`ingest/owner.py`) over Spark and the Delta log, and its reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from evermark.app.build import Stores
from evermark.app.delivering import DeliveryRunner
from evermark.app.inspect import newest
from evermark.app.source_monitor import SourceMonitor
from evermark.breaker import BreakerState
from evermark.cluster.fence import alone, source_lease
from evermark.cluster.holding import Candidate, LeaseKeeper, Share
from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.replay.owner import RequestDesk
from evermark.delivery.work import Span
from evermark.errors import EvermarkError, NotFoundError, known
from evermark.event import Seen
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.checkpoint_saver import SavingObserver
from evermark.ingest.copying.requests import CopyRequests
from evermark.ingest.copying.steps import Copier
from evermark.ingest.dedup import RecentIds
from evermark.ingest.owner import IngestLimits, SourceOwner
from evermark.ingest.pieces import Piece, ReadFrom
from evermark.ingest.reading import ReadPlan, Seats, SourceReading
from evermark.ingest.repair.base import Choice, Recovery
from evermark.ingest.repair.steps import FoundFile, RepairTarget
from evermark.ingest.repair.watch import RecoveryWatch
from evermark.log.append import DeltaLog
from evermark.log.disk import require_room
from evermark.log.head import durable_version
from evermark.log.maintenance import EVERY_S_MIN, Maintenance, is_unwell, next_round_s
from evermark.log.opened import lost
from evermark.log.read import FileRange, LogReader
from evermark.log.torn import set_aside_torn, torn_delta_checkpoints
from evermark.observe.health import HANGING_HINT, HealthBoard, PartitionHealth
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.runtime import LoopTask, Pause, Runtime, Steps, Wake, any_set
from evermark.sources.base import Gap, Limit
from evermark.sources.copies import ChunkWork, Copy, Copying
from evermark.storage import Place

MAINTENANCE, FILES = "maintenance", "files"  # what may be wrong with a log, as health has it
_MAINTENANCE_HINT = (
    "it is tried again, a minute apart at most; until it succeeds the log is not compacted, and nothing old leaves it"
)
_SAID_MAX = 20  # files that a line of the log names
_MAINTENANCE_END_S = 0.2  # a round that takes longer conflicts with nothing but a power cut; another owner waits


class Tasks(Protocol):
    """Work that Spark tasks do for the owner of a source."""

    def write_pieces(self, of: ReadFrom, pieces: Sequence[Piece]) -> list[dict[str, Any]]: ...

    def write_chunks(
        self, copying: Copying, works: Sequence[Sequence[ChunkWork]], epoch: int, until_s: float
    ) -> list[dict[str, Any]]: ...

    def find_missing(
        self, gap: Gap, files: Sequence[FileRange], wanted: RepairTarget, folder: Place
    ) -> list[FoundFile]: ...


@dataclass(eq=False)
class LaneTools:
    """`SourceTools` of one source: its log is a Delta table; the source is read here, or by tasks side by side."""

    deployment: Stores
    tasks: Tasks
    name: str
    metrics: Metrics
    limit: Limit
    runtime: Runtime
    seats: Seats = field(default_factory=Seats)

    def __post_init__(self) -> None:
        self.recoveries = self.deployment.recoveries
        self.copies = self.deployment.copies
        self.write_chunks = self.tasks.write_chunks
        self._source = self.deployment.sources[self.name]
        self._folder = self.deployment.log_folder(self.name)
        self._log = get_logger(source=self.name)
        self._reader = LogReader(self._folder)
        self._opened: DeltaLog | None = None  # an open log that nobody uses
        self._used: DeltaLog | None = None  # the log that the owner uses, or used when it was the owner last
        self.prepared = self.runtime.wake()
        recent = self.deployment.reading.recent
        self._recent = RecentIds(recent, self.runtime.monotonic) if recent is not None else None
        self.saving: SavingObserver = SavingObserver()
        self._rows_before: int | None = None

    def warm(self) -> None:
        """Before the source is ours: open what its owner will need, so that it goes on at once."""
        if self._reader.files_if_any():
            self._opened = DeltaLog(self._folder)
            self._opened.sync()
        self.newest(self._source.partitions())
        torn_delta_checkpoints(self._folder)

    def prepare(self) -> None:
        if self._recent is not None:
            self._recent.clear()  # the log may be another one than we left
        # Of a log that is open already, only the commits that have come since are read and synced.
        self._opened, self._used = self._opened or self._used, None
        # The owner of other partitions may be at it just now, and commit a moment later what looked torn before.
        with alone(self.deployment.state, f"torn commits of {self.name}") as conn:
            torn = set_aside_torn(self._folder, durable_version(conn, self.name))
        if torn:
            self._opened, self._reader = None, LogReader(self._folder)
            self._log.warning("commits that never reached the disk whole were set aside", versions=torn)
        self.prepared.set()

    def require_room(self) -> None:
        require_room(self._folder)

    def open_log(self, epoch: int) -> tuple[DeltaLog, BatchTaker]:
        # A log that is away with its disk is not begun anew: what is taken into an empty table would hide it.
        heads = self.deployment.heads.load(self.name).values() if self._opened is None else ()
        taken = max((head.batch for head in heads), default=0)
        log, self._opened = self._opened or DeltaLog(self._folder, taken=taken), None
        self._used = self._used or log
        ignored = self.metrics.controls_ignored.labels(self.name)
        taker = BatchTaker(
            self.name,
            epoch,
            self._source,
            log,
            self._reader,
            self.deployment.heads,
            self.deployment.checkpoints,
            on_unconfirmed=lambda error: self._log.info("source not confirmed yet", error=error),
            on_controls=RequestDesk(self.deployment.replays, self.name, self._reader, epoch, self._log, ignored.inc),
            policy=self.deployment.reading.saving,
            breaker=self.deployment.store_breaker,
            saving=self.saving,
            clock=self.runtime.monotonic,
        )
        return log, taker

    def newest(self, partitions: Sequence[int]) -> Mapping[int, Seen]:
        return newest(self._reader, partitions, self.recoveries.past(self.name))

    def read(
        self,
        plan: ReadPlan,
        taker: BatchTaker,
        on_taken: Callable[[WrittenBatch], None],
        ends: Sequence[Wake],
        cuts: Sequence[Wake],
    ) -> Steps[Mapping[int, EvermarkError]]:
        of = ReadFrom(self.name, self._source, str(self._folder))
        took = self.metrics.take_seconds.labels(self.name).observe
        gaps = self.deployment.reading.gaps
        reading = SourceReading(
            of, self.limit, self.runtime, partial(self.tasks.write_pieces, of), self._say_feed_ended, took,
            self._recent, gaps, self.newest, self._say_jump, self._rows_before, self.seats,
        )  # fmt: skip
        try:
            return (yield from reading.steps(plan, taker, self._with_cache_shown(on_taken), ends, cuts))
        finally:
            # Reading that goes on with other partitions knows how much there is: its first batch needs no job of Spark.
            self._rows_before = reading.rows_before

    def _with_cache_shown(self, on_taken: Callable[[WrittenBatch], None]) -> Callable[[WrittenBatch], None]:
        def show(taken: WrittenBatch) -> None:
            on_taken(taken)
            if self._recent is not None:
                self.metrics.dedup_cache.labels(self.name).set(len(self._recent))

        return show

    def _say_jump(self, partition: int, jump_s: float) -> None:
        asked = "times jump: the source is asked whether something is missing"
        self._log.info(asked, partition=partition, jump_s=round(jump_s))

    def _say_feed_ended(self, error: EvermarkError) -> None:
        self._log.warning("the source sends no events just now: it is asked for them", error=error)

    def checkpoint(self, partition: int) -> str | None:
        found = self.deployment.checkpoints.list(self.name).get(partition)
        return found.position if found is not None else None

    def holds(self, partition: int, position: str) -> bool:
        return self._reader.holds(partition, position)

    def find(self, gap: Gap, wanted: RepairTarget) -> list[FoundFile]:
        return self.tasks.find_missing(gap, self._reader.files(), wanted, self._folder)


@dataclass(eq=False)
class SourceRunner(SavingObserver):
    """A source that is owned or stood by for: what its owner tells is reported, its log is maintained beside it."""

    deployment: Stores
    tools: LaneTools
    name: str
    board: HealthBoard
    metrics: Metrics
    delivery: DeliveryRunner
    runtime: Runtime
    share: Share = field(default_factory=Share)
    watch: RecoveryWatch | None = None
    keeper: LeaseKeeper | None = None
    requests: CopyRequests | None = None

    def __post_init__(self) -> None:
        self._source = self.deployment.sources[self.name]
        self._folder = self.deployment.log_folder(self.name)
        self._log = get_logger(source=self.name)
        self._repair_log = get_logger(source=self.name, part="repair")
        candidate = Candidate(
            self.deployment.leases,
            self.deployment.holder,
            self.runtime,
            self._log,
            self.deployment.lease_limits,
            share=self.share,
            on_refused=lambda lease: self.metrics.refused.labels(lease).inc(),
            keeper=self.keeper,
            on_hanging=self._say_hanging,
        )
        self.hangs: str | None = None  # why the lease was let go of, if its loop hangs: the lane has to end
        self._copy_log = get_logger(source=self.name, part="copy")
        limits = IngestLimits(breaker=self.deployment.reading.breaker)
        self._owner = SourceOwner(
            self.name, self._source, self.tools, self, candidate, limits, self._source.divisible(), self._copier,
            self.watch,
        )  # fmt: skip
        self.tools.saving = self
        self._released = self.runtime.wake()
        self._monitor: SourceMonitor | None = None
        self._owned_leases: list[str] = []
        self._in_maintenance = threading.Lock()
        self._grown = self.runtime.wake()  # the log has, since its last maintenance
        self._task: LoopTask | None = None
        self._store_is_away: bool | None = None  # None: not known yet; an owner before this one may have said it
        self._failed_rounds: int | None = None  # of maintenance, in a row; None: none has ended yet, as above
        self._lost_files: tuple[str, ...] | None = None

    def start(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called when the source is let go of."""

        def steps() -> Steps[None]:
            yield from self._owner.steps()
            on_end()

        self._task = self.runtime.loop(f"source {self.name}", steps(), heavy=True)

    def stop(self) -> None:
        self._owner.stop()

    def join(self, timeout_s: float) -> bool:
        return self._task is None or self._task.join(timeout_s)

    def busy_s(self) -> float:
        """For how long its owner has been busy without a pause, with a batch mostly; 0 where it waits."""
        return self._owner.busy_s()

    def is_repairing(self) -> bool:
        """Whether its owner is closing a gap, which its end would have begin anew."""
        return self._owner.is_repairing()

    def _say_hanging(self, reason: str) -> None:
        self.hangs = reason
        self.metrics.hanging.labels(source_lease(self.name)).inc()
        for partition in self._owner.owned_partitions():
            self.board.put(self.name, partition, PartitionHealth.STALE, reason, HANGING_HINT)

    # as observer of the owner

    def standby(self) -> None:
        self.board.store_back(self.name)
        for partition in self._owner.partitions():
            self.board.put(self.name, partition, PartitionHealth.STANDBY)

    def unowned(self, error: EvermarkError) -> None:
        for partition in self._owner.partitions():
            self.board.put(self.name, partition, PartitionHealth.STALE, error.message, error.hint)

    def owned(self) -> None:
        owned = self._owner.owned_partitions()
        for partition in self._owner.partitions():
            if partition in owned:
                self.board.owned(self.name, partition)  # opening its log may take long, and fail
            else:
                self.board.put(self.name, partition, PartitionHealth.STANDBY)
        self._owned_leases = [source_lease(self.name, p) for p in owned] if self._owner.divided else []
        for lease in self._owned_leases or [source_lease(self.name)]:
            self.metrics.lease_held.labels(lease).set(1)
        if 0 not in owned:
            return  # what is done once for a source is done where its first partition is read
        released = self._released = self.runtime.wake()
        self.tools.prepared.clear()  # by the owner before, who may have been this process
        self.runtime.loop(f"maintenance {self.name}", self._maintain(released))
        self._monitor = SourceMonitor(self._source, self.name, self.board, self.metrics, self.runtime)
        self._monitor.start()

    def released(self) -> None:
        self._released.set()
        if self._in_maintenance.acquire(timeout=_MAINTENANCE_END_S):  # the next owner looks for torn commits
            self._in_maintenance.release()
        if self._monitor is not None:
            self._monitor.stop()
        self._monitor = None
        for partition in self._owner.partitions():
            self.metrics.partition_up.labels(self.name, partition).set(0)
        for lease in self._owned_leases or [source_lease(self.name)]:
            self.metrics.lease_held.labels(lease).set(0)

    def reading(self, partitions: Sequence[int]) -> None:
        for partition in partitions:
            self.board.put(self.name, partition, PartitionHealth.HEALTHY)
            self.metrics.partition_up.labels(self.name, partition).set(1)
            self._show_breaker(f"partition {partition}", self._owner.breaker(partition))

    def failed(self, partition: int, error: EvermarkError, again_in_s: float | None) -> None:
        self.metrics.partition_restarts.labels(self.name, partition).inc()
        self.metrics.partition_up.labels(self.name, partition).set(0)
        self._show_breaker(f"partition {partition}", self._owner.breaker(partition))
        state = PartitionHealth.FAILED if again_in_s is None else PartitionHealth.STALE
        self.board.put(self.name, partition, state, error.message, error.hint)

    def taken(self, taken: WrittenBatch) -> None:
        rows, partition = taken.rows, taken.partition
        self.board.seen(self.name, partition, rows, datetime.now(UTC))
        if taken.duplicates:
            self.metrics.duplicates_dropped.labels(self.name, partition).inc(taken.duplicates)
        if not rows:
            return
        self._grown.set()
        self.metrics.events_taken.labels(self.name, partition).inc(rows)
        self.metrics.batches_taken.labels(self.name, partition).inc()
        self.metrics.log_head.labels(self.name, partition).set(taken.batch)
        paths = tuple(str(self._folder / f.path) for f in taken.files)
        place, begun = SourcePartition(self.name, partition), Cursor(taken.batch - 1)
        self.delivery.on_span(Span(place, begun, taken.batch, paths, rows, exact=True, fresh=taken.fresh))

    # as observer of saved checkpoints

    def saved(self, partition: int, took_s: float) -> None:
        self.metrics.checkpoints_saved.labels(self.name, partition).inc()
        self.metrics.checkpoint_seconds.labels(self.name).observe(took_s)
        if self._store_is_away is not False:
            self._say_store_is_there()

    def away(self, partition: int, error: EvermarkError, breaker: BreakerState) -> None:
        self.metrics.checkpoint_errors.labels(self.name, partition).inc()
        self._show_breaker("checkpoints", breaker)
        self.board.store_away(self.name, error.message, error.hint)
        if not self._store_is_away:
            self._store_is_away = True
            self._log.warning("checkpoints cannot be saved; the source is not confirmed until they can", error=error)

    def back(self) -> None:
        self._say_store_is_there()
        self._log.info("checkpoints are saved again")

    def _say_store_is_there(self) -> None:
        self._store_is_away = False
        self._show_breaker("checkpoints", BreakerState.CLOSED)
        self.board.store_back(self.name)

    def _show_breaker(self, of: str, breaker: BreakerState) -> None:
        for state in BreakerState:
            self.metrics.breaker.labels(of, self.name, state.value).set(state is breaker)

    # as observer of repairs

    def opened(self, recovery: Recovery, error: EvermarkError) -> None:
        partition = recovery.partition
        self._repair_log.error(
            "a gap was found; it is being closed", partition=partition, error=error, recovery=recovery.id
        )
        self.metrics.gaps.labels(self.name, partition).inc()
        self._ask_for_resync(recovery)

    def _ask_for_resync(self, recovery: Recovery) -> None:
        """A gap is closed whatever its size. Behind a large one, followers do better to take their state anew."""
        partition, gaps = recovery.partition, self.deployment.reading.gaps
        now = recovery.opened_at
        try:
            last = self.tools.newest([partition]).get(partition)
            large = last is not None and gaps.is_large(last.event_time or last.at, now)
            is_news = large and self.deployment.recoveries.set_large(recovery)
        except Exception as error:  # noqa: BLE001 - asked again with the next try to close it
            self._repair_log.warning("the size of the gap is not known", partition=partition, error=error)
            return
        if last is not None and is_news:
            since = (last.event_time or last.at).isoformat()
            self.metrics.resyncs.labels(self.name, partition).inc()
            self.board.resync(self.name, partition, now)
            self._repair_log.error(
                "the gap is larger than gap_detection.small_gap: followers should take their state anew",
                partition=partition, last_event=since,
            )  # fmt: skip

    def begun(self, recovery: Recovery) -> None:
        self._ask_for_resync(recovery)  # if it was opened by a process that died before it had said so
        said = f"failover: {recovery.reason}" + (f"; at last: {recovery.error}" if recovery.error else "")
        hint = "it is being closed; see the log"
        self.board.put(self.name, recovery.partition, PartitionHealth.STALE, said, hint, repairing=True)

    def waits(self, recovery: Recovery, error: EvermarkError) -> None:
        said = f"failover: {recovery.reason}; closing it waits: {error.message}"
        self.board.put(self.name, recovery.partition, PartitionHealth.STALE, said, error.hint, repairing=True)

    def closed(self, recovery: Recovery, gap: Gap, rows: int, ops: Mapping[str, int]) -> None:
        partition = recovery.partition
        self.metrics.recovered.labels(self.name, partition).inc(rows)
        if recovery.choice is Choice.SKIP:
            self.metrics.gaps_accepted.labels(self.name, partition).inc()
            self._repair_log.error(
                "a gap was accepted", partition=partition, after=recovery.left_at, until=gap.position
            )
        elif gap.is_state:
            # How often a record changed in between nobody knows: what is told is how the records differ.
            counts = {f"{op}s": ops.get(op, 0) for op in ("insert", "update", "delete")}
            self._repair_log.warning(
                "records that differed from the log were taken; changes they had in between are in no event",
                partition=partition, events=rows, **counts,
            )  # fmt: skip
        else:
            self._repair_log.warning("events the log lacked were taken", partition=partition, events=rows)

    def ended(self, recovery: Recovery, error: EvermarkError | None) -> None:
        partition = recovery.partition
        if error is not None:
            self._repair_log.error("the gap cannot be closed", partition=partition, error=error)
        else:
            at = recovery.position
            self._repair_log.warning("the gap is closed", partition=partition, recovery=recovery.id, goes_on_at=at)

    def left_behind(self, error: EvermarkError) -> None:
        self._repair_log.warning("the spare slot could not be dropped", error=error)

    # copies

    def _copier(self, epoch: int, busy: Callable[[], bool], step_down: Callable[[], None]) -> Copier | None:
        copying = self._source.copying()
        if copying is None:
            return None
        every_s = self._owner.limits.look_every_s
        copier = Copier(
            self.name, epoch, copying, self.tools, self, self.runtime, self._copy_log, every_s, busy, step_down
        )
        if self.requests is not None:
            self.requests.watch(self.name, copier.asked)
        return copier

    def copy_began(self, copy: Copy, chunks: int) -> None:
        self._copy_log.info("a copy begins", copy=copy.id, stream=copy.stream, chunks=chunks)

    def copy_went_on(self, source: str, rows: int, chunks_left: int) -> None:
        self.metrics.copy_rows.labels(source).inc(rows)
        self.metrics.copy_chunks_left.labels(source).set(chunks_left)

    def copy_ended(self, copy: Copy, error: EvermarkError | None) -> None:
        if error is not None:
            self._copy_log.error("a copy failed", copy=copy.id, stream=copy.stream, error=error)
        else:
            self._copy_log.info("a copy is done", copy=copy.id, stream=copy.stream, rows=copy.rows)

    def copy_failed(self, copy: Copy, error: EvermarkError) -> None:
        self._copy_log.warning("copying failed; it is tried again", copy=copy.id, stream=copy.stream, error=error)

    # beside reading

    def _least_cursors(self) -> dict[int, int]:
        """Asked right before events leave the log: a gap may have been found since the round began. Where nothing is
        known of a partition, its events stay.
        """
        return self.delivery.least_cursors(self.name) if self._owner.may_retain() else {}

    def _maintain(self, released: Wake) -> Steps[None]:
        while not any_set((released, self.tools.prepared)):  # not over commits that are about to be set aside
            yield Pause(EVERY_S_MIN, (released, self.tools.prepared))
        maintenance, every_s = Maintenance(self._folder, self.deployment.retention), EVERY_S_MIN
        while True:
            if every_s > EVERY_S_MIN:
                yield Pause(every_s - EVERY_S_MIN, (released, self._grown))
            yield Pause(EVERY_S_MIN, (released,))
            has_grown = self._grown.is_set()
            self._grown.clear()
            with self._in_maintenance:
                if released.is_set():
                    return
                did_something = self._maintained(maintenance)
            every_s = next_round_s(
                every_s, has_grown=has_grown, did_something=did_something, others_append=self._owner.divided
            )

    def _maintained(self, maintenance: Maintenance) -> bool | None:
        """Whether there was something to do; None: it failed."""
        try:
            report = maintenance.run(self._least_cursors)
        except Exception as error:  # noqa: BLE001 - it is tried again
            self._log.warning("maintenance of the log failed", error=error)
            self._failed_rounds = 1 + (self._failed_rounds or 0)
            if is_unwell(self._failed_rounds):
                said = known(error)
                reason = f"{self._failed_rounds} rounds in a row have failed: {said.message}"
                hint = "" if isinstance(said, NotFoundError) else said.hint  # which is of a log that never was there
                self.board.log_unwell(self.name, MAINTENANCE, reason, hint or _MAINTENANCE_HINT)
            return None
        if self._failed_rounds != 0:
            self._failed_rounds = 0
            self.board.log_well(self.name, MAINTENANCE)
        self._say_lost(report.lost)
        counts = report.counts()
        for what, count in counts.items():
            self.metrics.care.labels(what).inc(count)
        return bool(counts)

    def _say_lost(self, names: tuple[str, ...]) -> None:
        """Files of the log that are not in its folder, whether anybody reads them just now or not."""
        if names:
            error = lost(str(self._folder / names[0]))
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            self.board.log_unwell(self.name, FILES, f"{error.message}{more}", error.hint)
            if names != self._lost_files:
                self._log.error("files of the log are missing", files=names[:_SAID_MAX], count=len(names), error=error)
        elif self._lost_files != ():
            self.board.log_well(self.name, FILES)
        self._lost_files = names
