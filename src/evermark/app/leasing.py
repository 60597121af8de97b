"""Holding a lease while work goes on: renewed in the background, and the work told when it is lost. And acting for a
person on what a lease guards, whoever holds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from evermark.cluster.base import Holder, Lease, LeaseStore
from evermark.cluster.holders import lease_rows
from evermark.errors import BusyError, EvermarkError, StaleError
from evermark.observe.logging import get_logger
from evermark.state.connection import State

T = TypeVar("T")

TTL_S = 10.0
_RENEW_EVERY_S = TTL_S / 4
_STANDBY_POLL_S = 0.5
_TRIES = 3


class HeldLease:
    """Renews until closed. `lost` is set when somebody else has it, or when we cannot know any longer."""

    def __init__(self, store: LeaseStore, lease: Lease, on_lost: Callable[[], None]) -> None:
        self.lease = lease
        self._store = store
        self._on_lost = on_lost
        self.lost = threading.Event()
        self._closed = threading.Event()
        self._log = get_logger(lease=lease.name, epoch=lease.epoch)
        self._thread = threading.Thread(target=self._renew, name=f"lease {lease.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=TTL_S)
        try:
            self._store.release(self.lease)
        except EvermarkError as error:
            self._log.warning("lease not released; it runs out by itself", error=error)

    def _renew(self) -> None:
        missed_s = 0.0
        while not self._closed.wait(_RENEW_EVERY_S):
            try:
                self._store.renew(self.lease, TTL_S)
                missed_s = 0.0
            except StaleError as error:
                self._log.warning("lease lost", error=error)
                break
            except Exception as error:  # noqa: BLE001 - a lease that nobody renews must be noticed as lost
                missed_s += _RENEW_EVERY_S
                self._log.warning("lease not renewed", error=error, missed_s=missed_s)
                if missed_s >= TTL_S:
                    break
        else:
            return
        self.lost.set()
        self._on_lost()


def acquire(
    store: LeaseStore,
    name: str,
    holder: Holder,
    stopping: threading.Event,
    on_standby: Callable[[], None],
    on_error: Callable[[EvermarkError], None] = lambda _: None,
) -> Lease | None:
    """Wait for the lease; None when told to stop first. A store that cannot be asked is no other owner."""
    told = False
    said = ""
    while not stopping.is_set():
        try:
            lease = store.acquire(name, holder, TTL_S)
        except EvermarkError as error:
            if error.message != said:
                get_logger(lease=name).warning("lease not acquired", error=error)
            told, said = False, error.message
            on_error(error)
            stopping.wait(_STANDBY_POLL_S)
            continue
        if lease is not None:
            return lease
        said = ""
        if not told:
            told = True
            on_standby()
        stopping.wait(_STANDBY_POLL_S)
    return None


def as_holder(leases: LeaseStore, holder: Holder, state: State, name: str, step: Callable[[int], T]) -> T:
    """Do one transaction of a person's on what a lease guards, with the epoch that holds it.

    While an instance has it, that is the instance's: it sees the change at its next look, and a person need not
    stop it. While nobody does, it is our own, for as long as the step takes. `holder` must not be one that holds this
    lease for longer: what is acquired here is released here.
    """
    for attempt in range(_TRIES):
        owner = lease_rows(state).get(name)
        lease = None
        try:
            if owner is not None and owner.held:
                return step(owner.epoch)
            lease = leases.acquire(name, holder, TTL_S)
            if lease is not None:
                return step(lease.epoch)
        except StaleError:  # the owner changed just now
            if attempt + 1 == _TRIES:
                raise
        finally:
            if lease is not None:
                leases.release(lease)
    raise BusyError(f"lease {name} changes hands just now", hint="try again in a moment")
