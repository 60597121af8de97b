"""The circuit breaker opens, waits, probes and closes as stated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evermark.breaker import CLOSED, Breaker, Limits, Phase, ask, failed, from_json, succeeded, to_json

LIMITS = Limits(threshold=5, timeout_s=30.0)


def opened(at: float = 100.0) -> Breaker:
    breaker = CLOSED
    for _ in range(LIMITS.threshold):
        breaker = failed(breaker, at, LIMITS)
    return breaker


def test_the_fifth_failure_in_a_row_opens_it() -> None:
    """Four failures are borne, the fifth stops the calls."""
    breaker = CLOSED
    for _ in range(4):
        breaker = failed(breaker, 100.0, LIMITS)
        assert ask(breaker, 100.0, LIMITS)[0]
    breaker = failed(breaker, 100.0, LIMITS)
    assert breaker.phase is Phase.OPEN
    assert not ask(breaker, 129.9, LIMITS)[0]


def test_a_success_forgets_the_failures_before_it() -> None:
    """Only failures in a row count."""
    breaker = failed(failed(CLOSED, 1.0), 2.0)
    assert succeeded(breaker) == CLOSED


def test_after_the_timeout_exactly_one_probe_passes() -> None:
    """The second caller waits for what the probe finds."""
    allowed, breaker = ask(opened(100.0), 130.0, LIMITS)
    assert allowed
    assert breaker.phase is Phase.HALF_OPEN
    assert not ask(breaker, 130.1, LIMITS)[0]


def test_a_failed_probe_opens_it_for_another_timeout() -> None:
    """The wait begins anew at the probe's failure."""
    _, breaker = ask(opened(100.0), 130.0, LIMITS)
    breaker = failed(breaker, 131.0, LIMITS)
    assert not ask(breaker, 160.9, LIMITS)[0]
    assert ask(breaker, 161.0, LIMITS)[0]


def test_a_good_probe_closes_it() -> None:
    """One success is enough."""
    _, breaker = ask(opened(), 130.0, LIMITS)
    assert succeeded(breaker) == CLOSED


def test_a_probe_that_never_reported_is_followed_by_another() -> None:
    """A process that died while probing does not leave the breaker half open for ever."""
    _, breaker = ask(opened(100.0), 130.0, LIMITS)
    assert ask(breaker, 160.0, LIMITS)[0]


def test_late_failures_of_earlier_calls_do_not_prolong_the_wait() -> None:
    """Calls under way when it opened may fail later."""
    breaker = failed(opened(100.0), 125.0, LIMITS)
    assert ask(breaker, 130.0, LIMITS)[0]


def test_a_clock_set_back_lets_a_probe_through() -> None:
    """Better an early probe than one in an hour."""
    assert ask(opened(at=10_000.0), 100.0, LIMITS)[0]


@given(st.lists(st.tuples(st.sampled_from(["ask", "ok", "bad"]), st.integers(0, 20)), max_size=60))
def test_no_call_is_refused_longer_than_the_timeout(steps: list[tuple[str, int]]) -> None:
    """Whatever happens, somebody may try again one timeout after the last change; and state survives JSON."""
    breaker, now = CLOSED, 0.0
    for what, later in steps:
        now += later
        if what == "ask":
            _, breaker = ask(breaker, now, LIMITS)
        else:
            breaker = succeeded(breaker) if what == "ok" else failed(breaker, now, LIMITS)
        assert from_json(to_json(breaker)) == breaker
        assert breaker.phase is not Phase.CLOSED or breaker.failures < LIMITS.threshold
        assert ask(breaker, now + LIMITS.timeout_s, LIMITS)[0]


def test_an_unreadable_state_is_a_closed_breaker() -> None:
    """Damage costs a few calls, never events."""
    assert from_json({"phase": "ajar"}) == CLOSED
    assert from_json({}) == CLOSED
