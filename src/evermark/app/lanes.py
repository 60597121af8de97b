"""The lanes of an instance, from the driver's side: submitted to Spark, renewed, started again, told to stop."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from evermark.app.build import LaneParts
from evermark.app.lane import (
    BEGIN,
    DELIVERY,
    HURRY,
    LET_GO,
    READY,
    RENEW,
    SHARE,
    STOP,
    TAKEN,
    EndTimes,
    LaneWork,
    run_lane,
    source_part,
)
from evermark.delivery.store.postgres_rates import SharedRates
from evermark.error_policy import backoff_s
from evermark.errors import EvermarkError, NotFoundError
from evermark.observe.health import HealthBoard
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.runtime import Threads, Wake, any_set
from evermark.secrets import SecretBox
from evermark.sources.base import Limit
from evermark.spark.channel import Channel, LaneReport
from evermark.state.connection import schema_for

if TYPE_CHECKING:
    from pyspark import SparkContext

_LOOK_EVERY_S = 1.0  # whether a lane is silent, or its time is up; all else wakes
_BACKOFF_MAX_S = 10.0
# A lane says every second that it lives.
_SILENT_MAX_S = 20.0
# How long a lane may take to be ready: a start of Spark's Python takes seconds, of a busy machine many.
_READY_MAX_S = 120.0
_SILENT = f"has said nothing for {_SILENT_MAX_S:g} s"
_LATE = f"was not ready within {_READY_MAX_S:g} s"
# Lanes of each shard, in a row, that Spark did not begin in their time: then Spark hangs, not the lane.
_LATE_MAX = 2
# Without a word of its lane for this long nothing is read or delivered: health says so.
_STALLED_AFTER_S = 10.0
# A lane that ran this long before it failed was healthy: the failure counts as a first.
_WELL_AFTER_S = 60.0


@dataclass(eq=False)
class _Submitted:
    """One lane: a job of Spark with one task."""

    name: str
    work: LaneWork
    ready: Wake
    ended: Wake
    submitted: float
    asked: bool = False  # for its work: Spark has begun it
    error: str | None = None
    began: float = 0.0
    heard_at: float = 0.0
    successor: _Submitted | None = None  # begins with each part that this lane lets go of
    let_go: list[str] = field(default_factory=list)
    alone_since: float = math.inf  # with a successor that failed, whose parts nobody has


def shared_out(parts: LaneParts, limit: Limit, end: EndTimes, lanes: int, cores: int | None = None) -> list[LaneWork]:
    """The work of a deployment over so many lanes: a shard of delivery in each, and the sources in turn. `cores` of a
    cluster that are not the lanes' are shared, too.
    """
    names = sorted(parts.sources)
    at_once = 0 if cores is None else max(0, cores - 2 * lanes) // lanes
    return [LaneWork(parts, limit, end, tuple(names[n::lanes]), n, lanes, at_once) for n in range(lanes)]


class Lanes:
    """Keeps a lane running for each work until stopped, and another ready before its time is up."""

    name = "lanes"

    def __init__(
        self,
        context: SparkContext,
        channel: Channel,
        works: Sequence[LaneWork],
        box: SecretBox,
        board: HealthBoard,
        metrics: Metrics,
        lane_s: float,
        on_taken: Callable[[], None] = lambda: None,
        on_able: Callable[[Sequence[LaneWork]], None] = lambda _: None,
    ) -> None:
        """`on_taken`: a lane has taken a batch. `on_able`: these works can be done now, and no others."""
        from evermark.spark.copying import copied_by_tasks
        from evermark.spark.deliver import SparkDeliverer
        from evermark.spark.job import written_by_tasks
        from evermark.spark.repair import found_missing
        from evermark.spark.session import sql_session

        self._context = context
        self._works = works
        self._board = board
        self._metrics = metrics
        self._lane_s = lane_s
        self._on_taken = on_taken
        self._share: frozenset[str] | None = None
        self._on_able = on_able
        self._able: dict[str, _Submitted] = {}  # by name: lanes that are ready
        self._telling_able = threading.Lock()
        self._lanes: dict[str, _Submitted] = {}
        self._waiting: dict[int, float] = {}  # by shard, since when its lane is not in charge
        self._late_in_a_row: dict[int, int] = {}  # by shard
        self._runtime = Threads()
        self._stopping = self._runtime.wake()
        self._hurry = self._runtime.wake()
        self._log = get_logger(part="lanes")
        parts = works[0].parts
        rates = SharedRates(parts.state_dsn, schema_for(parts.name))
        deliverer = SparkDeliverer(context, box, rates.shared, len(works))
        serves: dict[str, Callable[..., Any]] = {
            "lane": self._work_of,
            "write_pieces": lambda of, pieces: written_by_tasks(context, of, pieces),
            "find_missing": lambda *given: found_missing(sql_session(), *given),
            "write_chunks": lambda *given: copied_by_tasks(context, *given),
            "deliver": deliverer.deliver,
            "replay": deliverer.replay,
        }
        self._channel = channel
        channel.serve(serves, self._heard)
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"lanes {work.shard}", daemon=True) for work in works
        ]

    def share(self, leases: frozenset[str] | None) -> None:
        """From now on these leases are to be taken, and others handed over. None: every lease that can be had."""
        self._share = leases
        for lane in list(self._lanes):
            self._channel.tell(lane, SHARE, leases)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def hurry(self) -> None:
        self._hurry.set()

    def join(self, timeout_s: float) -> bool:
        """Whether all have ended by then."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def any_ended(self) -> bool:
        return not all(thread.is_alive() for thread in self._threads)

    def stalled(self) -> dict[str, str]:
        """The sources that nobody reads here just now, because of their lane, and why."""
        now = time.monotonic()
        if self._stopping.is_set():
            return {}
        found: dict[str, str] = {}
        for work in self._works:
            if now - self._waiting.get(work.shard, now) > _READY_MAX_S:
                found |= dict.fromkeys(work.sources, f"lane {work.shard} waits for Spark to run it")
        for lane in list(self._lanes.values()):
            if lane.heard_at and now - lane.heard_at > _STALLED_AFTER_S:
                found |= dict.fromkeys(_sources(lane, self._given(lane)), f"lane {lane.work.shard} is silent")
            if now - lane.alone_since > _STALLED_AFTER_S:
                found |= dict.fromkeys(_sources(lane, lane.let_go), f"lane {lane.work.shard} has no successor")
        return found

    def stuck(self) -> str | None:
        """Why this Spark cannot be used any more, though it answers. One Python process that hangs when it begins keeps
        Spark from beginning others, and a lane that is submitted again waits behind it.
        """
        late = list(self._late_in_a_row.values())
        if len(late) < len(self._works) or min(late) < _LATE_MAX:
            return None
        return f"Spark began no lane within {_READY_MAX_S:g} s, {_LATE_MAX} times in a row"

    def _run(self, work: LaneWork) -> None:
        failures = 0
        lane: _Submitted | None = None
        while not self._stopping.is_set():
            began = time.monotonic()
            self._waiting.setdefault(work.shard, began)
            lane = self._kept(lane or self._submit(work))
            if lane is None or lane.error is None:
                continue
            failures = 1 if time.monotonic() - began > _WELL_AFTER_S else failures + 1
            wait_s = backoff_s(failures - 2, max_s=_BACKOFF_MAX_S) if failures > 1 else 0.0
            self._log.error("a lane ended; another is started", error=lane.error, in_s=wait_s)
            self._runtime.wait(wait_s, self._stopping)
            lane = None

    def _kept(self, lane: _Submitted) -> _Submitted | None:
        """Run a lane until it has ended. Returns the lane that follows it, itself if it failed, or None."""
        while not any_set((lane.ready, lane.ended, self._stopping)):
            if self._late(lane):
                if not lane.asked:
                    self._late_in_a_row[lane.work.shard] = 1 + self._late_in_a_row.get(lane.work.shard, 0)
                return self._given_up(lane, _LATE)
            self._runtime.wait(_LOOK_EVERY_S, lane.ready, lane.ended, self._stopping)
        self._late_in_a_row.clear()
        if not lane.ready.is_set():
            return self._end(lane)
        lane.began = lane.heard_at = time.monotonic()
        self._waiting.pop(lane.work.shard, None)
        self._channel.tell(lane.name, BEGIN, *_parts(lane.work))
        next_lane: _Submitted | None = None
        while not self._look(lane, next_lane):
            if self._stopping.is_set():
                return self._end(lane, next_lane)
            if self._silent(lane):
                # It loses its leases by itself; if it goes on, nothing of it lands.
                given_up = self._given_up(lane, _SILENT)
                return next_lane or given_up
            next_lane = self._followed(lane, next_lane)
        if lane.error is not None and next_lane is not None:
            self._log.error("a lane ended; the next takes over", error=lane.error)
        return next_lane or (lane if lane.error is not None else None)

    def _followed(self, lane: _Submitted, next_lane: _Submitted | None) -> _Submitted | None:
        """The lane that is to follow, submitted when the time of this one is up, and looked after."""
        if next_lane is None:
            return self._submit(lane.work) if time.monotonic() - lane.began > self._lane_s else None
        if self._late(next_lane):
            self._given_up(next_lane, _LATE)
        elif next_lane.ready.is_set() and self._silent(next_lane):
            self._given_up(next_lane, _SILENT)
        if next_lane.ended.is_set():  # it failed before its turn
            self._log.warning("the next lane did not start; this one goes on", error=next_lane.error)
            # What this one has let go of already waits for another.
            again_s = self._lane_s if lane.successor is None else _BACKOFF_MAX_S
            lane.began = time.monotonic() - self._lane_s + again_s
            lane.alone_since = min(lane.alone_since, time.monotonic())
            return None
        if next_lane.ready.is_set() and lane.successor is not next_lane:
            self._renew(lane, next_lane)
        return next_lane

    def _renew(self, lane: _Submitted, next_lane: _Submitted) -> None:
        """Have a lane let go of its parts, and the next lane begin with them."""
        lane.successor, lane.alone_since = next_lane, math.inf
        if lane.let_go:  # to a lane that failed
            self._channel.tell(next_lane.name, BEGIN, *lane.let_go)
        self._channel.tell(lane.name, RENEW)

    def _look(self, lane: _Submitted, next_lane: _Submitted | None) -> bool:
        """Wait until something is to be decided, or may be; whether the lane has ended."""
        awaited = [lane.ended, self._stopping]
        if next_lane is not None:
            awaited += [next_lane.ended] if lane.successor is next_lane else [next_lane.ended, next_lane.ready]
        self._runtime.wait(_LOOK_EVERY_S, *awaited)
        return lane.ended.is_set()

    def _given(self, lane: _Submitted) -> tuple[str, ...]:
        """The parts that a lane has to do: all, or what the lane before it has let go of; without its own."""
        before = next((each for each in list(self._lanes.values()) if each.successor is lane), None)
        parts = _parts(lane.work) if lane.began else () if before is None else tuple(before.let_go)
        return tuple(part for part in parts if part not in lane.let_go)

    def _silent(self, lane: _Submitted) -> bool:
        return time.monotonic() - lane.heard_at > _SILENT_MAX_S

    def _late(self, lane: _Submitted) -> bool:
        return not lane.ready.is_set() and time.monotonic() - lane.submitted > _READY_MAX_S

    def _given_up(self, lane: _Submitted, why: str) -> _Submitted:
        """Its process hangs, or was stopped. Spark kills it."""
        from evermark.spark.job import cancel_long_task

        lane.error = f"{lane.name} {why}"
        cancel_long_task(self._context, lane.name)
        return lane

    def _end(self, *lanes: _Submitted | None) -> _Submitted | None:
        going = [lane for lane in lanes if lane is not None]
        for lane in going:
            while not any_set((lane.ready, lane.ended)):
                self._runtime.wait(_LOOK_EVERY_S, lane.ready, lane.ended)
            self._channel.tell(lane.name, STOP)
        hurried = False
        for lane in going:
            while not lane.ended.is_set():
                self._runtime.wait(_LOOK_EVERY_S, lane.ended, *(() if hurried else (self._hurry,)))
                if self._hurry.is_set() and not hurried:
                    hurried = True
                    for other in going:
                        self._channel.tell(other.name, HURRY)
        failed = next((lane for lane in going if lane.error is not None), None)
        return failed if not self._stopping.is_set() else None

    def _submit(self, work: LaneWork) -> _Submitted:
        name = f"lane-{uuid.uuid4().hex[:12]}"
        lane = _Submitted(name, work, self._runtime.wake(), self._runtime.wake(), submitted=time.monotonic())
        self._lanes[lane.name] = lane
        threading.Thread(target=self._job, args=(lane,), name=lane.name, daemon=True).start()
        return lane

    def _job(self, lane: _Submitted) -> None:
        from evermark.spark.job import run_long_task

        try:
            run_long_task(self._context, lane.name, run_lane)
        except EvermarkError as error:
            lane.error = lane.error or error.message
        except Exception as error:  # noqa: BLE001 - it is said, and another lane is started
            lane.error = f"{type(error).__name__}: {error}"[:500]
        finally:
            del self._lanes[lane.name]
            if self._ended_alone(lane):  # it could not say so itself
                self._board.deliver(here=False, shard=lane.work.shard)
            lane.ended.set()
            self._no_longer_able(lane)

    def _ended_alone(self, lane: _Submitted) -> bool:
        """It failed, and no other lane has its work, or is about to."""
        others = (each for each in list(self._able.values()) if each is not lane)
        return lane.error is not None and not any(each.work.shard == lane.work.shard for each in others)

    def _no_longer_able(self, lane: _Submitted) -> None:
        """Until another lane is ready, other instances do the work of a lane that failed. A lane that ended in order
        has a successor in a moment."""
        with self._telling_able:
            others = [each for each in self._able.values() if each is not lane]
            alone = all(each.work.shard != lane.work.shard for each in others)
            if self._able.get(lane.name) is not lane or (alone and lane.error is None):
                return
            del self._able[lane.name]
            if alone:
                self._tell_able()

    def _tell_able(self) -> None:
        """Under the lock: of two that change at once, the later one is told last."""
        if not self._stopping.is_set():
            self._on_able(list({each.work.shard: each.work for each in self._able.values()}.values()))

    def _tell_share(self, lane: str) -> None:
        """Until the last share that the lane was told is the present one: the share may change between reading and
        telling it, and the lane would keep the old one for as long as nothing changes.
        """
        told = False
        while not told:
            share = self._share
            self._channel.tell(lane, SHARE, share)
            told = share is self._share

    # what lanes ask and tell

    def _work_of(self, lane: str) -> LaneWork:
        submitted = self._lanes.get(lane)
        if submitted is None:
            raise NotFoundError(f"{lane} is over", hint="a later one runs")
        submitted.asked = True
        return replace(submitted.work, share=self._share)

    def _heard(self, name: str, reports: list[LaneReport]) -> None:
        lane = self._lanes.get(name)
        if lane is not None:
            lane.heard_at = time.monotonic()
        for target, method, arguments, named in reports:
            if target == "board":
                getattr(self._board, method)(*arguments, **named)
            elif target == "metrics":
                labels, operation, given = arguments
                metric = getattr(self._metrics, method)
                getattr(metric.labels(*labels) if labels else metric, operation)(*given)
            elif target == "log":
                getattr(self._log.unbind("part"), method)(**arguments[0])
            elif method == READY and lane is not None:
                self._is_ready(lane)
            elif method == TAKEN:
                self._on_taken()
                for other in list(self._lanes):
                    if other != name:
                        self._channel.tell(other, TAKEN, *arguments)
            elif method == LET_GO and lane is not None and lane.successor is not None:
                lane.let_go += arguments
                self._channel.tell(lane.successor.name, BEGIN, *arguments)

    def _is_ready(self, lane: _Submitted) -> None:
        with self._telling_able:
            over = [n for n, each in self._able.items() if each.ended.is_set() and each.work.shard == lane.work.shard]
            for name in over:
                del self._able[name]
            self._able[lane.name] = lane
            self._tell_able()
        self._tell_share(lane.name)  # it may have changed since the lane was told its work
        lane.ready.set()
        if given := self._given(lane):  # a retry of its task: the attempt before it had begun with them
            self._channel.tell(lane.name, BEGIN, *given)
        if lane.began and lane.successor is not None and not lane.successor.ended.is_set():
            self._channel.tell(lane.name, RENEW)


def _sources(lane: _Submitted, parts: Iterable[str]) -> list[str]:
    some = set(parts)
    return [name for name in lane.work.sources if source_part(name) in some]


def _parts(work: LaneWork) -> tuple[str, ...]:
    return (DELIVERY, *map(source_part, work.sources))
