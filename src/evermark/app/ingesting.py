"""One source of a deployment: its owner (`ingest/owner.py`) over Spark and the Delta log, and its reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from evermark.app.build import Stores
from evermark.app.inspect import newest
from evermark.app.source_monitor import SourceMonitor
from evermark.cluster.fence import source_lease
from evermark.cluster.holding import Candidate
from evermark.delivery.base import Cursor, SourcePartition
from evermark.delivery.replay.owner import RequestDesk
from evermark.delivery.work import Span
from evermark.errors import EvermarkError
from evermark.event import Seen
from evermark.ingest.owner import SourceOwner
from evermark.ingest.pieces import Piece, ReadFrom
from evermark.ingest.reading import ReadPlan, SourceReading
from evermark.ingest.repair.base import Choice, Recovery
from evermark.ingest.repair.steps import FoundFile, RepairTarget
from evermark.ingest.take import Taken, Taker
from evermark.log.append import DeltaLog
from evermark.log.disk import require_room
from evermark.log.maintenance import MAINTENANCE_EVERY_S, Maintenance
from evermark.log.read import FileRange, LogReader
from evermark.log.torn import set_aside_torn
from evermark.observe.health import HealthBoard, PartitionHealth
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.runtime import Runtime, Task, Wake, any_set
from evermark.sources.base import Gap, Limit


class Tasks(Protocol):
    """Work that Spark tasks do for the owner of a source."""

    def write_pieces(self, of: ReadFrom, pieces: Sequence[Piece]) -> list[dict[str, Any]]: ...

    def find_missing(
        self, gap: Gap, files: Sequence[FileRange], wanted: RepairTarget, folder: Path
    ) -> list[FoundFile]: ...


class LaneWorks:
    """`SourceWorks` of one source: its log is a Delta table; the source is read here, or by tasks side by side."""

    def __init__(self, deployment: Stores, tasks: Tasks, name: str, metrics: Metrics, limit: Limit) -> None:
        self.recoveries = deployment.recoveries
        self._d = deployment
        self._tasks = tasks
        self._name = name
        self._source = deployment.sources[name]
        self._folder = deployment.log_folder(name)
        self._metrics = metrics
        self._limit = limit
        self._log = get_logger(source=name)

    def prepare(self) -> None:
        heads = self._d.heads.load(self._name)
        torn = set_aside_torn(self._folder, max((h.delta_version for h in heads.values()), default=-1))
        if torn:
            self._log.warning("commits that never reached the disk whole were set aside", versions=torn)

    def require_room(self) -> None:
        require_room(self._folder)

    def open_log(self, epoch: int) -> tuple[DeltaLog, Taker]:
        log, reader = DeltaLog(self._folder), LogReader(self._folder)
        ignored = self._metrics.controls_ignored.labels(self._name)
        taker = Taker(
            self._name,
            epoch,
            self._source,
            log,
            reader,
            self._d.heads,
            self._d.checkpoints,
            on_unconfirmed=lambda error: self._log.info("source not confirmed yet", error=error),
            on_controls=RequestDesk(self._d.replays, self._name, reader, epoch, self._log, ignored.inc),
        )
        return log, taker

    def newest(self, partitions: Sequence[int]) -> Mapping[int, Seen]:
        return newest(self._folder, partitions, self.recoveries.past(self._name))

    def read(
        self, plan: ReadPlan, taker: Taker, on_taken: Callable[[Taken], None], ends: Sequence[Wake]
    ) -> Mapping[int, EvermarkError]:
        of = ReadFrom(self._name, self._source, str(self._folder))
        reading = SourceReading(of, self._limit, self._tasks.write_pieces, self._say_unfed)
        return reading.run(plan, taker, on_taken, partial(any_set, ends))

    def _say_unfed(self, error: EvermarkError) -> None:
        self._log.warning("the source sends no events just now: it is asked for them", error=error)

    def find(self, gap: Gap, wanted: RepairTarget) -> list[FoundFile]:
        return self._tasks.find_missing(gap, LogReader(self._folder).files(), wanted, self._folder)


class SourceRunner:
    """A source that is owned or stood by for: reported to the health board, metrics and the log, with maintenance
    of its log beside it.
    """

    def __init__(
        self,
        deployment: Stores,
        tasks: Tasks,
        name: str,
        board: HealthBoard,
        metrics: Metrics,
        on_span: Callable[[Span], None],
        least_cursors: Callable[[str], dict[int, int]],
        limit: Limit,
        runtime: Runtime,
    ) -> None:
        self.name = name
        self._d = deployment
        self._source = deployment.sources[name]
        self._folder = deployment.log_folder(name)
        self._board = board
        self._metrics = metrics
        self._on_span = on_span
        self._least_cursors = least_cursors
        self._runtime = runtime
        self._log = get_logger(source=name)
        self._repair_log = get_logger(source=name, part="repair")
        self._owner = SourceOwner(
            name,
            self._source,
            LaneWorks(deployment, tasks, name, metrics, limit),
            self,
            Candidate(deployment.leases, deployment.holder, runtime, self._log),
        )
        self._released = runtime.wake()
        self._monitor: SourceMonitor | None = None
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._runtime.spawn(f"source {self.name}", self._owner.run)

    def stop(self) -> None:
        self._owner.stop()

    def join(self, timeout_s: float) -> bool:
        return self._task is None or self._task.join(timeout_s)

    # news of the owner

    def standby(self) -> None:
        for partition in self._owner.partitions():
            self._board.put(self.name, partition, PartitionHealth.STANDBY)

    def unowned(self, error: EvermarkError) -> None:
        for partition in self._owner.partitions():
            self._board.put(self.name, partition, PartitionHealth.STALE, error.message, error.hint)

    def owned(self) -> None:
        self._metrics.lease_held.labels(source_lease(self.name)).set(1)
        released = self._released = self._runtime.wake()
        self._runtime.spawn(f"maintenance {self.name}", lambda: self._maintain(released))
        self._monitor = SourceMonitor(self._source, self.name, self._board, self._metrics)
        self._monitor.start()

    def released(self) -> None:
        self._released.set()
        if self._monitor is not None:
            self._monitor.stop()
        for partition in self._owner.partitions():
            self._metrics.partition_up.labels(self.name, partition).set(0)
        self._metrics.lease_held.labels(source_lease(self.name)).set(0)

    def reading(self, partitions: Sequence[int]) -> None:
        for partition in partitions:
            self._board.put(self.name, partition, PartitionHealth.HEALTHY)
            self._metrics.partition_up.labels(self.name, partition).set(1)

    def failed(self, partition: int, error: EvermarkError, again_in_s: float | None) -> None:
        self._metrics.partition_restarts.labels(self.name, partition).inc()
        self._metrics.partition_up.labels(self.name, partition).set(0)
        state = PartitionHealth.FAILED if again_in_s is None else PartitionHealth.STALE
        self._board.put(self.name, partition, state, error.message, error.hint)

    def taken(self, taken: Taken) -> None:
        rows, partition = taken.append.rows, taken.partition
        self._metrics.checkpoints_saved.labels(self.name, partition).inc()
        self._board.seen(self.name, partition, rows, datetime.now(UTC))
        if taken.duplicates:
            self._metrics.duplicates_dropped.labels(self.name, partition).inc(taken.duplicates)
        if not rows:
            return
        self._metrics.events_taken.labels(self.name, partition).inc(rows)
        self._metrics.batches_taken.labels(self.name, partition).inc()
        self._metrics.log_head.labels(self.name, partition).set(taken.batch)
        paths = tuple(str(self._folder / f.path) for f in taken.append.files)
        self._on_span(
            Span(SourcePartition(self.name, partition), Cursor(taken.batch - 1), taken.batch, paths, rows, exact=True)
        )

    # news of repairing

    def opened(self, recovery: Recovery, error: EvermarkError) -> None:
        partition = recovery.partition
        self._repair_log.error(
            "a gap was found; it is being closed", partition=partition, error=error, recovery=recovery.id
        )
        self._metrics.gaps.labels(self.name, partition).inc()

    def begun(self, recovery: Recovery) -> None:
        said = f"failover: {recovery.reason}"
        hint = "it is being closed; see the log"
        self._board.put(self.name, recovery.partition, PartitionHealth.STALE, said, hint, repairing=True)

    def closed(self, recovery: Recovery, gap: Gap, rows: int) -> None:
        partition = recovery.partition
        self._metrics.recovered.labels(self.name, partition).inc(rows)
        if recovery.choice is Choice.SKIP:
            self._metrics.gaps_accepted.labels(self.name, partition).inc()
            self._repair_log.error(
                "a gap was accepted", partition=partition, after=recovery.left_at, until=gap.position
            )
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

    # beside reading

    def _maintain(self, released: Wake) -> None:
        maintenance = Maintenance(self._folder, self._d.retention)
        while not self._runtime.wait(MAINTENANCE_EVERY_S, released):
            try:
                report = maintenance.run(self._least_cursors(self.name) if self._owner.may_retain() else None)
            except Exception as error:  # noqa: BLE001 - it is tried again
                self._log.warning("log care failed", error=error)
                continue
            for what, count in vars(report).items():
                if count:
                    self._metrics.care.labels(what).inc(count)
