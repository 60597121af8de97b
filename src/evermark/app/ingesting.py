"""One source, from lease to query, for as long as the process lives."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from evermark.app.build import Deployment
from evermark.app.inspect import newest
from evermark.app.leasing import HeldLease, acquire
from evermark.app.mending import Mending
from evermark.app.replaying import RequestDesk
from evermark.app.watching import Watching
from evermark.cluster.fence import source_lease
from evermark.delivery.base import Cursor, SourcePartition
from evermark.delivery.work import Span
from evermark.error_policy import Action, action_after, action_for, backoff_s
from evermark.errors import EvermarkError, StaleError
from evermark.ingest.gather import WHOLE_SOURCE, Gathered
from evermark.ingest.resume import Resume
from evermark.ingest.take import Taken, Taker
from evermark.log.append import DeltaLog
from evermark.log.disk import require_room
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader
from evermark.log.torn import set_aside_torn
from evermark.observe.health import HealthBoard, PartitionHealth
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.sources.base import Limit
from evermark.spark.datasource import IngestPlan
from evermark.spark.ingest import IngestQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CARE_EVERY_S = 1.0
# A query that ran this long before it failed was well: its next failure is a first one again.
_WELL_AFTER_S = 60.0
_LET_GO_POLL_S = 0.05
# Whoever waits for a database to come back waits no longer than this on our account.
_BACKOFF_MAX_S = 10.0


@dataclass
class _Trouble:
    attempts: int = 0
    not_before: float = 0.0
    stopped: bool = False


class SourceRunner:
    """Stands by for the source's lease, then reads it; one failed partition never stops the others."""

    def __init__(
        self,
        deployment: Deployment,
        spark: SparkSession,
        name: str,
        scratch: Path,
        board: HealthBoard,
        metrics: Metrics,
        on_span: Callable[[Span], None],
        least_cursors: Callable[[str], dict[int, int]],
        limit: Limit,
    ) -> None:
        self.name = name
        self._d = deployment
        self._source = deployment.sources[name]
        self._folder = deployment.log_folder(name)
        self._spark = spark
        self._scratch = scratch
        self._board = board
        self._metrics = metrics
        self._on_span = on_span
        self._least_cursors = least_cursors
        self._limit = limit
        self._stopping = threading.Event()
        self._query: IngestQuery | None = None
        self._trouble: dict[int, _Trouble] = {}
        self._left_at: dict[int, str] = {}
        self._mended = 0
        self._reading: frozenset[int] = frozenset()
        self._stepped_down = threading.Event()
        self._checked = False
        self._mending: Mending | None = None
        self._log = get_logger(source=name)
        self._thread = threading.Thread(target=self._run, name=f"source {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._end_query()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _end_query(self) -> None:
        query = self._query
        if query is not None:
            query.stop()

    def _run(self) -> None:
        while not self._stopping.is_set():
            lease = acquire(
                self._d.leases,
                source_lease(self.name),
                self._d.holder,
                self._stopping,
                self._say_standby,
                self._say_unowned,
            )
            if lease is None:
                return
            held = HeldLease(self._d.leases, lease, self._end_query)
            self._metrics.lease_held.labels(lease.name).set(1)
            care = threading.Event()
            housekeeper = threading.Thread(target=self._care, args=(care,), name=f"care {self.name}", daemon=True)
            try:
                self._log.info("source owned", epoch=lease.epoch)
                housekeeper.start()
                self._own(held)
            except EvermarkError as error:
                self._whole_source_failed(error)
            except Exception as error:  # noqa: BLE001 - an unknown failure must not end the thread in silence
                self._whole_source_failed(EvermarkError(f"{type(error).__name__}: {error}"[:1000]))
            finally:
                care.set()
                for partition in self._known_partitions():
                    self._metrics.partition_up.labels(self.name, partition).set(0)
                self._metrics.lease_held.labels(lease.name).set(0)
                held.close()

    def _own(self, held: HeldLease) -> None:
        heads = self._d.heads.load(self.name)
        torn = set_aside_torn(self._folder, max((h.delta_version for h in heads.values()), default=-1))
        if torn:
            self._log.warning("commits that never reached the disk whole were set aside", versions=torn)

        def make_taker(log: DeltaLog, reader: LogReader) -> Taker:
            return Taker(
                self.name,
                held.lease.epoch,
                self._source,
                log,
                reader,
                self._d.heads,
                self._d.checkpoints,
                on_unconfirmed=lambda error: self._log.info("source not confirmed yet", error=error),
                on_controls=RequestDesk(self._d.replays, self.name, reader, held.lease.epoch, self._metrics),
            )

        mending = Mending(
            self._d,
            self._spark,
            self.name,
            make_taker,
            self._on_taken,
            self._on_mended,
            self._let_go,
            self._step_down,
            self._board,
            self._metrics,
            held.lease.epoch,
        )
        self._checked, self._mending = False, mending
        watching = Watching(self._source, self.name, self._board, self._metrics)
        mending.start()
        watching.start()
        try:
            self._read_on(held, make_taker(DeltaLog(self._folder), LogReader(self._folder)), mending)
        finally:
            watching.stop()
            mending.stop()

    def _read_on(self, held: HeldLease, taker: Taker, mending: Mending) -> None:
        self._stepped_down.clear()
        while not (self._stopping.is_set() or held.lost.is_set() or self._stepped_down.is_set()):
            mended = self._mended
            active, wait_s = self._ready_partitions(mending.partitions())
            if not active:
                self._stopping.wait(min(wait_s, 1.0))
                continue
            self._reading = frozenset(active)
            if self._reading & mending.partitions():  # one of them is being mended since
                self._reading = frozenset()
                continue
            began = time.monotonic()
            try:
                failed = self._read(taker, active, mended)
            finally:
                self._reading = frozenset()
            if time.monotonic() - began > _WELL_AFTER_S:
                self._trouble.clear()
            if any(action_for(e) is Action.STEP_DOWN for e in failed.values()):
                self._log.warning("stepping down", error=next(iter(failed.values())))
                return
            if failed and not self._still_ours(held):
                return  # whatever it was, a stale owner saw it: nobody is to blame
            for partition, error in failed.items():
                for each in active if partition == WHOLE_SOURCE else [partition]:
                    said = mending.found(each, error, self._left_at.get(each, ""))
                    if said is not None:
                        self._note_failure([each], said)

    def _step_down(self) -> None:
        self._stepped_down.set()
        self._end_query()

    def _let_go(self, partition: int) -> None:
        """Returns when nobody reads the partition any more: it is about to be mended."""
        while partition in self._reading and not self._stopping.is_set():
            self._end_query()  # again: the query may have been in the making
            time.sleep(_LET_GO_POLL_S)

    def _on_mended(self, partition: int, error: EvermarkError | None) -> None:
        """Reading begins again with the partition in it; or it has to wait for a person."""
        if error is not None:
            self._note_failure([partition], error)
            return
        self._trouble.pop(partition, None)
        self._mended += 1
        self._end_query()

    def _still_ours(self, held: HeldLease) -> bool:
        try:
            self._d.leases.require(held.lease)
        except StaleError as error:
            self._log.warning("stepping down", error=error)
            return False
        except EvermarkError:
            pass  # state cannot be asked just now; the failure stands
        return True

    def _read(self, taker: Taker, active: list[int], mended: int) -> dict[int, EvermarkError]:
        try:
            require_room(self._folder)  # a query that starts looks healthy until its first batch
            resumes = {p: _begun(taker, p) for p in active}
            starts = {p: r.position for p, r in resumes.items() if r.position is not None}
            self._left_at = starts
            self._source.check(starts, newest(self._folder, active, self._d.recoveries.past(self.name)))
            self._checked = True
            for partition, position in starts.items():
                self._source.begin(partition, position)
        except EvermarkError as error:
            return {error.partition if error.partition is not None else WHOLE_SOURCE: error}
        repeats = {p: r.repeats_to for p, r in resumes.items()}
        plan = IngestPlan(self.name, self._source, str(self._folder), starts, repeats, self._limit)
        self._query = IngestQuery(
            self._spark, plan, taker, self._scratch, self._on_taken, on_gathered=self._on_gathered
        )
        for partition in active:
            self._board.put(self.name, partition, PartitionHealth.HEALTHY)
            self._metrics.partition_up.labels(self.name, partition).set(1)
        self._log.info("reading", partitions=active)
        try:
            if self._stopping.is_set() or self._mended != mended:  # a partition has come back meanwhile
                return {}
            return self._query.run()
        except EvermarkError as error:
            return {WHOLE_SOURCE: error}
        finally:
            self._query = None

    def _ready_partitions(self, mended: set[int]) -> tuple[list[int], float]:
        now = time.monotonic()
        waits: list[float] = []
        ready: list[int] = []
        for partition in self._source.partitions():
            trouble = self._trouble.get(partition, _Trouble())
            if trouble.stopped or partition in mended:
                continue
            (ready.append(partition) if trouble.not_before <= now else waits.append(trouble.not_before - now))
        return ready, min(waits, default=1.0)

    def _note_failure(self, partitions: list[int], error: EvermarkError) -> None:
        for partition in partitions:
            trouble = self._trouble.setdefault(partition, _Trouble())
            trouble.attempts += 1
            self._metrics.partition_restarts.labels(self.name, partition).inc()
            self._metrics.partition_up.labels(self.name, partition).set(0)
            if action_after(error, trouble.attempts) is Action.RETRY:
                delay = backoff_s(trouble.attempts - 1, max_s=_BACKOFF_MAX_S) * random.uniform(0.8, 1.2)
                trouble.not_before = time.monotonic() + delay
                self._log.warning("partition failed", partition=partition, error=error, again_in_s=round(delay, 1))
                state = PartitionHealth.STALE
            else:
                trouble.stopped = True
                self._log.error("partition stopped", partition=partition, error=error)
                state = PartitionHealth.FAILED
            self._board.put(self.name, partition, state, error.message, error.hint)

    def _whole_source_failed(self, error: EvermarkError) -> None:
        if action_for(error) is Action.STEP_DOWN:
            self._log.warning("stepping down", error=error)
            return
        self._note_failure(self._known_partitions(), error)
        self._stopping.wait(1.0)

    def _say_unowned(self, error: EvermarkError) -> None:
        for partition in self._known_partitions():
            self._board.put(self.name, partition, PartitionHealth.STALE, error.message, error.hint)

    def _known_partitions(self) -> list[int]:
        """Where a source is asked which partitions it has, and does not answer, its first one stands for all."""
        try:
            return list(self._source.partitions())
        except Exception as error:  # noqa: BLE001 - said by the reading itself
            self._log.debug("the source does not say which partitions it has", error=error)
            return [0]

    def _say_standby(self) -> None:
        self._log.info("standing by: another instance owns this source")
        for partition in self._known_partitions():
            self._board.put(self.name, partition, PartitionHealth.STANDBY)

    def _on_gathered(self, gathered: Gathered) -> None:
        for taken in gathered.taken:
            if taken.duplicates:
                self._metrics.duplicates_dropped.labels(self.name, taken.partition).inc(taken.duplicates)

    def _on_taken(self, taken: Taken) -> None:
        rows = taken.append.rows
        now = datetime.now(UTC)
        self._metrics.checkpoints_saved.labels(self.name, taken.partition).inc()
        self._board.seen(self.name, taken.partition, rows, now)
        if not rows:
            return
        self._metrics.events_taken.labels(self.name, taken.partition).inc(rows)
        self._metrics.batches_taken.labels(self.name, taken.partition).inc()
        self._metrics.log_head.labels(self.name, taken.partition).set(taken.batch)
        paths = tuple(str(self._folder / f.path) for f in taken.append.files)
        place = SourcePartition(self.name, taken.partition)
        self._on_span(Span(place, Cursor(taken.batch - 1), taken.batch, paths, rows, exact=True))

    def _may_retain(self) -> bool:
        """Not while a hole is open, or may be: what is collected now would be found missing from the log."""
        return self._checked and self._mending is not None and not self._mending.partitions()

    def _care(self, done: threading.Event) -> None:
        care = Maintenance(self._folder, self._d.config.log.retention)
        while not done.wait(_CARE_EVERY_S):
            try:
                report = care.run(self._least_cursors(self.name) if self._may_retain() else None)
            except Exception as error:  # noqa: BLE001 - care must not end; it is tried again
                self._log.warning("log care failed", error=error)
                continue
            for what, count in vars(report).items():
                if count:
                    self._metrics.care.labels(what).inc(count)


def _begun(taker: Taker, partition: int) -> Resume:
    try:
        return taker.begin(partition)
    except EvermarkError as error:
        if action_for(error) is Action.STOP and error.partition is None:
            error.partition = partition
        raise
