"""A file of the log that is missing: who has to read it stands still there and says so, and everybody else goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evermark.app.delivering import DeploymentReport
from evermark.delivery.model import Cursor, Fate, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.run.follower import STUCK_LOOK, STUCK_REST
from evermark.delivery.work import Assignment, DeliveryOptions
from evermark.errors import EvermarkError, FormatError
from evermark.log.opened import lost
from evermark.log.read import FileRange
from evermark.observe.health import HealthBoard, PartitionHealth, overall
from evermark.observe.metrics import Metrics
from evermark.testing.contracts.scene import P0, P1
from tests.unit.delivery.run.test_follower import World

LIVE, BEHIND = SubscriptionState.LIVE, SubscriptionState.BEHIND


@dataclass
class Holed(World):
    """Two partitions, a file for each batch. Reading a file that is `gone` raises what the log raises."""

    gone: set[str] = field(default_factory=set)
    told: list[tuple[SourcePartition, str | None]] = field(default_factory=list)
    got: dict[str, list[str]] = field(default_factory=dict)
    set_back: EvermarkError | None = None  # why no files are given at all
    by_part: bool = False  # the deliverer tells of it by an outcome, as where others were sent the span beside

    def __post_init__(self) -> None:
        super().__post_init__()
        self.store.open_partition(P1, 0, self.epoch)
        self.board = HealthBoard(self._clock)
        self.board.put(P0.source, 0, PartitionHealth.HEALTHY)
        said = SimpleNamespace(error=lambda *_, **__: None, warning=lambda *_, **__: None)
        stores, view = SimpleNamespace(state=None), SimpleNamespace(reader=None)
        self.report = DeploymentReport(cast("Any", stores), cast("Any", view), self.board, Metrics(), 0)
        self.report._log = said
        self.follower.on_stuck = self._tell
        self.follower.on_delivered = self.report.by_follower
        self.live.on_delivered = self.report.by_group

    def _clock(self) -> float:
        return self.now.timestamp()

    def _tell(self, place: SourcePartition, name: str | None, error: EvermarkError) -> None:
        self.told.append((place, name))
        self.report.stuck(place, name, error)

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        return {place: (self.head, self.now - timedelta(seconds=10)) for place in (P0, P1)}

    def files(self, source: str) -> list[FileRange]:
        if self.set_back is not None:
            raise self.set_back
        return [
            FileRange(f"{p.partition}-{n}", p.partition, p.partition, n, n, self.rows, 100)
            for p in (P0, P1)
            for n in range(1, self.head + 1)
        ]

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        for one in assignments:
            for path in self.gone.intersection(one.span.paths):
                if not self.by_part:
                    raise lost(path)
                return [Outcome(each.spec.name, Fate.STUCK, reason=lost(path).message) for each in assignments]
        for one in assignments:
            self.got.setdefault(one.spec.name, []).extend(one.span.paths)
        return super().deliver(assignments, options)

    def turn(self, *, batches: int = 1) -> None:
        """More batches, the group, and everybody who is due, all in one turn."""
        self.head += batches
        while self.follower.catch_up_group():
            pass
        if due := self.follower.due():
            self.follower.catch_up(*due)

    def trouble(self) -> list[tuple[str, str]]:
        return [(trouble.what, trouble.reason) for trouble in self.board.log_troubles()]


def left_behind(world: Holed, *names: str) -> None:
    """These are behind at the first batches, with nothing said of them."""
    world.turn()
    for name in names:
        world.store.suspend(name, "", world.epoch)
        world.store.resume(name, world.epoch)
    world.head += 3
    while world.follower.catch_up_group():
        pass


def test_a_subscription_whose_file_is_missing_says_so_and_the_others_go_on() -> None:
    """GIVEN two that are behind, and a file that one partition needs is deleted WHEN they are served in one turn THEN
    each says which file is missing and what to do, and gets all of the other partition; the group goes on; health is
    not healthy. WHEN the file is put back THEN they get everything, and nothing is said any more."""
    world = Holed({"well": 0.05, "a": 0.05, "b": 0.05})
    left_behind(world, "a", "b")
    world.gone = {"0-3"}
    for _ in range(20):
        world.now += timedelta(seconds=1)
        world.turn()
    for name in ("a", "b"):
        one = world.one(name)
        assert one.state is BEHIND
        assert "the file 0-3 of the log is missing" in one.reason and "put it back" in one.reason, one.reason
        assert world.store.cursors(name)[P0] == Cursor(2), "it has got all that comes before"
        assert world.store.cursors(name)[P1].batch >= world.head - 1, "it goes on in the other partition"
    assert world.state("well") is LIVE and world.got["well"][-1] == f"1-{world.head}"
    assert world.trouble() == [
        ("delivery of partition 0", "subscription a, and 1 more: the file 0-3 of the log is missing")
    ]
    assert overall(world.board.partitions(), log_troubles=world.board.log_troubles()) == "degraded"
    world.gone = set()
    for _ in range(15):
        world.now += timedelta(seconds=1)
        world.turn()
    for name in ("a", "b"):
        assert (world.state(name), world.one(name).reason) == (LIVE, "")
        assert sorted(set(world.got[name])) == sorted(file.path for file in world.files("shop"))
    assert world.trouble() == []


def test_a_log_that_ends_too_early_is_passed_by_nobody_and_they_say_so() -> None:
    """GIVEN a subscription that is behind, and one that is paused with old events WHEN the log does not reach its head
    THEN nobody's cursor moves, both the group and the subscription say why, now and then; WHEN it does THEN they go on.
    """
    world = Holed({"well": 0.05, "a": 0.05, "paused": 0.05})
    left_behind(world, "a")
    world.store.suspend("paused", "", world.epoch)
    cursors = [world.store.cursors("a"), world.store.cursors("paused"), world.store.group().cursors]
    world.set_back = FormatError("the log of shop/0 ends at batch 2, but batch 9 was taken", hint="put it back")
    for _ in range(20):
        world.now += timedelta(seconds=1)
        world.turn()
        world.follower.expire_stopped()
    assert [world.store.cursors("a"), world.store.cursors("paused"), world.store.group().cursors] == cursors
    assert "ends at batch 2" in world.one("a").reason and {name for _, name in world.told} == {None, "a"}
    assert len(world.told) <= 2 * 2 * 3, "in each of two partitions, every ten seconds"
    assert any("ends at batch 2" in reason for _, reason in world.trouble())
    world.set_back = None
    for _ in range(15):
        world.now += timedelta(seconds=1)
        world.turn()
    assert (world.state("a"), world.one("a").reason) == (LIVE, "")
    assert sorted(set(world.got["a"])) == sorted(file.path for file in world.files("shop"))
    assert world.trouble() == []


def test_a_file_that_is_missing_is_not_read_for_all_the_time() -> None:
    """GIVEN one that has nothing else to read WHEN it stands before a missing file THEN reading is tried again now and
    then, it is looked at once a second, and what is said of it stays."""
    world = Holed({"well": 0.05, "a": 0.05})
    left_behind(world, "a")
    world.gone = {"0-2"}
    looks = 0
    for _ in range(300):
        world.now += timedelta(seconds=0.2)
        if due := world.follower.due():
            looks += 1
            world.follower.catch_up(*due)
    assert len(world.told) == 60 / STUCK_REST.total_seconds()
    assert looks <= 60 / STUCK_LOOK.total_seconds() * 1.2
    assert world.trouble() != []


def test_the_group_stands_before_a_missing_file_and_goes_on_elsewhere() -> None:
    """GIVEN a file that the group needs is deleted before it was read WHEN the group is caught up THEN it says so, goes
    on in the other partition, and nothing ends; once the file is back nobody has lost anything."""
    world = Holed({"a": 0.05, "b": 0.05})
    world.turn()
    world.head += 40
    world.gone = {"0-30"}
    for _ in range(20):
        world.now += timedelta(seconds=1)
        world.turn()
    assert (world.state("a"), world.state("b")) == (LIVE, LIVE)
    assert world.store.group().cursors == {P0: Cursor(29), P1: Cursor(world.head)}
    assert 1 <= len(world.told) <= 3
    assert world.trouble() == [("delivery of partition 0", "the live group: the file 0-30 of the log is missing")]
    world.gone = set()
    for _ in range(5):
        world.now += STUCK_REST
        world.turn()
    assert world.store.group().cursors[P0] == Cursor(world.head)
    assert sorted(world.got["a"]) == sorted(file.path for file in world.files("shop"))
    assert world.trouble() == []


def test_the_same_where_the_work_is_done_beside() -> None:
    """GIVEN a large span of the group, done without its lock WHEN a file of it is missing THEN no error ends delivery,
    and it is said."""
    world = Holed({"a": 0.05}, rows=5_000)
    begun: list[Any] = []
    world.head, world.gone = 1, {"0-1"}
    assert world.follower.catch_up_group(begin=lambda _, work: begun.append(work))
    begun.pop()()
    assert world.told == [(P0, None)] and world.live.beside == {}


@pytest.mark.parametrize(("is_over", "tries"), [(True, 1), (False, 3)])
def test_an_owner_that_lost_its_lease_sends_nobody_anything_one_by_one(is_over: bool, tries: int) -> None:
    """GIVEN two that share a turn, and a file that both need is missing WHEN the lease is lost meanwhile THEN neither
    is served by itself: that would be new work. While it is held each is."""
    world = Holed({"well": 0.05, "a": 0.05, "b": 0.05})
    left_behind(world, "a", "b")
    world.gone = {"0-2", "1-2"}
    world.follower.over = lambda: is_over
    tried: list[int] = []
    deliver = world.follower.deliverer.deliver

    def counted(assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        tried.append(len(assignments))
        return deliver(assignments, options)

    world.follower.deliverer = cast("Any", SimpleNamespace(deliver=counted))
    world.follower.catch_up(*world.follower.due())
    assert (tried[0], len(tried)) == (2, tries)


def test_one_that_was_told_by_an_outcome_says_so_too() -> None:
    """GIVEN a deliverer that served others beside WHEN it tells of a missing file by an outcome THEN the subscription
    says the same, and its cursor stands."""
    world = Holed({"well": 0.05, "a": 0.05}, by_part=True)
    left_behind(world, "a")
    world.gone = {"0-2", "1-2"}
    for _ in range(10):
        world.turn(batches=0)
    assert "is missing" in world.one("a").reason
    assert world.store.cursors("a") == {P0: Cursor(1), P1: Cursor(1)}
    assert len(world.told) == 2
