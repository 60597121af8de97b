"""The plan of a replica source: whatever arrives in which order, each event has one position, and keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import ConflictError, FormatError, GapError, StaleError
from evermark.replicas.ranges import Held, Ranges
from evermark.sources.replica import plan as planning
from evermark.sources.replica.plan import Plan, number_of, position

TABLES = ("bills", "orders")
_numbers = st.frozensets(st.integers(1, 30), max_size=12)
_held = st.dictionaries(
    st.sampled_from(TABLES), st.dictionaries(st.sampled_from(("a", "b", "c")), _numbers, max_size=3), max_size=2
)


def _grow_by(seen: dict[str, dict[str, Ranges]], new: dict[str, dict[str, frozenset[int]]]) -> None:
    for table, by_origin in new.items():
        for origin, numbers in by_origin.items():
            held = seen.setdefault(table, {})
            held[origin] = held.get(origin, Ranges()) | Ranges.of(numbers)


def _events(plan: Plan, start: int, end: int) -> dict[int, tuple[str, str, int]]:
    found = {}
    for part in plan.between(start, end):
        for number in range(part.at, part.end):
            found[number] = (part.table, part.origin, part.first + number - part.at)
    return found


@given(st.lists(st.tuples(_held, st.integers(0, 40)), max_size=8))
def test_each_event_has_one_position_and_keeps_it(
    steps: list[tuple[dict[str, dict[str, frozenset[int]]], int]],
) -> None:
    """GIVEN events that arrive in any order, and confirmations at any place THEN each that the peer has stands at one
    position, positions have no gaps, and none ever stands for another event; the plan survives being written down."""
    seen: dict[str, dict[str, Ranges]] = {}
    plan, given_out = Plan("reader.0"), dict[int, tuple[str, str, int]]()
    for new, confirmed in steps:
        _grow_by(seen, new)
        plan = planning.grown(plan, TABLES, seen)
        for number, event in _events(plan, plan.start, plan.end).items():
            assert given_out.setdefault(number, event) == event
        plan = replace(planning.confirmed(plan, confirmed), epoch=plan.epoch + 1, pending=Plan("reader.1", plan.end))
        assert planning.from_json(planning.as_json(plan)) == plan
    assert sorted(given_out) == list(range(plan.end))
    everything = [
        (table, origin, number)
        for table, held in seen.items()
        for origin, ranges in held.items()
        for start, end in ranges
        for number in range(start, end + 1)
    ]
    assert sorted(given_out.values()) == sorted(everything)
    known: dict[str, Held] = {table: plan.known(table) for table in TABLES}
    assert not planning.unplanned(plan, TABLES, seen)
    assert sum(ranges.count for held in known.values() for ranges in held.values()) == len(everything)


def test_a_plan_is_cut_where_its_peer_lacks_an_event() -> None:
    """GIVEN parts that are still to be read, WHEN the peer lacks one of them THEN that and what follows is dropped."""
    plan = planning.grown(Plan("r"), TABLES, {"orders": {"a": Ranges.through(5), "b": Ranges.through(5)}})
    left = planning.without_vanished(plan, 3, {"orders": {"a": Ranges.through(5), "b": Ranges.through(4)}})
    assert (left.end, [part.origin for part in left.parts]) == (5, ["a"])
    assert planning.without_vanished(plan, 3, {"orders": {"a": Ranges.of([4, 5]), "b": Ranges.through(5)}}) == plan


def test_numbers_below_a_floor_are_a_gap_unless_the_plan_begins_there() -> None:
    """GIVEN events that the peer collected THEN a first plan begins behind them, and a later one has a gap."""
    held, floors = {"orders": {"a": Ranges.through(9)}}, {"orders": {"a": 4}}
    first = planning.begun("r", TABLES, floors)
    planning.check_floors("north", first, TABLES, held, floors)
    assert planning.grown(first, TABLES, held).end == 5
    with pytest.raises(GapError, match="north has no events 1 to 4 of a"):
        planning.check_floors("north", Plan("r", done={"orders": {}}), TABLES, held, floors)
    late = planning.with_tables(Plan("r", done={"bills": {}}), TABLES, floors)
    planning.check_floors("north", late, TABLES, held, floors)


def test_what_is_planned_anew_claims_nothing_that_its_peer_collected() -> None:
    """GIVEN a log whose plan is lost, and a peer that collected events THEN these are a gap: the log may lack them."""
    held, floors = {"orders": {"a": Ranges.through(12)}}, {"orders": {"a": 9}}
    with pytest.raises(GapError, match="north has no events 1 to 9 of a"):
        planning.check_floors("north", planning.anew("r", 3, TABLES), TABLES, held, floors)


def test_only_what_the_peer_had_when_it_was_planned_anew_may_be_in_the_log() -> None:
    """GIVEN a plan that was made anew THEN repeats end with what its peer had then; what it lost since may come back
    later, and be one."""
    held = {"orders": {"a": Ranges.through(5)}}
    plan = planning.anew("r", 100, TABLES)
    assert plan.repeats_to > 10**19
    plan = planning.grown(plan, TABLES, held)
    assert plan.repeats_to == plan.end == 105
    later = planning.grown(plan, TABLES, {"orders": {"a": Ranges.through(7)}})
    assert (later.repeats_to, later.end) == (105, 107)
    assert planning.without_vanished(later, 105, {"orders": {"a": Ranges.through(6)}}).repeats_to == 105
    cut = planning.without_vanished(later, 100, {"orders": {"a": Ranges.through(4)}})
    assert planning.grown(cut, TABLES, {"orders": {"a": Ranges.through(9)}}).repeats_to == 109


def test_an_owner_of_an_earlier_epoch_is_refused() -> None:
    """GIVEN a plan that a later owner took up THEN an earlier one may not use it, and one that follows may."""
    with pytest.raises(StaleError, match="epoch 3, and ours is 2"):
        planning.check_owner(Plan("r", epoch=3), 2)
    planning.check_owner(Plan("r", epoch=3), 3)
    planning.check_owner(Plan("r", epoch=3), 4)
    planning.check_owner(None, 0)


def test_a_position_is_a_number_of_one_width() -> None:
    """GIVEN a position THEN it is read as it was written, and anything else is refused."""
    assert number_of(position(12)) == 12
    assert position(9) < position(10)
    for text in ("", "12", "-0000000000000000001", "x" * 20):
        with pytest.raises(FormatError):
            number_of(text)
    with pytest.raises(ConflictError, match="no plan leads from 0 to 5"):
        Plan("r").between(0, 5)
