"""The floor under which nothing can be missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evermark.sources.postgres.read.xmin_floor import NOTE_EVERY_S, Sample, XminFloor


def test_a_sample_is_proven_only_by_what_was_confirmed_beyond_it() -> None:
    """GIVEN a sample WHEN less is confirmed THEN it proves nothing yet."""
    floor = XminFloor(Sample(xmin=70, lsn=1000))
    assert floor.proven(999) is None
    assert floor.proven(1000) == 70


def test_a_sample_that_is_no_higher_makes_room_for_the_next() -> None:
    """GIVEN a transaction that stays open WHEN its sample is used up THEN a later one is taken."""
    floor = XminFloor(Sample(70, 1000), noted=70)
    assert floor.proven(2000) is None
    assert floor.wants_sample(now=0.0)


def test_the_floor_is_noted_seldom() -> None:
    """Each note is a write in the user's database."""
    floor = XminFloor()
    floor.done(70, now=100.0)
    assert not floor.wants_sample(100.0 + NOTE_EVERY_S - 1)
    assert floor.wants_sample(100.0 + NOTE_EVERY_S)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60)), max_size=30), st.data())
def test_no_event_below_a_proven_floor_is_unconfirmed(transactions: list[tuple[int, int]], data: st.DataObject) -> None:
    """For any transactions (begun at, committed at), samples and confirms: what is below the floor was confirmed."""
    # Transaction numbers are given out in order of beginning; time stands for the WAL.
    begun = sorted((start, start + length) for start, length in transactions)
    floor, noted, confirmed = XminFloor(), 0, 0
    for now in range(1, 120):
        if data.draw(st.booleans()) and floor.sample is None:
            still_open = [n for n, (start, end) in enumerate(begun) if start <= now < end]
            not_begun = [n for n, (start, _) in enumerate(begun) if start > now]
            floor.sample = Sample(min([*still_open, *not_begun], default=len(begun)), now)
        if data.draw(st.booleans()):
            confirmed = data.draw(st.integers(confirmed, now))
            proven = floor.proven(confirmed)
            if proven is not None:
                floor.done(proven, 0.0)
                noted = proven
        assert all(end <= confirmed for n, (_, end) in enumerate(begun) if n < noted)
