"""Stale owners cannot write: the check that every fenced transaction makes.

The key-share lock is what makes the check hold until the transaction ends: a change of holder takes the row `for
update` and so waits for us, while a renewal changes no key column and does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evermark.errors import StaleError
from evermark.state.connection import Connection, State

DELIVER_LEASE = "deliver"


def deliver_lease(shard: int) -> str:
    """The lease of a shard of delivery. That of the first is also for everything that is not done for each shard."""
    return f"{DELIVER_LEASE}:{shard}" if shard else DELIVER_LEASE


def source_lease(source: str, partition: int = 0) -> str:
    """The lease under which a partition's log head and checkpoint are written, once its source is divided. Until then
    that of the first is for all; it is always for everything that is not done for each partition.
    """
    return f"source:{source}:{partition}" if partition else f"source:{source}"


def is_of(lease: str, source: str) -> bool:
    """Whether it is the lease of the source, or of a partition of it."""
    return f"{lease}:".startswith(f"{source_lease(source)}:")


# To be put in front of a fenced statement: `with fence as (…)`. One row when the epoch holds the lease, else none. The
# partition of a source that is not divided has no lease of its own.
_HELD = """
from leases
where name = coalesce((select own.name from leases own where own.name = %(own_lease)s), %(lease)s)
  and epoch = %(lease_epoch)s and instance is not null
for key share
"""
FENCE = f"select 1 {_HELD}"


def fence(conn: Connection, lease: str, epoch: int, own: str | None = None) -> None:
    """Raise `StaleError` unless `epoch` holds `lease`, and keep it so until the transaction ends. `own` is the lease to
    hold instead, where there is one.
    """
    given = {"lease": lease, "own_lease": own or lease, "lease_epoch": epoch}
    if conn.execute(FENCE, given).fetchone() is None:
        raise stale(own or lease, epoch)


@contextmanager
def fenced(state: State, lease: str, epoch: int, own: str | None = None) -> Iterator[Connection]:
    """A transaction that only the holder of the lease can begin, and that ends before another can hold it."""
    with state.transaction() as conn:
        fence(conn, lease, epoch, own)
        yield conn


@contextmanager
def alone(state: State, work: str) -> Iterator[Connection]:
    """One process at a time does this work, whichever partitions it owns; one that sleeps in the middle of it loses the
    turn after seconds, like every transaction of State. What it asks State meanwhile it asks through this connection:
    some sources that each wait for a second one would wait for each other.
    """
    with state.transaction() as conn:
        conn.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"{state.schema}:{work}",))
        yield conn


def stale(lease: str, epoch: int) -> StaleError:
    return StaleError(
        f"lease {lease!r}: epoch {epoch} no longer holds it",
        hint="another instance owns this now; this one stops writing to it",
    )
