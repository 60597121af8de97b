"""Recoveries in this process: for tests and simulations. Shipped, and held to the same contract as those in State."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.ingest.repair.base import KEPT_MAX, TEXT_MAX, Choice, Recovery, Step, chosen_otherwise

_UNDER_WAY = (Step.OPENED, Step.CLOSED)


class MemoryRecoveries:
    """A `RecoveryStore`, fenced by `leases`."""

    def __init__(self, leases: MemoryLeases, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._leases = leases
        self._clock = clock
        self._kept: dict[int, Recovery] = {}
        self._taking: dict[int, tuple[int, int]] = {}  # the batch that is taken just now, and its events
        self._lock = threading.RLock()

    def current(self, source: str, partition: int) -> Recovery | None:
        with self._lock:
            under_way = [r for r in self._kept.values() if r.step in _UNDER_WAY]
            return next((r for r in under_way if (r.source, r.partition) == (source, partition)), None)

    def past(self, source: str) -> list[Recovery]:
        with self._lock:
            return [r for _, r in sorted(self._kept.items(), reverse=True) if r.source == source][:KEPT_MAX]

    def open(
        self, source: str, partition: int, reason: str, left_at: str, epoch: int, chosen: Choice | None = None
    ) -> Recovery:
        with self._lock:
            self._leases.fence(source_lease(source), epoch, source_lease(source, partition))
            found, reason, now = self.current(source, partition), reason[:TEXT_MAX], self._clock()
            if found is None:
                what = (source, partition, chosen or Choice.REPAIR, chosen is not None, reason, left_at, Step.OPENED)
                found = Recovery(len(self._kept) + 1, *what, None, 0, 0, "", now, now)
            elif chosen is not None and found.step is Step.OPENED:
                found = replace(found, choice=chosen, by_person=True, reason=reason, tries=0, changed_at=now)
            self._kept[found.id] = found
            return found

    def move(self, recovery: Recovery, step: Step, epoch: int, *, error: str = "", tried: bool = False) -> None:
        with self._lock:
            self._fence(recovery, epoch)
            found = self._kept[recovery.id]
            if found.step in _UNDER_WAY:
                tries, now = found.tries + tried, self._clock()
                self._kept[found.id] = replace(found, step=step, error=error[:TEXT_MAX], tries=tries, changed_at=now)

    def taking(self, recovery: Recovery, logged: int, rows: int, epoch: int) -> None:
        with self._lock:
            self._fence(recovery, epoch)
            found = self._kept[recovery.id]
            if found.step in _UNDER_WAY:
                batch, before = self._taking.get(found.id, (0, 0))
                self._kept[found.id] = replace(found, taken=found.taken + (before if batch <= logged else 0))
                self._taking[found.id] = (logged + 1, rows)

    def close_gap(self, recovery: Recovery, position: str, epoch: int) -> None:
        with self._lock:
            self._fence(recovery, epoch)
            found = self._kept[recovery.id]
            if found.step not in _UNDER_WAY or found.choice is not recovery.choice:
                raise chosen_otherwise(recovery)
            _, taken = self._taking.pop(found.id, (0, 0))
            self._kept[found.id] = replace(found, position=position, taken=found.taken + taken)
            self.move(recovery, Step.CLOSED, epoch)

    def _fence(self, recovery: Recovery, epoch: int) -> None:
        own = source_lease(recovery.source, recovery.partition)
        self._leases.fence(source_lease(recovery.source), epoch, own)
