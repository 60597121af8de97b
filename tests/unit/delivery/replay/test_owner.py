"""The loop of replays: how often a step that fails for a reason of our own is tried. In simulated time, in memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

from evermark.delivery.decide.retry import STUCK_REST_S
from evermark.delivery.model import Fate, Outcome
from evermark.delivery.replay.owner import ReplayLimits, ReplayLoop
from evermark.delivery.replay.plan import AskedBy, Replay, Replayed, ReplayState, ReplayWork, Request
from evermark.errors import EvermarkError, UnreachableError
from evermark.observe.health import TROUBLE_TOLD_S
from simulator.baton import Baton, BatonRuntime, Process
from tests.unit.delivery.test_retention import DAY, T0, World


@dataclass
class Refused(World):
    """A deliverer that cannot work for those in `refused`, though the log and the receivers are well."""

    refused: set[str] = field(default_factory=set)
    tries: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runtime = BatonRuntime(Baton(random.Random(1), 0.0, 0.01), Process("p"))
        quiet = lambda *_, **__: None  # noqa: E731
        log = SimpleNamespace(debug=quiet, info=quiet, warning=quiet, error=quiet)
        observer = cast("Any", SimpleNamespace(replaying=quiet, by_replay=quiet, replay_stuck=self._stuck))
        self.stuck: list[str] = []
        self.ended = self.runtime.wake()
        self.loop = ReplayLoop(self.replayer, {}, observer, self.runtime, log, (self.ended,), 2)
        self.days(9)
        began = self.runtime.monotonic()
        self.replayer.clock = lambda: self.now + timedelta(seconds=self.runtime.monotonic() - began)

    def replay(self, work: ReplayWork, ahead: Any = None) -> Replayed:
        name = work.spec.name
        self.tries[name] = self.tries.get(name, 0) + 1
        if name in self.refused:
            raise UnreachableError("the engine is away")
        return Replayed(work.slice.end, Outcome(name, Fate.DONE, accepted=work.slice.rows))

    def _stuck(self, replay: Replay, subscription: str | None, error: EvermarkError) -> None:
        self.stuck.append(f"{subscription}: {error.message}")

    def ask(self, name: str) -> str:
        return self.replays.request(Request(AskedBy.CLI, "shop", T0, T0 + 9 * DAY, subscription=name), self.epoch)

    def run(self, *seconds: float) -> list[int]:
        """The loop for as long as all of these; how often "a" had been tried after each."""
        tried: list[int] = []

        def watch() -> None:
            for some in seconds:
                self.runtime.wait(some)
                tried.append(self.tries.get("a", 0))
                if len(tried) < len(seconds):
                    self.refused.clear()
            self.ended.set()

        task = self.runtime.spawn("replays", self.loop.run)
        self.runtime.spawn("watch", watch)
        self.runtime.baton.run(lambda: task.task.done)
        self.runtime.baton.close()
        return tried


def test_a_step_that_fails_is_tried_less_and_less_often_and_holds_up_no_other() -> None:
    """GIVEN replays for two, for one of which no step can be made WHEN minutes pass THEN that one is tried every ten
    seconds at last, and the other is done."""
    world = Refused(refused={"a"})
    failing, well = world.ask("a"), world.ask("b")
    (tried,) = world.run(300.0)
    longest = ReplayLimits().failed_wait_s_max
    assert 300 / longest / 2 < tried < 300 / longest + 8
    assert world.replays.one(failing).state is ReplayState.RUNNING
    assert world.replays.one(well).state is ReplayState.DONE
    # AND it is said of the replay, and told as long as it lasts; a ttl of it begins
    (target,) = world.replays.one(failing).targets
    assert target.reason == "the engine is away" and target.stuck_since is not None
    assert set(world.stuck) == {"a: the engine is away"} and len(world.stuck) > 300 / TROUBLE_TOLD_S


def test_a_step_that_failed_once_or_twice_is_said_in_the_log_alone() -> None:
    """GIVEN a replay whose first steps fail WHEN the next one goes well THEN nothing was noted of it."""
    world = Refused(refused={"a"})
    made = world.ask("a")
    world.run(1.2, 15.0)
    assert world.replays.one(made).state is ReplayState.DONE
    assert world.stuck == [] and world.tries["a"] >= 2


def test_a_step_that_failed_goes_on_soon_after_the_reason_is_gone() -> None:
    """GIVEN a replay that could not go on for minutes WHEN it can THEN it is done within the longest wait."""
    world = Refused(refused={"a"})
    made = world.ask("a")
    before, after = world.run(300.0, ReplayLimits().failed_wait_s_max + STUCK_REST_S)
    assert before < after
    found = world.replays.one(made)
    assert (found.state, found.targets[0].reason, found.targets[0].stuck_since) == (ReplayState.DONE, "", None)
