"""Checkpoints in State: the default."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from evermark.checkpoints.base import Checkpoint, require_forward
from evermark.cluster.fence import FENCE, fence, source_lease
from evermark.errors import ConflictError, NotFoundError, StaleError
from evermark.state.connection import Connection, State

if TYPE_CHECKING:
    from evermark.checkpoints.kinds import CheckpointConfig

_MOVE = f"""
with fence as ({FENCE})
update checkpoints c
set position = %(position)s, batch = %(batch)s, epoch = %(epoch)s, updated_at = clock_timestamp()
from fence
where c.source = %(source)s and c.partition = %(partition)s
  and c.position = %(old_position)s and c.batch = %(old_batch)s and c.epoch = %(old_epoch)s
"""

_INSERT = """
insert into checkpoints (source, partition, position, batch, epoch) values (%s, %s, %s, %s, %s)
on conflict (source, partition) do nothing
"""

_LOCK = "select position, batch, epoch from checkpoints where source = %s and partition = %s for update"

_UPDATE = """
update checkpoints set position = %s, batch = %s, epoch = %s, updated_at = clock_timestamp()
where source = %s and partition = %s
"""


class PostgresCheckpoints:
    """A `CheckpointStore`, fenced by the lease of the source.

    A save is one round trip: the rule is applied to our last save, and the row changes only if it still holds that
    save and our epoch still holds the lease. If not, the same rule is applied again, to the locked row.
    """

    def __init__(self, state: State, lease_for: Callable[[str], str] = source_lease) -> None:
        self._state = state
        self._lease_for = lease_for
        self._last: dict[tuple[str, int], Checkpoint] = {}

    def save(self, source: str, partition: int, checkpoint: Checkpoint, *, repaired: bool = False) -> None:
        last = self._last.get((source, partition))
        with self._state.connection() as conn:
            if last is None or repaired or not self._move(conn, source, partition, last, checkpoint):
                with conn.transaction():
                    self._save_locked(conn, source, partition, checkpoint, repaired)
        self._last[source, partition] = checkpoint

    def load(self, source: str, partition: int) -> Checkpoint:
        with self._state.connection() as conn:
            row = conn.execute(
                "select position, batch, epoch from checkpoints where source = %s and partition = %s",
                (source, partition),
            ).fetchone()
        if row is None:
            raise NotFoundError(
                f"no checkpoint of {source}/{partition}", hint="`evermark checkpoint list` shows all checkpoints"
            )
        return Checkpoint(*row)

    def list(self, source: str) -> dict[int, Checkpoint]:
        with self._state.connection() as conn:
            rows = conn.execute(
                "select partition, position, batch, epoch from checkpoints where source = %s order by partition",
                (source,),
            ).fetchall()
        return {partition: Checkpoint(*rest) for partition, *rest in rows}

    def delete(self, source: str, partition: int) -> None:
        with self._state.connection() as conn:
            conn.execute("delete from checkpoints where source = %s and partition = %s", (source, partition))

    def _move(self, conn: Connection, source: str, partition: int, last: Checkpoint, new: Checkpoint) -> bool:
        try:
            require_forward(last, new, f"{source}/{partition}")
        except (StaleError, ConflictError):
            return False  # our last save may be out of date; the locked row decides
        moved = conn.execute(
            _MOVE,
            {
                "lease": self._lease_for(source),
                "lease_epoch": new.epoch,
                "source": source,
                "partition": partition,
                "position": new.position,
                "batch": new.batch,
                "epoch": new.epoch,
                "old_position": last.position,
                "old_batch": last.batch,
                "old_epoch": last.epoch,
            },
        )
        return moved.rowcount == 1

    def _save_locked(self, conn: Connection, source: str, partition: int, new: Checkpoint, repaired: bool) -> None:
        fence(conn, self._lease_for(source), new.epoch)
        given = (new.position, new.batch, new.epoch)
        if conn.execute(_INSERT, (source, partition, *given)).rowcount == 1:
            return
        row = conn.execute(_LOCK, (source, partition)).fetchone()
        require_forward(Checkpoint(*row) if row else None, new, f"{source}/{partition}", repaired=repaired)
        if conn.execute(_UPDATE, (*given, source, partition)).rowcount != 1:
            raise ConflictError(
                f"checkpoint of {source}/{partition} was deleted while it was being saved", hint="stop before resetting"
            )


def open_checkpoints(_: CheckpointConfig, state: State) -> PostgresCheckpoints:
    return PostgresCheckpoints(state)
