"""The loop of one source: stands by for its lease, reads it for as long as the lease is held, and begins again.

Reading is a port (`SourceTools.read`): Spark does it in the product. Failures are handled here: a partition that
fails is tried again after a while or stops, and the others go on; a gap is left to `ingest/repair/steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from evermark.breaker import Breaker, BreakerLimits, BreakerState
from evermark.cluster.base import Lease
from evermark.cluster.fence import source_lease
from evermark.cluster.holding import Candidate, HeldLease
from evermark.error_policy import Action, action_for, action_while_reading, backoff_s
from evermark.errors import EvermarkError, GapError, StaleError, known
from evermark.event import Seen
from evermark.ingest.batch_taker import BatchTaker, Fenced, WrittenBatch
from evermark.ingest.copying.steps import Copier
from evermark.ingest.reading import ReadPlan
from evermark.ingest.repair.steps import Repairer, RepairObserver, RepairTools
from evermark.ingest.repair.watch import RecoveryWatch
from evermark.ingest.resume import Resume
from evermark.ingest.task_reports import WHOLE_SOURCE
from evermark.progress import PATIENT_S, Progress
from evermark.runtime import Pause, Steps, Wake, any_set, run_through
from evermark.sources.base import Source


@dataclass(frozen=True)
class IngestLimits:
    # After a few failures in a row a partition is left alone for the breaker's time: each try of one interrupts others.
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    # Reading that lasted this long before it failed was healthy: the failure counts as a first.
    well_after_s: float = 60.0
    look_every_s: float = 1.0  # for a partition that may be read again, and for a gap
    let_go_poll_s: float = 0.05
    copier_end_s: float = 1.0


LIMITS = IngestLimits()


class SourceTools(RepairTools, Protocol):
    """The tools of a source's owner."""

    def prepare(self) -> None:
        """A lease was acquired: bring the log into a state in which it can be read and appended to."""

    def require_room(self) -> None:
        """Raises `DiskFullError` where the next batch would not fit."""

    def newest(self, partitions: Sequence[int]) -> Mapping[int, Seen]:
        """The last event of each partition in the log, by which the source is known again."""

    def read(
        self,
        plan: ReadPlan,
        taker: BatchTaker,
        on_taken: Callable[[WrittenBatch], None],
        ends: Sequence[Wake],
        cuts: Sequence[Wake],
    ) -> Steps[Mapping[int, EvermarkError]]:
        """Read batch after batch, and have each taken (`take_each`), until one of the wakes is set or something fails.
        The batch under way is taken after one of `ends`, and left behind after one of `cuts`. Each step is told to the
        taker's `progress`.

        Returns when all reading has ended: the failures by partition, `WHOLE_SOURCE` for any other failure.
        """


class SourceObserver(RepairObserver, Protocol):
    """Told how an owner and its partitions are. No method may block for long, or raise."""

    def standby(self) -> None:
        """Another instance has the lease."""

    def unowned(self, error: EvermarkError) -> None:
        """Whether another instance has the lease cannot be found out just now."""

    def owned(self) -> None: ...

    def released(self) -> None:
        """Nothing is read any more, and the lease is about to be given back."""

    def reading(self, partitions: Sequence[int]) -> None: ...

    def failed(self, partition: int, error: EvermarkError, again_in_s: float | None) -> None:
        """None: it has stopped, until a person acts."""


@dataclass
class _Trouble:
    breaker: Breaker
    not_before: float = 0.0
    stopped: bool = False


@dataclass(eq=False)
class SourceOwner:
    """`run` returns after `stop`, which may be called from anywhere."""

    name: str
    source: Source
    tools: SourceTools
    observer: SourceObserver
    candidate: Candidate
    limits: IngestLimits = LIMITS
    divided: bool = False  # whether other instances may read other partitions of it
    # Makes what copies rows beside the reading: of an epoch, what asks whether a gap is open, and what steps down.
    copier: Callable[[int, Callable[[], bool], Callable[[], None]], Copier | None] = lambda *_: None

    watch: RecoveryWatch | None = None  # looks for gaps of many sources

    def __post_init__(self) -> None:
        self._runtime, self._log = self.candidate.runtime, self.candidate.log
        self._stopping = self._runtime.wake()
        self._stepped_down = self._runtime.wake()
        self._ending = self._runtime.wake()  # of the reading under way, or of the next one: cut off
        self._due = self._runtime.wake()  # the same, once its batch is taken: other partitions may be read again
        self._reading: frozenset[int] = frozenset()
        self._trouble: dict[int, _Trouble] = {}
        self._left_at: Mapping[int, str] = {}
        self._repairer: Repairer | None = None
        self._checked = False
        self._held_names: frozenset[str] = frozenset()
        self._progress = Progress()

    def busy_s(self) -> float:
        """For how long it has been busy with its source without a pause; 0 where it waits, or does not own it."""
        return self._progress.busy_s()

    def is_repairing(self) -> bool:
        """Whether a gap is being closed just now."""
        return self._repairer is not None and self._repairer.is_at_work

    def stop(self) -> None:
        self._stopping.set()

    def breaker(self, partition: int) -> BreakerState:
        trouble = self._trouble.get(partition)
        return BreakerState.CLOSED if trouble is None else trouble.breaker.state(self._runtime.monotonic())

    def may_retain(self) -> bool:
        """Whether old events may leave the log. Not while a gap is open, or may be: events removed then would be
        found missing from the log.
        """
        repairer = self._repairer
        if not self._checked or repairer is None or repairer.partitions():
            return False
        others = [p for p in self.source.partitions() if not self._is_mine(p)]
        rows = self.candidate.leases.rows() if others else {}
        found = [rows.get(source_lease(self.name, p)) for p in others]
        if not all(row is not None and row.held and row.checked for row in found):
            return False  # another owner has not looked yet whether there is a gap, or there is none
        return all(self.tools.recoveries.current(self.name, p) is None for p in others)

    def partitions(self) -> list[int]:
        """If the source does not say which partitions it has, the first partition stands for all."""
        try:
            return list(self.source.partitions())
        except Exception as error:  # noqa: BLE001 - said by the reading itself
            self._log.debug("the source does not say which partitions it has", error=error)
            return [0]

    def owned_partitions(self) -> list[int]:
        """The partitions that this process owns now."""
        return [p for p in self.partitions() if self._is_mine(p)]

    def _is_mine(self, partition: int) -> bool:
        return source_lease(self.name, partition if self.divided else 0) in self._held_names

    def run(self) -> None:
        run_through(self._runtime, self.steps())

    def steps(self) -> Steps[None]:
        while not self._stopping.is_set():
            held = yield from self._acquired()
            if held is None:
                return
            self._held_names, self._progress = held.names, held.progress
            self._log.info("source owned", epoch=held.lease.epoch, **self._which())
            self.observer.owned()
            try:
                yield from held.progress.watched(self._own(held))
            except Exception as error:  # noqa: BLE001 - an unknown failure must not end the loop in silence
                yield from held.progress.watched(self._whole_source_failed(known(error)))
            finally:
                self.observer.released()
                held.close()
                self._held_names = frozenset()

    def _acquired(self) -> Steps[HeldLease | None]:
        first = source_lease(self.name)
        others = [source_lease(self.name, p) for p in self.partitions() if p] if self.divided else []
        return self.candidate.acquiring(first, self._stopping, self._say_standby, self.observer.unowned, others)

    def _which(self) -> dict[str, object]:
        return {"partitions": self.owned_partitions()} if self.divided else {}

    def _say_standby(self) -> None:
        self._log.info("standing by: another instance owns this source")
        self.observer.standby()

    def _own(self, held: HeldLease) -> Steps[None]:
        epoch = held.lease.epoch
        self._checked = False
        held.progress.alive(PATIENT_S)  # a large log, or one in a bucket, takes its time to be opened
        self.source.owned(epoch)
        self.tools.prepare()
        self._stepped_down.clear()
        repairer = self._repairer = Repairer(
            self.name,
            epoch,
            self.source,
            self.tools,
            self.observer,
            self._runtime,
            self._log,
            self.limits.look_every_s,
            self._let_go,
            self._on_repaired,
            self._stepped_down.set,
            self._is_mine,
            self.watch,
        )
        copier = copying = None
        repairing = self._runtime.loop(f"repair {self.name}", repairer.steps())
        try:
            if self._is_mine(0):  # its owner also does what is not done for each partition
                copier = self.copier(epoch, lambda: bool(repairer.partitions()), self._stepped_down.set)
            if copier is not None:
                copying = self._runtime.spawn(f"copy {self.name}", copier.run)
            taker = self.tools.open_log(epoch)[1]
            taker.progress = held.progress
            yield from self._read_on(held, taker, repairer)
        finally:
            repairer.stopped.set()
            if copier is not None and copying is not None:
                copier.stopped.set()
                copying.join(self.limits.copier_end_s)  # its tasks may wait for others; what they write late is refused
            yield from repairing.joining()

    def _read_on(self, held: HeldLease, taker: BatchTaker, repairer: Repairer) -> Steps[None]:
        runtime, over = self._runtime, (self._stopping, held.lost, held.moved, self._stepped_down)
        while not any_set(over):
            # Before anything is looked at: from here on no request to end is missed.
            ending, due = self._ending, self._due = runtime.wake(), runtime.wake()
            active, wait_s = self._ready_partitions(repairer.partitions())
            if not active:
                look_s = self.limits.look_every_s
                yield Pause(look_s if wait_s is None else min(wait_s, look_s), over)
                continue
            self._reading = frozenset(active)
            began = runtime.monotonic()
            try:
                if self._reading & repairer.partitions():  # one of them is being repaired since
                    continue
                if wait_s is not None:
                    runtime.loop(f"wait {self.name}", self._end_after(wait_s, due))
                cuts = (ending, held.lost, self._stepped_down)
                failed = yield from self._read(taker, active, (due, self._stopping, held.moved), cuts)
            finally:
                self._reading = frozenset()
                due.set()
            if runtime.monotonic() - began > self.limits.well_after_s:
                for partition in active:
                    self._trouble.pop(partition, None)
            if any(action_for(error) is Action.STEP_DOWN for error in failed.values()):
                self._step_down(next(error for error in failed.values() if action_for(error) is Action.STEP_DOWN))
                return
            if failed and not self._blame(failed, active, held, repairer):
                return

    def _end_after(self, wait_s: float, due: Wake) -> Steps[None]:
        """A partition that failed is read again when its time has come, though the others are read meanwhile."""
        yield Pause(wait_s, (due,))
        due.set()

    def _blame(
        self, failed: Mapping[int, EvermarkError], active: Sequence[int], held: HeldLease, repairer: Repairer
    ) -> bool:
        """Note which partitions failed, or leave the gap to be repaired. False: the owner is stale, so none did."""
        is_sure = True
        try:
            held.require()
        except StaleError as error:
            self._log.warning("stepping down", error=error)
            return False
        except EvermarkError:
            is_sure = False  # State cannot be asked just now: no reason to stop for good
        named = failed.keys() & set(active)
        whole = None if named == failed.keys() else next(e for p, e in failed.items() if p not in named)
        noted: dict[int, EvermarkError] = {}
        for partition in active:
            trouble = failed.get(partition, whole)
            said = repairer.found(partition, trouble, self._left_at.get(partition, "")) if trouble else None
            if said is not None:
                noted[partition] = said
        self._note_failure(noted, is_sure=is_sure)
        return True

    def _read(
        self, taker: BatchTaker, active: Sequence[int], ends: Sequence[Wake], cuts: Sequence[Wake]
    ) -> Steps[Mapping[int, EvermarkError]]:
        resumes: dict[int, Resume] = {}
        progress = taker.progress
        try:
            self.tools.require_room()  # reading that begins looks healthy until its first batch
            progress.alive(PATIENT_S)  # the log is read for its heads
            fenced = _fenced(taker, active)
            for partition in active:
                if any_set((*ends, *cuts)):
                    return {}  # beginning many takes a while, and another may wait for them
                progress.alive(PATIENT_S)  # the log is read for where it ends, and for requests since the checkpoint
                resumes[partition] = _begun(taker, partition, fenced.get(partition))
            starts = {p: r.position for p, r in resumes.items() if r.position is not None}
            self._left_at = starts
            progress.alive(PATIENT_S)  # the log is read for its last events
            self.source.check(starts, self.tools.newest(active))
            self._checked = True
            if self.divided:  # the owner of the first partition waits for it before it removes events
                mine = [Lease(source_lease(self.name, p), taker.epoch) for p in active]
                self.candidate.leases.note_checked(mine)
            for partition, position in starts.items():
                progress.alive()
                self.source.begin(partition, position)
        except EvermarkError as error:
            blamed = error.partition if error.partition is not None else WHOLE_SOURCE
            return _excused({blamed: error}, resumes)
        self.observer.reading(active)
        self._log.info("reading", partitions=list(active))
        yield Pause(0.0)  # it has begun: what others need to begin is theirs now, however much there is to read here
        if any_set((*ends, *cuts)):
            return {}
        last = [resume.rows for resume in resumes.values() if resume.rows is not None]
        plan = ReadPlan(
            starts,
            {p: r.batch for p, r in resumes.items()},
            {p: r.repeats_to for p, r in resumes.items()},
            sum(last) if last else None,
        )
        try:
            return _excused((yield from self.tools.read(plan, taker, self._taken, ends, cuts)), resumes)
        except EvermarkError as error:
            return {WHOLE_SOURCE: error}

    def _taken(self, taken: WrittenBatch) -> None:
        """A batch that was taken is the success that closes the partition's breaker."""
        if self._trouble.pop(taken.partition, None) is not None:
            self.observer.reading([taken.partition])
        self.observer.taken(taken)

    def _ready_partitions(self, repaired: set[int]) -> tuple[list[int], float | None]:
        """The partitions that may be read now, and in how many seconds another may be."""
        now = self._runtime.monotonic()
        troubles = {p: self._trouble.get(p) for p in self.source.partitions() if p not in repaired and self._is_mine(p)}
        waits = {p: t.not_before - now if t else 0.0 for p, t in troubles.items() if t is None or not t.stopped}
        ready = [p for p, wait_s in waits.items() if wait_s <= 0]
        return ready, min((wait_s for wait_s in waits.values() if wait_s > 0), default=None)

    def _note_failure(self, failed: Mapping[int, EvermarkError], *, is_sure: bool = True) -> None:
        # The same for all: partitions that failed together are read again together.
        now, jitter = self._runtime.monotonic(), 0.8 + 0.4 * self._runtime.random()
        for partition, error in failed.items():
            trouble = self._trouble.setdefault(partition, _Trouble(Breaker(self.limits.breaker)))
            breaker = trouble.breaker
            breaker.failed(now)
            again_in_s: float | None = None
            if action_while_reading(error, breaker.failures) is not Action.STOP or not is_sure:
                pause_s = backoff_s(breaker.failures - 1, max_s=self.limits.breaker.timeout_s) * jitter
                again_in_s = breaker.wait_s(now) or pause_s
                trouble.not_before = now + again_in_s
                self._log.warning("partition failed", partition=partition, error=error, again_in_s=round(again_in_s, 1))
            else:
                trouble.stopped = True
                self._log.error("partition stopped", partition=partition, error=error)
            self.observer.failed(partition, error, again_in_s)

    def _whole_source_failed(self, error: EvermarkError) -> Steps[None]:
        if action_for(error) is Action.STEP_DOWN:
            self._step_down(error)
            return
        self._note_failure(dict.fromkeys(self.owned_partitions(), error))
        # As long as the partitions wait: the lease is not taken anew only to fail again. Where all have stopped, a
        # person may still mend what was said, or have a gap closed.
        not_before = [trouble.not_before for trouble in self._trouble.values() if not trouble.stopped]
        now = self._runtime.monotonic()
        wait_s = min(not_before, default=now + self.limits.breaker.timeout_s) - now
        yield Pause(max(self.limits.look_every_s, wait_s), (self._stopping,))

    def _step_down(self, error: EvermarkError) -> None:
        self._log.warning("stepping down", error=error)
        if isinstance(error, StaleError):
            self.candidate.on_refused(source_lease(self.name))

    # what repairing asks of its owner

    def _let_go(self, partition: int) -> None:
        """Returns when nobody reads the partition any more: it is about to be repaired."""
        while partition in self._reading:
            self._ending.set()
            self._runtime.wait(self.limits.let_go_poll_s)

    def _on_repaired(self, partition: int, error: EvermarkError | None) -> None:
        """The partition is read again; or, with an error, has to wait for a person."""
        if error is not None:
            self._note_failure({partition: error})
            return
        self._trouble.pop(partition, None)
        self._due.set()


def _excused(failed: Mapping[int, EvermarkError], resumes: Mapping[int, Resume]) -> dict[int, EvermarkError]:
    """Without its checkpoint a partition begins too early, which may look like a gap."""

    def excuse(partition: int) -> EvermarkError | None:
        mine = [resume.without_checkpoint for p, resume in resumes.items() if partition in {p, WHOLE_SOURCE}]
        return next((trouble for trouble in mine if trouble is not None), None)

    return {p: (excuse(p) or error) if isinstance(error, GapError) else error for p, error in failed.items()}


def _fenced(taker: BatchTaker, partitions: Sequence[int]) -> Mapping[int, Fenced]:
    """None of them if one fails: begun one by one, they say which."""
    try:
        return taker.fence(partitions)
    except EvermarkError:
        return {}


def _begun(taker: BatchTaker, partition: int, fenced: Fenced | None) -> Resume:
    try:
        return taker.begin(partition, fenced)
    except EvermarkError as error:
        if action_for(error) is Action.STOP and error.partition is None:
            error.partition = partition
        raise
