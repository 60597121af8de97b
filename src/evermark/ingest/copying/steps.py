"""Copies of one source, carried out beside its reading: planned, written by tasks in rounds, settled once read.

Nothing in here knows Spark, Delta or Postgres. Whatever crashes, the next owner begins with what State has: attempts
that nobody finishes are given up, chunks that are ready wait for their marks, and the rest is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evermark import failpoint
from evermark.error_policy import Action, action_after, action_for, backoff_s
from evermark.errors import EvermarkError, NotFoundError, known, of_kind
from evermark.ingest.repair.base import RecoveryStore
from evermark.runtime import Log, Runtime
from evermark.sources.copies import AskedBy, Chunk, ChunkState, ChunkWork, Copy, Copying, CopyState, CopyStore, Mark
from evermark.storage import storage_of

WRITERS_MAX = 4  # tasks at a time: each has a slot at the source, which has other work to do
CHUNKS_A_TASK = 8
ROUND_S = 5.0  # no chunk is begun later in a round: an owner that is to stop waits for no longer
# Chunks that are ready and wait to be read: files that take room.
READY_MAX = 32
SETTLE_EVERY_S = 0.2  # so often it is looked whether they were read
_BACKOFF_MAX_S = 60.0
_UNDER_WAY = (CopyState.PLANNED, CopyState.RUNNING)


def gives_up(copy: Copy, error: EvermarkError) -> bool:
    """Whether a copy is tried no more. What the file asks for is tried for as long as it names the stream: a right that
    is granted, or a key that is added, is noticed."""
    if copy.asked_by is AskedBy.START:
        return isinstance(error, NotFoundError)
    return action_after(error, copy.tries + 1) is Action.STOP


class CopyTools(Protocol):
    """The tools of a copier."""

    @property
    def copies(self) -> CopyStore: ...

    @property
    def recoveries(self) -> RecoveryStore: ...

    def checkpoint(self, partition: int) -> str | None: ...

    def holds(self, partition: int, position: str) -> bool:
        """Whether the log has an event at exactly this position."""

    def write_chunks(
        self, copying: Copying, works: Sequence[Sequence[ChunkWork]], epoch: int, until_s: float
    ) -> list[dict[str, Any]]:
        """A task for each list, and a report of each: its `error`, if any, and the `copies` that this is about."""


class CopyObserver(Protocol):
    def copy_began(self, copy: Copy, chunks: int) -> None: ...

    def copy_went_on(self, source: str, rows: int, chunks_left: int) -> None:
        """So many more rows are in the log; so many chunks of all copies are left."""

    def copy_ended(self, copy: Copy, error: EvermarkError | None) -> None:
        """Without an error it is done; else it is not tried any more."""

    def copy_failed(self, copy: Copy, error: EvermarkError) -> None:
        """It is tried again."""


@dataclass(eq=False)
class Copier:
    """`run` returns after `stopped` is set. While `busy` (a gap is open) no chunk is begun. It looks at once when
    `asked` is set, and every `look_every_s` anyhow."""

    name: str
    epoch: int
    copying: Copying
    tools: CopyTools
    observer: CopyObserver
    runtime: Runtime
    log: Log
    look_every_s: float
    busy: Callable[[], bool]
    on_step_down: Callable[[], None]
    _again_at: dict[str, float] = field(default_factory=dict)  # of copies that failed
    _waits: dict[str, int] = field(default_factory=dict)  # that were made for them, one after the other

    def __post_init__(self) -> None:
        self.stopped, self.asked = self.runtime.wake(), self.runtime.wake()
        self._begun = False
        self._waiting = 0  # chunks that are ready and not read yet, as last seen
        self._inherited: set[Mark] = set()  # ready before our term
        self._held_up: set[str] = set()  # copies that were said to fail because no look came to its end

    def run(self) -> None:
        failures = 0
        while not self.stopped.is_set():
            wait_s = self.look_every_s
            self.asked.clear()
            try:
                if self.look():
                    wait_s = 0.0
                elif self._waiting:
                    wait_s = min(SETTLE_EVERY_S, wait_s)
                failures = 0
                self._go_on()
            except Exception as error:  # noqa: BLE001 - tried again; an unknown failure must not end the loop
                if self.stopped.is_set():
                    return
                if action_for(error) is Action.STEP_DOWN:
                    self.log.warning("stepping down", part="copy", error=error)
                    self.on_step_down()
                    return
                self.log.warning("copying failed; it is tried again", part="copy", error=error)
                self._hold_up(known(error))
                wait_s = backoff_s(failures, base_s=self.look_every_s)
                failures += 1
            self.runtime.wait(wait_s, self.stopped, self.asked)

    def _hold_up(self, error: EvermarkError) -> None:
        """What fails for all copies is said of each that is under way, so that health names it. It is no try of theirs:
        a source that was away for a minute must not make the first failure of a copy's own its last."""
        try:
            under_way = [copy for copy in self.tools.copies.listed(self.name) if copy.state in _UNDER_WAY]
            self._held_up |= {copy.id for copy in under_way}
            for copy in under_way:
                self.tools.copies.trouble(copy.id, _said(error), self.epoch, counts=False)
        except Exception as untold:  # noqa: BLE001 - State does not take it just now, which is said elsewhere
            self.log.debug("that copying failed could not be noted", part="copy", error=untold)

    def _go_on(self) -> None:
        """A look came to its end. What one copy alone has is said anew by its next try."""
        while self._held_up:
            copy = min(self._held_up)
            if copy not in self._again_at:
                self.tools.copies.trouble(copy, "", self.epoch)
            self._held_up.remove(copy)

    def look(self) -> bool:
        """Settle what was read, and write some more. Whether there is more to do at once."""
        copies = self.tools.copies
        if not self._begun:
            copies.give_up_all(self.name, self.epoch)
            copies.want(self.name, self.copying.wanted, self.epoch)
            self._inherited = {_mark(chunk) for chunk in self._ready()}
            self._sweep()
            self._begun = True
        known_copies = copies.listed(self.name)
        under_way = any(copy.state in _UNDER_WAY for copy in known_copies)
        left = [copy for copy in known_copies if copy.chunks_left]  # of one that was cancelled, perhaps
        waiting = self._waiting = self._settle(left) if under_way or left else 0
        may_place = self.copying.watch(self.epoch if under_way or waiting else None)
        if not (under_way and may_place) or self.busy() or waiting >= READY_MAX or self.stopped.is_set():
            return False
        for copy in reversed(known_copies):
            if copy.state is CopyState.PLANNED and self._is_due(copy):
                self._plan(copy)
        return self._round(READY_MAX - waiting)

    def _is_due(self, copy: Copy) -> bool:
        return self._again_at.get(copy.id, 0.0) <= self.runtime.monotonic()

    def _plan(self, copy: Copy) -> None:
        try:
            chunks = self._planned(copy)
        except Exception as error:
            if action_for(error) is Action.STEP_DOWN:
                raise
            self._note(copy, known(error))
            return
        failpoint.hit("copy.planned")
        self.observer.copy_began(copy, chunks)
        self.observer.copy_went_on(self.name, 0, sum(each.chunks_left for each in self.tools.copies.listed(self.name)))

    def _planned(self, copy: Copy) -> int:
        if not self.copying.reads(copy.stream):
            raise _unnamed(copy)
        bounds = self.copying.plan(copy.stream)
        self.tools.copies.plan(copy.id, bounds, self.epoch)
        return len(bounds)

    # rounds

    def _round(self, most: int) -> bool:
        """Have some chunks written by tasks; whether there were any."""
        works: list[ChunkWork] = []
        going: dict[str, Copy] = {}
        limit = min(most, WRITERS_MAX * CHUNKS_A_TASK)
        for copy in reversed(self.tools.copies.listed(self.name)):
            if copy.state is CopyState.RUNNING and not self.copying.reads(copy.stream):
                self._note(copy, _unnamed(copy))
            elif copy.state is CopyState.RUNNING and self._is_due(copy) and len(works) < limit:
                some = self.tools.copies.chunks(copy.id, [ChunkState.OPEN, ChunkState.WRITING], limit - len(works))
                works += [ChunkWork(copy.id, c.number, copy.stream, c.bounds, copy.condition, c.told) for c in some]
                going[copy.id] = copy
        if not works:
            for copy in going.values():
                self._note(copy, None)  # all of it is written: what an owner before this one met is over
            return False
        tasks = min(WRITERS_MAX, len(works))
        reports = self.tools.write_chunks(self.copying, [works[n::tasks] for n in range(tasks)], self.epoch, ROUND_S)
        failed: dict[str, EvermarkError] = {}
        for report in reports:
            if report.get("error") is not None:
                said = report["error"]
                error = of_kind(said.get("kind", ""), said.get("message", ""), said.get("hint", ""))
                if action_for(error) is Action.STEP_DOWN:
                    raise error
                failed.update(dict.fromkeys(report["copies"], error))
        for number, copy in going.items():
            self._note(copy, failed.get(number))
        return len(failed) < len(going)

    def _note(self, copy: Copy, error: EvermarkError | None) -> None:
        if error is None:
            self._again_at.pop(copy.id, None)
            self._waits.pop(copy.id, None)
            if copy.error:
                self.tools.copies.trouble(copy.id, "", self.epoch)
            return
        final = gives_up(copy, error)
        # What is waited for (a source that is away, a table that is locked) spends no try.
        counts = action_for(error) is not Action.RETRY
        self.tools.copies.trouble(copy.id, _said(error), self.epoch, failed=final, counts=counts)
        waits = self._waits.get(copy.id, 0)
        self._waits[copy.id] = waits + 1
        self._again_at[copy.id] = self.runtime.monotonic() + backoff_s(waits, max_s=_BACKOFF_MAX_S)
        if final:
            self.observer.copy_ended(copy, error)
        else:
            self.observer.copy_failed(copy, error)

    # what was read

    def _settle(self, copies: Sequence[Copy]) -> int:
        """Chunks whose marks reading has passed in all partitions are done; how many still wait for it."""
        ends = [self.tools.checkpoint(partition) for partition in self.copying.partitions]
        at = [end for end in ends if end is not None]
        repaired = any(self.tools.recoveries.current(self.name, each) is not None for each in self.copying.partitions)
        if len(at) < len(ends) or repaired:
            return READY_MAX  # nothing is read just now
        gone_wrong = self.tools.recoveries.past(self.name)
        waiting = 0
        for copy in copies:
            passed: list[Chunk] = []
            lost: list[Chunk] = []
            for chunk in self.tools.copies.chunks(copy.id, [ChunkState.READY]):
                compared = [self.copying.compare(chunk.position, end) for end in at]
                # A mark may have been lost with a slot, whenever its task came to say that it was ready; and between
                # two terms checkpoints may be reset: then nobody knows whether reading began behind it.
                doubtful = (
                    None in compared
                    or _mark(chunk) in self._inherited
                    or any(each.changed_at >= copy.made_at for each in gone_wrong)
                )
                if False in compared:
                    waiting += 1
                elif doubtful and self._reopened(chunk):
                    lost.append(chunk)
                else:
                    passed.append(chunk)
            if passed:
                self.tools.copies.done(copy.id, [chunk.number for chunk in passed], self.epoch)
                failpoint.hit("copy.done")
            for chunk in (*lost, *passed):
                storage_of(self.copying.folder).delete(self.copying.folder / chunk.file)
            if passed:
                self._tell(copy, sum(chunk.rows for chunk in passed))
        return waiting

    def _reopened(self, chunk: Chunk) -> bool:
        """Whether rows of the chunk were lost: then they are written again, but for partitions that have theirs."""
        firsts = self.copying.firsts(chunk)
        told = [partition for partition, position in firsts.items() if self.tools.holds(partition, position)]
        if len(told) == len(firsts):
            return False
        self.tools.copies.reopen(chunk.copy, chunk.number, self.epoch, told)
        return True

    def _tell(self, copy: Copy, rows: int) -> None:
        now = self.tools.copies.listed(self.name)
        self.observer.copy_went_on(self.name, rows, sum(each.chunks_left for each in now))
        for each in now:
            if each.id == copy.id and each.state is CopyState.DONE:
                self.observer.copy_ended(each, None)

    def _sweep(self) -> None:
        """Remove files that no chunk has: of attempts that were given up, or of chunks that are done."""
        folder = self.copying.folder
        files = storage_of(folder).listed(folder)
        if not files:
            return
        kept = {chunk.file for chunk in self._ready()}
        for file in files:
            if file.name not in kept:
                storage_of(folder).delete(folder / file.name)

    def _ready(self) -> Iterator[Chunk]:
        copies = self.tools.copies
        for copy in copies.listed(self.name):
            if copy.chunks_left:
                yield from copies.chunks(copy.id, [ChunkState.READY])


def _said(error: EvermarkError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _mark(chunk: Chunk) -> Mark:
    return Mark(chunk.copy, chunk.number, chunk.attempt)


def _unnamed(copy: Copy) -> NotFoundError:
    return NotFoundError(f"{copy.stream} does not stand in the file", hint="name it there, or leave it out")
