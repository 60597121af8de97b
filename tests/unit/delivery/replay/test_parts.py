"""A replay in parts by key: its mark never passes an event that a part still owes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.model import Fate, Outcome
from evermark.delivery.replay.plan import ReplayWork, Round, joined
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.testing.contracts.scene import event, spec

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
LIMIT = 24


@dataclass(frozen=True)
class Owed:
    """An event of a part, and how its sending ends."""

    at: Mark
    ending: str


@st.composite
def works(draw: st.DrawFn) -> tuple[ReplayWork, list[Owed], list[list[Owed]], list[Fate]]:
    """Events of a slice, of which some share an instant, dealt to parts; at most as many as a step looks for."""
    count, parts = draw(st.integers(0, LIMIT)), draw(st.integers(1, 4))
    endings = st.sampled_from([*["accepted"] * 6, "parked", "parked", "owed"])
    found = [Owed(Mark(NOON + timedelta(seconds=n // 3), f"e{n:02}"), draw(endings)) for n in range(count)]
    dealt: list[list[Owed]] = [[] for _ in range(parts)]
    for one in found:
        dealt[draw(st.integers(0, parts - 1))].append(one)
    piece = TimeSlice(Mark(NOON), NOON + timedelta(minutes=1), ("f",), count)
    work = ReplayWork("r", piece, spec("a"), (), None, None, LIMIT, 1.0, False, draw(st.sampled_from([0, 1, 3, 100])))
    return work, found, dealt, [draw(st.sampled_from(list(Fate)[1:])) for _ in dealt]


def told(part: list[Owed], found: list[Owed], fate: Fate, room: int, rows: int) -> list[Round]:
    """What a task tells: rounds of so many rows, up to the first that is owed or has no room; then the others'."""
    rounds: list[Round] = []
    for start in range(0, len(part), rows):
        done: list[Owed] = []
        stopped: Fate | None = None
        for one in part[start : start + rows]:
            stopped = fate if one.ending == "owed" else Fate.FULL if one.ending == "parked" and not room else None
            if stopped is not None:
                break
            room -= one.ending == "parked"
            done.append(one)
        parked = [one.at for one in done if one.ending == "parked"]
        events = tuple(replace(event(1), event_id=at.event_id or "") for at in parked)
        outcome = Outcome("a", stopped or Fate.DONE, len(done) - len(parked), events)
        rounds.append(Round(outcome, len(done), done[-1].at if done else None, tuple(parked)))
        if stopped is not None:
            return rounds
    if len(found) > len(part):
        rounds.append(Round(Outcome("a", Fate.DONE), len(found) - len(part), found[-1].at))
    return rounds


def order(mark: Mark) -> tuple[datetime, str]:
    return mark.time, mark.event_id or ""


@given(works(), st.integers(1, 9))
def test_no_event_is_passed_that_a_part_still_owes(
    work: tuple[ReplayWork, list[Owed], list[list[Owed]], list[Fate]], rows: int
) -> None:
    """GIVEN whatever the parts say THEN every event before the mark was accepted or is parked, once; and all are when
    all parts are done.
    """
    asked, found, dealt, fates = work
    rounds = [told(part, found, fate, asked.parked_room, rows) for part, fate in zip(dealt, fates, strict=True)]
    step = joined(asked, rounds, LIMIT)
    passed = [one for one in found if order(one.at) <= order(step.mark)]
    assert order(step.mark) >= order(asked.slice.mark)
    assert all(one.ending != "owed" for one in passed)
    parked = [one.at.event_id for one in passed if one.ending == "parked"]
    assert [one.event_id for one in step.outcome.parked] == parked and len(parked) <= asked.parked_room
    if step.outcome.fate is Fate.DONE:
        assert passed == found
        assert step.mark == (found[-1].at if len(found) == LIMIT else asked.slice.end)
    elif all(one.ending != "owed" for one in found):
        assert step.outcome.fate is Fate.FULL


def test_a_part_without_room_beyond_what_all_reached_is_not_full() -> None:
    """GIVEN room for one WHEN a part parks one beyond the place that the other reached THEN it is left out, and the
    replay goes on: it has room."""
    piece = TimeSlice(Mark(NOON), NOON + timedelta(minutes=1), ("f",), 4)
    work = ReplayWork("r", piece, spec("a"), (), None, None, LIMIT, 1.0, False, 1)
    found = [Owed(Mark(NOON, f"e{n}"), ending) for n, ending in enumerate(("accepted", "owed", "parked", "parked"))]
    rounds = [told(part, found, Fate.UNFINISHED, 1, 9) for part in (found[:2], found[2:])]
    step = joined(work, rounds, LIMIT)
    assert (step.outcome.fate, step.mark, step.outcome.parked) == (Fate.UNFINISHED, found[0].at, ())
