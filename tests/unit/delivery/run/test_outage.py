"""A receiver that is down, from its first failure to its return (D4, D5): nothing parked, nothing lost, nobody hurt.

The decisions, the group and the follower are the real ones; the log, the receivers and the clock are the test's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise

import pytest

from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.retry import ENDPOINT_BACKOFF_S_MAX, LIMITS
from evermark.delivery.model import Cursor, Fate, MadeBy, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.log.read import FileRange
from evermark.testing.contracts.scene import P0, T0, spec

TURNS_MAX = 200


@dataclass
class World:
    """Two receivers, `well` and `ill`; a batch a turn, a second a turn."""

    head: int = 0
    now: datetime = T0
    down: set[str] = field(default_factory=set)
    retry_after_s: float | None = None
    fate: Fate = Fate.ENDPOINT_FAILED
    got: dict[str, list[int]] = field(default_factory=dict)
    asked: list[tuple[Assignment, datetime, DeliveryOptions]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._leases = MemoryLeases(is_gone=lambda holder: True)
        self._owners = 0
        self.store = MemoryDelivery(self._leases, jitter=lambda: 0.0, clock=lambda: self.now)
        self.restart()
        self.store.open_partition(P0, 0, self.epoch)
        self.store.register([spec("ill"), spec("well")], MadeBy.FILE, {}, self.epoch)

    def restart(self) -> None:
        """Another process: a new epoch, and nothing remembered but what the store holds."""
        self._owners += 1
        lease = self._leases.acquire(DELIVER_LEASE, Holder("i", "h", "b", self._owners, "1"), 1e9)
        assert lease is not None
        self.epoch = lease.epoch
        self.live = LiveGroup(self.store, self, self.epoch, lambda: self.now)
        self.follower = Follower(self.store, self, self.live, self, self.epoch, lambda: self.now)

    # LogView

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        return {P0: (self.head, self.now - timedelta(seconds=10))}

    def files(self, source: str) -> list[FileRange]:
        return [FileRange(f"b{n}", 0, 0, n, n, 5, 100) for n in range(1, self.head + 1)]

    # Deliverer

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        self.asked += [(assignment, self.now, options) for assignment in assignments]
        return [self._one(assignment.spec.name, assignment.span) for assignment in assignments]

    def _one(self, name: str, span: Span) -> Outcome:
        if name in self.down:
            outcome = Outcome(name, self.fate, reason="HTTP 503", retry_after_s=self.retry_after_s)
            return replace(outcome, reached=Cursor(span.after))
        self.got.setdefault(name, []).extend(range(span.after + 1, span.to + 1))
        return replace(Outcome(name, Fate.DONE, accepted=1), reached=Cursor(span.to))

    def turn(self, seconds: float = 1.0, *, batches: int = 1) -> None:
        self.head += batches
        self.now += timedelta(seconds=seconds)
        self.follower.catch_up_group()
        for one in self.follower.due():
            current = one
            while self.follower.catch_up(current) and current.state is not SubscriptionState.LIVE:
                current = self.store.subscription(one.name)

    def state(self, name: str = "ill") -> SubscriptionState:
        return self.store.subscription(name).state

    def times(self, name: str = "ill") -> list[datetime]:
        return [at for assignment, at, _ in self.asked if assignment.spec.name == name]


def until_suspended(world: World) -> None:
    world.down = {"ill"}
    for _ in range(TURNS_MAX):
        due = world.store.subscription("ill").next_attempt_at
        world.turn(max(1.0, (due - world.now).total_seconds()) if due else 1.0)
        if world.state() is SubscriptionState.SUSPENDED:
            return
    raise AssertionError("never suspended")


def test_d4_the_first_failure_moves_it_out_of_the_group_where_the_work_began() -> None:
    """GIVEN a member WHEN its endpoint fails THEN it is behind, at the batch before; the group goes on."""
    world = World()
    world.turn()
    world.down = {"ill"}
    world.turn()
    assert (world.state(), world.state("well")) == (SubscriptionState.BEHIND, SubscriptionState.LIVE)
    assert world.store.group().cursors[P0].batch == 2
    assert world.store.cursors("ill")[P0].batch == 1
    assert world.store.subscription("ill").reason == "HTTP 503"


def test_d4_a_long_outage_parks_nothing_and_makes_no_dead_letters() -> None:
    """GIVEN a receiver down for two days WHEN it returns THEN no row was ever made, and it has every event in order."""
    world = World(down={"ill"})
    for _ in range(48):
        world.turn(3600, batches=5)
        assert world.store.parked.counts() == {}
    assert world.store.cursors("ill")[P0].batch == 0
    world.down.clear()
    for _ in range(3):
        world.turn(3600)
    everything = list(range(1, world.head + 1))
    assert world.got == {"ill": everything, "well": everything}
    assert (world.state(), world.store.subscription("ill").failures) == (SubscriptionState.LIVE, 0)


def test_d4_a_failing_endpoint_waits_longer_each_time_by_its_own_clock() -> None:
    """GIVEN a receiver that stays down WHEN time goes by THEN 1, 2, 4 … s apart; the other is served every second."""
    world = World(down={"ill"})
    for _ in range(70):
        world.turn()
    asked = world.times()
    waits = [(later - at).total_seconds() for at, later in pairwise(asked)]
    assert waits == [1, 2, 4, 8, 30]  # the fifth failure opens the breaker
    assert world.got["well"] == list(range(1, 71))


def test_d4_retry_after_holds_the_endpoint_back() -> None:
    """GIVEN 429 with Retry-After: 60 WHEN time goes by THEN it is not asked again before that."""
    world = World(down={"ill"}, retry_after_s=60.0)
    for _ in range(130):
        world.turn()
    asked = world.times()
    assert [(at - asked[0]).total_seconds() for at in asked] == [0, 60, 120]


def test_d4_gone_disables_and_is_not_asked_again() -> None:
    """GIVEN 410 WHEN weeks go by THEN it is disabled with the reason, and nothing is sent until a person acts."""
    world = World(down={"ill"}, fate=Fate.GONE)
    for _ in range(20):
        world.turn(86_400)
    assert world.state() is SubscriptionState.DISABLED
    assert len(world.times()) == 1
    world.down.clear()
    world.store.resume("ill", world.epoch)
    world.turn()
    assert world.got["ill"] == list(range(1, world.head + 1)), "it drains what it missed"


def test_d5_ten_failures_in_a_row_suspend_and_nine_do_not() -> None:
    """GIVEN a receiver that stays down WHEN it fails for the tenth time THEN it is suspended, with the reason kept."""
    world = World()
    until_suspended(world)
    assert len(world.times()) == LIMITS.suspend_after == 10
    assert world.store.subscription("ill").reason == "HTTP 503"


def test_d5_a_suspended_one_is_still_probed_and_a_success_brings_it_back_with_all_it_missed() -> None:
    """GIVEN a suspended one WHEN its receiver returns THEN the next probe finds out, and it drains the backlog."""
    world = World()
    until_suspended(world)
    probes = len(world.times())
    world.turn(2 * ENDPOINT_BACKOFF_S_MAX)
    assert len(world.times()) == probes + 1
    assert world.state() is SubscriptionState.SUSPENDED, "one more failure changes nothing"
    world.down.clear()
    world.turn(2 * ENDPOINT_BACKOFF_S_MAX)
    world.turn()
    assert world.got["ill"] == list(range(1, world.head + 1))
    assert world.state() is SubscriptionState.LIVE


def test_d5_a_person_resumes_it_at_once() -> None:
    """GIVEN a suspended one whose receiver returned WHEN a person resumes THEN it does not wait for its next probe."""
    world = World()
    until_suspended(world)
    world.down.clear()
    world.store.resume("ill", world.epoch)
    world.turn()
    assert world.got["ill"] == list(range(1, world.head + 1))


@pytest.mark.parametrize("restarted", [False, True])
def test_d4_a_person_resumes_one_that_is_behind_whatever_retry_after_it_was_told(restarted: bool) -> None:
    """GIVEN 429 with Retry-After: 24 h and a receiver that is well again WHEN a person resumes THEN it is tried now."""
    world = World(down={"ill"}, retry_after_s=86_400.0)
    world.turn()
    world.down.clear()
    world.turn()
    assert (world.state(), len(world.times())) == (SubscriptionState.BEHIND, 1), "it waits"
    if restarted:
        world.restart()
    world.store.resume("ill", world.epoch)
    world.turn()
    assert world.got["ill"] == list(range(1, world.head + 1))


def test_d5_what_is_known_of_an_endpoint_survives_a_restart() -> None:
    """GIVEN eight failures WHEN the process is another one THEN it waits out the same time, and two more suspend it."""
    world = World(down={"ill"})
    while world.store.subscription("ill").failures < 8:
        world.turn(300)
    due = world.store.subscription("ill").next_attempt_at
    world.restart()
    asked = len(world.times())
    while due is not None and world.now + timedelta(seconds=10) < due:
        world.turn(10)
    assert len(world.times()) == asked, "a restart is no reason to ask early"
    for _ in range(2):
        world.restart()
        world.turn(300)
    assert world.state() is SubscriptionState.SUSPENDED


@pytest.mark.parametrize("failures", [1, 5, 12])
def test_d5_an_endpoint_that_failed_is_met_with_one_request_until_one_is_accepted(failures: int) -> None:
    """GIVEN failures WHEN it is asked again THEN as a probe; WHEN a probe succeeded THEN the rest is sent as ever."""
    world = World(down={"ill"})
    while world.store.subscription("ill").failures < failures:
        world.turn(300, batches=20)
    world.asked.clear()
    world.down.clear()
    world.turn(600, batches=20)
    mine = [assignment.probe for assignment, _, _ in world.asked if assignment.spec.name == "ill"]
    assert mine[0] is True
    assert not any(mine[1:])
    assert not any(assignment.probe for assignment, _, _ in world.asked if assignment.spec.name == "well")


def test_d9_caught_up_events_are_historical_and_live_ones_are_not() -> None:
    """GIVEN one that was behind WHEN it catches up and joins THEN only what came late says so."""
    world = World(down={"ill"})
    for _ in range(3):
        world.turn(300)
    world.down.clear()
    world.asked.clear()
    while world.state() is not SubscriptionState.LIVE:
        world.turn(300)
    late = [options.historical for assignment, _, options in world.asked if assignment.spec.name == "ill"]
    assert late and all(late)
    world.asked.clear()
    world.turn()
    told = [(assignment.spec.name, options.historical) for assignment, _, options in world.asked]
    assert told == [("ill", False), ("well", False)]


def test_d13_the_group_never_stands_still_for_one_that_is_down() -> None:
    """GIVEN a receiver down for hours WHEN events flow THEN the other one gets each in the turn it was taken."""
    world = World(down={"ill"})
    for turn in range(1, 300):
        world.turn(60)
        assert world.got["well"][-1] == turn
