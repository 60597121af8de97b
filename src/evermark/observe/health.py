"""Health as people ask for it: per partition, then for the whole. Pure, but for the board that threads write on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

LAGGING_AFTER_S = 30.0
# Starting Spark takes ten seconds, on a loaded machine several times that.
ENGINE_LOST_MAX_S = 120.0


class PartitionHealth(StrEnum):
    HEALTHY = "healthy"
    LAGGING = "lagging"
    STALE = "stale"
    FAILED = "failed"
    STANDBY = "standby"  # another instance owns it; that is no illness


@dataclass(frozen=True)
class PartitionReport:
    state: PartitionHealth
    last_event_at: datetime | None = None
    last_batch_at: datetime | None = None
    lag_s: float = 0.0
    events: int = 0
    reason: str = ""
    hint: str = ""
    stale_streams: int = 0  # parts of it that cannot be read on, while the rest is
    stale_first: Mapping[str, str] = field(default_factory=dict)  # some of them, and why


class Board:
    """Where threads write how they are, and the server reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._partitions: dict[str, PartitionReport] = {}
        self._replays: dict[str, tuple[datetime, datetime]] = {}
        self._engine_lost_at: float | None = None
        self._engine_trouble = ""
        self.delivering = False

    def put(self, source: str, partition: int, state: PartitionHealth, reason: str = "", hint: str = "") -> None:
        """How a partition is from now on; what was taken so far stays."""
        with self._lock:
            old = self._partitions.get(f"{source}/{partition}", PartitionReport(state))
            self._partitions[f"{source}/{partition}"] = replace(old, state=state, reason=reason, hint=hint)

    def seen(self, source: str, partition: int, events: int, at: datetime, lag_s: float) -> None:
        """A batch was taken."""
        state = PartitionHealth.LAGGING if lag_s > LAGGING_AFTER_S else PartitionHealth.HEALTHY
        with self._lock:
            old = self._partitions.get(f"{source}/{partition}", PartitionReport(state))
            last = at if events else old.last_event_at
            self._partitions[f"{source}/{partition}"] = replace(
                old,
                state=state,
                last_event_at=last,
                last_batch_at=at,
                lag_s=lag_s,
                events=old.events + events,
                reason="",
                hint="",
            )

    def stale(self, source: str, streams: Mapping[int, tuple[int, Mapping[str, str]]]) -> None:
        """Which streams of a source cannot be read on just now: by partition how many, and why some of them cannot."""
        with self._lock:
            for name, old in self._partitions.items():
                of, _, partition = name.rpartition("/")
                if of == source:
                    count, first = streams.get(int(partition), (0, {}))
                    self._partitions[name] = replace(old, stale_streams=count, stale_first=first)

    def replaying(self, windows: Mapping[str, tuple[datetime, datetime]]) -> None:
        """Which windows are being replayed just now, by source."""
        with self._lock:
            self._replays = dict(windows)

    def replays(self) -> dict[str, tuple[datetime, datetime]]:
        with self._lock:
            return dict(self._replays)

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
            self._engine_trouble = ""

    def given_up(self) -> str | None:
        """Why this process should be ended and started anew by whoever looks after it; None while it helps itself."""
        with self._lock:
            if self._engine_lost_at is None:
                return None
            lost_s = self._clock() - self._engine_lost_at
        if lost_s < ENGINE_LOST_MAX_S:
            return None
        return f"Spark has not been running for {lost_s:.0f} s: {self._engine_trouble}"

    def partitions(self) -> dict[str, PartitionReport]:
        with self._lock:
            return dict(self._partitions)


def overall(reports: Mapping[str, PartitionReport]) -> str:
    """unhealthy when at least half of the partitions are unwell, degraded when any is, or a stream of one."""
    unwell = sum(r.state not in (PartitionHealth.HEALTHY, PartitionHealth.STANDBY) for r in reports.values())
    if not unwell:
        return "degraded" if any(r.stale_streams for r in reports.values()) else "healthy"
    return "unhealthy" if 2 * unwell >= len(reports) else "degraded"


def as_json(
    reports: Mapping[str, PartitionReport],
    *,
    version: str,
    uptime_s: float,
    replays: Mapping[str, tuple[datetime, datetime]] | None = None,
) -> dict[str, Any]:
    return {
        "status": overall(reports),
        "version": version,
        "uptime_s": round(uptime_s, 1),
        "replay": {
            source: {"from": since.isoformat(), "to": until.isoformat()}
            for source, (since, until) in sorted((replays or {}).items())
        },
        "partitions": {
            name: {
                "status": str(r.state),
                "lag_s": round(r.lag_s, 3),
                "events": r.events,
                "last_event": r.last_event_at.isoformat() if r.last_event_at else None,
                "reason": r.reason,
                "hint": r.hint,
                "stale_streams": r.stale_streams,
                "stale": dict(r.stale_first),
            }
            for name, r in sorted(reports.items())
        },
    }


def ready(reports: Mapping[str, PartitionReport]) -> bool:
    """Can take events, or stands by for whoever does. A dead receiver does not make it unready."""
    return bool(reports) and any(r.state is not PartitionHealth.FAILED for r in reports.values())
