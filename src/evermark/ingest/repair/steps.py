"""Gaps of one source, closed step by step beside its reading: partitions without a gap go on.

Nothing in here knows Spark, Delta or Postgres: the simulator runs it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Protocol

from evermark import failpoint
from evermark.error_policy import Action, action_for, backoff_s, is_stuck
from evermark.errors import EngineError, EvermarkError, GapError, IdentityError, UnreachableError, known
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.repair.base import (
    TRIES_MAX,
    Choice,
    Recovery,
    RecoveryStore,
    Step,
    exhausted,
    for_a_person,
    found_again,
    given_up,
    may_open,
)
from evermark.ingest.repair.watch import RecoveryWatch
from evermark.log.base import AppendLog, LogFile
from evermark.runtime import Log, Pause, Runtime, Steps, run_through
from evermark.sources.base import Gap, Repair, Source, Whereabouts

TIDY_EVERY = timedelta(minutes=1)
_RECOVER_HINT = "`evermark source recover` says what can be done; docs/playbook.md has the rest"


@dataclass(frozen=True)
class RepairTarget:
    """Where the events that are found belong."""

    source: str
    partition: int
    batch: int  # the last batch in the log
    epoch: int
    start: str  # where the log ends


@dataclass(frozen=True)
class FoundFile:
    """A file with some missing events; `end` is the position after the last of them, `ops` how many of each kind."""

    file: LogFile
    end: str
    ops: Mapping[str, int] = field(default_factory=dict)


def batches_of(found: Sequence[FoundFile], gap: Gap, wanted: RepairTarget) -> list[WrittenBatch]:
    """The batches that close the gap; the last ends where reading goes on. Without files only that position is kept."""
    files: list[tuple[LogFile, ...]] = [(one.file,) for one in found] or [()]
    ends = [wanted.start, *(one.end for one in found[:-1]), gap.position]
    return [
        WrittenBatch(wanted.partition, wanted.batch + number, wanted.epoch, start, end, mine)
        for number, (mine, (start, end)) in enumerate(zip(files, pairwise(ends), strict=True), start=1)
    ]


class RepairTools(Protocol):
    @property
    def recoveries(self) -> RecoveryStore: ...

    def open_log(self, epoch: int) -> tuple[AppendLog, BatchTaker]: ...

    def find(self, gap: Gap, wanted: RepairTarget) -> list[FoundFile]:
        """Write the events of the gap that the log lacks."""


class RepairObserver(Protocol):
    """Told how repairs go."""

    def opened(self, recovery: Recovery, error: EvermarkError) -> None: ...

    def begun(self, recovery: Recovery) -> None: ...

    def waits(self, recovery: Recovery, error: EvermarkError) -> None:
        """It cannot be closed just now, which costs no try: begun again after a while."""

    def taken(self, taken: WrittenBatch) -> None: ...

    def closed(self, recovery: Recovery, gap: Gap, rows: int, ops: Mapping[str, int]) -> None:
        """All `rows` that the log lacked are taken; `ops`: how many of each kind, where that is known."""

    def ended(self, recovery: Recovery, error: EvermarkError | None) -> None:
        """Reading may go on; or, with an error, a person has to look."""

    def left_behind(self, error: EvermarkError) -> None:
        """The leftovers of a failed recovery could not be removed."""


@dataclass(eq=False)
class Repairer:
    """Carries out open recoveries, found by us or asked for by a person. `run` returns after `stopped` is set.

    `let_go` returns when nobody reads a partition; `on_ended` lets it be read again, or, with an error, has it wait for
    a person.
    """

    name: str
    epoch: int
    source: Source
    tools: RepairTools
    observer: RepairObserver
    runtime: Runtime
    log: Log
    look_every_s: float
    let_go: Callable[[int], None]
    on_ended: Callable[[int, EvermarkError | None], None]
    on_step_down: Callable[[], None]
    is_mine: Callable[[int], bool] = lambda _: True  # whether a partition is repaired here
    watch: RecoveryWatch | None = None  # that looks for many sources; None: each look is one of ours
    _tidied_at: dict[int, datetime] = field(default_factory=dict)
    # Partitions whose recovery was begun here, and nobody was told of its end.
    _carried: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stopped = self.runtime.wake()
        self._found = self.runtime.wake()
        self.is_at_work = False  # a recovery is being carried out
        self._lock = threading.Lock()
        self._open = {p for p in self._partitions() if self.tools.recoveries.current(self.name, p) is not None}

    def _partitions(self) -> list[int]:
        return [partition for partition in self.source.partitions() if self.is_mine(partition)]

    def partitions(self) -> set[int]:
        """The partitions with a gap: not read until it is closed."""
        with self._lock:
            return set(self._open)

    def found(self, partition: int, error: EvermarkError, left_at: str) -> EvermarkError | None:
        """Reading met `error`. None: it is a gap, and is being closed; else the error to report."""
        if not may_open(error) or self.source.repair(partition) is None:
            return error
        past = self._past(partition)
        if exhausted(past, self.runtime.now()):
            return for_a_person(past[0].error) if past[0].step is Step.FAILED else found_again(error.message)
        # Before it is recorded: carrying it out removes it again when it is done.
        with self._lock:
            self._open.add(partition)
        try:
            recovery = self.tools.recoveries.open(self.name, partition, error.message, left_at, self.epoch)
        except EvermarkError:
            with self._lock:
                self._open.discard(partition)
            raise
        failpoint.hit("repair.opened")
        self.observer.opened(recovery, error)
        self._found.set()
        return None

    def run(self) -> None:
        run_through(self.runtime, self.steps())

    def steps(self) -> Steps[None]:
        """Look for gaps until stopped, and at once when one is found."""
        if self.watch is not None:
            self.watch.watch(self.name, self._found)
        try:
            yield from self._looks()
        finally:
            if self.watch is not None:
                self.watch.unwatch(self.name)

    def _looks(self) -> Steps[None]:
        failures = 0
        while not self.stopped.is_set():
            wait_s = self.look_every_s
            self._found.clear()
            try:
                if self._has_something():
                    self.carry_out_all()
                if self.watch is not None and not (self._open or self._carried):
                    wait_s = TIDY_EVERY.total_seconds()  # it wakes this loop where a gap is open
                failures = 0
            except Exception as error:  # noqa: BLE001 - tried again; an unknown failure must not end the loop
                if action_for(error) is Action.STEP_DOWN:
                    if not self.stopped.is_set():  # else another owner of this process may be at it by now
                        self.log.warning("stepping down", part="repair", error=error)
                        self.on_step_down()
                    return
                self.log.warning(
                    "looking for gaps, or closing one, failed; it is tried again", part="repair", error=error
                )
                wait_s = backoff_s(failures, base_s=self.look_every_s)
                failures += 1
            yield Pause(wait_s, (self._found, self.stopped))

    def _has_something(self) -> bool:
        return self.watch is None or bool(self._open or self._carried) or self.watch.may_have(self.name)

    def carry_out_all(self) -> None:
        """Look at every partition: an error in one is raised when the others were looked at, too."""
        problem: EvermarkError | None = None
        for partition in self._partitions():
            try:
                self._look_at(partition)
            except EvermarkError as error:
                if action_for(error) is Action.STEP_DOWN:
                    raise
                problem = problem or error
        if problem is not None:
            raise problem

    def _look_at(self, partition: int) -> None:
        recovery = self.tools.recoveries.current(self.name, partition)
        if recovery is not None and not self.stopped.is_set():
            self._carry_out(recovery)
        elif recovery is None and partition in self._carried:
            self._tell_end(self._carried[partition])
        elif recovery is None:
            self._tidy(partition)

    def _carry_out(self, recovery: Recovery) -> None:
        with self._lock:
            self._open.add(recovery.partition)
        self._carried[recovery.partition] = recovery.id
        self.observer.begun(recovery)
        repair = self.source.repair(recovery.partition)
        if repair is None:
            self._fail(recovery, None, EvermarkError("this source cannot be repaired"))
            return
        self.is_at_work = True
        try:
            self.let_go(recovery.partition)
            self._steps(recovery, repair)
        except Exception as error:  # noqa: BLE001 - an unknown one is counted like any other failed try
            self._after_failure(self._as_it_is(recovery), repair, known(error))
        finally:
            self.is_at_work = False
            repair.close()

    def _steps(self, recovery: Recovery, repair: Repair) -> None:
        now = recovery
        if now.step is Step.OPENED:
            # A person who chose knows which server this is; else it has to be the server we left.
            left_at = None if now.by_person else now.left_at or None
            gap = repair.begin(self.stopped.is_set, left_at, partial(self._whereabouts, now))
            now = self._as_it_is(now)  # waiting for a slot takes up to an hour: somebody may have chosen otherwise
            try:
                self._close_gap(now, gap)
            except EvermarkError as error:
                if not is_stuck(error):
                    raise
                # Waited for as for a disk that is away: another try would find the same.
                raise UnreachableError(error.message, hint=error.hint) from error
            self.tools.recoveries.close_gap(now, gap.position, self.epoch)
            now = replace(now, step=Step.CLOSED, position=gap.position)
            failpoint.hit("repair.closed")
        if now.position is None:
            raise EvermarkError(f"recovery {now.id} is closed, but nobody noted where", hint="report this")
        self.tools.recoveries.move(now, Step.CLOSED, self.epoch)  # refused if we are no longer the owner
        repair.finish(now.position)
        self.tools.recoveries.move(now, Step.DONE, self.epoch)
        failpoint.hit("repair.done")
        self._ended(now, None)

    def _close_gap(self, recovery: Recovery, gap: Gap) -> None:
        """Take the missing events, and checkpoint where reading goes on."""
        _, taker = self.tools.open_log(self.epoch)
        partition, start = recovery.partition, recovery.left_at
        fenced = taker.fence([partition])[partition]
        batch = fenced.tail.batch
        if batch or fenced.head is not None or fenced.checkpoint is not None:  # else where it begins is not known yet
            start = taker.begin(partition, fenced).position or start
        self.tools.recoveries.taking(recovery, batch, 0, self.epoch)  # what an earlier try took is counted now
        wanted = RepairTarget(self.name, partition, batch, self.epoch, start)
        found = self.tools.find(gap, wanted) if recovery.choice is Choice.REPAIR else []
        failpoint.hit("repair.found")
        rows = 0
        for written in batches_of(found, gap, wanted):
            if written.files:
                self.tools.recoveries.taking(recovery, written.batch - 1, written.rows, self.epoch)
            taker.take(written, repaired=True)
            self.observer.taken(written)
            rows += written.rows
        self.observer.closed(recovery, gap, rows, sum((Counter(one.ops) for one in found), Counter()))

    def _past(self, partition: int) -> list[Recovery]:
        return [r for r in self.tools.recoveries.past(self.name) if r.partition == partition]

    def _whereabouts(self, recovery: Recovery) -> Whereabouts:
        others = [r for r in self.tools.recoveries.past(self.name) if r.partition != recovery.partition]
        repaired = {r.position for r in others if r.position and r.position > recovery.left_at}
        return Whereabouts(self.tools.open_log(self.epoch)[1].stands(), sorted(repaired))

    def _as_it_is(self, recovery: Recovery) -> Recovery:
        """The same recovery as State has it now: how far it got, and what was chosen since."""
        return self.tools.recoveries.current(self.name, recovery.partition) or recovery

    def _after_failure(self, recovery: Recovery, repair: Repair, error: EvermarkError) -> None:
        action = action_for(error)
        if action is Action.STEP_DOWN or self.stopped.is_set():
            raise error
        if isinstance(error, IdentityError):
            self._fail(recovery, repair, error)  # trying again makes it no other server
            return
        # A passing failure spends no try. A failure of Spark may be a row it can never read.
        tried = action is not Action.RETRY or isinstance(error, EngineError)
        # The new slot may be gone as well: everything begins again, and finds what was taken meanwhile in the log.
        step = Step.OPENED if isinstance(error, GapError) else recovery.step
        if tried and recovery.tries + 1 >= TRIES_MAX:
            self._fail(recovery, repair, given_up(error))
            return
        said = error.message if tried else "; ".join(filter(None, (error.message, error.hint)))
        self.tools.recoveries.move(recovery, step, self.epoch, error=said, tried=tried)
        if not tried:
            self.observer.waits(recovery, error)
        raise error

    def _fail(self, recovery: Recovery, repair: Repair | None, error: EvermarkError) -> None:
        if repair is not None:
            self._abandon(repair)
        self.tools.recoveries.move(recovery, Step.FAILED, self.epoch, error=error.message, tried=True)
        self._ended(recovery, error)

    def _tidy(self, partition: int) -> None:
        """A late owner may make a slot after its successor was done: the slot keeps WAL, and nobody reads it."""
        now = self.runtime.now()
        if partition in self._tidied_at and now - self._tidied_at[partition] < TIDY_EVERY:
            return
        past = self._past(partition)
        repair = self.source.repair(partition) if past else None
        if repair is not None:
            self.tools.recoveries.move(past[0], past[0].step, self.epoch)  # refused if we are no longer the owner
            self._abandon(repair)
            repair.close()
        self._tidied_at[partition] = now

    def _abandon(self, repair: Repair) -> None:
        try:
            repair.abandon()  # a slot that nobody reads keeps WAL without end
        except EvermarkError as left:
            self.observer.left_behind(left)

    def _tell_end(self, number: int) -> None:
        """Its last step was recorded, but the answer was lost: without this the partition is never read again."""
        for recovery in self.tools.recoveries.past(self.name):
            if recovery.id == number:
                failed = recovery.step is Step.FAILED
                self._ended(recovery, GapError(recovery.error, hint=_RECOVER_HINT) if failed else None)

    def _ended(self, recovery: Recovery, error: EvermarkError | None) -> None:
        self._carried.pop(recovery.partition, None)
        self._tidied_at[recovery.partition] = self.runtime.now()
        with self._lock:
            self._open.discard(recovery.partition)
        self.observer.ended(recovery, error)
        self.on_ended(recovery.partition, error)
