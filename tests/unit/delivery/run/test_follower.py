"""Who is served beside the group and who within it: nobody who is slow may make the others wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.turns import TurnClass, next_turns
from evermark.delivery.model import (
    Cursor,
    Fate,
    MadeBy,
    Outcome,
    SourcePartition,
    Subscription,
    SubscriptionState,
)
from evermark.delivery.run import follower as following
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.errors import ConflictError, UnreachableError
from evermark.log.read import FileRange
from evermark.testing.contracts.scene import P0, P1, T0, event, failed, spec

STEPS_MAX = 50


@dataclass
class World:
    """A log whose head moves, receivers that take their time, and a clock that only they move."""

    pace_s: dict[str, float]
    head: int = 0
    now: datetime = T0
    lock_held: list[tuple[str, bool]] = field(default_factory=list)
    budgets: list[float | None] = field(default_factory=list)
    together: list[set[str]] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)
    rows: int = 5  # in each batch
    through: dict[str, str] = field(default_factory=dict)  # where one stops inside a batch when its time is over
    unreadable: set[str] = field(default_factory=set)  # whose files are gone
    full: set[str] = field(default_factory=set)  # who has no room to park what is held back

    def __post_init__(self) -> None:
        leases = MemoryLeases(is_gone=lambda _: True)
        lease = leases.acquire(DELIVER_LEASE, Holder("here", "host", "boot", 1, "now"), 1e9)
        assert lease is not None
        self.epoch = lease.epoch
        self.store = MemoryDelivery(leases, clock=lambda: self.now, jitter=lambda: 0.5)
        self.store.open_partition(P0, 0, self.epoch)
        self.store.register([spec(name) for name in self.pace_s], MadeBy.FILE, {}, self.epoch)
        self.live = LiveGroup(self.store, self, self.epoch, lambda: self.now)
        self.follower = Follower(self.store, self, self.live, self, self.epoch, lambda: self.now)

    # LogView

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        return {P0: (self.head, self.now - timedelta(seconds=10))}

    def files(self, source: str) -> list[FileRange]:
        return [FileRange(f"b{n}", 0, 0, n, n, self.rows, 100) for n in range(1, self.head + 1)]

    # Deliverer

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        names = [assignment.spec.name for assignment in assignments]
        self.spans += [assignment.span for assignment in assignments]
        self.together.append(set(names))
        if self.unreadable & set(names):
            raise UnreachableError("a file of the log is not there", hint="none")
        self.lock_held += [(name if options.historical else "group", self.live.lock.locked()) for name in names]
        self.budgets.append(options.budget_s)
        limit = options.budget_s if options.slack_s is None else options.slack_s
        took = [min(self.pace_s[name], limit if limit is not None else 1e9) for name in names]
        self.now += timedelta(seconds=max(took))
        return [self._delivered(assignment, limit) for assignment in assignments]

    def _delivered(self, assignment: Assignment, limit: float | None) -> Outcome:
        name, took_s = assignment.spec.name, self.pace_s[assignment.spec.name]
        if name in self.down:
            return replace(failed(name), reached=Cursor(assignment.span.after), took_s=took_s)
        if name in self.full:
            return replace(
                Outcome(name, Fate.FULL, reason="no room"), reached=Cursor(assignment.span.after), took_s=took_s
            )
        if limit is not None and took_s > limit:
            through = self.through.get(name, assignment.span.begun.through)
            unfinished = Outcome(name, Fate.UNFINISHED, accepted=3, reason="slow")
            return replace(unfinished, reached=Cursor(assignment.span.after, through), took_s=limit)
        return replace(Outcome(name, Fate.DONE, accepted=5), reached=Cursor(assignment.span.to), took_s=took_s)

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
    assert world.store.cursors("slow")[P0].batch >= world.head - 1


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
    for _ in range(4):
        world.follower.catch_up(world.one("slow"))
    assert world.budgets == [10.0, 20.0, 40.0, 80.0]
    assert world.store.cursors("slow")[P0].batch == 1


def turn_by_company(world: World) -> None:
    """One more batch, the group, and whoever is due: those of one class together."""
    world.head += 1
    world.follower.catch_up_group()
    turns, _ = next_turns(world.follower.due(), world.follower.turn_class, serving=[])
    for turn in turns:
        world.follower.catch_up(*turn.subscriptions)


def test_d13_the_slow_share_a_turn_and_so_do_the_failing_but_nobody_else() -> None:
    """GIVEN two that are slow and two that are down WHEN they are behind THEN each kind is served in one go."""
    world = World({"good": 0.05, "late1": 5.0, "late2": 6.0, "down1": 0.01, "down2": 0.01})
    world.down = {"down1", "down2"}
    for _ in range(12):
        turn_by_company(world)
        world.now += timedelta(seconds=15)  # past most backoffs
    assert {"late1", "late2"} in world.together and {"down1", "down2"} in world.together
    alone = [names for names in world.together if names & {"late1", "late2", "down1", "down2"} and len(names) == 1]
    assert alone == []
    assert not any("good" in names and len(names) == 2 for names in world.together)
    assert world.state("good") is SubscriptionState.LIVE
    assert world.store.cursors("late1")[P0].batch >= world.head - 1


def test_one_that_is_quick_again_is_not_taken_for_slow_because_of_its_company() -> None:
    """GIVEN two that shared a turn WHEN one of them answers quickly THEN it is in the group again, the other is not."""
    world = World({"good": 0.05, "was": 5.0, "is": 5.0})
    for _ in range(3):
        turn_by_company(world)
    assert (world.state("was"), world.state("is")) == (SubscriptionState.BEHIND, SubscriptionState.BEHIND)
    world.pace_s["was"] = 0.05
    for _ in range(4):
        turn_by_company(world)
    assert (world.state("was"), world.state("is")) == (SubscriptionState.LIVE, SubscriptionState.BEHIND)


def test_several_come_back_in_one_go() -> None:
    """GIVEN twenty that were cut off by a stall WHEN they are quick THEN the group stands still once for all."""
    names = [f"r{n}" for n in range(20)]
    world = World({"good": 0.05, **dict.fromkeys(names, 5.0)})
    turn_by_company(world)
    world.pace_s.update(dict.fromkeys(names, 0.05))
    world.together.clear()
    for _ in range(3):
        turn_by_company(world)
    assert {world.state(name) for name in names} == {SubscriptionState.LIVE}
    assert len([some for some in world.together if "good" not in some]) <= 4


def test_whoever_was_caught_by_a_stall_does_not_wait_for_the_slow() -> None:
    """GIVEN some cut off with one that is slow WHEN they are well THEN they are back after two seconds, not ten."""
    names = [f"r{n}" for n in range(5)]
    world = World({"good": 0.05, "slow": 9.0, **dict.fromkeys(names, 9.0)})
    world.head += 1
    world.follower.catch_up_group()
    assert {world.state(name) for name in names} == {SubscriptionState.BEHIND}
    world.pace_s.update(dict.fromkeys(names, 0.05))
    began = world.now
    late = [one for one in world.follower.due() if world.follower.turn_class(one) is TurnClass.LATE]
    assert {one.name for one in late} == {"slow", *names}
    world.follower.catch_up(*late)
    assert (world.now - began).total_seconds() <= 2.0
    assert {world.follower.turn_class(world.one(name)) for name in names} == {TurnClass.NEAR}
    assert world.follower.turn_class(world.one("slow")) is TurnClass.SLOW


def test_one_that_was_removed_meanwhile_leaves_the_others_settled() -> None:
    """GIVEN a shared turn WHEN one of them is made anew during it THEN the others have moved, and it is told."""
    world = World({"good": 0.05, "a": 5.0, "b": 5.0})
    turn_by_company(world)
    world.head += 1
    world.follower.catch_up_group()
    (a, b) = (world.one("a"), world.one("b"))
    deliver = world.deliver

    def meddled(assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        found = deliver(assignments, options)
        world.store.register([spec("good"), spec("b")], MadeBy.FILE, {}, world.epoch)
        return found

    world.follower.deliverer = SimpleNamespace(deliver=meddled)
    before = world.store.cursors("b")[P0]
    with pytest.raises(ConflictError):
        world.follower.catch_up(a, b)
    assert world.store.cursors("b")[P0] > before


@pytest.mark.parametrize(
    "seen", [{}, {P0: Cursor(0), SourcePartition("other", 0): Cursor(0)}], ids=["member", "place not open yet"]
)
def test_whoever_cannot_be_compared_with_the_group_is_left_for_later(
    monkeypatch: pytest.MonkeyPatch, seen: dict[SourcePartition, int]
) -> None:
    """GIVEN cursors read while it was a member, or a place was opened WHEN it is its turn THEN nothing is sent yet."""
    world = World({"good": 0.05, "slow": 5.0})
    world.turn()
    world.together.clear()
    slow = world.one("slow")
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "cursors", lambda _name: seen)
        assert world.follower.catch_up(slow) == frozenset()
    assert world.together == []
    world.follower.catch_up(slow)
    assert world.together == [{"slow"}]


def test_one_that_needs_very_long_is_served_alone() -> None:
    """GIVEN one that gets nowhere in a common turn WHEN its turns grow THEN nobody else waits for it."""
    world = World({"good": 0.05, "late": 5.0, "glacier": 60.0})
    for _ in range(3):
        turn_by_company(world)
    assert world.follower.turn_class(world.one("glacier")) is TurnClass.NONE
    assert {"glacier"} in world.together


def test_one_that_is_down_is_asked_with_a_few_events_and_gets_all_of_them_when_it_is_back() -> None:
    """GIVEN 100 batches of 5 events WHEN a receiver is down THEN it is asked with 100 at most; back, with thousands."""
    world = World({"good": 0.05, "down": 0.01})
    world.down = {"down"}
    for _ in range(100):
        world.turn()
    world.now = world.one("down").next_attempt_at or world.now
    world.spans.clear()
    world.follower.catch_up(world.one("down"))
    assert [span.rows for span in world.spans] == [following.PROBE_ROWS_MAX]
    world.down.clear()
    world.now = world.one("down").next_attempt_at or world.now
    companies: list[TurnClass] = []
    for _ in range(2):
        world.follower.catch_up(world.one("down"))
        companies.append(world.follower.turn_class(world.one("down")))
    # THEN while much is left it has turns of its own, and then one with all who are about to join
    assert companies == [TurnClass.NONE, TurnClass.NEAR]
    assert [span.rows for span in world.spans[1:]] == [following.PROBE_ROWS_MAX, 500 - following.PROBE_ROWS_MAX]


def test_leftovers_of_the_group_are_not_worked_on_without_end() -> None:
    """GIVEN a group whose only member takes for ever WHEN leftovers are due THEN it leaves, and the group goes on."""
    world = World({"slow": 1e6})
    world.turn()
    assert world.budgets[0] == following.FOLLOW_BUDGET_S
    assert world.state("slow") is SubscriptionState.BEHIND


def test_d1_a_batch_that_takes_hours_goes_on_where_it_stopped() -> None:
    """GIVEN one that needs an hour for a batch WHEN a turn ends or all starts anew THEN it goes on from there."""
    world = World({"quick": 0.05, "slow": 3_600.0})
    world.turn()
    for nth in range(1, 4):
        world.through["slow"] = f"{nth:03}"
        assert world.follower.catch_up(world.one("slow")) == {"slow"}, "it goes on at once"
        assert world.store.cursors("slow") == {P0: Cursor(0, f"{nth:03}")}
    assert [span.begun.through for span in world.spans if span.paths][-3:] == ["", "001", "002"]
    assert world.budgets[-3:] == [10.0] * 3, "it gets somewhere: no reason for longer turns"
    assert world.follower.turn_class(world.one("slow")) is TurnClass.NONE, "nobody else waits for it"
    # WHEN everything starts anew THEN nothing is forgotten
    world.follower = Follower(world.store, world, world.live, world, world.epoch, lambda: world.now)
    world.pace_s["slow"] = 0.05
    world.follower.catch_up(world.one("slow"))
    assert world.spans[-1].begun.through == "003"
    assert world.store.cursors("slow") == {P0: Cursor(1)}


def test_d1_whoever_leaves_the_group_in_the_middle_of_a_batch_is_served_from_there() -> None:
    """GIVEN a member that got to a place inside a batch WHEN it is cut off THEN the follower begins after it."""
    world = World({"quick": 0.05, "slow": 5.0}, through={"slow": "002"})
    world.turn()
    assert world.store.group().members == {"quick"}
    assert [span.begun.through for span in world.spans] == ["", "", "002"]


def in_two_partitions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The world's head is that of two partitions."""
    world.store.open_partition(P1, 0, world.epoch)

    def heads() -> Mapping[SourcePartition, tuple[int, datetime]]:
        return dict.fromkeys((P0, P1), (world.head, world.now - timedelta(seconds=10)))

    monkeypatch.setattr(world, "heads", heads)
    monkeypatch.setattr(world, "files", lambda _: [FileRange("all", 0, 1, 1, world.head, 5, 100)])


def test_a_partition_that_always_has_something_new_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN two partitions with a new batch at every look WHEN the group is caught up THEN both get their turns."""
    world = World({"one": 0.05})
    in_two_partitions(world, monkeypatch)
    for _ in range(6):
        world.head += 1
        world.follower.catch_up_group()
    assert [span.place for span in world.spans] == [P0, P1] * 3


def test_a_partition_with_more_than_a_receiver_takes_holds_up_no_other_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN one that is behind in two partitions WHEN one of them has a new batch at every look THEN both get turns; it
    stays where it got nowhere, with more time.
    """
    world = World({"behind": 5.0})
    in_two_partitions(world, monkeypatch)
    world.head = 1
    world.follower.catch_up_group()
    world.follower.catch_up_group()
    assert world.state("behind") is not SubscriptionState.LIVE, "it has left the group"
    world.follower.catch_up(world.one("behind"))  # a short turn, since it may be quick again
    world.spans.clear()
    for _ in range(6):
        world.head += 1
        world.follower.catch_up_group()
        world.follower.catch_up_group()
        world.follower.catch_up(world.one("behind"))
    assert [span.place for span in world.spans] == [P0, P1] * 3
    world.spans.clear()
    world.pace_s["behind"] = 30.0
    for _ in range(3):
        world.head += 1
        world.follower.catch_up_group()
        world.follower.catch_up_group()
        world.follower.catch_up(world.one("behind"))
    assert [span.place for span in world.spans] == [P0] * 3
    assert world.store.cursors("behind")[P0].batch > world.store.cursors("behind")[P1].batch


def test_owners_of_short_lives_do_not_all_begin_with_the_same_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN one that is behind in two partitions WHEN each turn is the first of another owner THEN both get turns."""
    world = World({"behind": 5.0})
    in_two_partitions(world, monkeypatch)
    world.head = 1
    world.follower.catch_up_group()
    world.follower.catch_up_group()
    world.follower.catch_up(world.one("behind"))
    first: set[SourcePartition] = set()
    for epoch in (world.epoch, world.epoch + 1):
        monkeypatch.setattr(world.store, "settle_subscription", lambda *_, **__: True)
        owner = Follower(world.store, world, world.live, world, epoch, lambda: world.now)
        world.spans.clear()
        owner.catch_up(world.one("behind"))
        first |= {span.place for span in world.spans}
    assert first == {P0, P1}


def test_leftovers_of_the_group_end_in_minutes_however_large_a_batch_is() -> None:
    """GIVEN a batch of millions WHEN the group takes for ever THEN it leaves soon: what it got is kept from then on."""
    world = World({"slow": 1e6}, rows=2_000_000, through={"slow": "777"})
    world.head = 1
    world.follower.catch_up_group()
    assert world.budgets == [following.GROUP_BUDGET_S_MAX]
    assert world.store.cursors("slow") == {P0: Cursor(0, "777")}


def test_one_whose_files_cannot_be_read_holds_up_nobody_of_its_turn() -> None:
    """GIVEN three that share a turn WHEN the assignment of one cannot be done THEN the others move on."""
    names = ["a", "b", "c"]
    world = World({"good": 0.05, **dict.fromkeys(names, 5.0)})
    turn_by_company(world)
    world.head += 1
    world.follower.catch_up_group()
    world.unreadable = {"b"}
    before = {name: world.store.cursors(name)[P0] for name in names}
    with pytest.raises(UnreachableError):
        world.follower.catch_up(*map(world.one, names))
    moved = {name for name in names if world.store.cursors(name)[P0] > before[name]}
    assert moved == {"a", "c"}
    assert world.follower.turn_class(world.one("b")) is TurnClass.NONE
    world.unreadable.clear()
    world.follower.catch_up(world.one("b"))
    assert world.store.cursors("b")[P0] > before["b"]
    assert world.follower.turn_class(world.one("b")) is not TurnClass.NONE


def test_one_that_fails_and_is_full_is_left_to_the_queue() -> None:
    """GIVEN a full one whose endpoint failed WHEN nothing can be sent THEN it is looked at seldom, and not forgiven."""
    world = World({"good": 0.05, "full": 0.01})
    world.down = {"full"}
    world.turn()
    world.down.clear()
    world.full = {"full"}
    world.now = world.one("full").next_attempt_at or world.now
    looks = 0
    for _ in range(600):
        for one in world.follower.due():
            looks += 1
            world.follower.catch_up(one)
        world.now += timedelta(seconds=1)
    found = world.one("full")
    assert (found.state, found.failures, looks) == (SubscriptionState.SUSPENDED, 1, 2)
    assert found.next_attempt_at is not None and found.next_attempt_at <= world.now, "what is parked may be tried"
    # WHEN what is parked was taken THEN it goes on at once
    world.full.clear()
    world.store.retried("full", Outcome("full", Fate.DONE, accepted=1), world.now, world.epoch)
    assert [one.name for one in world.follower.due()] == ["full"]


def test_what_has_no_room_is_followed_by_nothing() -> None:
    """GIVEN a span that failed after much of it WHEN what must be parked has no room THEN it stands where it stood."""
    world = World({"good": 0.05, "slow": 30.0})
    world.turn()
    one, span = world.one("slow"), Span(P0, Cursor(0), 3, (), 15)
    parked = tuple(event(n) for n in range(1, one.spec.parked_max + 2))
    outcome = Outcome("slow", Fate.ENDPOINT_FAILED, 5, parked, "HTTP 503")
    world.follower._settle(one, span, replace(outcome, reached=Cursor(2)))
    assert world.store.cursors("slow") == {P0: Cursor(0)}
    assert world.state("slow") is SubscriptionState.SUSPENDED
    assert world.one("slow").reason.startswith("0 deliveries are parked")


def test_one_made_anew_behind_is_not_sent_what_its_former_self_was_about_to_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN a member WHEN it is made anew, from the beginning, while the group looks THEN it gets batch 1 first."""
    world = World({"quick": 0.05, "anew": 0.05})
    world.turn()
    look = world.store.subscriptions

    def meddled() -> dict[str, Subscription]:
        monkeypatch.undo()
        world.store.register([spec("quick")], MadeBy.FILE, {}, world.epoch)
        world.store.register([spec("quick"), spec("anew")], MadeBy.FILE, {"anew": {P0: Cursor(0)}}, world.epoch)
        return look()

    monkeypatch.setattr(world.store, "subscriptions", meddled)
    world.together.clear()
    world.head += 1
    world.follower.catch_up_group()
    assert world.together == [{"quick"}]
    assert world.store.cursors("anew") == {P0: Cursor(0)}


def test_a_suspended_one_that_is_level_with_the_group_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN one that failed until it was suspended, and whose events expired WHEN its turns come THEN none of them asks
    to join, and the next event is tried; once that is taken it is in the group again."""
    world = World({"a": 0.05, "quick": 0.05})
    world.down = {"a"}
    while world.state("a") is not SubscriptionState.SUSPENDED:
        world.turn()
        world.now += timedelta(minutes=10)
    begun, head = world.store.cursors("a")[P0], Cursor(world.head)
    expired = Outcome("a", Fate.DONE, expired=5)
    world.store.settle_subscription("a", P0, begun, head, expired, world.now, world.epoch)
    joins: list[str] = []
    join = world.store.join
    monkeypatch.setattr(world.store, "join", lambda name, epoch: joins.append(name) or join(name, epoch))
    world.now += timedelta(minutes=10)
    for _ in range(3):
        world.follower.catch_up(world.one("a"))
    assert (world.state("a"), joins) == (SubscriptionState.SUSPENDED, [])
    world.down = set()
    world.turn()
    world.turn()
    assert (world.state("a"), joins) == (SubscriptionState.LIVE, ["a"])
