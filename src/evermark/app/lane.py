"""A lane: the owners of sources and of delivery in one long Spark task. This runs in a worker process of Spark's.

The task is given a name and nothing else. What to run it asks the driver, State and the log, so a retry of the task
begins where the work stands, not where the first attempt began. It ends when the driver says so, or is gone.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from evermark.app.build import LaneParts, Stores, open_in_lane
from evermark.app.delivering import DeliveryRunner
from evermark.app.ingesting import LaneTools, SourceRunner
from evermark.cluster.holding import Share
from evermark.cluster.together import keeper_for
from evermark.delivery.decide.matching import has_exact_steps, needs_spark
from evermark.delivery.model import Fate, Outcome
from evermark.delivery.replay.plan import Replayed, ReplayWork
from evermark.delivery.run.matched_here import is_small, matched_here
from evermark.delivery.run.post import Posting, timed
from evermark.delivery.sinks import Sinks
from evermark.delivery.store.postgres_rates import PostgresRates
from evermark.delivery.webhook.client import use_rates
from evermark.delivery.work import Assignment, DeliveryOptions, Result, Span, fold
from evermark.error_policy import is_stuck
from evermark.errors import EngineError, EvermarkError
from evermark.ingest.copying.requests import CopyRequests
from evermark.ingest.owner import LIMITS as INGEST_LIMITS
from evermark.ingest.pieces import Piece, ReadFrom
from evermark.ingest.reading import SEATS, Seats
from evermark.ingest.repair.steps import FoundFile, RepairTarget
from evermark.ingest.repair.watch import RecoveryWatch
from evermark.log.read import FileRange
from evermark.observe.health import HealthBoard
from evermark.observe.logging import forward_logging, get_logger
from evermark.observe.metrics import Metrics
from evermark.runtime import Runtime, Threads
from evermark.secrets import SecretBox
from evermark.sources.base import Gap, Limit
from evermark.sources.copies import ChunkWork, Copying
from evermark.spark.channel import LaneEnd
from evermark.storage import Place

BEGIN, RENEW, STOP, HURRY, TAKEN, SHARE = "begin", "renew", "stop", "hurry", "taken", "share"
READY, LET_GO = "ready", "let_go"
DELIVERY = "delivery"  # the part of a lane that is no source
_LOOK_EVERY_S = 0.5
# A lane that is told to stop before it is ready does so when it is.
_VETTING_S_MAX = 20.0
_WARMING_S_MAX = 20.0
# Of many sources a few at a time pass on to the next lane, which begins a few at a time: none waits for all others.
_PASSED_ON_AT_ONCE = 4
_PASS_ON_EVERY_S = 0.2
_DRAIN_LOOK_S = 0.02
# The owner of a source that is busy for so long may need any time for its batch: the lane goes on until it is taken.
# Longer than a source may wait for something new.
_BUSY_S = 2.0
_BUSY_LOOK_S = 0.1
# A repair may have to compare a whole database. One that hangs must not keep a lane for ever.
_REPAIR_S_MAX = 3600.0
_CALLS_SHOWN, _STACKS_MAX = 6, 20_000  # of a lane with a loop that hangs
Order = tuple[Any, ...]  # BEGIN with the names of parts; RENEW; STOP; HURRY; TAKEN with a span; SHARE with leases
_DRIVER_GONE, _LOOP_HANGS = 70, 71  # exit codes


@dataclass(frozen=True)
class EndTimes:
    """How long the steps of an orderly end may take; what is not done by then is done by the next start."""

    flush_s: float  # batches and deliveries under way are ended
    checkpoint_s: float  # checkpoints that wait are saved

    @property
    def in_all_s(self) -> float:
        """Sources end their batches and save their checkpoints, all side by side; then delivery ends."""
        return 2 * self.flush_s + self.checkpoint_s


@dataclass(frozen=True)
class LaneWork:
    """What a lane does, as the driver tells it."""

    parts: LaneParts
    limit: Limit
    end: EndTimes
    sources: tuple[str, ...]  # that are read here
    shard: int  # of delivery
    shards: int  # that there are: one in each lane
    at_once: int = 0  # jobs that Spark may run for it beside the lanes; 0: on one machine, where tasks share its cores
    share: frozenset[str] | None = None  # the leases that its instance is to take; None: all


class DriverTasks:
    """Spark, for the owners in a lane: jobs that the driver runs for them."""

    def __init__(self, end: LaneEnd, box: SecretBox, runtime: Runtime) -> None:
        self._end = end
        self._box = box
        self._runtime = runtime

    def write_pieces(self, of: ReadFrom, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", self._end.call("write_pieces", of, pieces))

    def find_missing(
        self, gap: Gap, files: Sequence[FileRange], wanted: RepairTarget, folder: Place
    ) -> list[FoundFile]:
        return cast("list[FoundFile]", self._end.call("find_missing", gap, files, wanted, folder))

    def write_chunks(
        self, copying: Copying, works: Sequence[Sequence[ChunkWork]], epoch: int, until_s: float
    ) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", self._end.call("write_chunks", copying, works, epoch, until_s))

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        """Few rows are matched and posted by the lane itself, but for subscriptions that Spark has to match; many by
        tasks. Subscriptions that are behind, and that Spark has to match, are then a job of their own. The live group
        is one job, so that a slow member is seen beside the others.
        """
        if not is_small(assignments):
            apart = options.slack_s is None
            there = {one.spec.name for one in assignments if apart and needs_spark(one.spec)}
            return self._divided(assignments, there, options, lambda here: self._by_spark(here, options))
        mine = [one for one in assignments if one.span.paths and (one.bot is None or one.bot.streams)]
        posting = Posting(tuple(mine), self._box, options)
        if not any(one.spec.where for one in mine):
            return _folded(assignments, posting.results() if mine else iter(()))
        matched = matched_here(mine)
        found = matched.found
        there = {mine[number].spec.name for number in matched.for_spark}
        if found is None:
            return self._by_spark(assignments, options)
        return self._divided(assignments, there, options, lambda here: _folded(here, posting.results(found=[found])))

    def _divided(
        self,
        assignments: Sequence[Assignment],
        there: Collection[str],
        options: DeliveryOptions,
        deliver: Callable[[Sequence[Assignment]], list[Outcome]],
    ) -> list[Outcome]:
        """The subscriptions named `there` are left to Spark, beside what `deliver` does for the others."""
        here = [one for one in assignments if one.spec.name not in there]
        if not there:
            return deliver(assignments)
        if not here:
            return self._by_spark(assignments, options)
        by_spark = self._beside([one for one in assignments if one.spec.name in there], options)
        try:
            outcomes = deliver(here)
        finally:
            # Also after an error: nothing may be under way when the caller tries again.
            theirs = by_spark.result()
        by_name = {outcome.subscription: outcome for outcome in (*outcomes, *theirs)}
        return [by_name[one.spec.name] for one in assignments]

    def _by_spark(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        return cast("list[Outcome]", self._end.call("deliver", assignments, options))

    def _beside(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> Future[list[Outcome]]:
        """If Spark fails, or cannot read the log, its subscriptions have not finished: the others were sent the batch,
        and must not be sent it again because of them.
        """
        future: Future[list[Outcome]] = Future()

        def run() -> None:
            try:
                future.set_result(self._by_spark(assignments, options))
            except EvermarkError as error:
                fate, said = Fate.UNFINISHED, error.message
                if is_stuck(error):
                    fate, said = Fate.STUCK, f"{error.message}; {error.hint}"
                future.set_result(timed([Outcome(one.spec.name, fate, reason=said) for one in assignments]))
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is used
                future.set_exception(error)

        self._runtime.spawn("deliver by Spark", run)
        return future

    def replay(self, work: ReplayWork, ahead: ReplayWork | None = None) -> Replayed:
        return cast("Replayed", self._end.call("replay", work, ahead))


def _folded(assignments: Sequence[Assignment], results: Iterable[list[Result]]) -> list[Outcome]:
    return timed(fold(assignments, chain.from_iterable(results)))


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

    def raise_to(self, *given: Any) -> None:
        self._end.tell("metrics", "raise_to", (), "__call__", given)

    def set_all(self, *given: Any) -> None:
        self._end.tell("metrics", "set_all", (), "__call__", given)

    def add_all(self, *given: Any) -> None:
        self._end.tell("metrics", "add_all", (), "__call__", given)


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
        use_rates(lambda: PostgresRates(deployment.state))
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
        self._end_times = work.end
        self._subscriptions = deployment.delivery.subscriptions
        self._log = get_logger(part="lane", lane=name)
        board = cast("HealthBoard", _Told(end, "board"))
        metrics = cast("Metrics", _ToldMetrics(end))
        runtime = Threads()
        tasks = DriverTasks(end, deployment.box, runtime)
        self._sink = Sinks()
        self._share = Share(work.share)
        self._delivery = DeliveryRunner(
            deployment,
            tasks,
            self._sink,
            board,
            metrics,
            runtime,
            work.shard,
            work.shards,
            self._tell_taken,
            work.at_once,
            self._share,
        )
        self._alone = work.shards == 1
        seats = Seats(len(work.sources))
        self._tools = [LaneTools(deployment, tasks, name, metrics, work.limit, runtime, seats) for name in work.sources]
        self._watch = RecoveryWatch(deployment.recoveries.known, runtime, self._log, INGEST_LIMITS.look_every_s)
        self._requests = CopyRequests(deployment.copies, runtime, self._log)
        keeper = keeper_for(deployment.leases, runtime)
        self._sources = [
            SourceRunner(
                deployment,
                tools,
                tools.name,
                board,
                metrics,
                self._delivery,
                runtime,
                self._share,
                self._watch,
                keeper,
                self._requests,
            )
            for tools in self._tools
        ]
        self._runtime = runtime
        self._parts: dict[str, SourceRunner | DeliveryRunner] = {
            DELIVERY: self._delivery,
            **{source_part(runner.name): runner for runner in self._sources},
        }
        self._begun: set[str] = set()
        self._hurry = self._said_busy = self._said_repairing = False

    def run(self) -> None:
        dead: list[str] = []
        hook = threading.excepthook
        threading.excepthook = lambda args: dead.append(
            f"the thread {args.thread and args.thread.name} ended: {type(args.exc_value).__name__}: {args.exc_value}"
        )
        deadline = time.monotonic() + _WARMING_S_MAX
        for tools in self._tools:
            if time.monotonic() > deadline:
                break  # of very many sources the rest is opened when they are ours
            with suppress(Exception):  # met again, and said, when the source is ours
                tools.warm()
        self._vet_beforehand()
        # Thousands of subscriptions stay for the lane's life: to go through them for garbage would stop it, every
        # batch, for a tenth of a second.
        gc.collect()
        gc.freeze()
        self._end.tell_now("lane", READY)
        try:
            self._runtime.loop("recoveries", self._watch.steps())
            self._obey(dead)
        finally:
            self._watch.stopped.set()
            self._requests.stopped.set()
            gc.unfreeze()
            threading.excepthook = hook
            self._sink.close()

    def _vet_beforehand(self) -> None:
        """Predicates take milliseconds each to vet, and are kept: while another lane runs there is time for it."""
        deadline = time.monotonic() + _VETTING_S_MAX
        try:
            for subscription in self._subscriptions().values():
                if time.monotonic() > deadline:
                    break
                has_exact_steps(subscription.spec.where)
        except EvermarkError as error:
            self._log.warning("predicates were not vetted beforehand; the first batch waits for it", reason=str(error))

    def _obey(self, dead: list[str]) -> None:
        """Until the lane has ended in order, or a thread has ended that must not.

        A lane that is renewed goes on with all its work while a source of it is in the middle of a long batch, and lets
        go of that source first: cut off there, the next lane would read the batch again, and be cut off, too. It also
        goes on while a gap is being closed, for an hour at most.
        """
        asked = renewed = False
        asked_at = 0.0
        first: dict[SourceRunner, None] = {}  # to be let go of
        while not dead:
            with suppress(queue.Empty):
                look_s = _DRAIN_LOOK_S if renewed else _BUSY_LOOK_S if asked else _LOOK_EVERY_S
                order, *parts = self._orders.get(timeout=look_s)
                if order == RENEW:
                    asked_at = asked_at if asked else time.monotonic()
                    asked = True
                elif order == TAKEN:
                    self._delivery.on_told(*parts)
                elif order == SHARE:
                    self._share.set(*parts)
                elif order == BEGIN:
                    for part in parts:
                        self._begin(part)
                else:
                    self._shut_down()
                    return
            is_repairing = asked and not renewed and self._is_any_repairing(asked_at)
            is_busy = asked and not is_repairing and self._is_any_busy(first)
            if asked and not (is_repairing or is_busy or renewed):
                renewed = True
                self._delivery.drain()
            if renewed and not is_busy and self._delivery.drained():
                self._pass_on()
                self._shut_down()
                return
            hanging = [each.hangs for each in self._parts.values() if each.hangs is not None]
            if hanging:
                self._end_hanging(hanging[0])
                return
            running = {part: self._parts[part] for part in self._begun if self._parts[part] not in first}
            dead += [f"the thread {part} ended" for part, runner in running.items() if runner.join(0.0)]
        self._log.error("the lane ends, and is started again", reason=dead[0])
        raise EngineError(dead[0])

    def _is_any_busy(self, first: dict[SourceRunner, None]) -> bool:
        """Whether a source is in the middle of a long batch. Such sources are told to stop behind it, and are added to
        `first`."""
        for runner in self._sources:
            if runner not in first and runner.busy_s() > _BUSY_S:
                first[runner] = None
                runner.stop()
        busy = [runner.name for runner in first if runner.busy_s() > _BUSY_S and not runner.join(0.0)]
        if busy and not self._said_busy:
            self._said_busy = True
            self._log.info("the lane goes on until the batches under way are taken", sources=busy)
        return bool(busy)

    def _is_any_repairing(self, asked_at: float) -> bool:
        """Asked before delivery is drained, and not again: what begins later is begun anew by the next lane."""
        if time.monotonic() - asked_at > _REPAIR_S_MAX:
            return False
        repairing = [runner.name for runner in self._sources if runner.is_repairing()]
        if repairing and not self._said_repairing:
            self._said_repairing = True
            self._log.info("the lane goes on until gaps are closed", sources=repairing)
        return bool(repairing)

    def _end_hanging(self, reason: str) -> None:
        """Not in order: whatever is closed here may wait for the loop that hangs. What others had under way is begun
        again by the next attempt of this task, as after a crash.
        """
        self._log.error("the lane ends, and is started again", reason=reason, stack=_stacks())
        self._end.close()  # all of that is told first
        os._exit(_LOOP_HANGS)

    def _tell_taken(self, span: Span) -> None:
        """The driver follows the log for clients of the live tail; other lanes wait for it, and it does not hurry."""
        (self._end.tell if self._alone else self._end.tell_now)("lane", TAKEN, span)

    def _begin(self, part: str) -> None:
        if part not in self._begun:
            self._begun.add(part)
            self._parts[part].start(lambda: self._end.tell_now("lane", LET_GO, part))

    def _pass_on(self) -> None:
        """Let go of sources by and by, while the next lane begins with them; told to stop meanwhile, of all at once."""
        left = list(self._sources) if len(self._sources) > SEATS else []
        go_on_at = 0.0
        while left:
            with suppress(queue.Empty):
                order, *parts = self._orders.get(timeout=max(0.0, go_on_at - time.monotonic()))
                if order == TAKEN:
                    self._delivery.on_told(*parts)
                elif order == SHARE:
                    self._share.set(*parts)
                elif order in (STOP, HURRY):
                    self._hurry = order == HURRY
                    return
            if time.monotonic() >= go_on_at:
                for runner in left[:_PASSED_ON_AT_ONCE]:
                    runner.stop()
                del left[:_PASSED_ON_AT_ONCE]
                go_on_at = time.monotonic() + _PASS_ON_EVERY_S

    def _shut_down(self) -> None:
        """Stop consuming, flush, checkpoint, let go of the leases; told to hurry, do not wait."""
        times = self._end_times
        for runner in self._sources:
            runner.stop()
        until = time.monotonic() + times.flush_s + times.checkpoint_s
        left = [runner.name for runner in self._sources if not self._joined(runner, until)]
        self._delivery.stop()
        if not self._joined(self._delivery, time.monotonic() + times.flush_s):
            self._log.warning("delivery did not end in time; what it had not settled is delivered again")
        if left:
            self._log.warning("not ended in time; the next start resumes from the checkpoint", sources=left)

    def _joined(self, runner: SourceRunner | DeliveryRunner, until: float) -> bool:
        while (left_s := until - time.monotonic()) > 0 and not self._hurried():
            if runner.join(min(0.1, left_s)):
                return True
        return runner.join(0.0)

    def _hurried(self) -> bool:
        """Whether the driver waits no longer. A part that this lane was to begin with is not begun any more."""
        with suppress(queue.Empty):
            self._hurry = self._hurry or self._orders.get_nowait()[0] == HURRY
        return self._hurry


def _stacks() -> str:
    """Where each thread stands, by name: a loop that hangs is among them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - nothing else tells it
        calls = traceback.extract_stack(frame)[-_CALLS_SHOWN:]
        where = " > ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls)
        found.append(f"{names.get(ident, ident)}: {where}")
    return "\n".join(sorted(found))[:_STACKS_MAX]
