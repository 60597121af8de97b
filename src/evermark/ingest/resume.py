"""From where a partition is read on. Pure: the log's tail, the durable head and the checkpoint in, a decision out."""

from __future__ import annotations

from dataclasses import dataclass, field

from evermark.checkpoints.base import Checkpoint
from evermark.errors import EvermarkError
from evermark.ingest.dedup import repeats_to
from evermark.log.base import Tail
from evermark.log.head import Head
from evermark.log.opened import require_whole


@dataclass(frozen=True)
class Resume:
    """Where to read on. `repeats_to`: up to this position the log may hold events that will be read again."""

    position: str | None  # None: the source's earliest; the partition was never begun
    batch: int  # the last batch in the log
    repeats_to: str | None = None
    # The store of checkpoints was away, and why: nobody knows what was passed, without events, after the log's end.
    without_checkpoint: EvermarkError | None = None
    rows: int | None = field(default=None, compare=False)  # of the last batch in the log, where that is known


def resume(tail: Tail, head: Head | None, checkpoint: Checkpoint | None, logged_to: str | None, where: str) -> Resume:
    """Decide by batch numbers, never by comparing positions: two histories of a source have no common order.

    `logged_to` is the greatest position in the tail's batch. Where reading begins at or before it, events up to it
    are in the log already (see `dedup`); a crash may come before the next batch is checkpointed, so every resume looks.
    """
    require_whole(tail.batch, max(head.batch if head else 0, checkpoint.batch if checkpoint else 0), where)
    position = _position(tail, head, checkpoint, logged_to)
    return Resume(position, tail.batch, repeats_to(position, logged_to), rows=tail.rows)


def _position(tail: Tail, head: Head | None, checkpoint: Checkpoint | None, logged_to: str | None) -> str | None:
    if checkpoint is not None and checkpoint.batch == tail.batch:
        return checkpoint.position
    if head is not None and head.batch == tail.batch and head.passed_to:
        return head.passed_to
    if tail.batch == 0:
        return None
    if tail.end is not None:
        return tail.end
    # The last event's own position is where reading begins again; that event, and its transaction, are excluded by id.
    return checkpoint.position if checkpoint is not None else logged_to
