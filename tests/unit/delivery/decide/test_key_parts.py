"""A hot subscription in parts by key: each event is in one, order holds, no event is passed that a part still owes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.decide.key_parts import PART_ROWS_MIN, cursor_at, joined, pace_after, part_numbers, rows_in
from evermark.delivery.model import Cursor, Fate, Outcome, ParkedEvent
from evermark.delivery.webhook.ordering import keys_of
from evermark.delivery.work import Assignment, Result, Span
from evermark.testing.contracts.scene import P0, event, spec

AFTER = 10
KEYS = pa.schema([(name, pa.string()) for name in ("stream", "op", "key", "previous_key")])
rows = st.fixed_dictionaries(
    {
        "stream": st.sampled_from(["a", "b", "c"]),
        "op": st.sampled_from([*["update"] * 20, "truncate"]),
        "key": st.one_of(st.none(), st.integers(0, 30).map(str)),
        "previous_key": st.sampled_from([*[None] * 20, "3", "4"]),
    }
)


def table(of: Sequence[dict[str, str | None]]) -> pa.Table:
    return pa.Table.from_pylist(list(of), KEYS)


@given(st.lists(rows, max_size=60), st.integers(1, 7))
def test_events_that_keep_their_order_are_in_one_part(of: list[dict[str, str | None]], parts: int) -> None:
    """GIVEN any events THEN each is in one part, and all of a line (as the sink sees it in the whole span) in one."""
    numbers = part_numbers(table(of), parts)
    assert len(numbers) == len(of) and all(0 <= number < parts for number in numbers)
    if not of:
        return
    lines = keys_of(
        table([{"source": "shop", **row} for row in of]).append_column("source", pa.array(["shop"] * len(of)))
    )
    home: dict[int, int] = {}
    for line, number in zip(lines.lines.tolist(), numbers.tolist(), strict=True):
        assert home.setdefault(line, number) == number


def test_parts_are_about_equally_large_and_the_same_in_every_process() -> None:
    """GIVEN many keys, or none THEN each part gets its share; another process says the same of each."""
    for key in (str, lambda _: None):
        of = [{"stream": "public.orders", "op": "insert", "key": key(n)} for n in range(4_000)]
        counts = [part_numbers(table(of), 4).tolist().count(part) for part in range(4)]
        assert min(counts) > 900
    program = (
        "import pyarrow as pa; from evermark.delivery.decide.key_parts import part_numbers as p;"
        "k = {'stream': ['s'] * 50, 'op': ['insert'] * 50, 'key': [str(n) for n in range(50)]};"
        "k['previous_key'] = pa.nulls(50, pa.string()); print(p(pa.table(k), 5).tolist())"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    same = part_numbers(table([{"stream": "s", "op": "insert", "key": str(n)} for n in range(50)]), 5)
    assert told.stdout.strip() == str(same.tolist())


def test_keys_that_are_no_text_and_files_without_a_stream_are_divided_too() -> None:
    """GIVEN bytes that are not UTF-8 in a key, and a null stream THEN there is a part for each."""
    key = pa.array([b"\xff\xfe", b"1", None], pa.binary()).cast(pa.string(), safe=False)
    nulls = pa.nulls(3, pa.string())
    given_one = pa.table([pa.array(["s", None, "s"]), pa.array(["insert"] * 3), key, nulls], schema=KEYS)
    assert len(part_numbers(given_one, 3)) == 3


# One event on its way in a part: when it is accepted, parked, expired, or still owed.
@dataclass(frozen=True)
class Owed:
    batch: int
    position: str
    ending: str


@st.composite
def works(draw: st.DrawFn) -> tuple[Assignment, list[list[Owed]], list[Fate]]:
    """A span of some batches whose events are dealt to parts; each part goes as far as it goes."""
    begun = Cursor(AFTER, draw(st.sampled_from(["", "0002"])))
    span = Span(P0, begun, AFTER + draw(st.integers(1, 3)), ("f",), 10)
    places = [(batch, f"{n:04}") for batch in range(AFTER + 1, span.to + 1) for n in range(8)]
    places = [at for at in places if Cursor(at[0] - 1, at[1]) > begun]
    count = draw(st.integers(1, 4))
    parts: list[list[Owed]] = [[] for _ in range(count)]
    for batch, position in places:
        ending = draw(st.sampled_from([*["accepted"] * 6, "parked", "parked", "expired", "owed"]))
        parts[draw(st.integers(0, count - 1))].append(Owed(batch, position, ending))
    room = draw(st.sampled_from([None, 0, 1, 2, 5]))
    return Assignment(span, spec("a"), parked_room=room), parts, [draw(st.sampled_from(list(Fate)[1:])) for _ in parts]


def told(part: list[Owed], fate: Fate, room: int, pieces: int) -> list[Result]:
    """What a task tells of its part: a result a batch and piece, up to the first event that is owed, or has no room."""
    results: list[Result] = []
    stopped: Fate | None = None
    for batch in sorted({one.batch for one in part}):
        mine = [one for one in part if one.batch == batch]
        for at in range(0, len(mine), pieces):
            done: list[Owed] = []
            for one in mine[at : at + pieces]:
                if stopped is None and one.ending == "parked" and room == 0:
                    stopped = Fate.FULL
                if stopped is None and one.ending == "owed":
                    stopped = fate
                if stopped is not None:
                    break
                room -= one.ending == "parked"
                done.append(one)
            parked = tuple(
                replace(event(batch), batch=batch, position=one.position) for one in done if one.ending == "parked"
            )
            expired = sum(one.ending == "expired" for one in done)
            outcome = Outcome("a", stopped or Fate.DONE, len(done), parked, expired=expired, took_s=1.0)
            results.append(Result(P0, batch, outcome, done[-1].position if done else None))
            if stopped is not None:
                return results
    return results


@given(works(), st.integers(1, 8))
def test_d1_no_event_is_passed_that_a_part_still_owes(
    work: tuple[Assignment, list[list[Owed]], list[Fate]], pieces: int
) -> None:
    """GIVEN whatever the parts say THEN every event before the cursor was accepted, or is parked or counted, once."""
    assignment, parts, fates = work
    room = assignment.spec.parked_max if assignment.parked_room is None else assignment.parked_room
    results = [told(part, fate, room, pieces) for part, fate in zip(parts, fates, strict=True)]
    found = joined(assignment, results)
    assert found.reached is not None and found.reached >= assignment.span.begun
    passed = [one for part in parts for one in part if Cursor(one.batch - 1, one.position) <= found.reached]
    assert all(one.ending != "owed" for one in passed)
    parked = sorted(Cursor(one.batch - 1, one.position) for one in passed if one.ending == "parked")
    assert [cursor_at(one) for one in found.parked] == parked and len(parked) <= room
    assert found.expired == sum(one.ending == "expired" for one in passed)
    assert (found.fate is Fate.DONE) == (found.reached == Cursor(assignment.span.to))
    worst = [one.outcome.fate for part in results for one in part]
    for fate in (Fate.GONE, Fate.ENDPOINT_FAILED):
        if fate in worst:
            assert found.fate is fate
            break


def test_d1_the_cursor_goes_as_far_as_the_slowest_part_and_a_part_that_wants_nothing_holds_nothing_up() -> None:
    """GIVEN a part that stops inside a batch, one that is done and one without events THEN the first decides."""
    assignment = Assignment(Span(P0, Cursor(AFTER), AFTER + 2, ("f",), 10), spec("a"))
    late = replace(event(AFTER + 2), batch=AFTER + 2, position="0009")
    slow = [Result(P0, AFTER + 1, Outcome("a", Fate.UNFINISHED, 3, took_s=2.0), "0004")]
    done = [Result(P0, AFTER + 2, Outcome("a", Fate.DONE, 5, (late,), took_s=1.0), "0009")]
    found = joined(assignment, [slow, done, []])
    assert (found.reached, found.fate, found.accepted, found.parked) == (Cursor(AFTER, "0004"), Fate.UNFINISHED, 8, ())
    assert found.took_s == 2.0
    assert joined(assignment, [done, []]).reached == Cursor(AFTER + 2)


def test_a_turn_in_parts_asks_for_what_all_parts_can_post_in_its_time() -> None:
    """GIVEN a turn whose parts ended THEN the next asks for a little less than the time allows; one whose parts did not
    end asks for half, until parts are not worth it; a subscription in one piece is tried in parts again later.
    """
    first = rows_in(None, 3, 2.0)
    assert first >= 3 * PART_ROWS_MIN
    outcome = Outcome("a", Fate.UNFINISHED, 3_000, took_s=1.0)
    well = pace_after(None, outcome, cut=True, ended=True)
    assert 3_000 < rows_in(well, 3, 2.0) < 6_000
    assert rows_in(pace_after(well, outcome, cut=True, ended=False), 3, 2.0) == rows_in(well, 3, 2.0) // 2
    # WHEN one key has most of the events, and the other parts send theirs again and again
    slow = pace_after(well, Outcome("a", Fate.UNFINISHED, 1_000, took_s=2.0), cut=True, ended=False)
    assert rows_in(slow, 3, 2.0) < 2 * PART_ROWS_MIN
    turns = 0
    while rows_in(slow, 3, 2.0) < 2 * PART_ROWS_MIN:
        slow, turns = pace_after(slow, outcome, cut=False, ended=True), turns + 1
    assert 5 < turns < 50
    # WHEN most events were given up or refused THEN they count: their turn was as quick
    given_up = Outcome("a", Fate.UNFINISHED, 10, parked_at((AFTER + 1, "0001")), expired=2_989, took_s=1.0)
    assert pace_after(None, given_up, cut=True, ended=True) == well
    # WHEN nothing is known of it THEN it is not remembered
    assert pace_after(None, outcome, cut=False, ended=True) is None
    assert pace_after(5.0, Outcome("a", Fate.DONE, took_s=0.0), cut=True, ended=True) == 5.0


def parked_at(*places: tuple[int, str]) -> tuple[ParkedEvent, ...]:
    return tuple(replace(event(batch), batch=batch, position=position) for batch, position in places)


def test_d1_parts_together_park_no_more_than_there_is_room_for() -> None:
    """GIVEN room for three WHEN two parts park two each THEN the cursor is behind the third, and it is full."""
    assignment = Assignment(Span(P0, Cursor(AFTER), AFTER + 1, ("f",), 10), spec("a"), parked_room=3)
    one = Outcome("a", Fate.DONE, 1, parked_at((AFTER + 1, "0001"), (AFTER + 1, "0005")))
    other = Outcome("a", Fate.DONE, 1, parked_at((AFTER + 1, "0002"), (AFTER + 1, "0008")))
    found = joined(assignment, [[Result(P0, AFTER + 1, one, "0007")], [Result(P0, AFTER + 1, other, "0008")]])
    assert (found.fate, found.reached) == (Fate.FULL, Cursor(AFTER, "0005"))
    assert [event.position for event in found.parked] == ["0001", "0002", "0005"]


def test_d1_a_part_without_room_beyond_what_all_reached_is_not_full() -> None:
    """GIVEN room for two WHEN a part parks two beyond the place that the other reached THEN they are left out, and the
    subscription goes on: it has room."""
    assignment = Assignment(Span(P0, Cursor(AFTER), AFTER + 1, ("f",), 10), spec("a"), parked_room=2)
    one = Outcome("a", Fate.FULL, 1, parked_at((AFTER + 1, "0005"), (AFTER + 1, "0006")))
    other = Outcome("a", Fate.UNFINISHED, 1)
    found = joined(assignment, [[Result(P0, AFTER + 1, one, "0006")], [Result(P0, AFTER + 1, other, "0003")]])
    assert (found.fate, found.reached, found.parked) == (Fate.UNFINISHED, Cursor(AFTER, "0003"), ())


def test_d1_a_cursor_does_not_stand_among_expired_events_that_cannot_be_counted() -> None:
    """GIVEN a part that stops inside a batch, of which another has expired events on both sides THEN none is counted,
    and the cursor stays before the batch.
    """
    assignment = Assignment(Span(P0, Cursor(AFTER), AFTER + 2, ("f",), 10), spec("a"))
    slow = [Result(P0, AFTER + 2, Outcome("a", Fate.UNFINISHED, 3), "0004")]
    late = [Result(P0, batch, Outcome("a", Fate.DONE, 1, expired=2), "0009") for batch in (AFTER + 1, AFTER + 2)]
    found = joined(assignment, [slow, late])
    assert (found.reached, found.expired) == (Cursor(AFTER + 1), 2)
