"""How a MongoDB source catches up: how much at a time, and in how many pieces (S3)."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evermark.sources.mongo.pace import PIECES_MAX, Pace, cuts
from evermark.sources.mongo.positions import Position

positions = st.builds(
    lambda seconds, inc, ordinal: Position(seconds << 32 | inc, ordinal),
    st.integers(0, 10_000),
    st.integers(0, 5),
    st.integers(0, 3),
)


@given(positions, positions)
def test_a_stretch_is_cut_between_cluster_times(one: Position, other: Position) -> None:
    """GIVEN two positions WHEN the stretch between them is cut THEN inside of it, in order, and never in a second."""
    start, end = sorted((one, other))
    found = cuts(start, end)
    assert len(found) < PIECES_MAX
    assert all(earlier < later for earlier, later in pairwise([start, *found, end]) if found)
    assert all(cut.ordinal == 0 and cut.time % (1 << 32) == 0 for cut in found)
    assert bool(found) == (end.seconds - start.seconds >= 4)


def test_batches_grow_while_they_are_quick_and_shrink_when_they_are_slow() -> None:
    """GIVEN batches that take a second, ten, and longer WHEN the next is asked for THEN it is longer, as long, and
    shorter; and never without end."""
    pace, now, at = Pace(), 0.0, 1000
    assert pace.span_s(at, now) is None
    pace.begin()
    spans = [pace.span_s(at, now)]
    for took_s in (1.0, 10.0, 25.0):
        now, at = now + took_s, at + 100
        spans.append(pace.span_s(at, now))
    assert spans == [8, 16, 16, 8]
    spans = [pace.span_s(at := at + 1000, now := now + 1.0) for _ in range(60)]
    assert spans[-1] == spans[-2] == 600


def test_a_question_that_is_asked_again_changes_nothing() -> None:
    """GIVEN a batch that did not come about WHEN it is asked for again at once THEN it is as long."""
    pace = Pace()
    pace.begin()
    assert {pace.span_s(1000, now / 10) for now in range(50)} == {8}


def test_stretches_end_when_they_do_not_gain_on_the_oplog() -> None:
    """GIVEN a stretch that took longer than it was WHEN the next is asked for THEN there is none, until there is much
    to read again."""
    pace = Pace()
    pace.begin()
    assert pace.span_s(1000, 0.0) == 8
    assert pace.span_s(1008, 9.0) is None
    assert pace.span_s(2000, 10.0) is None
    pace.begin()
    assert pace.span_s(2000, 11.0) == 8
