"""Holding a lease while work goes on: renewed beside the work, which is told when it is lost. And one change for a
person under a lease, whichever instance holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from evermark.cluster.base import Holder, Lease, LeaseStore
from evermark.errors import BusyError, EvermarkError, StaleError
from evermark.runtime import Log, Runtime, Wake

T = TypeVar("T")

_TRIES = 3


@dataclass(frozen=True)
class LeaseLimits:
    ttl_s: float = 10.0
    standby_poll_s: float = 0.5

    @property
    def renew_every_s(self) -> float:
        return self.ttl_s / 4


LIMITS = LeaseLimits()


@dataclass(eq=False)
class HeldLease:
    """Renews until closed. `lost` is set when another instance has the lease, or may have it."""

    store: LeaseStore
    lease: Lease
    runtime: Runtime
    log: Log
    limits: LeaseLimits = LIMITS

    def __post_init__(self) -> None:
        self.lost = self.runtime.wake()
        self._closed = self.runtime.wake()
        self._task = self.runtime.spawn(f"lease {self.lease.name}", self._renew)

    def close(self) -> None:
        self._closed.set()
        self._task.join(self.limits.ttl_s)
        try:
            self.store.release(self.lease)
        except EvermarkError as error:
            self._warn("lease not released; it runs out by itself", error=error)

    def _renew(self) -> None:
        limits, missed_s = self.limits, 0.0
        while not self.runtime.wait(limits.renew_every_s, self._closed):
            try:
                self.store.renew(self.lease, limits.ttl_s)
                missed_s = 0.0
            except StaleError as error:
                self._warn("lease lost", error=error)
                break
            except Exception as error:  # noqa: BLE001 - a lease that nobody renews must be noticed as lost
                missed_s += limits.renew_every_s
                self._warn("lease not renewed", error=error, missed_s=missed_s)
                if missed_s >= limits.ttl_s:
                    break
        else:
            return
        self.lost.set()

    def _warn(self, said: str, **about: object) -> None:
        self.log.warning(said, lease=self.lease.name, epoch=self.lease.epoch, **about)


@dataclass(frozen=True)
class Candidate:
    """A process that stands by for leases."""

    leases: LeaseStore
    holder: Holder
    runtime: Runtime
    log: Log
    limits: LeaseLimits = LIMITS

    def acquire(
        self,
        name: str,
        stopping: Wake,
        on_standby: Callable[[], None],
        on_error: Callable[[EvermarkError], None] = lambda _: None,
    ) -> HeldLease | None:
        """Wait for the lease; None when told to stop first. An error of the store goes to `on_error`."""
        said: str | None = None  # the error that was told last; empty: that another instance has the lease
        while not stopping.is_set():
            try:
                lease = self.leases.acquire(name, self.holder, self.limits.ttl_s)
            except EvermarkError as error:
                if error.message != said:
                    self.log.warning("lease not acquired", lease=name, error=error)
                said = error.message
                on_error(error)
            else:
                if lease is not None:
                    return HeldLease(self.leases, lease, self.runtime, self.log, self.limits)
                if said != "":
                    on_standby()
                said = ""
            self.runtime.wait(self.limits.standby_poll_s, stopping)
        return None


def as_holder(
    leases: LeaseStore,
    name: str,
    holder: Holder,
    owner_epoch: Callable[[], int | None],
    step: Callable[[int], T],
) -> T:
    """Run one transaction for a person under a lease, with the epoch that holds it.

    `owner_epoch` says under which epoch an instance holds the lease now. The instance sees the change at its next look,
    and a person need not stop it. While none does, the lease is acquired for as long as the step takes. `holder` must
    not be a process that holds this lease for longer: the lease acquired here is released here.
    """
    for attempt in range(_TRIES):
        lease = None
        try:
            epoch = owner_epoch()
            if epoch is not None:
                return step(epoch)
            lease = leases.acquire(name, holder, LIMITS.ttl_s)
            if lease is not None:
                return step(lease.epoch)
        except StaleError:  # the owner changed just now
            if attempt + 1 == _TRIES:
                raise
        finally:
            if lease is not None:
                leases.release(lease)
    raise BusyError(f"lease {name} changes hands just now", hint="try again in a moment")
