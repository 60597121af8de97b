"""Leases in this process: for tests, simulations and single-process use. Shipped, and held to the same contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from evermark.cluster import liveness
from evermark.cluster.base import Holder, Lease, LeaseRow
from evermark.cluster.fence import stale
from evermark.cluster.liveness import Held, IsGone, epoch_for
from evermark.errors import StaleError


class MemoryLeases:
    """A `LeaseStore`; the in-memory stores share it, so that they fence as the stores in Postgres do."""

    def __init__(
        self,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        is_gone: IsGone = liveness.is_gone,
    ) -> None:
        self._clock = clock
        self._is_gone = is_gone
        self._held: dict[str, Held] = {}
        self._last: dict[str, str] = {}
        self._checked: dict[str, int] = {}
        self._lock = threading.RLock()

    def acquire(self, name: str, holder: Holder, ttl_s: float) -> Lease | None:
        with self._lock:
            now = self._clock()
            epoch = epoch_for(self._held.get(name), holder, now, self._is_gone)
            if epoch is None:
                return None
            self._held[name] = Held(holder, epoch, now + timedelta(seconds=ttl_s))
            self._last[name] = holder.instance
            return Lease(name, epoch)

    def acquire_all(self, names: Sequence[str], holder: Holder, ttl_s: float) -> list[Lease]:
        with self._lock:
            mine, now = self.free(names, holder), self._clock()
            before = [_let_go_by(holder, self._held.get(name)) for name in mine]
            epoch = max((epoch_for(held, holder, now, self._is_gone) or 0 for held in before), default=0)
            expires_at = now + timedelta(seconds=ttl_s)
            self._held.update((name, Held(holder, epoch, expires_at)) for name in mine)
            self._last.update(dict.fromkeys(mine, holder.instance))
            return [Lease(name, epoch) for name in mine]

    def free(self, names: Sequence[str], holder: Holder) -> list[str]:
        with self._lock:
            now = self._clock()
            return [name for name in names if epoch_for(self._held.get(name), holder, now, self._is_gone) is not None]

    def divide(self, first: str, others: Sequence[str], holder: Holder) -> bool:
        with self._lock:
            missing = [name for name in others if name not in self._held]
            if not missing:
                return True
            now = self._clock()
            held = self._held.get(first)
            is_divided = len(missing) < len(others)
            if not is_divided and epoch_for(held, holder, now, self._is_gone) is None:
                return False
            epoch = 1 if held is None else held.epoch + 1
            self._held.update((name, Held(None, epoch, now)) for name in missing)
            if not is_divided:
                self._held[first] = Held(None, epoch, now)
            return True

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        with self._lock:
            ours = [(lease.name, self._ours(lease)) for lease in leases]
            expires_at = self._clock() + timedelta(seconds=ttl_s)
            self._held.update((name, replace(held, expires_at=expires_at)) for name, held in ours)
        return 0.0

    def renew_all(self, leases: Sequence[Lease], ttl_s: float) -> tuple[set[Lease], set[Lease]]:
        kept: set[Lease] = set()
        for lease in leases:
            with suppress(StaleError):
                self.renew([lease], ttl_s)
                kept.add(lease)
        return kept, set()

    def release(self, *leases: Lease) -> None:
        with self._lock:
            for lease in leases:
                held = self._held.get(lease.name)
                if held is not None and held.epoch == lease.epoch:
                    self._held[lease.name] = replace(held, holder=None)

    def require(self, lease: Lease) -> None:
        with self._lock:
            self._ours(lease)

    def note_checked(self, leases: Sequence[Lease]) -> None:
        with self._lock:
            self._checked.update((lease.name, lease.epoch) for lease in leases)

    def rows(self) -> dict[str, LeaseRow]:
        with self._lock:
            now = self._clock()
            return {name: self._row(name, held, now) for name, held in sorted(self._held.items())}

    def _row(self, name: str, held: Held, now: datetime) -> LeaseRow:
        is_held = held.holder is not None and held.expires_at > now and not self._is_gone(held.holder)
        checked = self._checked.get(name) == held.epoch
        return LeaseRow(name, held.epoch, held.holder, held.expires_at, is_held, self._last.get(name), checked)

    def fence(self, name: str, epoch: int, own: str | None = None) -> None:
        """Raise `StaleError` unless `epoch` holds the lease now; the lease `own` instead, where there is one."""
        self.require(Lease(own if own is not None and own in self._held else name, epoch))

    def _ours(self, lease: Lease) -> Held:
        held = self._held.get(lease.name)
        if held is None or held.holder is None or held.epoch != lease.epoch:
            raise stale(lease.name, lease.epoch)
        return held


def _let_go_by(holder: Holder, held: Held | None) -> Held | None:
    return replace(held, holder=None) if held is not None and held.holder == holder else held
