"""Where each partition of each source stopped.

Contract (checked by `evermark.testing.CheckpointContract` over every backend):

- A checkpoint says "everything *before* `position` is in the log, durably"; reading resumes *at* `position`.
- Saves are monotonic: a save with an older epoch is refused with `StaleError`; with the same epoch, a lower batch
  or position is refused with `ConflictError`. A save that repeats the stored value succeeds.
- `save` returns only after the value is durable.
- `load` before any save raises `NotFoundError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from evermark.errors import ConflictError, StaleError

if TYPE_CHECKING:
    from evermark.cluster.owned import AlsoSaved


@dataclass(frozen=True)
class Checkpoint:
    position: str
    batch: int
    epoch: int


class CheckpointStore(Protocol):
    def save(self, source: str, partition: int, checkpoint: Checkpoint, *, repaired: bool = False) -> None:
        """`repaired`: the position is of another history of the source, and not compared with the position before."""

    def beside(self, source: str, partition: int, checkpoint: Checkpoint) -> AlsoSaved[Checkpoint] | None:
        """How to save it with the head of the log, in one transaction; None where it is kept elsewhere."""

    def load(self, source: str, partition: int) -> Checkpoint: ...

    def list(self, source: str) -> dict[int, Checkpoint]: ...

    def delete(self, source: str, partition: int) -> None: ...


def require_forward(stored: Checkpoint | None, new: Checkpoint, where: str, *, repaired: bool = False) -> None:
    """The one rule of monotonic, fenced saves; every backend applies it inside its own transaction."""
    if stored is None:
        return
    if new.epoch < stored.epoch:
        raise StaleError(
            f"checkpoint of {where}: epoch {new.epoch} is older than the stored {stored.epoch}",
            hint="another instance owns this partition now; this one stops writing to it",
        )
    back = new.batch < stored.batch if repaired else (new.batch, new.position) < (stored.batch, stored.position)
    if new.epoch == stored.epoch and back:
        raise ConflictError(
            f"checkpoint of {where} would go back from batch {stored.batch} to {new.batch}",
            hint="use `evermark checkpoint reset` to go back on purpose",
        )
