"""Health as people ask for it: per partition, then for the whole. Pure, but for the board that threads write on.

Two reports make it. The reader of a partition says how reading goes (`put`, `seen`). And when health is asked for, the
source is asked which of its events the log does not have (`answered`): a reader that died or hangs says nothing, and is
found out by events that wait.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import Any

from evermark.observe.finding import for_source

LAGGING_AFTER_S = 30.0
# Starting Spark takes ten seconds, on a loaded machine several times that.
ENGINE_LOST_MAX_S = 120.0
RATE_OVER_S = 60.0
LISTED_MAX = 500  # partitions in one answer
# Trouble of a log is told again and again while it lasts, a minute apart at most. If nobody tells it any more, nobody
# here knows: another instance may take care of the log.
TROUBLE_TOLD_S = 180.0


class PartitionHealth(StrEnum):
    STARTING = "starting"  # this process has not begun to read it
    HEALTHY = "healthy"
    LAGGING = "lagging"  # it is read, but not fast enough, or not at all
    STALE = "stale"  # it cannot be read just now; it is tried again
    FAILED = "failed"  # a person must act
    STANDBY = "standby"  # another instance owns it; that is no illness


WELL = (PartitionHealth.HEALTHY, PartitionHealth.STANDBY)
READY = (*WELL, PartitionHealth.LAGGING)
# States of a reader that give way to a refusal by the source.
_ASKED = (PartitionHealth.STARTING, PartitionHealth.HEALTHY, PartitionHealth.STANDBY)


@dataclass(frozen=True)
class PartitionReport:
    state: PartitionHealth
    last_event_at: datetime | None = None
    lag_s: float | None = 0.0  # for how long the oldest event has waited that the log lacks; None: it cannot be known
    events: int = 0
    events_per_s: float = 0.0
    reason: str = ""
    hint: str = ""
    stale_streams: int = 0  # parts of it that cannot be read on, while the rest is
    stale_first: Mapping[str, str] = field(default_factory=dict)  # some of them, and why
    repairing: bool = False  # a gap is being closed: batches are taken, and yet it is not read
    resync_at: datetime | None = None  # when a gap was found that was so large that followers should take state anew


@dataclass(frozen=True)
class SourceAnswer:
    """A source's answer to the question which of its events the log lacks."""

    at: float  # when it was asked, by the board's clock
    lag_s: Mapping[int, float] = field(default_factory=dict)  # by partition; absent: nothing waits
    refused: Mapping[int, tuple[str, str]] = field(default_factory=dict)  # by partition, why not, and a hint


@dataclass(frozen=True)
class FailingCopy:
    """A copy that is tried again and again: rows that it is to bring are not in the log."""

    copy: str
    source: str
    stream: str
    tries: int
    error: str


@dataclass(frozen=True)
class LogTrouble:
    """What is wrong with the log of a source, though its partitions may be read and its events be taken."""

    source: str
    what: str  # maintenance, files, or delivery of a partition
    reason: str
    hint: str


@dataclass
class LiveGroupReport:
    """How the live group is. Subscriptions that are behind have a state of their own, and are no illness."""

    delivering: bool = False  # in this process
    standby: bool = False  # another instance delivers
    lag_s: float = 0.0  # for how long the log has had a batch that the live group has not passed

    @property
    def lagging(self) -> bool:
        return not self.standby and self.lag_s > LAGGING_AFTER_S


def unread(report: PartitionReport, *, is_left: bool, blind_s: float | None = None) -> PartitionReport:
    """A partition that another instance was to read, and none does: no instance is to take it. Or nobody here knows, as
    the others could not be looked at for so long. Pure.
    """
    if report.state is not PartitionHealth.STANDBY:
        return report
    if is_left:
        return replace(report, state=PartitionHealth.STALE, reason=_LEFT, hint=_LEFT_HINT)
    if blind_s is not None:
        said = f"whether another instance reads it is not known: State, or the leases, silent for {blind_s:.0f} s"
        return replace(report, state=PartitionHealth.STALE, reason=said, hint=_BLIND_HINT)
    return report


_LEFT = "no instance reads it: this one was drained, and no other can take it"
_BLIND_HINT = "check state.dsn and, where leases are in etcd, cluster.leases.etcd; it goes on by itself"
_LEFT_HINT = "start another instance, or this one again: `evermark up`"


def stalled(report: PartitionReport, reason: str | None) -> PartitionReport:
    """A partition as it is while no lane runs that would read it. What another instance reads is none of ours. Pure."""
    if reason is None or report.state in (PartitionHealth.STANDBY, PartitionHealth.FAILED):
        return report
    return replace(report, state=PartitionHealth.STALE, reason=reason, hint=_STALLED_HINT)


HANGING_HINT = "another lane begins with it by itself; if it happens again, the log says where; see cluster.leases.hang"
_STALLED_HINT = (
    "it goes on by itself when Spark runs its lane again; spark.log in the data folder, and on a cluster its master's"
    " page, say what it waits for (docs/cluster.md)"
)


def judged(report: PartitionReport, partition: int, answer: SourceAnswer | None, now: float) -> PartitionReport:
    """The reader's report of a partition and the source's answer, as one report. Pure."""
    if answer is None:
        return report
    if partition in answer.refused:
        if report.state in _ASKED:
            reason, hint = answer.refused[partition]
            report = replace(report, state=PartitionHealth.STALE, reason=reason, hint=hint)
        return replace(report, lag_s=None)
    if partition not in answer.lag_s:
        return report
    lag_s = answer.lag_s[partition] + max(0.0, now - answer.at)
    report = replace(report, lag_s=lag_s)
    if lag_s > LAGGING_AFTER_S and report.state is PartitionHealth.HEALTHY:
        said = f"events have been waiting for {lag_s:.0f} s to be taken"
        return replace(report, state=PartitionHealth.LAGGING, reason=said, hint=_LAGGING_HINT)
    return report


_OPENED = "its lease is held here, and its log is being opened"
_LAGGING_HINT = (
    "after an outage this passes; if the lag grows, reading is too slow or stands still: see the instance's log, and"
    " `evermark doctor`"
)


class HealthBoard:
    """Where threads report their health, and the server reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._partitions: dict[tuple[str, int], PartitionReport] = {}
        self._answers: dict[str, SourceAnswer] = {}
        self._batches: dict[tuple[str, int], deque[tuple[float, int]]] = {}
        self._engine_lost_at: float | None = None
        self._engine_trouble = ""
        self.replays: Mapping[str, tuple[datetime, datetime]] = {}  # which windows are replayed just now, by source
        self.copies: Sequence[FailingCopy] = ()  # as State has them
        self._copies_waiting: dict[str, tuple[float, list[FailingCopy]]] = {}  # by source, as it says; when it was told
        self.is_stopping = False
        self.stalled: Mapping[str, str] = {}  # by source: why it is not read though Spark runs: no room for a lane, …
        self.stores_away: dict[str, tuple[str, str]] = {}  # by source: why its checkpoints cannot be saved, and a hint
        self.delivery = LiveGroupReport()
        self._log_troubles: dict[tuple[str, str], tuple[float, LogTrouble]] = {}  # by source and what; when it was told
        self._left: frozenset[str] = frozenset()
        self._known_until: tuple[float, float] | None = None
        self._delivery_left = False
        self._shards: dict[int, tuple[bool, bool]] = {}
        # Brings the board up to date before it is read: asks all sources, until they have answered or time is up.
        self.ask: Callable[[], None] = lambda: None

    def expect(self, source: str, partition: int) -> None:
        """There is such a partition, and its reader has said nothing of it yet."""
        with self._lock:
            self._partitions.setdefault((source, partition), PartitionReport(PartitionHealth.STARTING))

    def owned(self, source: str, partition: int) -> None:
        """This process has its lease now, and is about to open its log: no other instance reads it any more."""
        with self._lock:
            old = self._partitions.get((source, partition))
            if old is None or old.state is PartitionHealth.STANDBY:
                old = old or PartitionReport(PartitionHealth.STARTING)
                self._partitions[source, partition] = replace(old, state=PartitionHealth.STARTING, reason=_OPENED)

    def put(
        self,
        source: str,
        partition: int,
        state: PartitionHealth,
        reason: str = "",
        hint: str = "",
        *,
        repairing: bool = False,
    ) -> None:
        """How reading a partition goes from now on; what was taken so far stays."""
        with self._lock:
            old = self._partitions.get((source, partition), PartitionReport(state))
            self._partitions[source, partition] = replace(
                old, state=state, reason=reason, hint=hint, repairing=repairing
            )

    def seen(self, source: str, partition: int, events: int, at: datetime) -> None:
        """A batch was taken. A repair does not end with the gap's first batch."""
        with self._lock:
            old = self._partitions.get((source, partition), PartitionReport(PartitionHealth.HEALTHY))
            if not old.repairing:
                old = replace(old, state=PartitionHealth.HEALTHY, reason="", hint="")
            last = at if events else old.last_event_at
            self._partitions[source, partition] = replace(old, last_event_at=last, events=old.events + events)
            if events:
                self._batches.setdefault((source, partition), deque()).append((self._clock(), events))
                self._forget(source, partition)

    def resync(self, source: str, partition: int, at: datetime) -> None:
        """A gap was found behind which consumers should take their state anew."""
        with self._lock:
            old = self._partitions.get((source, partition), PartitionReport(PartitionHealth.STALE))
            self._partitions[source, partition] = replace(old, resync_at=at)

    def stale(self, source: str, streams: Mapping[int, tuple[int, Mapping[str, str]]]) -> None:
        """Which streams of a source cannot be read on just now: by partition how many, and why some of them cannot."""
        with self._lock:
            for (of, partition), old in self._partitions.items():
                if of == source:
                    count, first = streams.get(partition, (0, {}))
                    self._partitions[of, partition] = replace(old, stale_streams=count, stale_first=first)

    def answered(self, source: str, answer: SourceAnswer) -> None:
        """A source has answered which of its events are not taken yet."""
        with self._lock:
            self._answers[source] = answer

    def engine_lost(self, reason: str) -> None:
        """Spark has died: nothing is taken or delivered until it runs again."""
        with self._lock:
            if self._engine_lost_at is None:
                self._engine_lost_at = self._clock()
            self._engine_trouble = reason
            for name, old in self._partitions.items():
                self._partitions[name] = replace(
                    old, state=PartitionHealth.STALE, reason=reason, hint="Spark is being started again"
                )

    def engine_runs(self) -> None:
        with self._lock:
            self._engine_lost_at = None

    def given_up(self) -> str | None:
        """Why this process should be ended and started anew by its supervisor; None while it helps itself."""
        with self._lock:
            if self._engine_lost_at is None:
                return None
            lost_s = self._clock() - self._engine_lost_at
        if lost_s < ENGINE_LOST_MAX_S:
            return None
        return f"Spark has not been running for {lost_s:.0f} s: {self._engine_trouble}"

    def store_away(self, source: str, reason: str, hint: str) -> None:
        """The checkpoints of a source cannot be saved: its events are taken, and it is not confirmed."""
        self.stores_away = {**self.stores_away, source: (reason, hint)}

    def store_back(self, source: str) -> None:
        self.stores_away = {name: why for name, why in self.stores_away.items() if name != source}

    def copies_wait(self, source: str, waiting: Mapping[str, tuple[int, str]]) -> None:
        """Copies that a source makes by itself, and cannot: by stream, how often it was tried, and why it failed. To be
        told again while it lasts: the lane that told it may have died, and the source be another instance's by now.
        """
        with self._lock:
            failing = [
                FailingCopy(f"{source}/{stream}", source, stream, tries, error)
                for stream, (tries, error) in sorted(waiting.items())
            ]
            self._copies_waiting[source] = self._clock(), failing

    def failing_copies(self) -> list[FailingCopy]:
        with self._lock:
            told = (some for at, some in self._copies_waiting.values() if self._clock() - at <= TROUBLE_TOLD_S)
            return [*self.copies, *(each for some in told for each in some)]

    def log_unwell(self, source: str, what: str, reason: str, hint: str) -> None:
        """Something is wrong with the log of a source; to be told again while it lasts (`TROUBLE_TOLD_S`)."""
        with self._lock:
            self._log_troubles[source, what] = self._clock(), LogTrouble(source, what, reason, hint)

    def log_well(self, source: str, what: str) -> None:
        """This is over, or never was."""
        with self._lock:
            self._log_troubles.pop((source, what), None)

    def log_troubles(self) -> list[LogTrouble]:
        """By source and what."""
        with self._lock:
            told = sorted(self._log_troubles.items())
            return [trouble for _, (at, trouble) in told if self._clock() - at <= TROUBLE_TOLD_S]

    def others_seen(self, good_for_s: float) -> None:
        """The other instances, and their leases, were looked at: what they do is known for so long."""
        now = self._clock()
        self._known_until = (now, now + good_for_s)

    def _blind_s(self) -> float | None:
        if self._known_until is None or self._clock() <= self._known_until[1]:
            return None
        return self._clock() - self._known_until[0]

    def left(self, sources: frozenset[str], *, delivery: bool) -> None:
        """The sources that no instance is to read; and whether none is to deliver. While this is so, nobody stands by
        for another.
        """
        with self._lock:
            self._left, self._delivery_left = sources, delivery
            self._judge_delivery()

    def deliver(self, *, here: bool, standby: bool = False, shard: int = 0) -> None:
        """Whether this instance delivers for a shard, and if not, whether another does."""
        with self._lock:
            self._shards[shard] = (here, standby)
            self._judge_delivery()

    def _judge_delivery(self) -> None:
        self.delivery.delivering = any(delivers for delivers, _ in self._shards.values())
        self.delivery.standby = not self._delivery_left and all(stands_by for _, stands_by in self._shards.values())

    def replaying(self, windows: Mapping[str, tuple[datetime, datetime]]) -> None:
        """Which windows are replayed just now, by source."""
        self.replays = windows

    def partitions(self) -> dict[str, PartitionReport]:
        """By `source/partition`."""
        now = self._clock()
        with self._lock:
            found = dict(self._partitions)
            answers, left = dict(self._answers), self._left
            for place, report in found.items():
                self._forget(*place)
                taken = sum(events for _, events in self._batches.get(place, ()))
                found[place] = replace(report, events_per_s=taken / RATE_OVER_S)
        told, blind_s = {}, self._blind_s()
        for (source, partition), report in found.items():
            here = stalled(unread(report, is_left=source in left, blind_s=blind_s), self.stalled.get(source))
            told[f"{source}/{partition}"] = judged(here, partition, answers.get(source), now)
        return told

    def _forget(self, source: str, partition: int) -> None:
        batches = self._batches.get((source, partition), deque())
        while batches and batches[0][0] < self._clock() - RATE_OVER_S:
            batches.popleft()


def overall(
    reports: Mapping[str, PartitionReport],
    delivery: LiveGroupReport | None = None,
    copies: Sequence[FailingCopy] = (),
    stores_away: Mapping[str, tuple[str, str]] | None = None,
    log_troubles: Sequence[LogTrouble] = (),
) -> str:
    """unhealthy: half of the partitions are unwell, or more; degraded: any is, a stream is stale, a copy fails, the
    store of checkpoints is away, something is wrong with a log, or delivery lags."""
    if not reports:
        return "degraded"  # nothing is known of any source yet
    starting = sum(r.state is PartitionHealth.STARTING for r in reports.values())
    unwell = sum(r.state not in WELL for r in reports.values()) - starting
    if unwell:
        return "unhealthy" if 2 * unwell >= len(reports) else "degraded"
    late = delivery is not None and delivery.lagging
    partly = any(r.stale_streams for r in reports.values()) or bool(copies or stores_away or log_troubles)
    return "degraded" if starting or late or partly else "healthy"


def as_json(
    reports: Mapping[str, PartitionReport],
    *,
    version: str,
    uptime_s: float,
    replays: Mapping[str, tuple[datetime, datetime]] | None = None,
    delivery: LiveGroupReport | None = None,
    copies: Sequence[FailingCopy] = (),
    stores_away: Mapping[str, tuple[str, str]] | None = None,
    log_troubles: Sequence[LogTrouble] = (),
    as_list: bool = False,
) -> dict[str, Any]:
    """`as_list`: partitions as a list, in the order of their names, and not by name. Of very many, the unwell are told
    first, and all are counted.
    """
    delivery = delivery or LiveGroupReport()
    first = sorted(reports, key=lambda name: (reports[name].state in WELL, name))[:LISTED_MAX]
    several = len({name.rpartition("/")[0] for name in reports}) > 1
    partitions = {name: _partition_json(name, reports[name], several=several) for name in sorted(first)}
    counts = Counter(str(report.state) for report in reports.values())
    return {
        "status": overall(reports, delivery, copies, stores_away, log_troubles),
        "version": version,
        "uptime_s": round(uptime_s, 1),
        "uptime": _nanoseconds(uptime_s),
        "delivering": delivery.delivering,
        "delivery": {"standby": delivery.standby, "lag_s": round(delivery.lag_s, 3)},
        "replay": {
            source: {"from": since.isoformat(), "to": until.isoformat()}
            for source, (since, until) in sorted((replays or {}).items())
        },
        "failing_copies": [asdict(each) for each in copies],
        "checkpoints_away": {
            source: {"reason": reason, "hint": hint} for source, (reason, hint) in sorted((stores_away or {}).items())
        },
        "log_troubles": [asdict(each) for each in log_troubles[:LISTED_MAX]],
        "partition_counts": dict(sorted(counts.items())),
        "partitions": list(partitions.values()) if as_list else partitions,
    }


def _partition_json(name: str, report: PartitionReport, *, several: bool) -> dict[str, Any]:
    """Our names, and those of the first design, whose durations are whole nanoseconds, as Go writes them."""
    source, _, number = name.rpartition("/")
    last = report.last_event_at.isoformat() if report.last_event_at else None
    rate = round(report.events_per_s, 3)
    return {
        "source": source,
        "id": int(number),
        "status": str(report.state),
        "lag_s": None if report.lag_s is None else round(report.lag_s, 3),
        "lag": None if report.lag_s is None else _nanoseconds(report.lag_s),
        "events": report.events,
        "events_per_s": rate,
        "eventRate": rate,
        "last_event": last,
        "lastEvent": last,
        "reason": report.reason,
        "hint": for_source(report.hint, source) if several else report.hint,
        "stale_streams": report.stale_streams,
        "stale": dict(report.stale_first),
        "resync_at": report.resync_at.isoformat() if report.resync_at else None,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass
class LagWatch:
    """Says when a partition begins to lag, and when that is over: each once. Pure, but for what it has said."""

    lagging: frozenset[str] = frozenset()

    def heard(self, reports: Mapping[str, PartitionReport]) -> tuple[list[str], list[str]]:
        """The partitions that began to lag, and those that ceased to. While lag is not known, nothing changes."""
        late = {name for name, r in reports.items() if r.lag_s is not None and r.lag_s > LAGGING_AFTER_S}
        unknown = {name for name, r in reports.items() if r.lag_s is None}
        before, self.lagging = self.lagging, frozenset(late | (self.lagging & unknown))
        return sorted(self.lagging - before), sorted(before - self.lagging)


def unready(reports: Mapping[str, PartitionReport]) -> dict[str, str]:
    """Why events cannot be taken, by partition. A dead receiver, a backlog or standing by do not make it unready."""
    if not reports:
        return {"sources": "starting"}
    return {
        name: f"{r.state}: {r.reason}" if r.reason else str(r.state)
        for name, r in islice(((n, r) for n, r in sorted(reports.items()) if r.state not in READY), LISTED_MAX)
    }
