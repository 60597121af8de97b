"""Delivery of a deployment: its owner (`delivery/run/owner.py`) over State, the Delta log and Spark; its reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime

from evermark.app.build import Stores
from evermark.app.reporting import DeliveryReport
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.holding import Candidate
from evermark.delivery.base import SourcePartition
from evermark.delivery.replay.plan import Due, Replay, Replayed, running_windows
from evermark.delivery.run.owner import BothDeliverer, DeliveryOwner, DeliveryWorks
from evermark.delivery.status import accounts, kept_for, least_cursors
from evermark.delivery.webhook.base import Sink
from evermark.delivery.work import Span
from evermark.log.read import FileRange, LogReader
from evermark.observe.health import HealthBoard
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.runtime import Runtime, Task


class DeploymentLog:
    """`LogView` over state's heads and the Delta tables. When a head moved is when we first saw it there."""

    def __init__(self, deployment: Stores) -> None:
        self._d = deployment
        self._readers: dict[str, LogReader] = {}
        self._seen: dict[SourcePartition, tuple[int, datetime]] = {}
        self._lock = threading.Lock()

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        now = datetime.now(UTC)
        with self._lock:
            for source in self._d.sources:
                for partition, head in self._d.heads.load(source).items():
                    place = SourcePartition(source, partition)
                    if self._seen.get(place, (-1, now))[0] != head.batch:
                        self._seen[place] = (head.batch, now)
            return dict(self._seen)

    def files(self, source: str) -> list[FileRange]:
        return self.reader(source).files()

    def reader(self, source: str) -> LogReader:
        with self._lock:
            return self._readers.setdefault(source, LogReader(self._d.log_folder(source)))


class DeploymentReport(DeliveryReport):
    """Reports delivery to metrics, the health board and the log."""

    def __init__(self, deployment: Stores, view: DeploymentLog, board: HealthBoard, metrics: Metrics) -> None:
        super().__init__(metrics, get_logger(part="deliver"))
        self._d = deployment
        self._view = view
        self._board = board

    def standby(self) -> None:
        self._board.deliver(here=False, standby=True)

    def owned(self) -> None:
        self._metrics.lease_held.labels(DELIVER_LEASE).set(1)

    def delivering(self) -> None:
        self._board.deliver(here=True)

    def released(self) -> None:
        self._board.deliver(here=False)
        self._metrics.lease_held.labels(DELIVER_LEASE).set(0)
        self.accounts({}, datetime.now(UTC))  # what another instance does with them, this one does not know

    def handed_over(self, delivered: bool) -> None:
        self._metrics.handovers.labels("delivered" if delivered else "left").inc()

    def report(self) -> None:
        store, now = self._d.delivery, datetime.now(UTC)
        heads = {place: head for place, (head, _) in self._view.heads().items()}
        self.accounts(accounts(store, heads, lambda source: self._view.reader(source).files_if_any()), now)
        files = {source: self._view.reader(source).files_if_any() for source in self._d.sources}
        self.kept(kept_for(store.cursors_outside(), files, now - self._d.retention))
        self.counted(store.counted("expired"), store.counted("dropped"))

    def replaying(self, running: list[Replay]) -> None:
        self._board.replaying(running_windows(running))
        for source in self._d.sources:
            count = sum(replay.request.source == source for replay in running)
            self._metrics.replays_running.labels(source).set(count)

    def by_replay(self, due: Due, result: Replayed) -> None:
        name, outcome = due.target.subscription, result.outcome
        self._metrics.replay_delivered.labels(name).inc(outcome.accepted)
        if outcome.parked:
            self._metrics.parked.labels(name).inc(len(outcome.parked))


class DeliveryRunner:
    name = "delivery"

    def __init__(
        self,
        deployment: Stores,
        deliverer: BothDeliverer,
        sink: Sink,
        board: HealthBoard,
        metrics: Metrics,
        runtime: Runtime,
    ) -> None:
        self._d = deployment
        self._runtime = runtime
        view = DeploymentLog(deployment)
        works = DeliveryWorks(
            deployment.delivery,
            deployment.replays,
            view,
            deliverer,
            sink,
            deployment.box.open,
            deployment.sources,
            lambda: deployment.specs,
            deployment.batch_at,
            os.cpu_count() or 1,
        )
        self._owner = DeliveryOwner(
            works,
            DeploymentReport(deployment, view, board, metrics),
            Candidate(deployment.leases, deployment.holder, runtime, get_logger(part="deliver")),
        )
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._runtime.spawn("deliver", self._owner.run)

    def stop(self) -> None:
        self._owner.stop()

    def join(self, timeout_s: float) -> bool:
        return self._task is None or self._task.join(timeout_s)

    def on_span(self, span: Span) -> None:
        self._owner.hand_over(span)

    def least_cursors(self, source: str) -> dict[int, int]:
        """Per partition of a source, the batch that every reader has passed; none while a replay may need it all."""
        if source in self._d.replays.open_sources():
            return {}
        return least_cursors(self._d.delivery.group(), self._d.delivery.cursors_outside(), source)
