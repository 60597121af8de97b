"""D10: the requests of a subscription with a rate, over stretches of time that processes take in turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.decide.pace import STRETCH_S, Stretch, requests_in_stretch


@given(st.floats(0.01, 1e4), st.lists(st.floats(0.0, 0.3), max_size=60))
def test_d10_no_two_requests_of_a_stretch_are_closer_than_the_rate_or_after_its_end(
    rate: float, pauses: list[float]
) -> None:
    """GIVEN a stretch WHEN requests are asked for at any times THEN each has a moment of its own, not before it was
    asked for; a moment that has passed is lost, and nothing is left behind the end."""
    count = requests_in_stretch(rate)
    stretch, now, sent = Stretch(0.1, count, rate), 0.0, []
    for pause in pauses:
        now += pause
        if (at := stretch.next_at(now)) is None:
            break
        assert at >= now
        assert at < 0.1 + count / rate + 1e-9
        sent.append(int((at - 0.1) * rate + 1e-6))
    assert all(one < other for one, other in pairwise(sent)), "no moment is used twice"


@pytest.mark.parametrize(("rate", "requests"), [(0.1, 1), (1.0, 1), (2.0, 1), (3.0, 1), (50.0, 25), (1000.0, 500)])
def test_d10_a_stretch_is_half_a_second_or_one_request(rate: float, requests: int) -> None:
    """GIVEN a rate THEN State is asked twice a second at most, and at a rate below that once for each request."""
    assert requests_in_stretch(rate) == requests
    assert requests / rate <= max(STRETCH_S, 1 / rate)
