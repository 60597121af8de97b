"""Carrying a recovery out: who is told, in which order, and what a failure costs. Over a real State, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evermark.cluster.fence import source_lease
from evermark.cluster.postgres import PostgresLeases
from evermark.errors import BusyError, ConflictError, EngineError, EvermarkError, GapError, IdentityError
from evermark.ingest.repair.base import Choice, Recovery, Step
from evermark.ingest.repair.postgres import Recoveries
from evermark.ingest.repair.steps import Repairer as Steps
from evermark.observe.logging import get_logger
from evermark.runtime import Task, Threads
from evermark.sources.base import Gap, Repair, Whereabouts
from evermark.testing.states import fresh_state, owners
from evermark.testing.until import until


class Repairer(Repair):
    """Tells what was asked of it, and fails with what it is given to fail with."""

    def __init__(self, told: list[str], failures: list[EvermarkError]) -> None:
        self.told, self.failures = told, failures
        self.meanwhile: Callable[[], object] = lambda: None

    def begin(
        self,
        stopped: Callable[[], bool],
        left_at: str | None = None,
        whereabouts: Callable[[], Whereabouts] | None = None,
    ) -> Gap:
        self.told.append(f"begin {left_at}")
        self.meanwhile()
        if self.failures:
            raise self.failures.pop(0)
        return cast("Gap", SimpleNamespace(position="9"))

    def finish(self, position: str) -> None:
        self.told.append(f"finish {position}")

    def abandon(self) -> None:
        self.told.append("abandon")

    def close(self) -> None: ...


class Scene:
    def __init__(self, recoveries: Recoveries, epoch: int) -> None:
        self.recoveries, self.epoch = recoveries, epoch
        self.told: list[str] = []
        self.failures: list[EvermarkError] = []
        self.ended: list[EvermarkError | None] = []
        self.repairer = Repairer(self.told, self.failures)
        source = SimpleNamespace(partitions=lambda: [0], repair=lambda _: self.repairer)
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        observer = SimpleNamespace(opened=nothing, begun=nothing, waits=nothing, ended=nothing, left_behind=nothing)
        self.runtime = Threads()
        self.steps = Steps(
            "shop",
            epoch,
            cast("Any", source),
            cast("Any", SimpleNamespace(recoveries=recoveries)),
            cast("Any", observer),
            self.runtime,
            get_logger(),
            0.01,
            lambda partition: self.told.append(f"let go {partition}"),
            lambda _, error: self.ended.append(error),
            lambda: self.told.append("step down"),
        )
        self.task: Task | None = None

    def newest(self) -> Recovery:
        return self.recoveries.past("shop")[0]

    def start(self) -> None:
        self.task = self.runtime.spawn("repair", self.steps.run)

    def run_to_its_end(self) -> None:
        self.start()
        until(lambda: self.ended, "it has ended")


@pytest.fixture
def scene(pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Looks again at once instead of after a while; closing the gap itself is tested where Spark is."""
    with fresh_state(pg_dsn) as state:
        take_over = owners(PostgresLeases(state, is_gone=lambda _: True))
        made = Scene(Recoveries(state), take_over(source_lease("shop")))

        def close_gap(self: Steps, recovery: Recovery, _gap: Gap) -> None:
            made.told.append(f"close by {recovery.choice}")
            self.tools.recoveries.taking(recovery, 0, 3, self.epoch)

        monkeypatch.setattr(Steps, "_close_gap", close_gap)
        yield made
        made.steps.stopped.set()
        assert made.task is None or made.task.join(60)


def found(scene: Scene, error: EvermarkError) -> EvermarkError | None:
    return scene.steps.found(0, error, "5")


def test_the_partition_is_let_go_of_before_anything_is_touched(scene: Scene) -> None:
    """GIVEN a gap WHEN it is closed THEN nobody reads while it is, the place must be ours, and then it is over."""
    assert found(scene, GapError("lost")) is None
    assert scene.steps.partitions() == {0}
    scene.run_to_its_end()
    assert scene.told == ["let go 0", "begin 5", "close by repair", "finish 9"]
    assert scene.ended == [None]
    assert scene.steps.partitions() == set()
    assert (scene.newest().step, scene.newest().taken) == (Step.DONE, 3)


def test_another_server_is_left_alone_at_once(scene: Scene) -> None:
    """GIVEN a gap nobody has spoken about WHEN the server is another THEN it fails, with that as its reason."""
    scene.failures.append(IdentityError("not the one we left", hint="choose"))
    found(scene, GapError("lost"))
    scene.run_to_its_end()
    assert isinstance(scene.ended[0], IdentityError)
    assert scene.told == ["let go 0", "begin 5", "abandon"]
    assert scene.newest().step is Step.FAILED


@pytest.mark.parametrize("error", [GapError("lost too"), EngineError("a row it cannot read")])
def test_three_tries_are_enough_and_leave_no_slot_behind(scene: Scene, error: EvermarkError) -> None:
    """GIVEN a failure that comes again WHEN it came three times THEN a person has to look, and nothing keeps WAL."""
    scene.failures += [error] * 5
    found(scene, GapError("lost"))
    scene.run_to_its_end()
    assert [word for word in scene.told if word != "let go 0"] == [*["begin 5"] * 3, "abandon"]
    assert scene.ended[0] is not None and "3 tries" in scene.ended[0].message


def test_what_passes_by_itself_spends_no_try(scene: Scene) -> None:
    """GIVEN a server that is busy for long WHEN it is free at last THEN the gap is closed."""
    scene.failures += [BusyError("wait")] * 5
    found(scene, GapError("lost"))
    scene.run_to_its_end()
    assert scene.ended == [None]
    assert scene.newest().tries == 0


def test_losing_the_log_to_somebody_is_passed_on(scene: Scene) -> None:
    """GIVEN a commit that lost WHEN repairing steps down THEN the owner is told: nobody else would end its lease."""
    scene.failures.append(ConflictError("another writer"))
    found(scene, GapError("lost"))
    scene.start()
    until(lambda: "step down" in scene.told, "the owner is told")
    assert scene.newest().step is Step.OPENED


def test_a_choice_made_while_the_slot_is_waited_for_is_heeded(scene: Scene) -> None:
    """GIVEN a gap to be skipped WHEN a person says repair meanwhile THEN it is repaired."""
    asked = scene.recoveries.open
    asked("shop", 0, "chosen", "5", scene.epoch, Choice.SKIP)
    scene.repairer.meanwhile = lambda: asked("shop", 0, "after all", "5", scene.epoch, Choice.REPAIR)
    scene.run_to_its_end()
    assert scene.told == ["let go 0", "begin None", "close by repair", "finish 9"]
