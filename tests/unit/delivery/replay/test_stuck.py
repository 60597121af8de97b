"""A file of the log that is missing: a replay waits right before it and says so, and the others go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evermark.app.delivering import DeploymentReport
from evermark.delivery.decide.retry import STUCK_REST_S
from evermark.delivery.model import Fate, Outcome, SourcePartition
from evermark.delivery.replay.plan import AskedBy, Replayed, ReplayState, ReplayWork, Request, Target
from evermark.delivery.replay.timeslice import Mark
from evermark.errors import EvermarkError, FormatError, NotFoundError, UnreachableError
from evermark.log.opened import PLAYBOOK, lost
from evermark.log.read import FileRange
from evermark.observe.health import HealthBoard, PartitionHealth, overall
from evermark.observe.metrics import Metrics
from evermark.testing.contracts.scene import T0
from tests.unit.delivery.test_retention import DAY, World


@dataclass
class Holed(World):
    """A file for each day, and a deliverer that raises what the log raises if it has to read one that is `gone`."""

    gone: set[str] = field(default_factory=set)
    tries: dict[str, int] = field(default_factory=dict)
    got: dict[str, set[str]] = field(default_factory=dict)
    log_error: EvermarkError | None = None  # of the whole log
    away: bool = False  # the log of another source

    def __post_init__(self) -> None:
        super().__post_init__()
        self.board = HealthBoard(self._clock)
        self.board.put("shop", 0, PartitionHealth.HEALTHY)
        stores, view = SimpleNamespace(state=None, sources={}), SimpleNamespace(reader=None)
        self.report = DeploymentReport(cast("Any", stores), cast("Any", view), self.board, Metrics(), 0)
        self.report._log = SimpleNamespace(error=lambda *_, **__: None, warning=lambda *_, **__: None)
        self.replayer.on_stuck, self.replayer.on_step = self.report.replay_stuck, self.report.by_replay
        self.days(9)

    def _clock(self) -> float:
        return self.now.timestamp()

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        return {**super().heads(), SourcePartition("away", 0): (7, self.now - timedelta(seconds=10))}

    def files(self, source: str) -> list[FileRange]:
        if source == "away" and self.away:
            raise UnreachableError("the log of away does not answer", hint="see to the disk")
        if self.log_error is not None:
            raise self.log_error
        return super().files(source)

    def replay(self, work: ReplayWork, ahead: Any = None) -> Replayed:
        name = work.spec.name
        self.tries[name] = self.tries.get(name, 0) + 1
        for path in self.gone.intersection(work.slice.paths):
            raise lost(path)
        self.got.setdefault(name, set()).update(work.slice.paths)
        return Replayed(work.slice.end, Outcome(name, Fate.DONE, accepted=work.slice.rows))

    def ask(self, name: str) -> str:
        return self.replays.request(Request(AskedBy.CLI, "shop", T0, T0 + 9 * DAY, subscription=name), self.epoch)

    def look(self, seconds: float) -> None:
        """As often as the loop of replays."""
        until: datetime = self.now + timedelta(seconds=seconds)
        while self.now < until:
            replays, due = self.replayer.look()
            self.report.replaying(replays)
            for one in due:
                self.replayer.step(one, flowing=False)
            self.now += timedelta(seconds=0.5)

    def target(self, replay: str) -> Target:
        return self.replays.one(replay).targets[0]

    def trouble(self) -> list[tuple[str, str, str]]:
        return [(each.what, each.reason, each.hint) for each in self.board.log_troubles()]


def test_a_replay_waits_right_before_a_file_that_is_missing_and_says_so() -> None:
    """GIVEN two replays WHEN a file that one of them needs is missing THEN it has sent what comes before, says which
    file and what to do, and tries again with a backoff; the other ends; health is not healthy. WHEN the file is back
    THEN it ends too, and nothing is said any more."""
    world = Holed()
    world.gone = {"b5"}
    made = world.ask("a")
    other = world.replays.request(Request(AskedBy.CLI, "shop", T0, T0 + 4 * DAY, subscription="b"), world.epoch)
    world.look(60)
    target = world.target(made)
    assert "the file b5 of the log is missing" in target.reason and PLAYBOOK in target.reason
    assert target.failures > 1 and target.next_attempt_at is not None
    assert world.got["a"] == {"b1", "b2", "b3", "b4"}, "all that comes before, and nothing behind"
    assert world.replays.one(other).state is ReplayState.DONE
    assert [(what, reason) for what, reason, _ in world.trouble()] == [
        ("replay", f"replay {made} for subscription a: the file b5 of the log is missing")
    ]
    assert PLAYBOOK in world.trouble()[0][2]
    assert overall(world.board.partitions(), log_troubles=world.board.log_troubles()) == "degraded"
    world.tries.clear()
    world.look(600)
    assert world.tries["a"] <= 600 / STUCK_REST_S
    assert world.trouble() != [], "it is said as long as it lasts"
    world.gone = set()
    world.look(STUCK_REST_S + 5)
    assert world.replays.one(made).state is ReplayState.DONE
    assert world.got["a"] == {f"b{n}" for n in range(1, 10)}
    assert world.trouble() == []


@pytest.mark.parametrize("end", ["cancelled", "given up"])
def test_nothing_is_said_of_a_replay_that_ended_before_a_missing_file(end: str) -> None:
    """GIVEN a replay that stands before a missing file WHEN it is cancelled, or the file is given up and nothing is
    left to send THEN health says nothing of it any more."""
    world = Holed()
    world.gone = {"b9"}
    made = world.ask("a")
    world.look(30)
    assert world.trouble() != []
    if end == "cancelled":
        world.replays.cancel(made, world.epoch)
    else:
        world.head = 8
    world.look(STUCK_REST_S + 2)
    assert world.replays.one(made).state is (ReplayState.CANCELLED if end == "cancelled" else ReplayState.DONE)
    assert world.trouble() == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotFoundError("no log"), "the log of shop is gone"),
        (FormatError("the log of shop/0 ends at batch 2, but batch 9 was taken"), "ends at batch 2"),
    ],
)
def test_a_replay_of_a_log_that_is_gone_is_not_done(error: EvermarkError, said: str) -> None:
    """GIVEN a replay that runs, and one that has not begun WHEN the whole log is away, or its newest commits are THEN
    both wait, the first says why, and they end when the log is back."""
    world = Holed()
    made = world.ask("a")
    world.replayer.look()
    world.log_error = error
    later = world.ask("b")
    world.look(5)
    assert world.replays.one(made).state is ReplayState.RUNNING
    assert world.target(made).mark == Mark(T0) and said in world.target(made).reason
    assert world.replays.one(later).state is ReplayState.WAITING
    assert said in world.replays.one(later).reason
    world.log_error = None
    world.look(STUCK_REST_S + 2)
    assert [world.replays.one(one).state for one in (made, later)] == [ReplayState.DONE] * 2


def test_a_replay_that_cannot_start_holds_up_no_other_and_says_why() -> None:
    """GIVEN a replay of a source whose log cannot be listed, and after it one of another source WHEN the loop goes on
    THEN the other is done; the first says why it waits, and so does health; WHEN the log is back THEN it starts, and
    nothing is said any more."""
    world = Holed()
    world.replayer.sources = ["shop", "away"]
    world.away = True
    waiting = world.replays.request(Request(AskedBy.CLI, "away", T0, T0 + 9 * DAY, subscription="b"), world.epoch)
    well = world.ask("a")
    listed = 0
    for _ in range(30):
        world.look(1)
        listed += bool(world.trouble())
    assert listed == 30, "it is said as long as it lasts"
    assert world.replays.one(well).state is ReplayState.DONE
    found = world.replays.one(waiting)
    assert (found.state, found.reason) == (ReplayState.WAITING, "the log of away does not answer; see to the disk")
    assert world.trouble() == [("replay", f"replay {waiting}: the log of away does not answer", "see to the disk")]
    world.away = False
    world.look(STUCK_REST_S + 2)
    found = world.replays.one(waiting)
    assert (found.state, found.reason, world.trouble()) == (ReplayState.DONE, "", [])


def test_a_replay_that_was_cancelled_before_it_could_start_stands_before_nothing() -> None:
    """GIVEN a replay that cannot start WHEN a person cancels it THEN health says nothing of it any more."""
    world = Holed()
    world.replayer.sources, world.away = ["shop", "away"], True
    waiting = world.replays.request(Request(AskedBy.CLI, "away", T0, T0 + 9 * DAY, subscription="b"), world.epoch)
    world.look(5)
    assert world.trouble() != []
    world.replays.cancel(waiting, world.epoch)
    world.look(1)
    assert world.trouble() == []
