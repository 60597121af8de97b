"""A lane: the owners of sources and of delivery in one long Spark task. This runs in a worker process of Spark's.

The task is given a name and nothing else. What to run it asks the driver, State and the log, so a retry of the task
begins where the work stands, not where the first attempt began. It ends when the driver says so, or is gone.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from evermark.app.build import LaneParts, Stores, open_in_lane
from evermark.app.delivering import DeliveryRunner
from evermark.app.ingesting import LaneWorks, SourceRunner
from evermark.delivery.base import Outcome
from evermark.delivery.replay.plan import Replayed, ReplayWork
from evermark.delivery.run.post import Posting, timed
from evermark.delivery.sinks import Sinks
from evermark.delivery.work import Assignment, DeliveryOptions, fold
from evermark.errors import EngineError
from evermark.ingest.pieces import Piece, ReadFrom
from evermark.ingest.repair.steps import FoundFile, RepairTarget
from evermark.log.read import FileRange
from evermark.observe.health import HealthBoard
from evermark.observe.logging import forward_logging, get_logger
from evermark.observe.metrics import Metrics
from evermark.runtime import Threads
from evermark.sources.base import Gap, Limit
from evermark.spark.channel import LaneEnd

BEGIN, STOP, HURRY = "begin", "stop", "hurry"
READY, LET_GO = "ready", "let_go"
DELIVERY = "delivery"  # the part of a lane that is no source
# More rows than this are posted by tasks: they have processors of their own.
_POSTED_HERE_MAX = 2_000
_LOOK_EVERY_S = 0.5
Order = tuple[str, ...]  # BEGIN with the names of parts; STOP; HURRY
_DRIVER_GONE = 70  # exit code


@dataclass(frozen=True)
class LaneWork:
    """What a lane does, as the driver tells it."""

    parts: LaneParts
    limit: Limit
    stop_s: float  # how long an orderly end may take


class DriverTasks:
    """Spark, for the owners in a lane: jobs that the driver runs for them."""

    def __init__(self, end: LaneEnd, deployment: Stores) -> None:
        self._end = end
        self._box = deployment.box

    def write_pieces(self, of: ReadFrom, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", self._end.call("write_pieces", of, pieces))

    def find_missing(self, gap: Gap, files: Sequence[FileRange], wanted: RepairTarget, folder: Path) -> list[FoundFile]:
        return cast("list[FoundFile]", self._end.call("find_missing", gap, files, wanted, folder))

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        if not posted_here(assignments):
            return cast("list[Outcome]", self._end.call("deliver", assignments, options))
        mine = [one for one in assignments if one.span.paths and (one.bot is None or one.bot.streams)]
        posting = Posting(tuple(mine), self._box, options)
        results = posting.results() if mine else iter(())
        return timed(fold(assignments, chain.from_iterable(results)))

    def replay(self, work: ReplayWork, ahead: ReplayWork | None = None) -> Replayed:
        return cast("Replayed", self._end.call("replay", work, ahead))


def posted_here(assignments: Sequence[Assignment]) -> bool:
    """Few rows are posted by the lane itself; predicates are matched by Spark."""
    spans = {one.span for one in assignments}
    return sum(span.rows for span in spans) <= _POSTED_HERE_MAX and not any(one.spec.where for one in assignments)


def source_part(name: str) -> str:
    return f"source {name}"


class _Told:
    """An object of the driver's whose methods are called there, later and without an answer."""

    def __init__(self, end: LaneEnd, target: str) -> None:
        self._end, self._target = end, target

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *arguments, **named: self._end.tell(self._target, method, *arguments, **named)


class _ToldMetrics:
    """The driver's metrics: counts over lanes that follow each other go on."""

    def __init__(self, end: LaneEnd) -> None:
        self._end = end

    def __getattr__(self, name: str) -> _ToldMetric:
        return _ToldMetric(self._end, name)


@dataclass(frozen=True)
class _ToldMetric:
    end: LaneEnd
    name: str
    values: tuple[str, ...] = ()

    def labels(self, *values: object) -> _ToldMetric:
        return _ToldMetric(self.end, self.name, tuple(map(str, values)))

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *arguments: self.end.tell("metrics", self.name, self.values, method, arguments)


def run_lane(lane: str) -> None:
    """The body of the task. Raises when a thread that must not end has ended."""
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    end = LaneEnd(lane, lambda order: _end_at_once() if order is None else orders.put(order))
    forward_logging(lambda level, event: end.tell("log", level, event))
    try:
        work = cast("LaneWork", end.call("lane", lane))
        # Not by the lane alone: a process may run it again when its first attempt failed, and must not be taken for it.
        deployment = open_in_lane(work.parts, f"{lane}-{uuid.uuid4().hex[:8]}")
        try:
            _Lane(lane, end, orders, work, deployment).run()
        finally:
            deployment.close()
    finally:
        end.close()


def _end_at_once() -> None:
    """The driver is gone: nobody could stop this lane any more, and its successor waits for its leases."""
    os._exit(_DRIVER_GONE)


class _Lane:
    def __init__(
        self, name: str, end: LaneEnd, orders: queue.SimpleQueue[Order], work: LaneWork, deployment: Stores
    ) -> None:
        self._end = end
        self._orders = orders
        self._stop_s = work.stop_s
        self._log = get_logger(part="lane", lane=name)
        board = cast("HealthBoard", _Told(end, "board"))
        metrics = cast("Metrics", _ToldMetrics(end))
        runtime, tasks = Threads(), DriverTasks(end, deployment)
        self._sink = Sinks()
        self._delivery = DeliveryRunner(deployment, tasks, self._sink, board, metrics, runtime)
        self._works = [LaneWorks(deployment, tasks, name, metrics, work.limit, runtime) for name in deployment.sources]
        self._sources = [
            SourceRunner(deployment, works, works.name, board, metrics, self._delivery, runtime)
            for works in self._works
        ]
        self._parts: dict[str, SourceRunner | DeliveryRunner] = {
            DELIVERY: self._delivery,
            **{source_part(runner.name): runner for runner in self._sources},
        }
        self._begun: set[str] = set()

    def run(self) -> None:
        dead: list[str] = []
        hook = threading.excepthook
        threading.excepthook = lambda args: dead.append(
            f"the thread {args.thread and args.thread.name} ended: {type(args.exc_value).__name__}: {args.exc_value}"
        )
        for works in self._works:
            with suppress(Exception):  # met again, and said, when the source is ours
                works.warm()
        self._end.tell_now("lane", READY)
        try:
            self._watch(dead)
        finally:
            threading.excepthook = hook
            self._sink.close()

    def _watch(self, dead: list[str]) -> None:
        while not dead:
            with suppress(queue.Empty):
                order, *parts = self._orders.get(timeout=_LOOK_EVERY_S)
                if order != BEGIN:
                    self._shut_down()
                    return
                for part in parts:
                    self._begin(part)
            dead += [f"the thread {part} ended" for part in self._begun if self._parts[part].join(0.0)]
        self._log.error("the lane ends, and is started again", reason=dead[0])
        raise EngineError(dead[0])

    def _begin(self, part: str) -> None:
        if part not in self._begun:
            self._begun.add(part)
            self._parts[part].start(lambda: self._end.tell_now("lane", LET_GO, part))

    def _shut_down(self) -> None:
        """Stop consuming, flush, checkpoint, let go of the leases; told to hurry, do not wait."""
        for runner in self._sources:
            runner.stop()
        left = [runner.name for runner in self._sources if not self._joined(runner)]
        self._delivery.stop()
        if not self._joined(self._delivery):
            self._log.warning("delivery did not end in time; what it had not settled is delivered again")
        if left:
            self._log.warning("not ended in time; the next start resumes from the checkpoint", sources=left)

    def _joined(self, runner: SourceRunner | DeliveryRunner) -> bool:
        deadline = time.monotonic() + self._stop_s
        while time.monotonic() < deadline and self._orders.empty():  # any order now is to hurry
            if runner.join(0.1):
                return True
        return runner.join(0.0)
