"""What the group is sent of one partition, where that takes long, holds up no other partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from evermark.delivery.model import Cursor, Fate, MadeBy, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.run.follower import FollowLimits
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.errors import UnreachableError
from evermark.log.read import FileRange
from evermark.testing.contracts.scene import P0, P1, event, spec
from tests.unit.delivery.run.test_follower import World

LARGE = 5_000


def nothing() -> None: ...


@dataclass
class Wide(World):
    """Batches of one partition are large; while the first is under way, `meanwhile` happens; during a look, `look`."""

    heads_at: dict[SourcePartition, int] = field(default_factory=lambda: {P0: 1, P1: 1})
    meanwhile: Callable[[], None] = nothing
    look: Callable[[], None] = nothing
    failing: set[tuple[str, SourcePartition]] = field(default_factory=set)
    ended: dict[str, Outcome] = field(default_factory=dict)  # of the large batch
    begun: list[Callable[[], None]] = field(default_factory=list)
    sent: list[tuple[str, SourcePartition, int]] = field(default_factory=list)
    locked: list[tuple[SourcePartition, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.store.open_partition(P1, 0, self.epoch)

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        happens, self.look = self.look, nothing
        happens()
        return {place: (head, self.now - timedelta(seconds=10)) for place, head in self.heads_at.items()}

    def files(self, source: str) -> list[FileRange]:
        rows = {P0: LARGE, P1: 5}
        return [
            FileRange(f"{p.partition}-{n}", p.partition, p.partition, n, n, rows[p], 100)
            for p, head in self.heads_at.items()
            for n in range(1, head + 1)
        ]

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        self.sent += [(one.spec.name, one.span.place, one.span.to) for one in assignments]
        self.locked += [(one.span.place, self.live.lock.locked()) for one in assignments]
        if assignments[0].span.place == P0 and not options.historical:
            happens, self.meanwhile = self.meanwhile, nothing
            happens()
        outcomes = super().deliver(assignments, options)
        told = [
            replace(outcome, fate=Fate.ENDPOINT_FAILED, reached=one.span.begun)
            if (outcome.subscription, one.span.place) in self.failing
            else outcome
            for one, outcome in zip(assignments, outcomes, strict=True)
        ]
        return [self.ended.get(one.subscription, one) for one in told] if assignments[0].span.place == P0 else told

    def catch_up_group(self) -> bool:
        return self.follower.catch_up_group(begin=lambda _, work: self.begun.append(work))

    def cursor(self, name: str, place: SourcePartition) -> int:
        cursors = self.store.group().cursors if self.state(name) is SubscriptionState.LIVE else self.store.cursors(name)
        return cursors[place].batch


def test_the_group_goes_on_in_other_partitions_while_one_takes_long() -> None:
    """GIVEN a large batch of one partition under way WHEN batches of another come THEN they are delivered before it is
    done, by hand-over and by the follower; and nobody else works for the group in the first."""
    world = Wide({"a": 0.05, "b": 0.05})

    def meanwhile() -> None:
        assert world.catch_up_group()
        world.heads_at[P1] = 2
        assert world.live.hand_over(Span(P1, Cursor(1), 2, ("1-2",), 5, exact=True))
        assert not world.live.hand_over(Span(P0, Cursor(0), 1, ("0-1",), 5, exact=True))
        assert not world.catch_up_group()
        assert world.store.group().cursors == {P0: Cursor(0), P1: Cursor(2)}

    world.meanwhile = meanwhile
    assert world.catch_up_group()
    assert world.sent == []
    world.begun.pop()()
    assert world.store.group().cursors == {P0: Cursor(1), P1: Cursor(2)}
    assert sorted(set(world.locked)) == [(P0, False), (P1, True)]
    assert len(world.sent) == len(set(world.sent)), "an event was sent twice"
    assert world.live.beside == {}


def test_a_member_that_leaves_meanwhile_is_not_sent_the_large_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a large batch that a member is being sent WHEN it leaves the group because of another partition THEN it
    neither gets the batch a second time nor joins before the batch is settled, which then counts for it, too."""
    world = Wide({"a": 0.05, "b": 0.05})
    world.failing = {("a", P1)}

    def meanwhile() -> None:
        assert world.catch_up_group()
        assert world.state("a") is SubscriptionState.BEHIND
        world.failing = set()
        world.now += timedelta(hours=1)
        for _ in range(3):
            world.follower.catch_up(world.one("a"))
        assert (world.cursor("a", P0), world.cursor("a", P1)) == (0, 1)
        assert world.state("a") is SubscriptionState.BEHIND
        monkeypatch.setattr(world.store, "settle_group", settle_group)

    def settle_group(*given: Any) -> None:
        monkeypatch.undo()
        world.store.settle_group(*given)
        world.follower.catch_up(world.one("a"))  # its turn looks between the group's cursor and its own

    world.meanwhile = meanwhile
    world.catch_up_group()
    world.begun.pop()()
    assert world.cursor("a", P0) == 1
    assert [sent for sent in world.sent if sent[:2] == ("a", P0)] == [("a", P0, 1)]
    world.follower.catch_up(world.one("a"))
    assert world.state("a") is SubscriptionState.LIVE


@pytest.mark.parametrize("accepted", [0, 1_000])
@pytest.mark.parametrize("leaves_before", [False, True])
def test_a_failure_inside_a_large_batch_is_kept_with_how_far_it_got(accepted: int, leaves_before: bool) -> None:
    """GIVEN a large batch of which a member was sent a part WHEN it then answers "busy for an hour" THEN that counts
    once and is waited for, and it goes on inside the batch; so it does if it had left because of another partition."""
    world = Wide({"a": 0.05, "b": 0.05})
    parked, reached = (event(1, status=400 if accepted else None),), Cursor(0, "000005")
    busy = Outcome("a", Fate.ENDPOINT_FAILED, accepted, parked, "503", retry_after_s=3_600.0, reached=reached)
    world.ended = {"a": busy}
    if leaves_before:
        world.failing = {("a", P1)}
        world.meanwhile = lambda: None if world.catch_up_group() else pytest.fail("there is a batch of P1")
    world.catch_up_group()
    world.begun.pop()()
    one = world.one("a")
    assert (one.state, one.failures) == (SubscriptionState.BEHIND, 1)
    assert (world.store.cursors("a")[P0], len(world.store.parked.rows("a"))) == (reached, 1)
    if accepted or not leaves_before:
        assert one.reason == "503"
        assert one.next_attempt_at is not None and one.next_attempt_at >= world.now + timedelta(hours=1)


def test_one_that_has_no_more_room_inside_a_large_batch_stays_full() -> None:
    """GIVEN a large batch of which a member was sent a part WHEN there is no room for more refused events THEN it is
    suspended as one that is full, with what was parked on the way."""
    world = Wide({"a": 0.05, "b": 0.05})
    reached = Cursor(0, "000005")
    world.ended = {"a": Outcome("a", Fate.FULL, 1_000, (event(1),), "no room", reached=reached)}
    world.catch_up_group()
    world.begun.pop()()
    assert (world.state("a"), world.one("a").reason) == (SubscriptionState.SUSPENDED, "no room")
    assert (world.store.cursors("a")[P0], len(world.store.parked.rows("a"))) == (reached, 1)


def test_a_look_that_takes_long_begins_no_batch_that_was_settled_meanwhile() -> None:
    """GIVEN a large batch under way WHEN it is settled between the follower's look at the group and its look at the
    log THEN the follower does not deliver it once more."""
    world = Wide({"a": 0.05})
    world.heads_at[P1] = 0
    world.catch_up_group()
    world.look = world.begun.pop()
    assert not world.catch_up_group()
    assert world.sent == [("a", P0, 1)]
    assert world.begun == []


def test_one_that_joins_meanwhile_gets_the_large_batch_by_itself() -> None:
    """It was not sent what was under way when it joined: it leaves the group again, before that."""
    world = Wide({"a": 0.05})

    def meanwhile() -> None:
        world.pace_s["new"] = 0.05
        world.store.register([spec("a"), spec("new")], MadeBy.FILE, {}, world.epoch)
        assert world.state("new") is SubscriptionState.LIVE

    world.meanwhile = meanwhile
    world.catch_up_group()
    world.begun.pop()()
    assert world.state("new") is SubscriptionState.BEHIND
    assert world.cursor("new", P0) == 0
    world.follower.catch_up(world.one("new"))
    assert ("new", P0, 1) in world.sent


def test_a_few_at_once_and_the_small_ones_of_others_before_them() -> None:
    """GIVEN as many large batches under way as may be WHEN another partition has one THEN it waits; a small one not."""
    world = Wide({"a": 0.05})
    world.follower.limits = FollowLimits(beside_at_once=0)
    assert world.catch_up_group()
    assert (world.begun, [place for _, place, _ in world.sent]) == ([], [P1])
    assert not world.catch_up_group()
    world.follower.limits = FollowLimits()
    assert world.catch_up_group()
    assert len(world.begun) == 1


def test_work_that_fails_beside_leaves_its_partition_to_be_tried_again() -> None:
    """Files that cannot be read, or State that is away: the partition is free again, and nothing was settled."""
    world = Wide({"a": 0.05})
    world.unreadable = {"a"}
    world.catch_up_group()
    with pytest.raises(UnreachableError):
        world.begun.pop()()
    assert world.live.beside == {}
    world.unreadable = set()
    while not world.begun:
        assert world.catch_up_group()
    world.begun.pop()()
    assert world.store.group().cursors[P0] == Cursor(1)
