"""Spans of time as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark import durations


@given(ms=st.integers(0, 100 * 365 * 86_400_000))
def test_a_shown_duration_reads_back_as_itself(ms: int) -> None:
    """Every span to the millisecond has a text form that means it."""
    span = timedelta(milliseconds=ms)
    assert durations.parse(durations.show(span)) == span


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("5s", 5), ("3m", 180), ("1h30m", 5400), ("1.5h", 5400), ("30d", 2592000)]
)
def test_durations_mean_what_people_write(text: str, seconds: float) -> None:
    """The forms of the reference."""
    assert durations.parse(text).total_seconds() == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", "-5s", "5 s", "5s5s", "5s1h", "1e3s", "5S", "99999999d", "٥s", "5s\n5s"]
)
def test_what_is_no_duration_is_refused_without_being_repeated(text: str) -> None:
    """An error about a duration does not show the text, which may be a secret put into the wrong place."""
    with pytest.raises(ValueError, match="expected") as caught:
        durations.parse(text)
    assert len(text) < 6 or text not in str(caught.value)
