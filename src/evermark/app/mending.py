"""Holes of one source, closed beside its reading: what is whole goes on meanwhile. The steps are those of `Mender`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from evermark.app.build import Deployment
from evermark.error_policy import Action, action_for, backoff_s
from evermark.errors import EvermarkError
from evermark.ingest.mender import FoundFile, Mender, RepairTarget
from evermark.ingest.recovery import Choice, Recovery
from evermark.ingest.take import Taken, Taker
from evermark.log.append import DeltaLog
from evermark.log.read import LogReader
from evermark.observe.health import HealthBoard, PartitionHealth
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.sources.base import Hole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_EVERY_S = 1.0


class Mending:
    """One thread per owned source, and what is said and counted on the way."""

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
        board: HealthBoard,
        metrics: Metrics,
        epoch: int,
    ) -> None:
        self._spark = spark
        self._name = name
        self._folder: Path = deployment.log_folder(name)
        self._make_taker = make_taker
        self._on_taken = on_taken
        self._on_ended = on_ended
        self._on_step_down = on_step_down
        self._board = board
        self._metrics = metrics
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._log = get_logger(source=name, part="mend")
        self._thread = threading.Thread(target=self._run, name=f"mend {name}", daemon=True)
        self._mender = Mender(
            name,
            epoch,
            deployment.sources[name],
            deployment.recoveries,
            self._open_log,
            self._find,
            let_go,
            self._stopping.is_set,
            lambda: datetime.now(UTC),
            self,
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join()

    def partitions(self) -> set[int]:
        """Those with a hole: nobody reads them until it is closed."""
        return self._mender.partitions()

    def found(self, partition: int, error: EvermarkError, left_at: str) -> EvermarkError | None:
        """Reading met `error`. None: it is a hole, and is being closed; else what is to be said about it."""
        return self._mender.found(partition, error, left_at)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            wait_s = _LOOK_EVERY_S
            try:
                self._mender.carry_out_all()
                failures = 0
            except Exception as error:  # noqa: BLE001 - tried again; an unknown failure must not end the thread
                if action_for(error) is Action.STEP_DOWN:
                    self._log.warning("stepping down", error=error)
                    self._on_step_down()
                    return
                self._log.warning("looking for holes, or closing one, failed; it is tried again", error=error)
                wait_s = backoff_s(failures, base_s=1.0)
                failures += 1
            self._wake.wait(wait_s)
            self._wake.clear()

    def _open_log(self) -> tuple[DeltaLog, Taker]:
        log = DeltaLog(self._folder)
        return log, self._make_taker(log, LogReader(self._folder))

    def _find(self, hole: Hole, wanted: RepairTarget) -> list[FoundFile]:
        from evermark.spark.repair import found_missing

        return found_missing(self._spark, hole, LogReader(self._folder).files(), wanted, self._folder)

    # news

    def opened(self, recovery: Recovery, error: EvermarkError) -> None:
        partition = recovery.partition
        self._log.error("a hole was found; it is being closed", partition=partition, error=error, recovery=recovery.id)
        self._metrics.gaps.labels(self._name, partition).inc()
        self._wake.set()

    def begun(self, recovery: Recovery) -> None:
        said = f"failover: {recovery.reason}"
        hint = "it is being closed; see the log"
        self._board.put(self._name, recovery.partition, PartitionHealth.STALE, said, hint, mending=True)

    def taken(self, taken: Taken) -> None:
        self._on_taken(taken)

    def closed(self, recovery: Recovery, hole: Hole, rows: int) -> None:
        partition = recovery.partition
        self._metrics.recovered.labels(self._name, partition).inc(rows)
        if recovery.choice is Choice.SKIP:
            self._metrics.gaps_accepted.labels(self._name, partition).inc()
            self._log.error("a gap was accepted", partition=partition, after=recovery.left_at, until=hole.position)
        else:
            self._log.warning("events the log lacked were taken", partition=partition, events=rows)

    def ended(self, recovery: Recovery, error: EvermarkError | None) -> None:
        partition = recovery.partition
        if error is not None:
            self._log.error("the hole cannot be closed", partition=partition, error=error)
        else:
            at = recovery.position
            self._log.warning("the hole is closed", partition=partition, recovery=recovery.id, goes_on_at=at)
        self._on_ended(partition, error)

    def left_behind(self, error: EvermarkError) -> None:
        self._log.warning("the spare slot could not be dropped", error=error)
