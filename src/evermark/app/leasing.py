"""Holding a lease while work goes on: renewed in the background, and the work told when it is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

from evermark.cluster.base import Holder, Lease, LeaseStore
from evermark.errors import EvermarkError, StaleError
from evermark.observe.logging import get_logger

TTL_S = 10.0
_RENEW_EVERY_S = TTL_S / 4
_STANDBY_POLL_S = 0.5


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
            except EvermarkError as error:
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
