"""Taking a batch: the order of effects that makes "taken" mean "logged and durable".

files → commit → fsync → log_head → (control events) → checkpoint → confirm. A crash between two steps leaves a state
from which `begin` goes on. Without control events head and checkpoint are one transaction, if both are in State; a
checkpoint that is kept elsewhere may wait (`ingest/checkpoint_saver.py`), and the source waits with it.
Nothing in here knows Spark, Delta or Postgres: the simulator runs this very code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from evermark import failpoint
from evermark.breaker import Breaker
from evermark.checkpoints.base import Checkpoint, CheckpointStore
from evermark.errors import BusyError, ConflictError, EvermarkError, UnreachableError
from evermark.ingest.checkpoint_saver import AWAY, CheckpointSaver, SavePolicy, SavingObserver
from evermark.ingest.resume import Resume, resume
from evermark.log.base import Append, AppendLog, Tail
from evermark.log.head import NO_VERSION, Head, HeadStore
from evermark.progress import PATIENT_S, Progress
from evermark.sources.base import Feed, Source

NO_FEEDS: Mapping[int, Feed] = {}


class LoggedPositions(Protocol):
    def position_max(self, partition: int) -> str | None: ...


@dataclass(frozen=True)
class WrittenBatch(Append):
    """One batch as tasks left it: files written, nothing committed."""

    duplicates: int = 0
    ready: int = 0  # how many of its rows stood in files that were ready before it was read
    controls: int | None = None  # how many of its events are control events; None: not counted
    fresh: pa.Table | None = field(default=None, compare=False, repr=False)  # its rows, if they are few and at hand


def controls_seen_to(tail: Tail, head: Head | None, checkpoint: Checkpoint | None) -> int:
    """Up to which batch control events are carried out: all before the checkpoint, and all before the head's own batch.

    When neither is known State was lost, not a batch: requests from before that are not carried out again.
    """
    if checkpoint is not None:
        return checkpoint.batch
    return max(0, head.batch - 1) if head is not None else tail.batch


@dataclass(frozen=True)
class Fenced:
    """A partition that was just made ours in the log: how it stands there, in State and in the store of checkpoints."""

    tail: Tail
    head: Head | None
    checkpoint: Checkpoint | None
    away: EvermarkError | None  # why the checkpoint is not known
    version: int  # of the log's table, which is durable


@dataclass(eq=False)
class BatchTaker:
    """Takes one source's batches, for as long as its lease epoch is valid.

    `on_controls(partition, after, to)`: control events may stand in the batches `after < batch <= to`. It finds them in
    the log and carries them out before it returns; the same batches may be named again.
    """

    name: str
    epoch: int
    source: Source
    log: AppendLog
    logged: LoggedPositions
    heads: HeadStore
    checkpoints: CheckpointStore
    on_unconfirmed: Callable[[Exception], None] = lambda _: None
    on_controls: Callable[[int, int, int], None] = lambda _partition, _after, _to: None
    policy: SavePolicy = field(default_factory=SavePolicy)
    breaker: Breaker = field(default_factory=Breaker)  # of the store of checkpoints
    saving: SavingObserver = field(default_factory=SavingObserver)
    clock: Callable[[], float] = time.monotonic
    progress: Progress = field(default_factory=Progress)  # of the loop that takes

    def __post_init__(self) -> None:
        self._saver = CheckpointSaver(self._save_as, self.policy, self.breaker, self.clock, self.saving)
        self._unsure: set[int] = set()  # partitions that began without their checkpoint
        self._heads: dict[int, Head] = {}  # as they were moved last
        self._passed: dict[int, str] = {}  # up to where partitions were read since, with nothing to take

    def fence(self, partitions: Sequence[int]) -> dict[int, Fenced]:
        """Make the partitions ours in the log; what is looked at and synced for all is so once."""
        # Before the tails: heads and checkpoints can then not be ahead of them, even if we are no longer the owner.
        heads = self.heads.load(self.name)
        checkpoints, away = self._stored(partitions[0])
        tails = self.log.fence_all(partitions, self.epoch)
        if away is not None and not all(tail.batch or p in heads for p, tail in tails.items()):
            raise away  # nothing else says where reading begins
        version = self.log.sync()
        return {p: Fenced(tail, heads.get(p), checkpoints.get(p), away, version) for p, tail in tails.items()}

    def stands(self) -> dict[int, str]:
        """Of each partition that was ever begun, a position before which the log has everything."""
        return {p: head.passed_to or head.position for p, head in self.heads.load(self.name).items()}

    def begin(self, partition: int, fenced: Fenced | None = None) -> Resume:
        """Make the partition ours, unless it was just fenced, and find where it stands. The log is the truth; head and
        checkpoint follow it.
        """
        where = f"{self.name}/{partition}"
        self._saver.forget(partition)
        self._unsure.discard(partition)
        self._passed.pop(partition, None)
        found_there = fenced or self.fence([partition])[partition]
        tail, head, checkpoint = found_there.tail, found_there.head, found_there.checkpoint
        away, version = found_there.away, found_there.version
        logged_to = self.logged.position_max(partition) if tail.batch else None
        found = resume(tail, head, checkpoint, logged_to, where)
        position = found.position if found.position is not None else self.source.earliest(partition)
        seen_to = controls_seen_to(tail, head, checkpoint)
        if seen_to < tail.batch:
            self.on_controls(partition, seen_to, tail.batch)  # before head and checkpoint pass them
        if tail.batch and (head is None or head.batch < tail.batch):
            # Where the batch ends, which is not always where reading begins again; a head never goes back.
            end = tail.end or logged_to or position
            head = Head(tail.batch, self.epoch, end, version)
            self.heads.move(self.name, partition, head, recovered=True)
        elif head is None:
            # If its checkpoint is lost before the first batch, it must not begin anew at what is the earliest by then.
            head = Head(0, self.epoch, position, NO_VERSION)
            self.heads.move(self.name, partition, head)
        self._heads[partition] = head
        if away is not None:
            # What was passed without events after the log's end is not known, and is passed once more.
            self._unsure.add(partition)
        begun = Checkpoint(position, tail.batch, self.epoch)
        self._saver.save_first(partition, begun, is_away=away is not None)
        self._saver.to_confirm(partition)  # its predecessor did
        return replace(found, position=position, without_checkpoint=away)

    def _stored(self, partition: int) -> tuple[Mapping[int, Checkpoint], EvermarkError | None]:
        """The checkpoints by partition; or, while the store is away, why they cannot be read. `partition`: one of those
        that begin."""
        try:
            return self._saver.ask(partition, lambda: self.checkpoints.list(self.name)), None
        except AWAY as error:
            return {}, error

    def take(self, written: WrittenBatch, *, repaired: bool = False) -> None:
        """After this returns, the events may be delivered and will never be asked for again.

        `repaired`: the batch closes a gap, and reading goes on at its end, perhaps in another history.
        """
        if not written.files:
            self._passed[written.partition] = written.end
            self._offer(Checkpoint(written.end, written.batch - 1, self.epoch), written, repaired=repaired)
            return
        self.progress.alive()
        self.log.commit(written)
        self.progress.alive()
        version = self.log.sync()
        self.progress.alive()
        failpoint.hit("log.synced")
        where, head = (self.name, written.partition), Head(written.batch, self.epoch, written.end, version)
        checkpoint = Checkpoint(written.end, written.batch, self.epoch)
        # Control events are carried out between the two: then they are two transactions.
        also = self.checkpoints.beside(*where, checkpoint) if written.controls == 0 and not repaired else None
        began = self.clock()
        saved = self.heads.move(*where, head, also=also)
        self._heads[written.partition] = head
        self._passed.pop(written.partition, None)
        self.progress.alive()
        failpoint.hit("head.moved")
        if written.controls != 0:
            self.progress.alive(PATIENT_S)  # they may be many, each with a transaction of its own
            self.on_controls(written.partition, written.batch - 1, written.batch)
        if saved:
            self._unsure.discard(written.partition)  # what is stored is what it says itself
            self._saver.saved(written.partition, written.end, self.clock() - began)
            failpoint.hit("checkpoint.saved")
        else:
            self._offer(checkpoint, written, repaired=repaired)

    def _offer(self, checkpoint: Checkpoint, written: WrittenBatch, *, repaired: bool) -> None:
        if repaired:  # it may be of another history, which the log's own end does not tell
            self._save(written.partition, checkpoint.position, checkpoint.batch, repaired=True)
        else:
            self._saver.offer(written.partition, checkpoint, written.rows)

    def save_due(self, partitions: Iterable[int], feeds: Mapping[int, Feed] = NO_FEEDS) -> dict[int, EvermarkError]:
        """Save checkpoints that have waited for long enough, and confirm what was saved, of partitions that are being
        read; which of them failed. To be called now and then.
        """
        failed: dict[int, EvermarkError] = {}
        for partition in partitions:
            try:
                self._saver.save_due(partition)
                self.confirm_saved(partition, feeds.get(partition))
            except EvermarkError as error:
                failed[partition] = error
        return failed

    def save_rest(self, partitions: Iterable[int]) -> None:
        """Reading ends: save the checkpoints that wait. What cannot be saved, the log knows."""
        try:
            self._saver.save_rest(partitions)
        except EvermarkError as error:
            self.on_unconfirmed(error)

    def confirm_saved(self, partition: int, feed: Feed | None = None) -> None:
        """Confirm up to the last checkpoint that is saved, if that is news."""
        end = self._saver.to_confirm(partition)
        if end is not None:
            self.confirm(partition, end, feed)

    def confirm(self, partition: int, end: str, feed: Feed | None = None) -> None:
        """Tell the source, or its feed, that it may forget. Late or never is harmless: a busy one is told later."""
        try:
            if feed is not None:
                feed.confirm(end)
            else:
                self.source.confirm(partition, end)
        except (BusyError, UnreachableError) as error:
            self.on_unconfirmed(error)
            return
        failpoint.hit("source.confirmed")

    def _save(self, partition: int, position: str, batch: int, *, repaired: bool = False) -> None:
        self._save_as(partition, Checkpoint(position, batch, self.epoch), repaired=repaired)

    def _save_as(self, partition: int, checkpoint: Checkpoint, *, repaired: bool = False) -> None:
        began = self.clock()
        if partition in self._unsure:
            self._require_not_older(partition, checkpoint)
        if not self._note_passed(partition, checkpoint, repaired=repaired):
            self.checkpoints.save(self.name, partition, checkpoint, repaired=repaired)
        self._saver.saved(partition, checkpoint.position, self.clock() - began)
        failpoint.hit("checkpoint.saved")

    def _note_passed(self, partition: int, checkpoint: Checkpoint, *, repaired: bool) -> bool:
        """Note in the head what was passed without events, not later than the checkpoint by which the source is told to
        forget it: if all checkpoints are lost, reading from the log's end on would look like a gap. Whether the
        checkpoint was saved with it.
        """
        head = self._heads.get(partition)
        if head is None or head.batch != checkpoint.batch or checkpoint.position != self._passed.get(partition):
            return False
        passed = replace(head, epoch=self.epoch, passed=checkpoint.position, passed_batch=head.batch)
        also = self.checkpoints.beside(self.name, partition, checkpoint) if not repaired else None
        saved = self.heads.move(self.name, partition, passed, also=also)
        self._heads[partition] = passed
        return saved

    def _require_not_older(self, partition: int, checkpoint: Checkpoint) -> None:
        """A partition that began without its checkpoint, at the log's end, must not save over one that passed more: the
        source may have forgotten what lies between. Raises `ConflictError`: the source is let go of, and begins anew.
        """
        stored = self.checkpoints.list(self.name).get(partition)
        if stored is not None and stored.batch == checkpoint.batch and stored.position != checkpoint.position:
            raise ConflictError(
                f"{self.name}/{partition} began while its checkpoint could not be read, which says otherwise",
                hint="it begins anew at its checkpoint by itself",
            )
        self._unsure.discard(partition)


def take_each(
    taker: BatchTaker,
    batches: Sequence[WrittenBatch],
    on_taken: Callable[[WrittenBatch], None],
    feeds: Mapping[int, Feed] = NO_FEEDS,
) -> dict[int, EvermarkError]:
    """Take one batch of each partition; returns the failures. A failure does not stop the other partitions."""
    failed: dict[int, EvermarkError] = {}
    for written in batches:
        feed = feeds.get(written.partition)
        try:
            taker.take(written)
            on_taken(written)
            taker.progress.alive(PATIENT_S if feed is None else 0.0)  # to forget, Postgres reads its WAL once more
            taker.confirm_saved(written.partition, feed)
        except EvermarkError as error:
            failed[written.partition] = error
    return failed
