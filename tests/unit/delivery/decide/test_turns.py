"""Who is served with whom, and for how long: a bad receiver holds up nobody but its like."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.decide.turns import (
    ALONE_AT_ONCE,
    SHARED_MAX,
    SHARED_WELL_MAX,
    TURN_S,
    Turn,
    TurnClass,
    goes_on,
    next_turns,
)
from evermark.delivery.model import Subscription, SubscriptionState
from evermark.testing.contracts.scene import spec

COMPANIES = st.lists(st.sampled_from(TurnClass), max_size=40)


def waiting_of(companies: list[TurnClass]) -> tuple[list[Subscription], dict[str, TurnClass]]:
    some = [Subscription(spec(f"s{n:02}"), SubscriptionState.BEHIND) for n in range(len(companies))]
    return some, {one.name: turn_class for one, turn_class in zip(some, companies, strict=True)}


@given(COMPANIES, COMPANIES)
def test_d13_nobody_shares_with_another_company_and_places_are_limited(
    companies: list[TurnClass], serving: list[TurnClass]
) -> None:
    """GIVEN any that wait and are served THEN one turn for each class, few alone, and nobody twice."""
    waiting, turn_class = waiting_of(companies)
    turns, queued = next_turns(waiting, lambda one: turn_class[one.name], serving)
    names = [name for turn in turns for name in turn.names]
    assert len(set(names)) == len(names)
    for turn in turns:
        assert {turn_class[name] for name in turn.names} == {turn.turn_class}
        well = turn.turn_class in (TurnClass.LATE, TurnClass.NEAR)
        most = SHARED_WELL_MAX if well else SHARED_MAX
        assert len(turn.names) <= (1 if turn.turn_class is TurnClass.NONE else most)
    shared = [turn.turn_class for turn in turns if turn.turn_class is not TurnClass.NONE]
    assert len(set(shared)) == len(shared)
    assert not set(shared) & set(serving)
    alone = sum(turn.turn_class is TurnClass.NONE for turn in turns)
    assert alone == min(companies.count(TurnClass.NONE), max(0, ALONE_AT_ONCE - serving.count(TurnClass.NONE)))
    assert queued == (companies.count(TurnClass.NONE) > alone)
    # THEN every class that is not being served is
    assert set(shared) == {one for one in companies if one is not TurnClass.NONE} - set(serving)


def test_whoever_waited_longest_is_served_first() -> None:
    """GIVEN more than there are places WHEN turns begin THEN those at the head of the line have them."""
    waiting, turn_class = waiting_of([TurnClass.NONE] * 9 + [TurnClass.SLOW] * 20)
    turns, queued = next_turns(waiting, lambda one: turn_class[one.name], [])
    alone = [turn.names[0] for turn in turns if turn.turn_class is TurnClass.NONE]
    assert alone == [f"s{n:02}" for n in range(ALONE_AT_ONCE)] and queued
    (slow,) = (turn for turn in turns if turn.turn_class is TurnClass.SLOW)
    assert slow.names == tuple(f"s{n:02}" for n in range(9, 9 + SHARED_MAX))


def test_a_long_backlog_makes_room_when_somebody_waits_and_drains_when_nobody_does() -> None:
    """GIVEN a turn of its own WHEN others wait THEN it ends after its time; a shared one ends after one piece."""
    waiting, _ = waiting_of([TurnClass.NONE])
    mine = Turn(TurnClass.NONE, tuple(waiting))
    assert goes_on(mine, 3600.0, queued=False)
    assert goes_on(mine, TURN_S - 0.1, queued=True)
    assert not goes_on(mine, TURN_S, queued=True)
    assert not goes_on(Turn(TurnClass.SLOW, tuple(waiting)), 0.0, queued=False)
