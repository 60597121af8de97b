"""How far the log of each partition is durable: `log_head`. Nothing is delivered beyond it.

Contract of `HeadStore` (checked by `evermark.testing.contracts.HeadContract` over every backend):

- A head moves from batch n to n + 1, after that batch was committed *and* made durable. Repeating the stored move
  succeeds. It never goes back, in batch, position or table version.
- With `recovered=True` it may pass several batches: an owner that found them in the log, committed by its
  predecessor, has made them durable and catches the head up.
- A partition that never had a batch has a head of batch 0 from its first start on: its position is where it began. It
  stays there until batch 1; nothing can be read up to it.
- A move is fenced by the lease of the source; `Head.epoch` is the epoch of the owner that moves it, which after a
  recovery is not the epoch that committed the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evermark.cluster.memory import MemoryLeases
from evermark.cluster.owned import AlsoSaved, MemoryRows, OwnedRows, PostgresRows
from evermark.errors import ConflictError, StaleError
from evermark.state.connection import Connection, State

NO_VERSION = -1  # of a table that holds no batch yet


@dataclass(frozen=True)
class Head:
    """The last durable batch of one partition: where it ends, and the table version that holds it."""

    batch: int
    epoch: int
    position: str
    delta_version: int
    # Up to where the source was read behind a batch, with nothing to take: it may have forgotten all of that.
    passed: str = ""
    passed_batch: int = 0

    @property
    def passed_to(self) -> str:
        """What was passed behind this very batch. A program of before moves the head, and leaves `passed` as it is.
        Before the first batch that is at least where the partition began.
        """
        passed = self.passed if self.passed_batch == self.batch else ""
        return passed or (self.position if self.batch == 0 else "")


_HINT = "the log and its head disagree: restart the source, which reads the head from the log again"


def require_next(stored: Head | None, new: Head, where: str, *, recovered: bool) -> None:
    """The one rule of moving a head."""
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
    if stored is None and new.batch == 0:
        return
    last = 0 if stored is None else stored.batch
    if new.batch < last or (new.batch != last + 1 and not recovered):
        raise ConflictError(f"log head of {where} would go from batch {last} to {new.batch}", hint=_HINT)
    # By batch and version alone: after a gap was closed on another server its positions may be lower.
    if stored is not None and new.delta_version < stored.delta_version:
        raise ConflictError(f"log head of {where}: batch {new.batch} stands before batch {last}", hint=_HINT)


class HeadStore:
    def __init__(self, rows: OwnedRows[Head]) -> None:
        self._rows = rows

    def load(self, source: str) -> dict[int, Head]:
        """The heads of all partitions that were ever begun."""
        return self._rows.load(source)

    def load_all(self) -> dict[tuple[str, int], Head]:
        """The same of all sources, by source and partition, at one moment."""
        return self._rows.load_all()

    def move(
        self,
        source: str,
        partition: int,
        head: Head,
        *,
        recovered: bool = False,
        also: AlsoSaved[Any] | None = None,
    ) -> bool:
        """Returns once the new head is durable; whether `also` is, too."""

        def require(stored: Head | None) -> None:
            require_next(stored, head, f"{source}/{partition}", recovered=recovered)

        return self._rows.save(source, partition, head, require, also)


def durable_version(conn: Connection, source: str) -> int:
    """The version of the table up to which a source's log is durable; `NO_VERSION` before its first batch."""
    row = conn.execute("select max(delta_version) from log_head where source = %s", (source,)).fetchone()
    return int(row[0]) if row is not None and row[0] is not None else NO_VERSION


class PostgresHeads(HeadStore):
    def __init__(self, state: State) -> None:
        super().__init__(PostgresRows(state, "log_head", Head))


class MemoryHeads(HeadStore):
    def __init__(self, leases: MemoryLeases | None = None) -> None:
        super().__init__(MemoryRows(leases))
