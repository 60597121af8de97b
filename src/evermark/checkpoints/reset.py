"""Forgetting where a partition stopped, on purpose. The log stays as it is, and says where reading goes on. Of a
partition that never had an event the head says that: where it began, or what was passed since.

When the log was put back from a backup it may end before batches that were taken. Then the durable head goes too, and
cursors come back to where the log ends: the batches that follow get the same numbers again, and must be delivered.
"""

from __future__ import annotations

from evermark.checkpoints.base import CheckpointStore
from evermark.cluster.fence import DELIVER_LEASE, fence, source_lease
from evermark.state.connection import State

_LOCK_GROUPS = "select from delivery_group order by shard for update"
_LOWER_HEAD = "delete from log_head where source = %s and partition = %s and batch > %s"
_FORGET_BEGINNING = "delete from log_head where source = %s and partition = %s and batch = 0"
# A cursor inside the batch that is made anew forgets how far it got there: the new batch holds other events.
_LOWER_CURSORS = """
update cursors set batch = %(batch)s, through = ''
where source = %(source)s and partition = %(partition)s
  and (batch > %(batch)s or (batch = %(batch)s and through <> ''))
"""


def reset(
    state: State,
    checkpoints: CheckpointStore,
    source: str,
    partition: int,
    log_batch: int,
    *,
    source_epoch: int,
    deliver_epoch: int,
    anew: bool = False,
) -> int:
    """`log_batch` is the last batch in the log. `anew`: a partition that never had an event forgets where it began.
    Returns how many readers had to be brought back to the log.
    """
    checkpoints.delete(source, partition)  # before the rest: without it the rest may be done again, and is harmless
    with state.transaction() as conn:
        fence(conn, source_lease(source), source_epoch, source_lease(source, partition))
        fence(conn, DELIVER_LEASE, deliver_epoch)
        conn.execute(_LOCK_GROUPS)  # owners of other shards of delivery are not fenced by that lease
        conn.execute(_LOWER_HEAD, (source, partition, log_batch))
        if anew:
            conn.execute(_FORGET_BEGINNING, (source, partition))
        where = {"source": source, "partition": partition, "batch": log_batch}
        return conn.execute(_LOWER_CURSORS, where).rowcount
