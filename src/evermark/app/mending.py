"""Holes of one source, closed beside its reading: what is whole goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from evermark import failpoint
from evermark.app.build import Deployment
from evermark.error_policy import Action, action_for, backoff_s
from evermark.errors import EngineError, EvermarkError, GapError, IdentityError
from evermark.ingest.recovery import TRIES_MAX, Choice, Recovery, Step, exhausted, given_up, may_open
from evermark.ingest.take import Taken, Taker
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.read import LogReader
from evermark.observe.health import Board, PartitionHealth
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.sources.base import Hole, Mend, Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from evermark.spark.mend import Wanted

_LOOK_EVERY_S = 1.0


class Mending:
    """One thread per owned source: carries out whatever recovery stands open, found by us or asked for by a person."""

    def __init__(
        self,
        deployment: Deployment,
        spark: SparkSession,
        name: str,
        make_taker: Callable[[DeltaLog, LogReader], Taker],
        on_taken: Callable[[Taken], None],
        on_ended: Callable[[int, EvermarkError | None], None],
        let_go: Callable[[int], None],
        on_step_down: Callable[[], None],
        board: Board,
        metrics: Metrics,
        epoch: int,
    ) -> None:
        self._recoveries = deployment.recoveries
        self._spark = spark
        self._name = name
        self._source: Source = deployment.sources[name]
        self._folder: Path = deployment.log_folder(name)
        self._make_taker = make_taker
        self._on_taken = on_taken
        self._on_ended = on_ended
        self._let_go = let_go
        self._on_step_down = on_step_down
        self._board = board
        self._metrics = metrics
        self._epoch = epoch
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._open = {p for p in self._source.partitions() if self._recoveries.current(name, p) is not None}
        self._log = get_logger(source=name, part="mend")
        self._thread = threading.Thread(target=self._run, name=f"mend {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join()

    def partitions(self) -> set[int]:
        """Those with a hole: nobody reads them until it is closed."""
        with self._lock:
            return set(self._open)

    def found(self, partition: int, error: EvermarkError, left_at: str) -> EvermarkError | None:
        """Reading met `error`. None: it is a hole, and is being closed; else what is to be said about it."""
        if not may_open(error) or self._source.mend(partition) is None:
            return error
        past = [r for r in self._recoveries.past(self._name) if r.partition == partition]
        if exhausted(past, datetime.now(UTC)):
            return given_up(past[0].error or error.message)
        # Before it is recorded: whoever carries it out takes it out again when it is done.
        with self._lock:
            self._open.add(partition)
        try:
            recovery = self._recoveries.open(self._name, partition, error.message, left_at, self._epoch)
        except EvermarkError:
            with self._lock:
                self._open.discard(partition)
            raise
        failpoint.hit("mend.opened")
        self._log.error("a hole was found; it is being closed", partition=partition, error=error, recovery=recovery.id)
        self._metrics.gaps.labels(self._name, partition).inc()
        self._wake.set()
        return None

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            wait_s = _LOOK_EVERY_S
            try:
                for partition in self._source.partitions():
                    recovery = self._recoveries.current(self._name, partition)
                    if recovery is not None and not self._stopping.is_set():
                        self._carry_out(recovery)
                failures = 0
            except Exception as error:  # noqa: BLE001 - tried again; an unknown failure must not end the thread
                if action_for(error) is Action.STEP_DOWN:
                    self._log.warning("stepping down", error=error)
                    self._on_step_down()
                    return
                self._log.warning("the hole is not closed yet", error=error)
                wait_s = backoff_s(failures, base_s=1.0)
                failures += 1
            self._wake.wait(wait_s)
            self._wake.clear()

    def _carry_out(self, recovery: Recovery) -> None:
        with self._lock:
            self._open.add(recovery.partition)
        said = f"failover: {recovery.reason}"
        self._board.put(self._name, recovery.partition, PartitionHealth.STALE, said, "it is being closed; see the log")
        mend = self._source.mend(recovery.partition)
        if mend is None:
            self._fail(recovery, None, EvermarkError("this source cannot be mended"))
            return
        try:
            self._let_go(recovery.partition)
            self._steps(recovery, mend)
        except EvermarkError as error:
            self._after_failure(self._as_it_is(recovery), mend, error)
        except Exception as error:  # noqa: BLE001 - counted like any other failed try
            unknown = EvermarkError(f"{type(error).__name__}: {error}"[:1000])
            self._after_failure(self._as_it_is(recovery), mend, unknown)
        finally:
            mend.close()

    def _steps(self, recovery: Recovery, mend: Mend) -> None:
        now = recovery
        if now.step is Step.OPENED:
            # A person who chose knows which server this is; else it has to be the one we left.
            hole = mend.begin(self._stopping.is_set, None if now.by_person else now.left_at or None)
            now = self._as_it_is(now)  # waiting for a slot takes up to an hour: somebody may have chosen otherwise
            taken = self._close_hole(now, hole)
            self._recoveries.close_hole(now, hole.position, taken, self._epoch)
            now = replace(now, step=Step.CLOSED, position=hole.position)
            failpoint.hit("mend.closed")
        if now.position is None:
            raise EvermarkError(f"recovery {now.id} is closed, but nobody noted where", hint="report this")
        self._recoveries.move(now, Step.CLOSED, self._epoch)  # refused if we are no longer the owner
        mend.finish(now.position)
        self._recoveries.move(now, Step.DONE, self._epoch)
        failpoint.hit("mend.done")
        self._log.warning("the hole is closed", partition=now.partition, recovery=now.id, goes_on_at=now.position)
        self._ended(now.partition, None)

    def _close_hole(self, recovery: Recovery, hole: Hole) -> int:
        """Take what the log lacks, and checkpoint where reading goes on; the number of events taken."""
        from evermark.spark.mend import Wanted, found_missing

        partition = recovery.partition
        log, reader = DeltaLog(self._folder), LogReader(self._folder)
        taker = self._make_taker(log, reader)
        start = recovery.left_at
        batch = log.fence(partition, self._epoch).batch
        if batch:
            start = taker.begin(partition).position or start
        wanted = Wanted(self._name, partition, self._folder, batch, self._epoch, start)
        missing: list[Taken] = []
        if recovery.choice is Choice.REPAIR:
            missing = found_missing(self._spark, hole, reader.files(), wanted)
        failpoint.hit("mend.found")
        for taken in missing or [_nothing(wanted, hole.position)]:
            taker.take(taken, mended=True)
            self._on_taken(taken)
        rows = sum(taken.append.rows for taken in missing)
        self._metrics.recovered.labels(self._name, partition).inc(rows)
        if recovery.choice is Choice.SKIP:
            self._metrics.gaps_accepted.labels(self._name, partition).inc()
            self._log.error("a gap was accepted", partition=partition, after=recovery.left_at, until=hole.position)
        else:
            self._log.warning("events the log lacked were taken", partition=partition, events=rows)
        return rows

    def _as_it_is(self, recovery: Recovery) -> Recovery:
        """The same recovery as State has it now: how far it got, and what was chosen since."""
        return self._recoveries.current(self._name, recovery.partition) or recovery

    def _after_failure(self, recovery: Recovery, mend: Mend, error: EvermarkError) -> None:
        action = action_for(error)
        if action is Action.STEP_DOWN or self._stopping.is_set():
            raise error
        if isinstance(error, IdentityError):
            self._fail(recovery, mend, error)  # trying again makes it no other server
            return
        # What passes by itself spends no try. What Spark says may be a row it can never read.
        tried = action is not Action.RETRY or isinstance(error, EngineError)
        # The new slot may be gone as well: everything begins again, and finds what was taken meanwhile in the log.
        step = Step.OPENED if isinstance(error, GapError) else recovery.step
        if tried and recovery.tries + 1 >= TRIES_MAX:
            self._fail(recovery, mend, given_up(error.message))
            return
        self._recoveries.move(recovery, step, self._epoch, error=error.message, tried=tried)
        raise error

    def _fail(self, recovery: Recovery, mend: Mend | None, error: EvermarkError) -> None:
        if mend is not None:
            try:
                mend.abandon()  # a slot that nobody reads keeps WAL without end
            except EvermarkError as left:
                self._log.warning("the spare slot could not be dropped", error=left)
        self._recoveries.move(recovery, Step.FAILED, self._epoch, error=error.message, tried=True)
        self._log.error("the hole cannot be closed", partition=recovery.partition, error=error)
        self._ended(recovery.partition, error)

    def _ended(self, partition: int, error: EvermarkError | None) -> None:
        with self._lock:
            self._open.discard(partition)
        self._on_ended(partition, error)


def _nothing(wanted: Wanted, position: str) -> Taken:
    """No event was missing: only the checkpoint moves."""
    batch = wanted.batch + 1
    append = Append(wanted.partition, batch, wanted.epoch, wanted.start, position, ())
    return Taken(wanted.partition, batch, wanted.start, position, append)
