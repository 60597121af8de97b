"""How far the log of each partition is durable: `log_head`. Nothing is delivered beyond it.

Contract of `HeadStore` (checked by `evermark.testing.contracts.HeadContract` over every backend):

- A head moves from batch n to n + 1, after that batch was committed *and* made durable. Repeating the stored move
  succeeds. It never goes back, in batch, position or table version.
- With `recovered=True` it may pass several batches: an owner that found them in the log, committed by its
  predecessor, has made them durable and catches the head up.
- A move is fenced by the lease of the source; `Head.epoch` is the epoch of the owner that moves it, which after a
  recovery is not the epoch that committed the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from evermark.cluster.fence import FENCE, fence, source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.errors import ConflictError, StaleError
from evermark.state.connection import Connection, State


@dataclass(frozen=True)
class Head:
    """The last durable batch of one partition: where it ends, and the table version that holds it."""

    batch: int
    epoch: int
    position: str
    delta_version: int


class HeadStore(Protocol):
    def load(self, source: str) -> dict[int, Head]:
        """The heads of all partitions that ever had a batch."""

    def move(self, source: str, partition: int, head: Head, *, recovered: bool = False) -> None:
        """Returns once the new head is durable."""


def require_next(stored: Head | None, new: Head, where: str, *, recovered: bool) -> None:
    """The one rule of moving a head; every backend applies it inside its own transaction."""
    if stored is not None and new.epoch < stored.epoch:
        raise StaleError(
            f"log head of {where}: epoch {new.epoch} is older than the stored {stored.epoch}",
            hint="another instance owns this partition now; this one stops writing to it",
        )
    if stored is not None and new.batch == stored.batch:
        # The version may be a later one: after a recovery it is that of the snapshot the batch was found in.
        if new.position != stored.position or new.delta_version < stored.delta_version:
            raise ConflictError(f"log head of {where}: batch {new.batch} is known with another end", hint=_HINT)
        return
    last = 0 if stored is None else stored.batch
    if new.batch < last or (new.batch != last + 1 and not recovered):
        raise ConflictError(f"log head of {where} would go from batch {last} to {new.batch}", hint=_HINT)
    # By batch and version alone: after a gap was closed on another server its positions may be lower.
    if stored is not None and new.delta_version < stored.delta_version:
        raise ConflictError(f"log head of {where}: batch {new.batch} stands before batch {last}", hint=_HINT)


_HINT = "the log and its head disagree: restart the source, which reads the head from the log again"

_MOVE = f"""
with fence as ({FENCE})
update log_head h
set batch = %(batch)s, epoch = %(epoch)s, position = %(position)s, delta_version = %(delta_version)s,
    updated_at = clock_timestamp()
from fence
where h.source = %(source)s and h.partition = %(partition)s
  and h.batch = %(old_batch)s and h.epoch = %(old_epoch)s and h.position = %(old_position)s
  and h.delta_version = %(old_delta_version)s
"""

_LOCK = "select batch, epoch, position, delta_version from log_head where source = %s and partition = %s for update"

_INSERT = """
insert into log_head (source, partition, batch, epoch, position, delta_version) values (%s, %s, %s, %s, %s, %s)
on conflict (source, partition) do nothing
"""

_UPDATE = """
update log_head set batch = %s, epoch = %s, position = %s, delta_version = %s, updated_at = clock_timestamp()
where source = %s and partition = %s
"""


class PostgresHeads:
    """A `HeadStore` in State. A move is one round trip, in the same way as a checkpoint's save."""

    def __init__(self, state: State, lease_for: Callable[[str], str] = source_lease) -> None:
        self._state = state
        self._lease_for = lease_for
        self._last: dict[tuple[str, int], Head] = {}

    def load(self, source: str) -> dict[int, Head]:
        with self._state.connection() as conn:
            rows = conn.execute(
                "select partition, batch, epoch, position, delta_version from log_head where source = %s "
                "order by partition",
                (source,),
            ).fetchall()
        return {partition: Head(*rest) for partition, *rest in rows}

    def move(self, source: str, partition: int, head: Head, *, recovered: bool = False) -> None:
        last = self._last.get((source, partition))
        with self._state.connection() as conn:
            if last is None or not self._move(conn, source, partition, last, head, recovered):
                with conn.transaction():
                    self._move_locked(conn, source, partition, head, recovered)
        self._last[source, partition] = head

    def _move(self, conn: Connection, source: str, partition: int, last: Head, new: Head, recovered: bool) -> bool:
        try:
            require_next(last, new, f"{source}/{partition}", recovered=recovered)
        except (StaleError, ConflictError):
            return False  # our last move may be out of date; the locked row decides
        given: dict[str, object] = {
            "lease": self._lease_for(source),
            "lease_epoch": new.epoch,
            "source": source,
            "partition": partition,
        }
        given |= vars(new) | {f"old_{name}": value for name, value in vars(last).items()}
        return conn.execute(_MOVE, given).rowcount == 1

    def _move_locked(self, conn: Connection, source: str, partition: int, new: Head, recovered: bool) -> None:
        fence(conn, self._lease_for(source), new.epoch)
        where = f"{source}/{partition}"
        given = (new.batch, new.epoch, new.position, new.delta_version)
        row = conn.execute(_LOCK, (source, partition)).fetchone()
        if row is None:
            require_next(None, new, where, recovered=recovered)
            if conn.execute(_INSERT, (source, partition, *given)).rowcount != 1:
                raise ConflictError(f"log head of {where} was begun by another instance just now", hint=_HINT)
            return
        require_next(Head(*row), new, where, recovered=recovered)
        conn.execute(_UPDATE, (*given, source, partition))


class MemoryHeads:
    """A `HeadStore` in this process: for tests and simulations."""

    def __init__(self, leases: MemoryLeases | None = None, lease_for: Callable[[str], str] = source_lease) -> None:
        self._leases = leases
        self._lease_for = lease_for
        self._heads: dict[tuple[str, int], Head] = {}
        self._lock = threading.Lock()

    def load(self, source: str) -> dict[int, Head]:
        with self._lock:
            return {partition: head for (name, partition), head in sorted(self._heads.items()) if name == source}

    def move(self, source: str, partition: int, head: Head, *, recovered: bool = False) -> None:
        with self._lock:
            if self._leases is not None:
                self._leases.fence(self._lease_for(source), head.epoch)
            stored = self._heads.get((source, partition))
            require_next(stored, head, f"{source}/{partition}", recovered=recovered)
            self._heads[source, partition] = head
