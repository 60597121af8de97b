"""The decisions about the live group: by property, and as a long story with an account of every event."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evermark.cluster.base import Holder
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.group import (
    Settlement,
    SubscriptionRecord,
    after_outcome,
    is_due,
    may_join,
    settle,
    subscription_after_failure,
)
from evermark.delivery.decide.retry import LIMITS
from evermark.delivery.model import (
    Cursor,
    Fate,
    Group,
    GroupWork,
    MadeBy,
    Outcome,
    ParkedEvent,
    SourcePartition,
    Subscription,
    SubscriptionState,
)
from evermark.delivery.store.memory import MemoryDelivery
from evermark.errors import ConflictError, StaleError
from evermark.testing.contracts.scene import P0, P1, T0, event, spec

NAMES = ("a", "b", "c", "d")
names = st.sampled_from(NAMES)
places = st.sampled_from([P0, P1])
PARKED_MAX = 3


def _standing(name: str, joined_version: int = 0) -> SubscriptionRecord:
    return SubscriptionRecord(name, SubscriptionState.LIVE, parked_max=PARKED_MAX, joined_version=joined_version)


@st.composite
def outcomes_of(draw: st.DrawFn, name: str) -> Outcome:
    numbers = draw(st.lists(st.integers(1, 9), max_size=4, unique=True))
    return Outcome(
        name,
        draw(st.sampled_from(list(Fate))),
        accepted=draw(st.integers(0, 2)),
        parked=tuple(event(n, status=draw(st.sampled_from([None, 400]))) for n in numbers),
        retry_after_s=draw(st.none() | st.floats(0, 1e9)),
        expired=draw(st.integers(0, 2)),
    )


@st.composite
def settlements(draw: st.DrawFn) -> tuple[Group, GroupWork, list[Outcome], Settlement]:
    members = draw(st.frozensets(names))
    version = draw(st.integers(0, 5))
    joined = {name: draw(st.integers(0, version)) for name in members}
    group = Group(version, members, {P0: Cursor(4), P1: Cursor(7)})
    begun_version = draw(st.none() | st.integers(0, version))
    work = GroupWork(P0, Cursor(4), Cursor(draw(st.integers(5, 9))), draw(st.frozensets(names)), begun_version)
    outcomes = [draw(outcomes_of(name)) for name in draw(st.lists(names, max_size=6))]
    records = {name: _standing(name, joined[name]) for name in members}
    parked_now = {name: draw(st.integers(0, PARKED_MAX)) for name in members}
    return group, work, outcomes, settle(group, work, outcomes, records, parked_now, T0, lambda: 0.5)


@given(settlements())
def test_who_stays_has_passed_every_event(case: tuple[Group, GroupWork, list[Outcome], Settlement]) -> None:
    """A member that stays was in the work from its beginning, and all its outcomes say so; its parks are kept."""
    group, work, outcomes, settled = case
    for name in settled.group.members:
        mine = [outcome for outcome in outcomes if outcome.subscription == name]
        assert name in group.members & work.members
        assert mine
        assert all(outcome.fate is Fate.DONE for outcome in mine)
        promised = {parked.event_id for outcome in mine for parked in outcome.parked}
        assert {parked.event_id for parked in settled.parked.get(name, ())} == promised


@given(settlements())
def test_who_leaves_keeps_the_cursor_the_work_began_at(
    case: tuple[Group, GroupWork, list[Outcome], Settlement],
) -> None:
    """With the whole vector, outside the group, with nothing parked and nothing counted as expired."""
    group, work, _, settled = case
    left, records = settled.left.keys(), {record.name: record for record in settled.records}
    assert left == group.members - settled.group.members
    for name, cursors in settled.left.items():
        assert cursors == group.cursors
        assert cursors[work.place] == work.begun
        assert records[name].state is not SubscriptionState.LIVE
    assert not left & (settled.parked.keys() | settled.expired.keys())


@given(settlements())
def test_the_version_changes_iff_membership_does(case: tuple[Group, GroupWork, list[Outcome], Settlement]) -> None:
    """And the group's cursor moves at this place only."""
    group, work, _, settled = case
    assert (settled.group.version != group.version) == (settled.group.members != group.members)
    assert settled.group.version >= group.version
    assert settled.group.cursors == {**group.cursors, work.place: work.done}


@given(settlements())
def test_nobody_is_parked_beyond_the_limit(case: tuple[Group, GroupWork, list[Outcome], Settlement]) -> None:
    """Who would exceed it is suspended with a reason."""
    *_, settled = case
    assert all(len(parked) <= PARKED_MAX for parked in settled.parked.values())
    for record in settled.records:
        if record.name in settled.left and record.state is SubscriptionState.SUSPENDED:
            assert "parked" in record.reason
            assert (record.failures, record.is_full) == (0, True)


@pytest.mark.parametrize(("stored", "begun_at", "done_to"), [(4, 3, 5), (4, 5, 6), (4, 4, 4), (4, 4, 3), (None, 4, 5)])
def test_a_cursor_elsewhere_is_a_conflict(stored: int | None, begun_at: int, done_to: int) -> None:
    """Compare-and-set: only from the exact batch the work began at, and only forward."""
    group = Group(0, frozenset(), {} if stored is None else {P0: Cursor(stored)})
    with pytest.raises(ConflictError):
        settle(group, GroupWork(P0, Cursor(begun_at), Cursor(done_to), frozenset()), [], {}, {}, T0, lambda: 0.0)


@given(st.integers(0, 60), st.none() | st.floats(0, 1e12), st.floats(0, 1))
def test_a_failing_endpoint_is_tried_again_within_bounds(
    failures: int, retry_after_s: float | None, jitter: float
) -> None:
    """Never at once, never later than a day and its jitter; the tenth failure suspends."""
    before = replace(_standing("a"), state=SubscriptionState.BEHIND, failures=failures)
    failed = Outcome("a", Fate.ENDPOINT_FAILED, reason="503", retry_after_s=retry_after_s)
    after = subscription_after_failure(before, failed, T0, jitter)
    assert after.next_attempt_at is not None
    assert timedelta(seconds=1) <= after.next_attempt_at - T0 <= timedelta(hours=30)
    assert after.failures == failures + 1
    assert (after.state is SubscriptionState.SUSPENDED) == (failures + 1 >= 10)


def test_what_a_person_paused_no_outcome_lifts() -> None:
    """Only gone is stronger than a pause."""
    paused = replace(_standing("a"), state=SubscriptionState.SUSPENDED, reason="rest")
    for fate in (Fate.DONE, Fate.ENDPOINT_FAILED, Fate.UNFINISHED):
        assert after_outcome(paused, Outcome("a", fate, accepted=1), 0, T0, lambda: 0.0, LIMITS).record == paused
    gone = after_outcome(paused, Outcome("a", Fate.GONE), 0, T0, lambda: 0.0, LIMITS).record
    assert gone.state is SubscriptionState.DISABLED


@pytest.mark.parametrize(
    ("state", "wait_s", "due"),
    [
        (SubscriptionState.LIVE, None, False),
        (SubscriptionState.BEHIND, None, True),
        (SubscriptionState.BEHIND, 1, False),
        (SubscriptionState.BEHIND, 0, True),
        (SubscriptionState.SUSPENDED, None, False),
        (SubscriptionState.SUSPENDED, 1, False),
        (SubscriptionState.SUSPENDED, 0, True),
        (SubscriptionState.DISABLED, None, False),
    ],
)
def test_the_follower_works_for_who_is_due(state: SubscriptionState, wait_s: int | None, due: bool) -> None:
    """Behind and suspended ones once their backoff is over; paused, disabled and live ones never."""
    when = None if wait_s is None else T0 + timedelta(seconds=wait_s)
    assert is_due(Subscription(spec("a"), state, next_attempt_at=when), T0) is due


@given(st.dictionaries(places, st.integers(0, 2)), st.dictionaries(places, st.integers(0, 2)))
def test_joining_needs_the_same_vector(mine: dict[SourcePartition, int], theirs: dict[SourcePartition, int]) -> None:
    """Equal everywhere, and nowhere unknown."""
    behind = replace(_standing("a"), state=SubscriptionState.BEHIND)
    assert may_join(behind, mine, Group(0, frozenset(), theirs)) == (mine == theirs)
    assert not may_join(replace(behind, state=SubscriptionState.SUSPENDED), mine, Group(0, frozenset(), mine))


class Story(RuleBasedStateMachine):
    """Batches of one event each, matched by everybody, while subscriptions come, go, fail, join and are made anew.

    After every step each subscription must have got, or have parked, every event between where it started and where
    its cursor stands. A life is a name with a number, since one name may be several subscriptions in a row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leases = MemoryLeases(is_gone=lambda holder: True)
        self.store = MemoryDelivery(self.leases, jitter=lambda: 0.0)
        self.head = {P0: 0, P1: 0}
        self.lives: dict[str, int] = {}
        self.start: dict[tuple[str, int], dict[SourcePartition, Cursor]] = {}
        self.stood: dict[tuple[str, int], dict[SourcePartition, Cursor]] = {}
        self.got: dict[tuple[str, int], set[str]] = {}
        self.works: list[tuple[Any, ...]] = []
        self.now = T0
        self.owners = 0
        self.epoch = 0

    @initialize()
    def begin(self) -> None:
        self.take_over(7)
        for place in self.head:
            self.store.open_partition(place, 0, self.epoch)
        for name in "abc":
            self.add_or_remove(name, early=False)

    @rule(luck=st.integers(0, 9))
    def take_over(self, luck: int) -> None:
        if luck != 7:
            return
        self.owners += 1
        lease = self.leases.acquire("deliver", Holder("i", "h", "b", self.owners, "1"), 60)
        assert lease is not None
        self.epoch = lease.epoch

    @rule(name=names, early=st.booleans())
    def add_or_remove(self, name: str, early: bool) -> None:
        wanted = set(self.store.subscriptions()) ^ {name}
        starts = {name: dict.fromkeys(self.head, Cursor(0))} if early else {}
        specs = [spec(one, parked_max=PARKED_MAX) for one in sorted(wanted)]
        self.store.register(specs, MadeBy.FILE, starts, self.epoch)
        if name in wanted:
            self._born(name, dict(starts.get(name, self.store.group().cursors)))

    def _born(self, name: str, start: dict[SourcePartition, Cursor]) -> None:
        self.lives[name] = self.lives.get(name, 0) + 1
        life = (name, self.lives[name])
        self.start[life] = start
        self.stood[life] = dict(start)
        self.got[life] = set()

    @rule(name=names, join=st.booleans())
    def make_anew(self, name: str, join: bool) -> None:
        """Removed and made again where it stood: the name, the cursor and the members are as before."""
        there = self.store.subscriptions()
        if name in there:
            stood = dict(self.store.cursors(name) or self.store.group().cursors)
            others = [spec(other, parked_max=PARKED_MAX) for other in there if other != name]
            self.store.register(others, MadeBy.FILE, {}, self.epoch)
            self.store.register([*others, spec(name, parked_max=PARKED_MAX)], MadeBy.FILE, {name: stood}, self.epoch)
            self._born(name, stood)
            if join:
                self.store.join(name, self.epoch)

    @precondition(lambda self: len(self.works) < 3)
    @rule(place=places, data=st.data())
    def begin_group_work(self, place: SourcePartition, data: st.DataObject) -> None:
        group = self.store.group()
        begun_at = group.cursors[place].batch
        done_to = self._batches_after(place, begun_at, data)
        heard = [name for name in sorted(group.members) if data.draw(st.integers(0, 9)) != 5]  # a task may be lost
        outcomes = [self._post(name, place, begun_at, done_to, data) for name in heard]
        self.works.append(("group", place, begun_at, done_to, group, outcomes, self.epoch))

    @precondition(lambda self: len(self.works) < 3 and self.store.cursors_outside())
    @rule(place=places, data=st.data())
    def begin_follower_work(self, place: SourcePartition, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.store.cursors_outside())))
        begun_at = self.store.cursors(name)[place].batch
        done_to = self._batches_after(place, begun_at, data)
        outcome = self._post(name, place, begun_at, done_to, data)
        generation = self.store.subscriptions()[name].generation
        self.works.append(("one", place, begun_at, done_to, name, outcome, self.epoch, generation))

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def settle_a_work(self, data: st.DataObject) -> None:
        work = self.works.pop(data.draw(st.integers(0, len(self.works) - 1)))
        kind, place, begun_at, done_to, who, result, epoch, *generation = work
        try:
            if kind == "group":
                self.store.settle_group(
                    GroupWork(place, Cursor(begun_at), Cursor(done_to), who.members, who.version),
                    result,
                    self.now,
                    epoch,
                )
            else:
                self.store.settle_subscription(
                    who, place, Cursor(begun_at), Cursor(done_to), result, self.now, epoch, generation=generation[0]
                )
        except (ConflictError, StaleError):
            pass  # somebody else did it, or owns it

    @rule(name=names)
    def catch_up_and_join(self, name: str) -> None:
        """The follower's last step, in one go: otherwise the story seldom gets that far."""
        group = self.store.group()
        for place, begun in self.store.cursors(name).items():
            done = group.cursors[place]
            if begun < done:
                self.got[name, self.lives[name]] |= {
                    _event_id(place, b) for b in range(begun.batch + 1, done.batch + 1)
                }
                outcome = Outcome(name, Fate.DONE, accepted=1)
                self.store.settle_subscription(name, place, begun, done, outcome, self.now, self.epoch)
        self.store.join(name, self.epoch)

    @rule(name=names, resume=st.sampled_from([True, True, False]))
    def suspend(self, name: str, resume: bool) -> None:
        if name in self.store.subscriptions():
            self.store.suspend(name, "", self.epoch)
            if resume:
                self.store.resume(name, self.epoch)

    @rule(deliver=st.booleans(), minutes=st.integers(1, 600))
    def retry(self, deliver: bool, minutes: int) -> None:
        self.now += timedelta(minutes=minutes)
        for row in self.store.parked.claim(self.now, 5, 60, self.epoch):
            if deliver:
                self.got[row.subscription, self.lives[row.subscription]].add(row.event.event_id)
                self.store.parked.delivered([row.id], self.epoch)
            else:
                self.store.parked.reschedule(
                    row, next_attempt_at=None, attempts=8, reason="", status=400, epoch=self.epoch
                )

    @invariant()
    def every_event_is_accounted_for(self) -> None:
        group = self.store.group()
        parked = {(row.subscription, row.event.event_id) for row in self.store.parked.rows(limit=10_000)}
        for name, subscription in self.store.subscriptions().items():
            life = (name, self.lives[name])
            is_member = subscription.state is SubscriptionState.LIVE
            assert is_member == (name in group.members)
            cursors = group.cursors if is_member else self.store.cursors(name)
            for place, cursor in cursors.items():
                assert cursor >= self.stood[life][place], f"{life} went back"
                self.stood[life][place] = cursor
                for batch in range(self.start[life][place].batch + 1, cursor.batch + 1):
                    one = _event_id(place, batch)
                    assert one in self.got[life] or (name, one) in parked, f"{life} lost {one}"

    def _batches_after(self, place: SourcePartition, begun_at: int, data: st.DataObject) -> int:
        self.head[place] = max(self.head[place], begun_at + data.draw(st.integers(1, 3)))
        return data.draw(st.integers(begun_at + 1, self.head[place]))

    def _post(self, name: str, place: SourcePartition, begun_at: int, done_to: int, data: st.DataObject) -> Outcome:
        """What the receiver does with these events, now; it becomes known to the store only when it is settled."""
        fate = data.draw(st.sampled_from([*[Fate.DONE] * 8, *Fate]))
        refused: list[ParkedEvent] = []
        for batch in range(begun_at + 1, done_to + 1):
            one = replace(event(batch, place), event_id=_event_id(place, batch))
            if data.draw(st.integers(0, 9)) == 5:
                refused.append(one)
            elif fate is Fate.DONE:
                self.got[name, self.lives[name]].add(one.event_id)
        return Outcome(name, fate, accepted=done_to - begun_at - len(refused), parked=tuple(refused))


def _event_id(place: SourcePartition, batch: int) -> str:
    return f"{place.partition}-{batch}"


TestStory = Story.TestCase
TestStory.settings = settings(
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
