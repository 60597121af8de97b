"""Leases: which instance may write to a source, and since when.

Contract (checked by `evermark.testing.LeaseContract` over every backend):

- At most one holder per name at any time by the store's own clock.
- Each change of holder raises the epoch, and an epoch is never given out twice.
- A holder that could not renew in time may still believe it holds the lease: nothing relies on its belief. Every
  write carries the epoch and is refused when it is old.
- A holder on the same machine whose process is gone loses the lease at once: no process is left that could still write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Holder:
    """One running process. `boot` tells two runs of the same machine apart, `started` two uses of the same pid."""

    instance: str
    host: str
    boot: str
    pid: int
    started: str


@dataclass(frozen=True)
class Lease:
    name: str
    epoch: int


class LeaseStore(Protocol):
    def acquire(self, name: str, holder: Holder, ttl_s: float) -> Lease | None:
        """The lease, or None while another holder has it. Acquiring it again renews it."""

    def renew(self, lease: Lease, ttl_s: float) -> None:
        """Raises `StaleError` when it is no longer ours."""

    def release(self, lease: Lease) -> None:
        """Let go early; harmless when it is no longer ours."""

    def require(self, lease: Lease) -> None:
        """Raises `StaleError` when the epoch is old. For checks outside a fenced transaction."""
