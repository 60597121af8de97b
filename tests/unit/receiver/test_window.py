"""D8: what the receiver remembers is long enough for what the sender does. Both sides' own numbers, not copies."""

from __future__ import annotations

from evermark.delivery.decide.retry import next_attempt
from evermark.delivery.limits import RETRY_WAITS_S
from evermark_receiver import DedupCache


def test_d8_the_default_window_covers_the_longest_retry_span() -> None:
    """GIVEN the sender's schedule with all its jitter WHEN the last attempt comes THEN the id is still remembered."""
    waits = [next_attempt(made, None, 1.0) for made in range(1, len(RETRY_WAITS_S) + 1)]
    span_s = sum(wait for wait in waits if wait is not None)
    assert next_attempt(len(RETRY_WAITS_S) + 1, None, 1.0) is None
    assert span_s >= sum(RETRY_WAITS_S)
    assert DedupCache().ttl_s >= 1.5 * span_s
