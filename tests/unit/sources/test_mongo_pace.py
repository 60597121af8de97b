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
    """GIVEN batches that take a second, ten, and a minute WHEN the next is asked for THEN it is longer, as long, and
    shorter; and never without end, nor nothing."""
    pace, now = Pace(), 0.0
    begun = pace.span_s(now)
    spans = []
    for took_s in (1.0, 10.0, 60.0):
        now += took_s
        spans.append(pace.span_s(now))
    assert spans == [2 * begun, 2 * begun, begun]
    spans = [pace.span_s(now := now + 1.0) for _ in range(60)]
    assert spans[-1] == spans[-2] == 30 * 86_400
    spans = [pace.span_s(now := now + 100.0) for _ in range(60)]
    assert spans[-1] == 2
