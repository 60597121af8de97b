"""What holds the log's retention back, and for how long: no subscription and no replay does so for ever in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.app.delivering import DeliveryReport
from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.backlog import expired_to
from evermark.delivery.model import Cursor, Fate, MadeBy, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.replay.memory import MemoryReplays
from evermark.delivery.replay.plan import AskedBy, Control, Replayed, ReplayState, Request, TargetState
from evermark.delivery.replay.replayer import START_WAIT_MAX, Replayer
from evermark.delivery.replay.request import request_of
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.status import kept_for, least_cursors
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.work import Assignment, DeliveryOptions
from evermark.errors import UnreachableError
from evermark.log.maintenance import may_be_collected
from evermark.log.read import FileRange
from evermark.observe.metrics import Metrics
from evermark.testing.contracts.scene import P0, T0, spec

DAY = timedelta(days=1)
ROWS = 5


@dataclass
class World:
    """A batch of five events a day, and receivers that take what they are sent."""

    now: datetime = T0
    head: int = 0
    sent: dict[str, list[int]] = field(default_factory=dict)
    replay_fate: Fate = Fate.DONE

    def __post_init__(self) -> None:
        self._leases = MemoryLeases(is_gone=lambda _: True)
        lease = self._leases.acquire(DELIVER_LEASE, Holder("i", "h", "b", 1, "1"), 1e9)
        assert lease is not None
        self.epoch = lease.epoch
        self.store = MemoryDelivery(self._leases, jitter=lambda: 0.0, clock=lambda: self.now)
        self.store.open_partition(P0, 0, self.epoch)
        self.store.register([spec("a"), spec("b"), spec("c", ttl_s=0.0)], MadeBy.FILE, {}, self.epoch)
        live = LiveGroup(self.store, self, self.epoch, lambda: self.now)
        self.follower = Follower(self.store, self, live, self, self.epoch, lambda: self.now)
        self.replays = MemoryReplays(self.store, clock=lambda: self.now)
        self.replayer = Replayer(self.replays, self.store, self, self, self.epoch, lambda: self.now, ["shop"])

    # LogView

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        return {P0: (self.head, self.now - timedelta(seconds=10))}

    def files(self, source: str) -> list[FileRange]:
        taken = [T0 + n * DAY for n in range(self.head + 1)]
        return [
            FileRange(f"b{n}", 0, 0, n, n, ROWS, 9, taken[n], None, taken[n], taken[n]) for n in range(1, self.head + 1)
        ]

    # Deliverer

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        return [self._one(assignment, options) for assignment in assignments]

    def _one(self, assignment: Assignment, options: DeliveryOptions) -> Outcome:
        name, span, before = assignment.spec.name, assignment.span, assignment.expires_before
        batches = range(span.after + 1, span.to + 1)
        old = [n for n in batches if before is not None and T0 + n * DAY < before]
        young = [n for n in batches if n not in old]
        if young and not options.sends:
            return replace(Outcome(name, Fate.UNFINISHED, expired=ROWS * len(old)), reached=Cursor(young[0] - 1))
        self.sent.setdefault(name, []).extend(young)
        return replace(Outcome(name, Fate.DONE, accepted=len(young), expired=ROWS * len(old)), reached=Cursor(span.to))

    def replay(self, work: Any, ahead: Any = None) -> Replayed:
        mark = work.slice.end if self.replay_fate is Fate.DONE else work.slice.mark
        return Replayed(mark, Outcome(work.spec.name, self.replay_fate, reason="503", retry_after_s=86_400.0))

    def days(self, count: int) -> None:
        for _ in range(count):
            self.head += 1
            self.now += DAY
            self.follower.catch_up_group()
            self.follower.expire_stopped()

    def stop(self, name: str, how: SubscriptionState) -> None:
        if how is SubscriptionState.DISABLED:
            self.store.disable(name, "410", self.epoch)
        else:
            self.store.suspend(name, "moving house", self.epoch)

    @property
    def collectable(self) -> list[int]:
        """Batches that a retention of one day may let go."""
        least = least_cursors(self.store.groups().values(), self.store.cursors_outside(), "shop")
        return [f.batch_max for f in self.files("shop") if may_be_collected(f, self.now - DAY, least)]


STOPPED = [SubscriptionState.SUSPENDED, SubscriptionState.DISABLED]


@pytest.mark.parametrize("how", STOPPED)
def test_d6_the_backlog_of_one_that_is_paused_or_disabled_expires_after_its_ttl_and_is_counted(
    how: SubscriptionState,
) -> None:
    """GIVEN one that a person or a 410 stopped WHEN weeks pass THEN what is older than its ttl is counted as expired,
    and no longer held; nothing is sent, and its state stays; resumed, it gets all that is younger.
    """
    world = World()
    world.stop("a", how)
    before = world.store.subscription("a")
    world.days(7)
    assert (world.store.cursors("a"), world.store.counted("expired")) == ({P0: Cursor(0)}, {})
    world.days(13)
    assert world.store.cursors("a") == {P0: Cursor(12)}, "all that was taken more than seven days ago"
    assert world.store.counted("expired") == {"a": 12 * ROWS}
    assert not world.sent.get("a")
    assert world.store.subscription("a") == before
    assert world.collectable == list(range(1, 13))
    assert world.sent["b"] == list(range(1, 21)), "nobody else lost anything"
    world.store.resume("a", world.epoch)
    for _ in range(5):
        for one in world.follower.due():
            world.follower.catch_up(one)
    assert world.sent["a"] == list(range(13, 21))
    assert world.store.counted("expired") == {"a": 12 * ROWS}


def test_d6_one_whose_backlog_cannot_expire_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN two that are paused WHEN the engine refuses the work for the first of them THEN the second one's old events
    expire all the same, and the trouble is raised."""
    world, deliver = World(), World.deliver

    def refused(world: World, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        if not options.sends and assignments[0].spec.name == "a":
            raise UnreachableError("the engine is away")
        return deliver(world, assignments, options)

    for name in ("a", "b"):
        world.stop(name, SubscriptionState.SUSPENDED)
    world.days(7)
    monkeypatch.setattr(World, "deliver", refused)
    world.head += 8
    world.now += 8 * DAY
    with pytest.raises(UnreachableError):
        world.follower.expire_stopped()
    assert set(world.store.counted("expired")) == {"b"}


@pytest.mark.parametrize("how", STOPPED)
def test_d6_without_a_ttl_nothing_expires_and_what_the_log_keeps_for_it_is_told(how: SubscriptionState) -> None:
    """GIVEN a stopped one with ttl 0 WHEN its backlog is older than the retention THEN a gauge and one line say so."""

    class Lines:
        def __init__(self) -> None:
            self.written: list[tuple[str, str, int]] = []

        def warning(self, what: str, **values: Any) -> None:
            self.written.append((what, values["subscription"], values["events"]))

    world, lines, metrics = World(), Lines(), Metrics()
    report = DeliveryReport(metrics, lines)

    def told() -> float | None:
        kept = kept_for(world.store.cursors_outside(), {"shop": world.files("shop")}, world.now - 30 * DAY)
        report.kept(kept)
        return metrics.registry.get_sample_value("evermark_subscription_kept_events", {"subscription": "c"})

    world.stop("c", how)
    world.days(30)
    assert (told(), lines.written) == (None, [])
    world.days(10)
    assert told() == told() == 9 * ROWS
    assert (world.store.cursors("c"), world.store.counted("expired"), world.collectable) == ({P0: Cursor(0)}, {}, [])
    assert lines.written == [
        ("the log keeps events beyond log.retention, because this subscription has not passed them", "c", 9 * ROWS)
    ]
    world.store.resume("c", world.epoch)
    for _ in range(5):
        for one in world.follower.due():
            world.follower.catch_up(one)
    assert world.sent["c"] == list(range(1, 41)), "it was owed all of it"
    assert told() is None


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 6), st.integers(0, 9)), max_size=8), st.integers(0, 25))
def test_d6_no_batch_with_a_young_event_is_ever_passed(files: list[tuple[int, int, int]], after: int) -> None:
    """GIVEN files of any batches, overlapping as compaction leaves them THEN all that is passed is old."""
    limit = T0 + 5 * DAY
    found = [
        FileRange("f", 0, 0, first, first + more, 1, 1, ingested_at_max=None if age == 9 else T0 + age * DAY)
        for first, more, age in files
    ]
    to = expired_to(P0, after, 25, found, limit)
    assert after <= to <= max(after, 25)
    for file in found:
        young = file.ingested_at_max is None or file.ingested_at_max >= limit
        assert not (young and max(file.batch_min, after + 1) <= min(file.batch_max, to))
    older = [file for file in found if file.batch_max > after]
    if older and all(file.ingested_at_max is not None and file.ingested_at_max < limit for file in older):
        assert to == max(after, 25), "nothing young is in the way"


# replays


def replayed(world: World) -> str:
    made = world.replays.request(Request(AskedBy.CLI, "shop", T0, T0 + 3 * DAY, subscription="a"), world.epoch)
    world.replayer.look()
    return made


def look(world: World, days: int) -> None:
    for _ in range(days):
        world.now += DAY
        work(world)
    world.replayer.look()


def work(world: World) -> None:
    _, due = world.replayer.look()
    for one in due:
        world.replayer.step(one, flowing=False)


@pytest.mark.parametrize("trouble", ["paused", "failing"])
def test_d6_a_replay_that_gets_nowhere_is_given_up_after_the_ttl_and_holds_nothing(trouble: str) -> None:
    """GIVEN a replay to one that is paused, or fails WHEN its ttl has passed without a step THEN it ends, with why."""
    world = World()
    world.days(3)
    ended: list[tuple[str, str]] = []
    world.replayer.on_ended = lambda _replay, target, why: ended.append((target.subscription, why))
    if trouble == "paused":
        world.store.suspend("a", "", world.epoch)
    else:
        world.replay_fate = Fate.ENDPOINT_FAILED
    made = replayed(world)
    look(world, 7)
    assert world.replays.one(made).state is ReplayState.RUNNING
    assert world.replays.open_sources() == {"shop"}
    look(world, 3)
    found = world.replays.one(made)
    assert (found.state, found.targets[0].state) == (ReplayState.DONE, TargetState.CANCELLED)
    assert found.targets[0].reason.startswith("expired: nothing of it could be delivered since 2026-11-1")
    said_last = {"paused": "its ttl", "failing": "its ttl: 503"}
    assert found.targets[0].reason.endswith(said_last[trouble])
    assert ended == [("a", found.targets[0].reason)]
    assert world.replays.open_sources() == set()


def test_d6_time_in_which_nobody_delivered_gives_up_no_replay_untried() -> None:
    """GIVEN a replay to one that failed once WHEN no instance runs for longer than the ttl THEN the next owner tries it
    before it is given up: the receiver is well by now, and has it all."""
    world = World()
    world.days(3)
    world.replay_fate = Fate.ENDPOINT_FAILED
    made = replayed(world)
    look(world, 1)
    assert world.replays.one(made).targets[0].stuck_since is not None
    world.now += 30 * DAY
    world.replay_fate = Fate.DONE
    world.replayer = Replayer(world.replays, world.store, world, world, world.epoch, lambda: world.now, ["shop"])
    look(world, 3)
    found = world.replays.one(made)
    assert (found.state, found.targets[0].state) == (ReplayState.DONE, TargetState.DONE)


def test_d6_a_replay_that_moves_now_and_then_or_waits_for_its_turn_is_not_given_up() -> None:
    """GIVEN two replays to one receiver WHEN the first fails for weeks but moves each week THEN both go on."""
    world = World()
    world.days(3)
    first, second = replayed(world), replayed(world)
    world.replay_fate = Fate.ENDPOINT_FAILED
    for _ in range(3):
        look(world, 6)
        stuck = world.replays.one(first).targets[0]
        world.replays._targets[first, "a"] = stuck.__class__(**{**vars(stuck), "stuck_since": None})  # it moved
    assert world.replays.one(second).targets[0].stuck_since is None
    assert {world.replays.one(each).state for each in (first, second)} == {ReplayState.RUNNING}
    world.replay_fate = Fate.DONE
    look(world, 5)
    assert {world.replays.one(each).state for each in (first, second)} == {ReplayState.DONE}
    assert [t.state for each in (first, second) for t in world.replays.one(each).targets] == [TargetState.DONE] * 2


@pytest.mark.parametrize("trouble", ["paused", "failing"])
def test_d6_replays_that_wait_for_one_subscription_are_given_up_after_one_ttl_together(trouble: str) -> None:
    """GIVEN several replays to one that is paused, or fails WHEN its ttl has passed THEN those that were asked for by
    then are given up one after the other at once; one that was asked for later has its own ttl."""
    world = World()
    world.days(3)
    if trouble == "paused":
        world.store.suspend("a", "", world.epoch)
    else:
        world.replay_fate = Fate.ENDPOINT_FAILED
    early = [replayed(world) for _ in range(3)]
    look(world, 5)
    late = replayed(world)
    look(world, 4)
    for _ in range(9):
        work(world)
    assert {world.replays.one(each).state for each in early} == {ReplayState.DONE}
    assert all("its ttl" in world.replays.one(each).targets[0].reason for each in early)
    assert world.replays.one(late).state is ReplayState.RUNNING
    look(world, 4)
    assert (world.replays.one(late).state, world.replays.open_sources()) == (ReplayState.DONE, set())


def test_d6_a_replay_behind_one_that_was_given_up_is_tried_first() -> None:
    """GIVEN two replays to one that fails WHEN the first is given up, and the receiver is well from then on THEN the
    second has it all."""
    world = World()
    world.days(3)
    world.replay_fate = Fate.ENDPOINT_FAILED
    first, second = replayed(world), replayed(world)
    while world.replays.one(first).state is ReplayState.RUNNING:
        look(world, 1)
    world.replay_fate = Fate.DONE
    look(world, 2)
    assert [world.replays.one(each).targets[0].state for each in (first, second)] == [
        TargetState.CANCELLED,
        TargetState.DONE,
    ]


def test_d6_with_ttl_0_a_replay_is_waited_for() -> None:
    """GIVEN a paused one that never gives up WHEN months pass THEN its replay is open, and shown as such."""
    world = World()
    world.days(3)
    world.store.suspend("c", "", world.epoch)
    made = world.replays.request(Request(AskedBy.CLI, "shop", T0, T0 + 3 * DAY, subscription="c"), world.epoch)
    look(world, 60)
    assert world.replays.one(made).state is ReplayState.RUNNING


def test_d6_a_request_whose_own_event_the_log_lost_is_ended() -> None:
    """GIVEN a control event in a batch the log will never have again WHEN a week has passed THEN it failed."""
    world = World()
    world.days(3)
    control = Control(
        "c1", 0, 99, "public.orders", T0, '{"type":"control","action":"replay","replay_from_ts":"-infinity"}'
    )
    request = request_of("shop", control)
    assert request is not None
    source = world._leases.acquire("source:shop", Holder("i", "h", "b", 1, "1"), 1e9)
    assert source is not None
    world.replays.register(request, source.epoch)
    look(world, START_WAIT_MAX.days)
    (found,) = world.replays.newest(1)
    assert found.state is ReplayState.WAITING
    look(world, 1)
    (found,) = world.replays.newest(1)
    assert (found.state, found.reason) == (
        ReplayState.FAILED,
        "the log of 'shop' never got to the event that asked for it",
    )
