"""Leases: which instance may write to a source, and since when.

Contract (checked by `evermark.testing.LeaseContract` over every backend):

- At most one holder per name at any time by the store's own clock.
- Each change of holder raises the epoch, and an epoch is never given out twice for one name.
- A holder that could not renew in time may still believe it holds the lease: nothing relies on its belief. Every
  write carries the epoch and is refused when it is old.
- A holder on the same machine whose process is gone loses the lease at once: no process is left that could still write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
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


@dataclass(frozen=True)
class LeaseRow:
    """One lease, to look at. `holder` is None after a release; `held` says that its holder may still be at work."""

    name: str
    epoch: int
    holder: Holder | None
    expires_at: datetime | None  # None where only the store knows
    held: bool
    last: str | None = None  # the instance that has it, or had it last
    checked: bool = False  # under this epoch, its partition was found to be without a gap


class LeaseStore(Protocol):
    def acquire(self, name: str, holder: Holder, ttl_s: float) -> Lease | None:
        """The lease, or None while another holder has it. Acquiring it again renews it."""

    def acquire_all(self, names: Sequence[str], holder: Holder, ttl_s: float) -> list[Lease]:
        """The leases of these that no other holder has, all under one epoch. A lease that `holder` has gets it, too."""

    def free(self, names: Sequence[str], holder: Holder) -> list[str]:
        """The leases of these that `holder` could acquire now; a look, which takes nothing and never waits."""

    def divide(self, first: str, others: Sequence[str], holder: Holder) -> bool:
        """Give each of `others` a lease of its own, where until now the lease `first` was for them, too. False: another
        holder has it, so this has to wait. Once some are divided, names that have come since get their leases at once:
        the holder of `first` does not write to them.
        """

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        """Returns for how many seconds they are renewed already: leases that are renewed with others may have been
        renewed a while ago.
        Raises `StaleError` when one of them is no longer ours.
        """

    def release(self, *leases: Lease) -> None:
        """Let go early, of all at one moment; harmless where they are no longer ours."""

    def require(self, lease: Lease) -> None:
        """Raises `StaleError` when the epoch is old. For checks outside a fenced transaction."""

    def note_checked(self, leases: Sequence[Lease]) -> None:
        """Under these epochs, what the leases are for was found to be without a gap: `rows` say so until they change
        hands. Nothing is noted for one that is no longer ours.
        """

    def rows(self) -> dict[str, LeaseRow]:
        """Every lease that was ever given out, by name."""


def owner_epoch(leases: LeaseStore, name: str) -> int | None:
    """The epoch of the instance that holds a lease now; None while none does."""
    row = leases.rows().get(name)
    return row.epoch if row is not None and row.held else None
