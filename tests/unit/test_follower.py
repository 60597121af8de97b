"""Who is served beside the group and who within it: nobody who is slow may make the others wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery import follower as following
from evermark.delivery.base import Fate, MadeBy, Outcome, Place, Subscription, SubscriptionSpec, SubscriptionState
from evermark.delivery.follower import Follower
from evermark.delivery.live import LiveGroup
from evermark.delivery.memory import MemoryDelivery
from evermark.delivery.work import Delivered, Manner, Span
from evermark.log.read import FileRange
from evermark.testing.contracts.scene import P0, T0, spec

STEPS_MAX = 50


@dataclass
class World:
    """A log whose head moves, receivers that take their time, and a clock that only they move."""

    pace_s: dict[str, float]
    head: int = 0
    now: datetime = T0
    lock_held: list[tuple[str, bool]] = field(default_factory=list)
    budgets: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        leases = MemoryLeases(is_gone=lambda _: True)
        lease = leases.acquire(DELIVER_LEASE, Holder("here", "host", "boot", 1, "now"), 1e9)
        assert lease is not None
        self.epoch = lease.epoch
        self.store = MemoryDelivery(leases, clock=lambda: self.now)
        self.store.open_place(P0, 0, self.epoch)
        self.store.register([spec(name) for name in self.pace_s], MadeBy.FILE, {}, self.epoch)
        self.live = LiveGroup(self.store, self, self.epoch, lambda: self.now)
        self.follower = Follower(self.store, self, self.live, self, self.epoch, lambda: self.now)

    # LogView

    def heads(self) -> Mapping[Place, tuple[int, datetime]]:
        return {P0: (self.head, self.now - timedelta(seconds=10))}

    def files(self, source: str) -> list[FileRange]:
        return [FileRange(f"b{n}", 0, 0, n, n, 5, 100) for n in range(1, self.head + 1)]

    # Deliverer

    def deliver(self, span: Span, specs: Sequence[SubscriptionSpec], manner: Manner) -> list[Delivered]:
        self.lock_held.append((specs[0].name if len(specs) == 1 else "group", self.live.lock.locked()))
        self.budgets.append(manner.budget_s)
        limit = manner.budget_s if manner.slack_s is None else manner.slack_s
        took = [min(self.pace_s[one.name], limit if limit is not None else 1e9) for one in specs]
        self.now += timedelta(seconds=max(took))
        return [self._delivered(one, span, limit) for one in specs]

    def _delivered(self, one: SubscriptionSpec, span: Span, limit: float | None) -> Delivered:
        if limit is not None and self.pace_s[one.name] > limit:
            return Delivered(one.name, span.after, Outcome(one.name, Fate.UNFINISHED, reason="slow"))
        return Delivered(one.name, span.to, Outcome(one.name, Fate.DONE, accepted=5))

    def state(self, name: str) -> SubscriptionState:
        return self.store.subscriptions()[name].state

    def one(self, name: str) -> Subscription:
        return self.store.subscriptions()[name]

    def turn(self) -> None:
        """One more batch, the group, and whoever is due, once each."""
        self.head += 1
        self.follower.catch_up_group()
        for subscription in self.follower.due():
            self.follower.catch_up(subscription)


def test_a_slow_receiver_leaves_the_group_and_is_served_beside_it() -> None:
    """GIVEN one that needs five seconds WHEN events flow THEN it gets all of them, and the group never waits for it."""
    world = World({"quick": 0.05, "slow": 5.0})
    for _ in range(20):
        world.turn()
    assert (world.state("quick"), world.state("slow")) == (SubscriptionState.LIVE, SubscriptionState.BEHIND)
    assert ("slow", True) not in world.lock_held, "the group stood still for it"
    assert world.store.cursors("slow")[P0] >= world.head - 1


def test_it_comes_back_when_it_is_quick_again() -> None:
    """GIVEN one that was slow WHEN it answers quickly THEN it is in the group again, after a span outside of it."""
    world = World({"quick": 0.05, "slow": 5.0})
    for _ in range(3):
        world.turn()
    world.pace_s["slow"] = 0.05
    for _ in range(STEPS_MAX):
        world.turn()
        if world.state("slow") is SubscriptionState.LIVE:
            break
    assert world.state("slow") is SubscriptionState.LIVE
    # WHEN it becomes slow again THEN what it was before does not count: it is served outside first
    world.lock_held.clear()
    world.pace_s["slow"] = 5.0
    for _ in range(5):
        world.turn()
    assert ("slow", True) not in world.lock_held


def test_one_that_was_slow_joins_an_idle_group_after_a_while() -> None:
    """GIVEN nothing more to deliver WHEN some time has passed THEN slowness of long ago keeps nobody out."""
    world = World({"quick": 0.05, "slow": 5.0})
    for _ in range(3):
        world.turn()
    for _ in range(3):
        world.follower.catch_up(world.one("slow"))
    assert world.state("slow") is SubscriptionState.BEHIND
    world.now += following.PACE_AGE + timedelta(seconds=1)
    world.follower.catch_up(world.one("slow"))
    assert world.state("slow") is SubscriptionState.LIVE


def test_a_turn_ends_and_one_that_got_nowhere_gets_a_longer_one() -> None:
    """GIVEN one that needs a minute for a batch WHEN its turns are too short THEN they grow until it gets through."""
    world = World({"quick": 0.05, "slow": 60.0})
    world.turn()
    world.budgets.clear()
    for _ in range(3):
        world.follower.catch_up(world.one("slow"))
    assert world.budgets == [20.0, 40.0, 80.0]
    assert world.store.cursors("slow")[P0] == 1
