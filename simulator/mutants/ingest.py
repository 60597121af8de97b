"""Bugs of taking, of the log and of leases."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from evermark.checkpoints.base import Checkpoint
from evermark.cluster import memory as lease_memory
from evermark.cluster.base import Holder
from evermark.cluster.liveness import Held, IsGone
from evermark.ingest import batch_taker
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.resume import Resume, resume
from evermark.log import memory as log_memory
from evermark.log.base import Append, Tail
from evermark.log.head import Head
from evermark.log.memory import MemoryLog
from simulator.mutants.mutant import Mutant


def _checkpoint_before_sync(self: BatchTaker, written: WrittenBatch) -> None:
    if written.files:
        self.log.commit(written)
    self._save(written.partition, written.end, written.batch if written.files else written.batch - 1)
    version = self.log.sync()
    if written.files:
        self.heads.move(self.name, written.partition, Head(written.batch, self.epoch, written.end, version))


def _head_before_sync(self: BatchTaker, written: WrittenBatch) -> None:
    if written.files:
        self.log.commit(written)
        self.heads.move(self.name, written.partition, Head(written.batch, self.epoch, written.end, written.batch))
        self.log.sync()
    self._save(written.partition, written.end, written.batch if written.files else written.batch - 1)


def _confirm_before_checkpoint(self: BatchTaker, written: WrittenBatch) -> None:
    if written.files:
        self.log.commit(written)
        version = self.log.sync()
        self.heads.move(self.name, written.partition, Head(written.batch, self.epoch, written.end, version))
    self.confirm(written.partition, written.end)
    self._save(written.partition, written.end, written.batch if written.files else written.batch - 1)


def _resume_without_tail(
    tail: Tail, head_batch: int, checkpoint: Checkpoint | None, logged_to: str | None, where: str
) -> Resume:
    return Resume(checkpoint.position if checkpoint else None, tail.batch)


def _resume_forgets_repeats(
    tail: Tail, head_batch: int, checkpoint: Checkpoint | None, logged_to: str | None, where: str
) -> Resume:
    if checkpoint is not None and checkpoint.batch == tail.batch:
        return Resume(checkpoint.position, tail.batch)
    if tail.batch == 0 or tail.end is not None:
        return Resume(tail.end, tail.batch)
    return Resume(checkpoint.position if checkpoint else logged_to, tail.batch, repeats_to=logged_to)


def _beginning_forgotten(
    tail: Tail, head: Head | None, checkpoint: Checkpoint | None, logged_to: str | None, where: str
) -> Resume:
    return resume(tail, head if tail.batch else None, checkpoint, logged_to, where)


def _passed_forgotten(
    tail: Tail, head: Head | None, checkpoint: Checkpoint | None, logged_to: str | None, where: str
) -> Resume:
    return resume(tail, replace(head, passed="") if head is not None else None, checkpoint, logged_to, where)


def _tail_unfenced(self: MemoryLog, partition: int, epoch: int) -> Tail:
    return self.tail(partition)


def _tail_not_compared(tail: tuple[int, int], append: Append, where: str) -> None:
    """The commit lands whatever the tail is."""


def _nothing_excluded(start: str, may_repeat_from: str, repeats_to: str | None) -> str | None:
    return None


def _same_epoch(held: Held | None, holder: Holder, now: datetime, is_gone: IsGone) -> int | None:
    if held is None:
        return 1
    owner = held.holder
    free = owner is None or owner == holder or held.expires_at <= now or is_gone(owner)
    return held.epoch if free else None


INGEST: tuple[Mutant, ...] = (
    Mutant(
        "checkpoint-before-sync",
        "a batch is checkpointed before it is durable",
        ((BatchTaker, "take", _checkpoint_before_sync),),
    ),
    Mutant(
        "head-before-sync", "the head moves before the batch is durable", ((BatchTaker, "take", _head_before_sync),)
    ),
    Mutant(
        "confirm-before-checkpoint",
        "the source may forget what no checkpoint has passed",
        ((BatchTaker, "take", _confirm_before_checkpoint),),
    ),
    Mutant(
        "resume-without-tail",
        "the log is not asked where to resume",
        ((batch_taker, "resume", _resume_without_tail),),
    ),
    Mutant(
        "resume-forgets-repeats",
        "a second begin forgets that the log is ahead of the checkpoint",
        ((batch_taker, "resume", _resume_forgets_repeats),),
        200,
    ),
    Mutant(
        "beginning-forgotten",
        "a partition without an event begins anew where its checkpoint is lost",
        ((batch_taker, "resume", _beginning_forgotten),),
    ),
    Mutant(
        "passed-forgotten",
        "what was passed without an event is known to the checkpoint alone",
        ((batch_taker, "resume", _passed_forgotten),),
    ),
    Mutant(
        "fence-skipped",
        "a new owner does not raise the log's epoch",
        ((MemoryLog, "fence", _tail_unfenced),),
        120,
    ),
    Mutant(
        "tail-not-compared",
        "a commit lands whatever the tail is",
        ((log_memory, "require_tail", _tail_not_compared),),
        120,
    ),
    Mutant(
        "repeats-logged",
        "ids that the log holds are not excluded",
        (("evermark.ingest.pieces", "looked_up_from", _nothing_excluded),),
    ),
    Mutant("epoch-kept", "a lease changes hands without a new epoch", ((lease_memory, "epoch_for", _same_epoch),)),
)
