"""Checkpoints in State, which is the default, and in this process, for tests and simulations."""

from __future__ import annotations

from evermark.checkpoints.base import Checkpoint, require_forward
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.owned import AlsoSaved, MemoryRows, OwnedRows, PostgresRows
from evermark.errors import NotFoundError
from evermark.state.connection import State


class OwnedCheckpoints:
    """A `CheckpointStore`, fenced by the lease of the source."""

    def __init__(self, rows: OwnedRows[Checkpoint]) -> None:
        self._rows = rows

    def save(self, source: str, partition: int, checkpoint: Checkpoint, *, repaired: bool = False) -> None:
        def require(stored: Checkpoint | None) -> None:
            require_forward(stored, checkpoint, f"{source}/{partition}", repaired=repaired)

        self._rows.save(source, partition, checkpoint, require)

    def beside(self, source: str, partition: int, checkpoint: Checkpoint) -> AlsoSaved[Checkpoint]:
        where = f"{source}/{partition}"
        return AlsoSaved(self._rows, checkpoint, lambda stored: require_forward(stored, checkpoint, where))

    def load(self, source: str, partition: int) -> Checkpoint:
        found = self._rows.load(source).get(partition)
        if found is None:
            raise NotFoundError(
                f"no checkpoint of {source}/{partition}", hint="`evermark checkpoint list` shows all checkpoints"
            )
        return found

    def list(self, source: str) -> dict[int, Checkpoint]:
        return self._rows.load(source)

    def list_all(self) -> dict[tuple[str, int], Checkpoint]:
        """Of all sources, by source and partition."""
        return self._rows.load_all()

    def delete(self, source: str, partition: int) -> None:
        self._rows.delete(source, partition)


class PostgresCheckpoints(OwnedCheckpoints):
    def __init__(self, state: State) -> None:
        super().__init__(PostgresRows(state, "checkpoints", Checkpoint))


class MemoryCheckpoints(OwnedCheckpoints):
    def __init__(self, leases: MemoryLeases | None = None) -> None:
        super().__init__(MemoryRows(leases))


def open_in_state(_: object, state: State) -> PostgresCheckpoints:
    return PostgresCheckpoints(state)


def open_in_memory(*_: object) -> MemoryCheckpoints:
    return MemoryCheckpoints()
