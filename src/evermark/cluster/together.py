"""Leases of one process that are renewed together: a thousand leases are one statement every two and a half seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from evermark.cluster.base import Holder, Lease, LeaseRow, LeaseStore
from evermark.cluster.fence import stale
from evermark.cluster.holding import LeaseKeeper
from evermark.errors import BusyError, EvermarkError, StaleError, known
from evermark.runtime import Runtime

# A lease that was renewed with others within these shares of its time is not renewed again, and one whose renewal is
# under way is not waited for.
_FRESH_SHARE = 1 / 8
_PATIENT_SHARE = 1 / 2
# A lease whose holder has not asked for it in so long is not renewed with others.
_GIVEN_UP_SHARE = 1.5


class BatchedLeases(LeaseStore, Protocol):
    def renew_all(self, leases: Sequence[Lease], ttl_s: float) -> tuple[set[Lease], set[Lease]]:
        """The leases that are still ours: renewed; and not renewed, as another transaction has them locked."""


@dataclass
class _Renewal:
    """Of one lease, the last that succeeded, and what the last one met."""

    at: float
    asked_at: float  # by its own holder
    error: EvermarkError | None = None
    tried_at: float = field(default=float("-inf"))

    def lives(self, now: float, ttl_s: float) -> bool:
        """Whether others renew it, too: not one that its holder gave up without coming to release it."""
        return not isinstance(self.error, StaleError) and now - self.asked_at < ttl_s * _GIVEN_UP_SHARE


class RenewedTogether:
    """A `LeaseStore`: the first renewal of a lease renews all that were acquired here. A lease is lost to its
    own holder alone: the others go on.
    """

    def __init__(self, store: BatchedLeases, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._renewals: dict[Lease, _Renewal] = {}
        self._under_way = False

    def acquire(self, name: str, holder: Holder, ttl_s: float) -> Lease | None:
        lease = self._store.acquire(name, holder, ttl_s)
        self._note([lease] if lease is not None else [])
        return lease

    def acquire_all(self, names: Sequence[str], holder: Holder, ttl_s: float) -> list[Lease]:
        leases = self._store.acquire_all(names, holder, ttl_s)
        self._note(leases)
        return leases

    def free(self, names: Sequence[str], holder: Holder) -> list[str]:
        return self._store.free(names, holder)

    def divide(self, first: str, others: Sequence[str], holder: Holder) -> bool:
        return self._store.divide(first, others, holder)

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        """Never waits for a renewal that another thread is at: one that does not come back is missed, as any is."""
        with self._lock:
            now = self._clock()
            mine = [self._renewals.setdefault(lease, _Renewal(float("-inf"), now)) for lease in leases]
            for each in mine:
                each.asked_at = now
            for error in (each.error for each in mine):
                if isinstance(error, StaleError):
                    raise error  # nobody renews it any more
            if all(now - each.tried_at < ttl_s * _FRESH_SHARE for each in mine):
                return _age_s(mine, now)
            if self._under_way:
                if all(now - each.at < ttl_s * _PATIENT_SHARE for each in mine):
                    return _age_s(mine, now)
                raise BusyError("the renewal of all leases takes long", hint="does the state database answer?")
            self._under_way = True
            living = [lease for lease, found in self._renewals.items() if found.lives(now, ttl_s)]
        self._renew_all(living, ttl_s)
        with self._lock:
            return _age_s(mine, self._clock())

    def _renew_all(self, leases: Sequence[Lease], ttl_s: float) -> None:
        kept: set[Lease] = set()
        locked: set[Lease] = set()
        failed: EvermarkError | None = None
        began = self._clock()  # a lease is good from then on at least
        try:
            kept, locked = self._store.renew_all(leases, ttl_s)
        except Exception as error:  # noqa: BLE001 - each holder is told
            failed = known(error)
        with self._lock:
            self._under_way = False
            now = self._clock()
            for lease in leases:
                if (renewal := self._renewals.get(lease)) is None:
                    continue  # released meanwhile
                renewal.tried_at = now
                renewal.error = failed
                if lease in locked:
                    renewal.error = BusyError(f"lease {lease.name} is locked by another process")
                elif failed is None and lease not in kept:
                    renewal.error = stale(lease.name, lease.epoch)
                if renewal.error is None:
                    renewal.at = began

    def release(self, *leases: Lease) -> None:
        with self._lock:
            for lease in leases:
                self._renewals.pop(lease, None)
        self._store.release(*leases)

    def require(self, lease: Lease) -> None:
        self._store.require(lease)

    def note_checked(self, leases: Sequence[Lease]) -> None:
        self._store.note_checked(leases)

    def rows(self) -> dict[str, LeaseRow]:
        return self._store.rows()

    def _note(self, leases: Sequence[Lease]) -> None:
        with self._lock:
            now = self._clock()
            self._renewals.update((lease, _Renewal(now, now)) for lease in leases)


def keeper_for(leases: LeaseStore, runtime: Runtime) -> LeaseKeeper | None:
    """What may keep all leases of a process; None where each is a call of its own, which may hang."""
    return LeaseKeeper(runtime) if isinstance(leases, RenewedTogether) else None


def _age_s(renewals: Sequence[_Renewal], now: float) -> float:
    """Since when all of them are good; what one of them met is raised."""
    for error in (each.error for each in renewals):
        if error is not None:
            raise error
    return max(now - each.at for each in renewals)
