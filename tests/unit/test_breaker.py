"""The circuit breaker: closed, open, half open, and back."""

from __future__ import annotations

from evermark.breaker import Breaker, BreakerLimits, BreakerState


def test_s8_it_opens_after_so_many_failures_in_a_row_and_one_try_decides() -> None:
    """GIVEN a breaker of three failures and ten seconds THEN two failures leave it closed, a success counts anew, the
    third opens it for ten seconds, one try goes through after that, and decides."""
    breaker = Breaker(BreakerLimits(threshold=3, timeout_s=10.0))
    for _ in range(2):
        breaker.failed(0.0)
    assert (breaker.state(0.0), breaker.wait_s(0.0)) == (BreakerState.CLOSED, 0.0)
    breaker.succeeded()
    for now in (1.0, 2.0, 3.0):
        assert breaker.state(now) is BreakerState.CLOSED
        breaker.failed(now)
    assert (breaker.state(3.0), breaker.wait_s(5.0)) == (BreakerState.OPEN, 8.0)
    assert (breaker.state(13.0), breaker.wait_s(13.0)) == (BreakerState.HALF_OPEN, 0.0)
    breaker.failed(14.0)
    assert (breaker.state(14.0), breaker.wait_s(14.0)) == (BreakerState.OPEN, 10.0)
    breaker.succeeded()
    assert breaker.state(14.0) is BreakerState.CLOSED
