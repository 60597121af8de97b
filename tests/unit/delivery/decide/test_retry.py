"""What answers mean, and when a delivery is tried again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.decide.answers import Verdict, classify
from evermark.delivery.decide.retry import (
    RETRY_AFTER_S_MAX,
    EndpointLimits,
    endpoint_backoff_s,
    in_place_wait_s,
    next_attempt,
    retry_after_s,
    should_suspend,
)
from evermark.delivery.limits import RETRY_WAITS_S

NOW = datetime(2026, 11, 15, 1, 2, 3, tzinfo=UTC)
jitters = st.floats(0, 1)
waits = st.none() | st.floats(0, 10 * RETRY_AFTER_S_MAX)


@given(st.integers(200, 299), st.sampled_from(["", "disable", "park"]))
def test_every_2xx_is_taken_whatever_else_it_says(status: int, said: str) -> None:
    """What was taken was taken."""
    assert classify(status, {"webhook-delivery": said}) is Verdict.ACCEPTED


@given(st.integers(100, 599).filter(lambda status: not 200 <= status < 300))
def test_nothing_but_2xx_is_taken(status: int) -> None:
    """No other status loses an event by counting as delivered."""
    assert classify(status, {}) is not Verdict.ACCEPTED


@given(st.integers(500, 599) | st.integers(300, 399) | st.sampled_from([408, 425, 429]))
def test_trouble_of_the_endpoint_blames_no_event(status: int) -> None:
    """A long outage, a redirect or a limit makes no dead letters."""
    assert classify(status, {"retry-after": "3"}) is Verdict.ENDPOINT


@given(st.integers(400, 499).filter(lambda status: status not in {408, 409, 410, 425, 429}))
def test_other_4xx_blame_the_event(status: int) -> None:
    """The receiver looked at it and said no."""
    assert classify(status, {"retry-after": "3"}) is Verdict.REFUSED


def test_409_means_busy_only_with_retry_after() -> None:
    """Without it, 409 is a refusal like any other."""
    assert classify(409, {"retry-after": "1"}) is Verdict.BUSY
    assert classify(409, {}) is Verdict.REFUSED


def test_410_and_the_explicit_words_of_the_receiver() -> None:
    """disable and park are heard with any status but 2xx."""
    assert classify(410, {}) is Verdict.GONE
    assert classify(503, {"webhook-delivery": " Disable"}) is Verdict.GONE
    assert classify(503, {"webhook-delivery": "park"}) is Verdict.REFUSED


def test_the_default_schedule_is_the_one_promised() -> None:
    """5 s, 5 m, 30 m, 2 h, 5 h, 10 h, 10 h, then dead."""
    delays = [next_attempt(made, None, 0.0) for made in range(1, 9)]
    assert delays == [5, 300, 1800, 7200, 18000, 36000, 36000, None]


@given(st.integers(1, 20), waits, jitters)
def test_a_retry_is_never_early_and_never_unbounded(made: int, asked: float | None, jitter: float) -> None:
    """Not before the schedule, not before Retry-After, and dead exactly when the schedule is used up."""
    delay = next_attempt(made, asked, jitter)
    if made > len(RETRY_WAITS_S):
        assert delay is None
        return
    assert delay is not None
    floor = max(RETRY_WAITS_S[made - 1], min(asked or 0.0, RETRY_AFTER_S_MAX))
    assert floor <= delay <= 1.25 * floor


@given(st.integers(1, 100_000), waits, jitters)
def test_an_endpoint_is_asked_again_within_bounds(failures: int, asked: float | None, jitter: float) -> None:
    """From 1 s, doubling; from the fifth failure 30 s, doubling to 5 min; or what Retry-After says, at most a day."""
    delay = endpoint_backoff_s(failures, jitter, asked)
    own = min(300.0, 30.0 * 2.0 ** min(failures - 5, 16)) if failures >= 5 else 2.0 ** (failures - 1)
    floor = max(own, min(asked or 0.0, RETRY_AFTER_S_MAX))
    assert floor <= delay <= 1.25 * floor


def test_d5_the_breaker_and_the_suspension_are_as_configured() -> None:
    """GIVEN two failures to open for ten minutes, three to suspend THEN that is what happens."""
    limits = EndpointLimits(threshold=2, timeout_s=600.0, suspend_after=3)
    assert [endpoint_backoff_s(n, 0.0, None, limits) for n in (1, 2, 3)] == [1.0, 600.0, 600.0]
    assert [should_suspend(n, limits) for n in (2, 3)] == [False, True]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120.0),
        (" 7 ", 7.0),
        ("999999999", RETRY_AFTER_S_MAX),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(days=1), usegmt=True), 0.0),
        (format_datetime(NOW + timedelta(days=30), usegmt=True), RETRY_AFTER_S_MAX),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_in_both_forms_and_bounded(header: str | None, seconds: float | None) -> None:
    """Whole seconds or an HTTP date; anything else is as if it were absent."""
    assert retry_after_s(header, NOW) == seconds


@given(st.text(max_size=200))
def test_no_retry_after_header_can_break_the_reader(header: str) -> None:
    """A receiver's header is foreign input."""
    seconds = retry_after_s(header, NOW)
    assert seconds is None or 0 <= seconds <= RETRY_AFTER_S_MAX


def test_the_tenth_failure_in_a_row_suspends() -> None:
    """Nine do not."""
    assert not should_suspend(9)
    assert should_suspend(10)


def test_a_passing_failure_is_asked_again_at_once_but_not_for_ever() -> None:
    """GIVEN an answer of 503 WHEN asked how to go on THEN two more tries, each later, and then it is final."""
    waits = [in_place_wait_s(Verdict.ENDPOINT, 503, None, tries) for tries in (1, 2, 3)]
    assert waits[0] is not None
    assert waits[1] is not None
    assert 0 < waits[0] < waits[1] < 1
    assert waits[2] is None


@pytest.mark.parametrize(
    ("verdict", "status", "retry_after"),
    [
        (Verdict.ENDPOINT, None, None),  # no answer: it may be dead, and a time-out each would be long
        (Verdict.ENDPOINT, 503, 30.0),  # it said when
        (Verdict.ENDPOINT, 302, None),  # asking again changes nothing
        (Verdict.REFUSED, 422, None),
        (Verdict.GONE, 410, None),
        (Verdict.ACCEPTED, 200, None),
    ],
)
def test_what_asking_again_cannot_change_is_final(
    verdict: Verdict, status: int | None, retry_after: float | None
) -> None:
    """GIVEN an answer that is no hiccup THEN the same request is not sent again at once."""
    assert in_place_wait_s(verdict, status, retry_after, 1) is None
