"""Who is served with whom, and for how long: a bad receiver holds up nobody but its like."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.base import Subscription, SubscriptionState
from evermark.delivery.turns import ALONE_AT_ONCE, SHARED_MAX, TURN_S, Company, Turn, goes_on, next_turns
from evermark.testing.contracts.scene import spec

COMPANIES = st.lists(st.sampled_from(Company), max_size=40)


def waiting_of(companies: list[Company]) -> tuple[list[Subscription], dict[str, Company]]:
    some = [Subscription(spec(f"s{n:02}"), SubscriptionState.BEHIND) for n in range(len(companies))]
    return some, {one.name: company for one, company in zip(some, companies, strict=True)}


@given(COMPANIES, COMPANIES)
def test_d13_nobody_shares_with_another_company_and_places_are_limited(
    companies: list[Company], serving: list[Company]
) -> None:
    """GIVEN any that wait and are served THEN one turn a company, few alone, and nobody twice."""
    waiting, company = waiting_of(companies)
    turns, queued = next_turns(waiting, lambda one: company[one.name], serving)
    names = [name for turn in turns for name in turn.names]
    assert len(set(names)) == len(names)
    for turn in turns:
        assert {company[name] for name in turn.names} == {turn.company}
        assert len(turn.names) <= (1 if turn.company is Company.NONE else SHARED_MAX)
    shared = [turn.company for turn in turns if turn.company is not Company.NONE]
    assert len(set(shared)) == len(shared)
    assert not set(shared) & set(serving)
    alone = sum(turn.company is Company.NONE for turn in turns)
    assert alone == min(companies.count(Company.NONE), max(0, ALONE_AT_ONCE - serving.count(Company.NONE)))
    assert queued == (companies.count(Company.NONE) > alone)
    # THEN every company that is not being served is
    assert set(shared) == {one for one in companies if one is not Company.NONE} - set(serving)


def test_whoever_waited_longest_is_served_first() -> None:
    """GIVEN more than there are places WHEN turns begin THEN those at the head of the line have them."""
    waiting, company = waiting_of([Company.NONE] * 9 + [Company.SLOW] * 20)
    turns, queued = next_turns(waiting, lambda one: company[one.name], [])
    alone = [turn.names[0] for turn in turns if turn.company is Company.NONE]
    assert alone == [f"s{n:02}" for n in range(ALONE_AT_ONCE)] and queued
    (slow,) = (turn for turn in turns if turn.company is Company.SLOW)
    assert slow.names == tuple(f"s{n:02}" for n in range(9, 9 + SHARED_MAX))


def test_a_long_backlog_makes_room_when_somebody_waits_and_drains_when_nobody_does() -> None:
    """GIVEN a turn of its own WHEN others wait THEN it ends after its time; a shared one ends after one piece."""
    waiting, _ = waiting_of([Company.NONE])
    mine = Turn(Company.NONE, tuple(waiting))
    assert goes_on(mine, 3600.0, queued=False)
    assert goes_on(mine, TURN_S - 0.1, queued=True)
    assert not goes_on(mine, TURN_S, queued=True)
    assert not goes_on(Turn(Company.SLOW, tuple(waiting)), 0.0, queued=False)
