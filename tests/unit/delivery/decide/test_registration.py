"""Subscriptions one by one: the decisions by property, and the long story of the group with the API in it."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from evermark.delivery.decide.group import SubscriptionRecord
from evermark.delivery.decide.registration import (
    CHANGEABLE,
    added,
    changed,
    current,
    free_names,
    retired,
    rotated,
    secret_ends,
    start_vector,
)
from evermark.delivery.model import (
    Cursor,
    CursorVector,
    Group,
    MadeBy,
    SourcePartition,
    Subscription,
    SubscriptionSpec,
    SubscriptionState,
)
from evermark.delivery.webhook.signing import SECRETS_MAX
from evermark.errors import ConfigError, ConflictError
from evermark.testing.contracts.scene import P0, P1, T0, spec
from tests.unit.delivery.decide.test_group import PARKED_MAX, Story

SECONDS = st.integers(-1000, 1000)
moments = st.builds(lambda s: T0 + timedelta(seconds=s), SECONDS)
cursors = st.dictionaries(st.sampled_from([P0, P1, SourcePartition("late", 0)]), st.builds(Cursor, st.integers(0, 9)))
standings = st.builds(
    SubscriptionRecord,
    name=st.just("a"),
    state=st.sampled_from(list(SubscriptionState)),
    reason=st.sampled_from(["", "503"]),
    failures=st.integers(0, 12),
    next_attempt_at=st.none() | moments,
    joined_version=st.integers(0, 5),
    generation=st.integers(0, 5),
)
CHANGES = {
    "url": st.sampled_from(["https://a.example/hook", "https://new.example/"]),
    "streams": st.sampled_from([(), ("public.orders",)]),
    "where": st.none() | st.just("data.n = 1"),
    "bundle": st.integers(1, 9),
    "headers": st.just({"x": "1"}),
    "parked_max": st.integers(1, 9),
}
changes = st.fixed_dictionaries({}, optional=CHANGES)


@st.composite
def rotations(draw: st.DrawFn) -> tuple[SubscriptionSpec, list[tuple[str, datetime | None, datetime]]]:
    """A subscription with a secret, and rotations of it at moments that go forward."""
    count, endless = draw(st.integers(0, 12)), draw(st.booleans())  # without ends, the limit comes into sight
    overlaps = st.none() if endless else st.none() | st.integers(0, 500)
    steps = draw(st.lists(st.tuples(overlaps, st.integers(0, 300)), min_size=count, max_size=count))
    now, plan = T0, []
    for number, (overlap, later) in enumerate(steps):
        now += timedelta(seconds=later)
        plan.append((f"s{number + 1}", None if overlap is None else now + timedelta(seconds=overlap), now))
    return replace(spec("a", secrets=("s0",)), made_by=MadeBy.API), plan


@given(st.none() | cursors, st.integers(0, 9), cursors)
def test_one_more_is_a_member_or_behind_and_nothing_between(
    start: CursorVector | None, version: int, group: CursorVector
) -> None:
    """Live with a new version and no cursors, or behind with a cursor for every place the group has."""
    plan = added(spec("a", parked_max=4), start, None, Group(version, frozenset({"b"}), group))
    ((made, record),) = plan.added.values()
    assert made.made_by is MadeBy.API and record.parked_max == 4
    assert record.is_member == (start is None) == (not plan.begun) == ("a" in plan.group.members)
    assert plan.group.version == version + (start is None)
    if record.is_member:
        assert record.joined_version == plan.group.version, "work that began before must not count for it"
    if start is not None:
        assert plan.begun["a"] == {**dict.fromkeys(group, Cursor(0)), **start}
        assert set(group) <= set(plan.begun["a"])


@given(st.sampled_from(list(MadeBy)), st.none() | cursors)
def test_a_taken_name_is_refused_whoever_has_it(owner: MadeBy, start: CursorVector | None) -> None:
    """Neither origin takes a name from the other, nor from itself."""
    with pytest.raises(ConflictError):
        added(spec("a"), start, owner, Group(0, frozenset(), {}))


@given(standings, changes)
def test_a_change_moves_nobody_in_or_out_of_the_group(standing: SubscriptionRecord, given: dict[str, Any]) -> None:
    """State and record stay, but for a new url, after which a failing or gone one is behind with a clean record."""
    before = replace(spec("a"), made_by=MadeBy.API)
    standing = replace(standing, parked_max=before.parked_max)
    wanted, after = changed(before, standing, given)
    assert wanted == replace(before, **given)
    assert after.is_member == standing.is_member
    assert (after.name, after.joined_version, after.generation) == ("a", standing.joined_version, standing.generation)
    assert after.parked_max == wanted.parked_max
    if wanted.url == before.url or standing.is_paused:
        assert replace(after, parked_max=standing.parked_max) == standing
    elif not standing.is_member:
        assert (after.state, after.failures, after.next_attempt_at) == (SubscriptionState.BEHIND, 0, None)


@pytest.mark.parametrize("field", sorted({f.name for f in fields(SubscriptionSpec)} - CHANGEABLE))
def test_what_cannot_be_changed_is_refused(field: str) -> None:
    """Every field of a spec is either changeable or refused; a new one must be thought about."""
    assert field in {"name", "secrets", "secrets_until", "start", "allow_networks", "made_by", "bot"}
    with pytest.raises(ConfigError):
        changed(replace(spec("a"), made_by=MadeBy.API), SubscriptionRecord("a", SubscriptionState.LIVE), {field: "x"})


@given(rotations(), st.integers(0, 4000))
def test_a_secret_signs_from_its_rotation_until_its_end(
    case: tuple[SubscriptionSpec, list[tuple[str, datetime | None, datetime]]], later: int
) -> None:
    """At any moment: the newest first, each former one iff no rotation since then ended it by that moment."""
    subscription, plan = case
    ends: dict[str, datetime | None] = {"s0": None}
    for secret, until, now in plan:
        try:
            subscription = rotated(subscription, secret, until, now)
        except ConflictError:
            good = [end for end in ends.values() if end is None or end > now]
            assert len(good) >= SECRETS_MAX and (until is None or until > now)
            break
        for old, end in ends.items():
            ends[old] = min((e for e in (end, until) if e is not None), default=None)
        ends[secret] = None
        assert subscription.secrets[0] == secret
        assert len(subscription.secrets) <= SECRETS_MAX
        then = now + timedelta(seconds=later)
        signing = current(subscription, then)
        assert set(signing.secrets) == {one for one, end in ends.items() if end is None or end > then}
        assert signing.secrets[0] == secret, "the newest never ends by itself"
        assert len(secret_ends(signing)) == len(signing.secrets)
        assert current(signing, then) == signing


@given(rotations())
def test_ending_the_overlap_leaves_the_newest(
    case: tuple[SubscriptionSpec, list[tuple[str, datetime | None, datetime]]],
) -> None:
    """One secret, without an end, whatever came before; doing it twice changes nothing."""
    subscription, plan = case
    for secret, until, now in plan[: SECRETS_MAX - 1]:
        subscription = rotated(subscription, secret, until, now)
    alone = retired(subscription)
    assert alone.secrets == subscription.secrets[:1] and secret_ends(alone) == [None]
    assert retired(alone) == alone
    assert replace(alone, secrets=(), secrets_until=()) == replace(subscription, secrets=(), secrets_until=())


def test_what_the_file_made_is_nobody_elses() -> None:
    """Changed, rotated, retired: each is refused with where to edit it."""
    mine = spec("a", secrets=("s0",))
    for call in (
        lambda: changed(mine, SubscriptionRecord("a", SubscriptionState.LIVE), {}),
        lambda: rotated(mine, "s1", None, T0),
        lambda: retired(mine),
    ):
        with pytest.raises(ConflictError) as refused:
            call()
        assert "subscriptions.a in evermark.yaml" in refused.value.hint


@given(st.frozensets(st.sampled_from([P0, P1])), st.builds(Cursor, st.integers(0, 9)))
def test_where_a_subscription_begins(places: frozenset[SourcePartition], batch: int) -> None:
    """Now has no vector; the beginning is 0 everywhere; a time asks every place."""
    assert start_vector("now", places, lambda *_: batch) is None
    assert start_vector("beginning", places, lambda *_: batch) == dict.fromkeys(places, Cursor(0))
    assert start_vector("2026-11-01T00:00:00Z", places, lambda *_: batch) == dict.fromkeys(places, Cursor(batch))


class ApiStory(Story):
    """The same story, with subscriptions that come and go one at a time, in the middle of anybody's work."""

    @rule(name=st.sampled_from(["a", "b", "c", "d"]), early=st.booleans())
    def add_or_remove(self, name: str, early: bool) -> None:
        if name in self.store.subscriptions():
            self.store.remove(name, self.epoch)
            return
        start = dict.fromkeys(self.head, Cursor(0)) if early else None
        self.store.add(spec(name, parked_max=PARKED_MAX), start, self.epoch)
        self._born(name, dict(self.store.group().cursors if start is None else start))

    @rule(name=st.sampled_from(["a", "b", "c", "d"]), join=st.booleans())
    def make_anew(self, name: str, join: bool) -> None:
        if name not in self.store.subscriptions():
            return
        group = dict(self.store.group().cursors)
        stood = group if join else dict(self.store.cursors(name) or group)
        self.store.remove(name, self.epoch)
        self.store.add(spec(name, parked_max=PARKED_MAX), None if join else stood, self.epoch)
        self._born(name, stood)

    @rule(name=st.sampled_from(["a", "b", "c", "d"]), url=st.sampled_from(["https://x.example", "https://y.example"]))
    def change(self, name: str, url: str) -> None:
        if name in self.store.subscriptions():
            self.store.change(name, {"url": url}, self.epoch)


TestApiStory = ApiStory.TestCase
TestApiStory.settings = settings(
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_name_taken_at_run_time_keeps_only_itself_from_its_events() -> None:
    """GIVEN a file that names what the API made WHEN it is registered THEN all others are, and that one is told."""
    made = Subscription(replace(spec("taken"), made_by=MadeBy.API), SubscriptionState.LIVE)
    kept = Subscription(spec("kept"), SubscriptionState.BEHIND)
    given_ = [spec("new"), spec("taken"), spec("kept")]
    mine, taken = free_names(given_, {"taken": made, "kept": kept})
    assert ([one.name for one in mine], taken) == (["new", "kept"], ["taken"])
