"""Who holds which lease, for people to look at. Nothing relies on it: every write is fenced by its epoch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from evermark.cluster import liveness
from evermark.cluster.base import Holder
from evermark.cluster.liveness import IsGone
from evermark.state.connection import State

# Released leases expire at -infinity, which has no Python value.
_ROWS = """
select name, epoch, instance, host, boot, pid, started, greatest(expires_at, 'epoch'), expires_at > clock_timestamp()
from leases where epoch > 0 order by name
"""


@dataclass(frozen=True)
class LeaseRow:
    """One lease. `holder` is None after a release; `held` says that its holder may still be at work."""

    name: str
    epoch: int
    holder: Holder | None
    expires_at: datetime | None
    held: bool


def owner_epoch(state: State, name: str) -> int | None:
    """The epoch of the instance that holds a lease now; None while none does."""
    row = lease_rows(state).get(name)
    return row.epoch if row is not None and row.held else None


def lease_rows(state: State, *, is_gone: IsGone = liveness.is_gone) -> dict[str, LeaseRow]:
    """Every lease that was ever given out, by name."""
    with state.connection() as conn:
        rows = conn.execute(_ROWS).fetchall()
    found = {}
    for name, epoch, instance, host, boot, pid, started, expires_at, unexpired in rows:
        holder = None if instance is None else Holder(instance, host, boot, pid, started)
        held = holder is not None and unexpired and not is_gone(holder)
        found[name] = LeaseRow(name, epoch, holder, expires_at if holder else None, held)
    return found
