"""The steps that close a gap, over stores in memory: what happens when an answer is lost, and where batches end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.errors import EvermarkError, GapError, IdentityError, StaleError, UnreachableError
from evermark.ingest.batch_taker import BatchTaker
from evermark.ingest.repair.base import TRIES_MAX, Choice, Recovery, Step
from evermark.ingest.repair.memory import MemoryRecoveries
from evermark.ingest.repair.steps import TIDY_EVERY, FoundFile, Repairer, RepairTarget, batches_of
from evermark.log.base import LogFile
from evermark.log.opened import PLAYBOOK, lost
from evermark.sources.base import Gap, Repair, Whereabouts
from evermark.testing.states import owners
from tests.unit.ingest.ingest_world import World, position

HOLE = cast("Gap", SimpleNamespace(position="9"))


class Forgetful(MemoryRecoveries):
    """Does what it is told, and loses the answer to one step."""

    loses: Step | None = None

    def move(self, recovery: Recovery, step: Step, epoch: int, **rest: Any) -> None:
        super().move(recovery, step, epoch, **rest)
        if step is self.loses:
            self.loses = None
            raise UnreachableError("state did not answer")


class Easy(Repair):
    """Nothing is wrong with it, unless it is given an error."""

    error: EvermarkError | None = None
    abandoned = 0

    def __init__(self, gap: Gap = HOLE) -> None:
        self.gap = gap

    def begin(
        self,
        stopped: Callable[[], bool],
        left_at: str | None = None,
        whereabouts: Callable[[], Whereabouts] | None = None,
    ) -> Gap:
        if self.error is not None:
            raise self.error
        return self.gap

    def finish(self, position: str) -> None: ...

    def abandon(self) -> None:
        self.abandoned += 1

    def close(self) -> None: ...


class Scene:
    """A mender whose news are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        leases = MemoryLeases(is_gone=lambda _: True)
        take = owners(leases)
        self.take_over = lambda: take(source_lease("shop"))
        self.epoch = self.take_over()
        self.recoveries = Forgetful(leases)
        self.repair = Easy()
        self.now = datetime.now(UTC)
        self.ends: list[tuple[int, EvermarkError | None]] = []
        self.waits: list[EvermarkError] = []
        self.stands: dict[int, str] = {}
        self.repairs: dict[int, Easy] = {0: self.repair}
        source = SimpleNamespace(
            partitions=lambda: list(self.repairs),
            repair=lambda partition: self.repairs[partition],
        )
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        taker = SimpleNamespace(stands=lambda: self.stands)
        observer = SimpleNamespace(
            opened=nothing,
            begun=nothing,
            taken=nothing,
            closed=nothing,
            left_behind=nothing,
            waits=lambda _, error: self.waits.append(error),
            ended=lambda recovery, error: self.ends.append((recovery.partition, error)),
        )
        monkeypatch.setattr(Repairer, "_close_gap", nothing)
        self.repairer = Repairer(
            "shop",
            self.epoch,
            cast("Any", source),
            cast("Any", SimpleNamespace(recoveries=self.recoveries, open_log=lambda _: (None, taker))),
            cast("Any", observer),
            cast("Any", SimpleNamespace(now=lambda: self.now, wake=Event)),
            cast("Any", None),
            1.0,
            nothing,
            nothing,
            nothing,
        )


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_reading_goes_on_though_the_answer_to_the_last_step_was_lost(scene: Scene) -> None:
    """GIVEN a gap that is closed WHEN State does not answer to that THEN the next look lets reading go on."""
    assert scene.repairer.found(0, GapError("lost"), "5") is None
    scene.recoveries.loses = Step.DONE
    with pytest.raises(UnreachableError):
        scene.repairer.carry_out_all()
    assert (scene.repairer.partitions(), scene.ends) == ({0}, [])
    scene.repairer.carry_out_all()
    assert (scene.repairer.partitions(), scene.ends) == (set(), [(0, None)])
    scene.repairer.carry_out_all()
    assert len(scene.ends) == 1, "an end is told once"


def test_a_repair_knows_where_partitions_stand_and_where_they_went_on_that_were_repaired_meanwhile(
    scene: Scene,
) -> None:
    """GIVEN three partitions with a gap WHEN they are repaired in turn THEN each is told where all stand and where the
    others went on, and of none that was repaired before its own gap."""
    scene.repairs |= {1: Easy(cast("Gap", SimpleNamespace(position="7"))), 2: Easy()}
    for partition in (0, 1, 2):
        assert scene.repairer.found(partition, GapError("lost"), "5") is None
    told: list[Whereabouts] = []

    def begin(self: Easy, stopped: object, left_at: object, whereabouts: Callable[[], Whereabouts]) -> Gap:
        told.append(whereabouts())
        return self.gap

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Easy, "begin", begin)
        scene.repairer.carry_out_all()
        assert [list(each.repaired) for each in told] == [[], ["9"], ["7", "9"]]
        assert all(each.at is scene.stands for each in told)
        assert scene.repairer.found(0, GapError("lost again"), "8") is None
        scene.repairer.carry_out_all()
        assert [list(each.repaired) for each in told[3:]] == [["9"]]


def test_a_person_is_asked_for_though_the_answer_to_giving_up_was_lost(scene: Scene) -> None:
    """GIVEN a gap that cannot be closed WHEN State does not answer to that THEN the next look says so."""
    assert scene.repairer.found(0, GapError("lost"), "5") is None
    scene.repair.error = IdentityError("another server", hint="choose")
    scene.recoveries.loses = Step.FAILED
    with pytest.raises(UnreachableError):
        scene.repairer.carry_out_all()
    scene.repairer.carry_out_all()
    ((partition, error),) = scene.ends
    assert (partition, error is not None and "another server" in error.message) == (0, True)


def test_a_gap_that_was_given_up_is_told_in_the_same_words_later(scene: Scene) -> None:
    """GIVEN three tries that failed WHEN the gap is met once more THEN a person reads what the tries ended with."""
    assert scene.repairer.found(0, GapError("lost"), "5") is None
    scene.repair.error = GapError("its slot cannot be made")
    while not scene.ends:
        with suppress(GapError):
            scene.repairer.carry_out_all()
    ((_, ended),) = scene.ends
    found = scene.repairer.found(0, GapError("lost"), "5")
    assert (found and found.message) == (ended and ended.message)
    assert found is not None and found.message.count("could not be closed") == 1


def test_an_error_in_one_gap_holds_up_no_other(scene: Scene) -> None:
    """GIVEN two gaps WHEN the server of the first is away THEN the second is closed, and the error is told then."""
    scene.repairs[1] = Easy()
    for partition in (0, 1):
        assert scene.repairer.found(partition, GapError("lost"), "5") is None
    scene.repair.error = UnreachableError("away")
    with pytest.raises(UnreachableError, match="away"):
        scene.repairer.carry_out_all()
    assert (scene.repairer.partitions(), scene.ends) == ({0}, [(1, None)])


def test_a_gap_whose_closing_needs_a_file_that_is_missing_waits_for_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a gap WHEN a file of the log is missing that has to be compared THEN no try is spent, however often it
    fails, and the file and the remedy are told; WHEN the file is back THEN the gap is closed."""

    def fail(*_: Any) -> None:
        raise lost("f.parquet")

    assert scene.repairer.found(0, GapError("lost"), "5") is None
    with monkeypatch.context() as patched:
        patched.setattr(Repairer, "_close_gap", fail)
        for _ in range(TRIES_MAX + 2):
            with pytest.raises(UnreachableError, match=r"f\.parquet of the log is missing"):
                scene.repairer.carry_out_all()
    recovery = scene.recoveries.current("shop", 0)
    assert recovery is not None and recovery.tries == 0
    assert "f.parquet" in recovery.error and PLAYBOOK in recovery.error
    assert len(scene.waits) == TRIES_MAX + 2 and all(PLAYBOOK in error.hint for error in scene.waits)
    assert (scene.repairer.partitions(), scene.ends) == ({0}, [])
    scene.repairer.carry_out_all()
    assert (scene.repairer.partitions(), scene.ends) == (set(), [(0, None)])


def test_a_gap_that_is_being_recorded_is_not_taken_for_one_that_ended(scene: Scene) -> None:
    """GIVEN a gap that was found WHEN nobody has begun to close it THEN no end of it is told."""
    with scene.repairer._lock:
        scene.repairer._open.add(0)
    scene.repairer.carry_out_all()
    assert (scene.repairer.partitions(), scene.ends) == ({0}, [])


def test_what_a_late_owner_left_behind_is_removed_by_its_successor(scene: Scene) -> None:
    """GIVEN a gap that was closed WHEN somebody makes a slot for it later THEN the owner drops it, and no stranger."""
    scene.repairer.carry_out_all()
    assert scene.repair.abandoned == 0, "where nothing was ever lost nothing is asked"
    scene.repairer.found(0, GapError("lost"), "5")
    scene.repairer.carry_out_all()
    scene.repairer.carry_out_all()
    assert (len(scene.ends), scene.repair.abandoned) == (1, 0)
    scene.now += TIDY_EVERY
    scene.repairer.carry_out_all()
    scene.repairer.carry_out_all()
    assert scene.repair.abandoned == 1
    scene.now += TIDY_EVERY
    scene.take_over()
    with pytest.raises(StaleError):
        scene.repairer.carry_out_all()
    assert scene.repair.abandoned == 1


def test_what_a_person_skipped_before_the_first_event_stays_skipped() -> None:
    """GIVEN a partition that has begun, and never had an event WHEN a person skips to now, and its checkpoint is lost
    after that THEN reading goes on where it was skipped to, not where it began."""
    world = World()
    take = owners(world.leases)
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731

    def taker() -> BatchTaker:
        stores: Any = (world.source, world.log, world, world.heads, world.checkpoints)
        return BatchTaker("shop", take(source_lease("shop")), *stores)

    owner = taker()
    assert owner.begin(0).position == position(0)
    recoveries = MemoryRecoveries(world.leases)
    recoveries.open("shop", 0, "asked", "", owner.epoch, Choice.SKIP)
    observer = SimpleNamespace(**dict.fromkeys(("begun", "taken", "closed", "ended"), nothing))
    tools = SimpleNamespace(recoveries=recoveries, open_log=lambda _: (world.log, owner))
    runtime = SimpleNamespace(now=lambda: datetime.now(UTC), wake=Event)
    gap = SimpleNamespace(position=position(5))
    repair = Easy(cast("Gap", gap))
    source = SimpleNamespace(partitions=lambda: [0], repair=lambda _: repair)
    given: list[Any] = [source, tools, observer, runtime, None, 1.0, nothing, nothing, nothing]
    Repairer("shop", owner.epoch, *given).carry_out_all()
    assert recoveries.past("shop")[0].step is Step.DONE
    assert (world.checkpoints.load("shop", 0).position, world.log.commits) == (position(5), [])
    world.checkpoints.delete("shop", 0)
    assert taker().begin(0).position == position(5)


def test_batches_that_close_a_gap_follow_each_other_and_end_where_reading_goes_on() -> None:
    """GIVEN what was found WHEN it is cut into batches THEN they are dense; without any only the place is kept."""
    wanted = RepairTarget("shop", 0, 3, 7, "m")
    found = [FoundFile(LogFile(f"f{n}", 2, 1), f"n{n}") for n in range(2)]
    batches = [(t.batch, t.start, t.end, t.rows, t.epoch) for t in batches_of(found, HOLE, wanted)]
    assert batches == [(4, "m", "n0", 2, 7), (5, "n0", "9", 2, 7)]
    ((batch, start, end, rows),) = [(t.batch, t.start, t.end, t.rows) for t in batches_of([], HOLE, wanted)]
    assert (batch, start, end, rows) == (4, "m", "9", 0)
