"""The loop that owns a source: who is read when, and what a failure costs. In simulated time, over stores in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evermark.breaker import BreakerLimits, BreakerState
from evermark.cluster.base import Holder, Lease
from evermark.cluster.fence import source_lease
from evermark.cluster.holding import Candidate
from evermark.cluster.memory import MemoryLeases
from evermark.errors import BusyError, EvermarkError, FormatError, GapError, StaleError, UnreachableError
from evermark.ingest import owner as owner_module
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.owner import LIMITS, IngestLimits, SourceOwner
from evermark.ingest.reading import ReadPlan
from evermark.ingest.repair.memory import MemoryRecoveries
from evermark.ingest.repair.steps import Repairer
from evermark.ingest.resume import Resume
from evermark.ingest.task_reports import WHOLE_SOURCE
from evermark.progress import PATIENT_S
from evermark.runtime import Pause, Steps, Wake, any_set
from evermark.sources.base import Seen
from simulator.baton import Baton, BatonRuntime, Process

Failures = dict[int, EvermarkError]


class Leases(MemoryLeases):
    """Loses its tongue when told to."""

    mute = False

    def require(self, lease: Lease) -> None:
        if self.mute:
            raise UnreachableError("state does not answer")
        super().require(lease)


class Scene:
    """A source of two partitions. `readings` is what was read and when; each ends as `outcomes` say, or when told."""

    def __init__(self, limits: IngestLimits = LIMITS) -> None:
        self.begin: Callable[[int], Resume] = lambda _: Resume("5", 1)
        self.opened: list[object] = []
        self.runtime = BatonRuntime(Baton(random.Random(1), 0.5, 0.01), Process("p"))
        self.leases = Leases(clock=self.runtime.now, is_gone=lambda _: False)
        self.recoveries = MemoryRecoveries(self.leases, self.runtime.now)
        self.outcomes: list[Failures] = []
        self.during: Callable[[Any], object] = lambda on_taken: None
        self.readings: list[tuple[float, list[int]]] = []
        self.cut_off: list[bool] = []
        self.rows_logged: int | None = None
        self.stopped: list[int] = []
        self.said: list[str] = []
        self.epochs: list[int] = []
        self.source = SimpleNamespace(
            partitions=lambda: [0, 1],
            check=lambda *_: None,
            owned=self.epochs.append,
            begin=lambda *_: None,
            repair=lambda _: None,
        )
        said = lambda event, **_: self.said.append(event)  # noqa: E731
        log = SimpleNamespace(debug=said, info=said, warning=said, error=said)
        holder = Holder("me", "host", "boot", 1, "1")
        self.candidate = Candidate(self.leases, holder, self.runtime, log)
        self.owner = SourceOwner("shop", cast("Any", self.source), self, cast("Any", self), self.candidate, limits)

    def run(self, seconds: float) -> None:
        self.runtime.spawn("source", self.owner.run)
        baton = self.runtime.baton
        self.runtime.spawn("clock", lambda: baton.sleep(seconds))
        baton.run(lambda: baton.now >= seconds)
        baton.close()

    # works

    def prepare(self) -> None: ...

    def require_room(self) -> None: ...

    def open_log(self, epoch: int) -> tuple[Any, BatchTaker]:
        taker = SimpleNamespace(fence=lambda _: {}, begin=lambda partition, _: self.begin(partition), epoch=epoch)
        return None, cast("BatchTaker", taker)

    def newest(self, partitions: Sequence[int]) -> Mapping[int, Seen]:
        return {}

    def find(self, *_: object) -> list[Any]:
        return []

    def read(
        self,
        plan: ReadPlan,
        taker: BatchTaker,
        on_taken: Callable[[WrittenBatch], None],
        ends: Sequence[Wake],
        cuts: Sequence[Wake],
    ) -> Steps[Failures]:
        self.readings.append((self.runtime.monotonic(), sorted(plan.starts)))
        self.rows_logged = plan.rows_logged
        if 0 in plan.starts and len(self.readings) > 1:
            self.during(on_taken)
        yield Pause(1.0 if self.outcomes else 1e9, (*ends, *cuts))
        self.cut_off.append(any_set(cuts))
        return self.outcomes.pop(0) if self.outcomes else {}

    # news

    def failed(self, partition: int, error: EvermarkError, again_in_s: float | None) -> None:
        if again_in_s is None:
            self.stopped.append(partition)

    def __getattr__(self, name: str) -> Any:
        if name in ("standby", "unowned", "owned", "released", "reading", "taken"):
            return lambda *_: None
        raise AttributeError(name)

    def read_of(self) -> list[list[int]]:
        return [partitions for _, partitions in self.readings]


def test_a_partition_that_failed_is_read_again_in_its_time_though_the_others_are_read_meanwhile() -> None:
    """GIVEN two partitions WHEN one is busy for a moment THEN the other is read alone, and soon both are again."""
    scene = Scene()
    scene.outcomes = [{1: BusyError("the slot is in use")}]
    scene.run(30.0)
    assert scene.read_of() == [[0, 1], [0], [0, 1]]
    assert scene.readings[2][0] - scene.readings[1][0] < 1.0
    assert not any(scene.cut_off), "the batch of the other is left behind"


def test_the_source_is_told_of_its_owners_epoch_before_anything_is_read() -> None:
    """GIVEN an owner WHEN another took its lease meanwhile and it gets it back THEN the source is told each epoch."""
    scene = Scene()
    told: list[int] = []
    scene.during = lambda _: told.extend(scene.epochs)
    scene.outcomes = [{0: StaleError("another one has the lease"), 1: StaleError("another one has the lease")}]
    scene.run(30.0)
    assert told == scene.epochs == sorted(set(scene.epochs))
    assert len(told) == 2


def test_s8_a_source_that_fails_again_and_again_is_left_alone_for_the_breakers_time() -> None:
    """GIVEN a breaker of three failures and 20 s WHEN reading fails five times THEN the pauses grow, the third failure
    opens the breaker, one try goes through after 20 s, and reading that goes well for a minute closes it."""
    scene = Scene(limits=IngestLimits(breaker=BreakerLimits(threshold=3, timeout_s=20.0)))
    down = UnreachableError("the server does not answer")
    scene.outcomes = [{0: down, 1: down} for _ in range(5)]
    scene.run(150.0)
    began = [at for at, _ in scene.readings]
    pauses = [later - at - 1.0 for at, later in pairwise(began)]  # a reading lasts a second
    assert all(pause < 1.3 for pause in pauses[:2])
    assert [round(pause) for pause in pauses[2:]] == [20, 20, 20]
    assert len(scene.readings) == 6


def test_an_owner_is_busy_while_it_reads_without_a_pause_and_not_while_it_waits() -> None:
    """GIVEN an owner WHEN it begins with its source for a while, without a pause THEN it says for how long; while it
    waits for events, or owns nothing, it is not busy."""
    scene = Scene()
    busy: list[float] = []

    def begin(_partition: int) -> Resume:
        scene.runtime.baton.sleep(3.0)
        busy.append(scene.owner.busy_s())
        return Resume("5", 1)

    scene.begin = begin
    assert scene.owner.busy_s() == 0.0
    scene.run(60.0)
    assert len(busy) == 2 and busy[1] >= busy[0] + 3.0 >= 6.0
    assert scene.owner.busy_s() == 0.0, "it waits"


def test_s4_an_idle_night_raises_no_gap_and_no_alarm() -> None:
    """GIVEN a source without an event for ten hours WHEN its owner waits THEN it is read in one piece: no failure, no
    gap, and nobody is told anything."""
    scene = Scene()
    scene.run(10 * 3600.0)
    assert scene.read_of() == [[0, 1]]
    assert (scene.opened, scene.stopped) == ([], [])
    assert not [said for said in scene.said if "fail" in said or "gap" in said or "stepping" in said]


def test_s8_a_batch_that_was_taken_closes_the_breaker_of_its_partition() -> None:
    """GIVEN a partition that failed WHEN it is read again and a batch is taken THEN its breaker is closed at once."""
    scene = Scene(limits=IngestLimits(breaker=BreakerLimits(threshold=1, timeout_s=20.0)))
    states: list[BreakerState] = []
    scene.outcomes = [{0: UnreachableError("away")}]
    scene.during = lambda on_taken: (
        states.append(scene.owner.breaker(0)),
        on_taken(SimpleNamespace(partition=0)),
        states.append(scene.owner.breaker(0)),
    )
    scene.run(60.0)
    assert states[-2:] == [BreakerState.HALF_OPEN, BreakerState.CLOSED]


def test_without_a_checkpoint_what_looks_like_a_gap_is_none() -> None:
    """GIVEN a store of checkpoints that is away WHEN the source has been confirmed past the log's end THEN that is no
    gap: it is tried again until the store answers."""
    scene = Scene()
    away = UnreachableError("etcd does not answer")
    begun = [Resume("5", 1, without_checkpoint=away), Resume("5", 1)]
    scene.begin = lambda _: begun[0] if len(begun) > 1 else begun[-1]

    def check(resume: Any, newest: Any = None) -> None:
        if len(begun) > 1:
            begun.pop(0)
            raise GapError("the slot is past 5")

    scene.source.check = check
    scene.source.repair = lambda _: scene.opened.append("a repair")
    scene.run(5.0)
    assert scene.read_of() == [[0, 1]]
    assert scene.opened == []


def test_a_partition_that_stops_stays_stopped_however_well_the_others_are() -> None:
    """GIVEN a partition that needs a person WHEN the other fails after hours THEN the first is not tried unasked."""
    scene = Scene()
    scene.outcomes = [{1: FormatError("damaged")}]
    scene.run(100.0)
    assert scene.read_of() == [[0, 1], [0]]
    assert scene.stopped == [1]


def test_what_a_stale_owner_saw_stops_nothing() -> None:
    """GIVEN a failure that needs a person WHEN the lease is another's by then THEN the owner steps down."""
    scene = Scene()
    scene.outcomes = [{1: FormatError("damaged")}]
    taken_over = lambda: scene.leases._held.update(  # noqa: E731
        {source_lease("shop"): scene.leases._held[source_lease("shop")].__class__(None, 9, datetime.now(UTC))}
    )
    read = scene.read

    def read_late(*given: Any) -> Failures:
        taken_over()
        return read(*given)

    cast("Any", scene).read = read_late
    scene.run(1.2)
    assert scene.stopped == []
    assert "stepping down" in scene.said


def test_nothing_stops_for_good_while_it_cannot_be_known_who_owns_it() -> None:
    """GIVEN a failure that needs a person WHEN State cannot be asked for the lease THEN it is tried again later."""
    scene = Scene()
    scene.leases.mute = True
    scene.outcomes = [{1: FormatError("damaged")}]
    scene.run(30.0)
    assert scene.stopped == []
    assert scene.read_of() == [[0, 1], [0], [0, 1]]


def test_reading_ends_when_the_lease_is_lost() -> None:
    """GIVEN a source that is read WHEN its lease is another's THEN reading ends, and the owner stands by."""

    class Lost(Leases):
        def renew(self, leases: Sequence[Lease], ttl_s: float) -> None:
            (lease,) = leases
            self._held[lease.name] = self._held[lease.name].__class__(
                Holder("you", "host", "boot", 2, "2"), lease.epoch + 1, datetime.max.replace(tzinfo=UTC)
            )
            raise StaleError("it is another's")

    scene = Scene()
    lost = Lost(clock=scene.runtime.now, is_gone=lambda _: False)
    scene.owner.candidate = replace(scene.owner.candidate, leases=lost)
    scene.run(20.0)
    assert scene.read_of() == [[0, 1]]
    assert scene.said[-1] == "standing by: another instance owns this source"


def test_an_unforeseen_error_is_tried_again_a_few_times_and_no_more() -> None:
    """GIVEN errors that nobody thought of WHEN they come again and again THEN all partitions stop after the sixth."""
    scene = Scene()
    scene.outcomes = [{WHOLE_SOURCE: EvermarkError("?")} for _ in range(10)]
    scene.run(120.0)
    assert len(scene.readings) == 6
    assert scene.stopped == [0, 1]


def test_an_owner_that_is_told_to_stop_gives_its_lease_back() -> None:
    """GIVEN a source that is read WHEN its owner is stopped THEN `run` returns, and the lease is free."""
    scene = Scene()
    task = scene.runtime.spawn("source", scene.owner.run)
    scene.runtime.spawn("stop", lambda: (scene.runtime.wait(3.0), scene.owner.stop()))
    scene.runtime.baton.run(lambda: task.task.done)
    scene.runtime.baton.close()
    assert scene.leases._held[source_lease("shop")].holder is None


def test_events_leave_the_log_only_when_every_owner_has_found_no_gap() -> None:
    """GIVEN partitions with different owners WHEN the other has not looked yet whether there is a gap, is gone, or has
    found one THEN the owner of the first removes nothing; when it has looked, it may.
    """
    scene = Scene()
    first, second = source_lease("shop"), source_lease("shop", 1)
    other = Holder("other", "host", "boot", 2, "2")
    scene.owner.divided = True
    scene.candidate.share.set([first])
    assert scene.leases.divide(first, [second], other)
    (theirs,) = scene.leases.acquire_all([second], other, 1e6)
    may: list[bool] = []

    def look() -> None:
        def ask() -> None:
            scene.runtime.wait(1.0)
            may.append(scene.owner.may_retain())

        ask()
        scene.leases.note_checked([theirs])
        ask()
        scene.leases.release(theirs)
        ask()
        (again,) = scene.leases.acquire_all([second], other, 1e6)
        ask()
        scene.leases.note_checked([again])
        ask()

    scene.runtime.spawn("look", look)
    scene.run(10.0)
    assert may == [False, True, False, False, True]
    assert scene.leases.rows()[first].checked


def _hang(scene: Scene, _partition: int) -> Resume:
    scene.runtime.wait(1e9)
    return Resume("5", 1)


def test_an_owner_whose_loop_hangs_loses_its_lease_and_one_that_waits_does_not() -> None:
    """GIVEN an owner WHEN nothing comes for an hour THEN it keeps its lease; WHEN a step does not come back THEN the
    lease is let go of after the bound, and whoever runs the loop is told."""
    for hangs in (False, True):
        scene = Scene()
        told: list[str] = []
        scene.owner.candidate = replace(scene.candidate, on_hanging=told.append)
        if hangs:
            scene.begin = partial(_hang, scene)
        scene.run(2 * PATIENT_S)  # the log is read where it hangs, which may take long
        assert scene.said.count("lease let go of") == len(told) == hangs


@pytest.mark.parametrize(("rows", "logged"), [((3, 4), 7), ((3, None), 3), ((None, None), None)])
def test_how_much_was_taken_last_is_told_to_who_reads(rows: tuple[int | None, ...], logged: int | None) -> None:
    """GIVEN what the log says of the last batches THEN it is known, as far as it is said, how much there may be."""
    scene = Scene()
    scene.begin = lambda partition: Resume("5", 1, rows=rows[partition])
    scene.run(1.0)
    assert scene.readings and scene.rows_logged == logged


@pytest.mark.parametrize("slow", ["begin", "newest"])
def test_a_large_log_that_is_read_before_the_first_batch_is_no_hang(slow: str) -> None:
    """GIVEN a log whose end takes half an hour to be read WHEN a partition begins, or its last events are looked up
    THEN the owner keeps its lease, and reads."""
    scene = Scene()
    call = getattr(scene, slow)

    def slowly(given: Any) -> Any:
        scene.runtime.wait(1800.0)
        return call(given)

    setattr(scene, slow, slowly)
    scene.run(PATIENT_S + 1800.0)
    assert scene.readings and "lease let go of" not in scene.said


def test_a_source_that_waits_for_its_breaker_keeps_its_lease() -> None:
    """GIVEN a breaker with a time that is longer than the bound WHEN the source fails THEN its pause is no hang."""
    scene = Scene(IngestLimits(breaker=BreakerLimits(threshold=1, timeout_s=600.0)))

    def fail(_: int) -> Resume:
        raise RuntimeError("unforeseen")

    scene.begin = fail
    scene.run(1000.0)
    assert "lease let go of" not in scene.said


@pytest.mark.parametrize("step", ["prepare", "open_log"])
def test_a_source_that_cannot_be_begun_until_a_person_acts_is_not_tried_all_the_time(step: str) -> None:
    """GIVEN a log that this program cannot read WHEN its source is begun THEN it is tried again now and then, as rarely
    as one that is away: not a lease a second, each with all that an owner begins."""
    scene, tried = Scene(), []

    def fails(*_: object) -> None:
        tried.append(scene.runtime.monotonic())
        raise FormatError("written by a newer program")

    setattr(scene, step, fails)
    scene.run(300.0)
    assert 5 <= len(tried) <= 300.0 / scene.owner.limits.breaker.timeout_s + 1
    assert set(scene.stopped) == {0, 1}


def test_an_owner_that_cannot_begin_to_copy_leaves_no_repairer_behind() -> None:
    """GIVEN what copies rows beside the reading WHEN it cannot be made THEN what closes gaps in that term ends with it:
    it would close the next one beside its successor, and have that step down."""
    scene, running = Scene(), []

    class Watched(Repairer):
        def steps(self) -> Steps[None]:
            running.append(self.epoch)
            try:
                yield from super().steps()
            finally:
                running.remove(self.epoch)

    tries = iter(range(3))

    def copier(epoch: int, *_: object) -> None:
        if next(tries, None) is not None:
            raise UnreachableError("it cannot be asked")

    scene.owner.copier = copier
    seen: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner_module, "Repairer", Watched)
        scene.runtime.spawn("look", lambda: (scene.runtime.baton.sleep(80.0), seen.append(list(running))))
        scene.run(90.0)
    assert len(scene.epochs) == 4
    assert seen == [[scene.epochs[-1]]]
