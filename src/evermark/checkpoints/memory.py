"""Checkpoints in this process: for tests and simulations. Shipped, and held to the same contract."""

from __future__ import annotations

import threading
from collections.abc import Callable

from evermark.checkpoints.base import Checkpoint, require_forward
from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.errors import NotFoundError


class MemoryCheckpoints:
    """A `CheckpointStore`, fenced by `leases` when they are given."""

    def __init__(self, leases: MemoryLeases | None = None, lease_for: Callable[[str], str] = source_lease) -> None:
        self._leases = leases
        self._lease_for = lease_for
        self._saved: dict[tuple[str, int], Checkpoint] = {}
        self._lock = threading.Lock()

    def save(self, source: str, partition: int, checkpoint: Checkpoint, *, repaired: bool = False) -> None:
        with self._lock:
            if self._leases is not None:
                self._leases.fence(self._lease_for(source), checkpoint.epoch)
            require_forward(
                self._saved.get((source, partition)), checkpoint, f"{source}/{partition}", repaired=repaired
            )
            self._saved[source, partition] = checkpoint

    def load(self, source: str, partition: int) -> Checkpoint:
        with self._lock:
            found = self._saved.get((source, partition))
        if found is None:
            raise NotFoundError(
                f"no checkpoint of {source}/{partition}", hint="`evermark checkpoint list` shows all checkpoints"
            )
        return found

    def list(self, source: str) -> dict[int, Checkpoint]:
        with self._lock:
            return {partition: c for (name, partition), c in sorted(self._saved.items()) if name == source}

    def delete(self, source: str, partition: int) -> None:
        with self._lock:
            self._saved.pop((source, partition), None)


def open_checkpoints(*_: object) -> MemoryCheckpoints:
    return MemoryCheckpoints()
