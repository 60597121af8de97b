"""Checkpoints in a store of their own, outside State: saves are fenced by a compare-and-set on the stored value.

State cannot be asked in the same step who holds the lease of a source. So a store outside of it holds the epoch of the
last save, and refuses older ones; an owner saves once before it reads anything, and from then on its predecessor is
refused.
"""

from __future__ import annotations

from typing import Any, Protocol

from evermark.checkpoints.base import Checkpoint, require_forward
from evermark.errors import ConflictError, NotFoundError, StaleError

Place = tuple[str, int]
Stored = tuple[Checkpoint, Any]  # with what the store compares when it is replaced

_TRIES = 5


class ComparedRows(Protocol):
    """The store itself. Every call answers, or raises, within seconds."""

    def get(self, source: str, partition: int) -> Stored | None: ...

    def list(self, source: str) -> dict[int, Checkpoint]: ...

    def swap(self, source: str, partition: int, new: Checkpoint, old: Stored | None) -> Stored | None:
        """Store `new` durably if the store still holds `old` (None: nothing). None: it holds something else."""

    def delete(self, source: str, partition: int) -> None: ...


class OutsideCheckpoints:
    """A `CheckpointStore`."""

    def __init__(self, rows: ComparedRows) -> None:
        self._rows = rows
        self._last: dict[Place, Stored] = {}  # our own last save: most saves need no look at the store before

    def save(self, source: str, partition: int, checkpoint: Checkpoint, *, repaired: bool = False) -> None:
        where = f"{source}/{partition}"
        for _ in range(_TRIES):
            mine = self._last.pop((source, partition), None)  # an error leaves open what the store holds
            old = mine or self._rows.get(source, partition)
            try:
                require_forward(old[0] if old else None, checkpoint, where, repaired=repaired)
            except (StaleError, ConflictError):
                if mine is None:
                    raise
                continue  # our last save may be out of date
            saved = self._rows.swap(source, partition, checkpoint, old)
            if saved is not None:
                self._last[source, partition] = saved
                return
        raise ConflictError(
            f"the checkpoint of {where} is being changed by others", hint="only one instance may own a source"
        )

    def beside(self, source: str, partition: int, checkpoint: Checkpoint) -> None:
        return None

    def load(self, source: str, partition: int) -> Checkpoint:
        found = self._rows.get(source, partition)
        if found is None:
            raise NotFoundError(
                f"no checkpoint of {source}/{partition}", hint="`evermark checkpoint list` shows all checkpoints"
            )
        return found[0]

    def list(self, source: str) -> dict[int, Checkpoint]:
        return self._rows.list(source)

    def delete(self, source: str, partition: int) -> None:
        self._last.pop((source, partition), None)
        self._rows.delete(source, partition)
