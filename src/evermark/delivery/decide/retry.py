"""When to try again. Pure: the time and the jitter are arguments.

A refused event has the schedule of its subscription (`retry_waits_s`); an endpoint that is down backs off
(`endpoint_backoff_s`); a hiccup is answered with a second try in place (`in_place_wait_s`). `answers` says which is
which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from evermark.delivery.decide.answers import Verdict
from evermark.delivery.limits import RETRY_WAITS_S

RETRY_AFTER_S_MAX = 24 * 3600.0
ENDPOINT_BACKOFF_S_MAX = 300.0
# A file of the log that is missing or damaged stays so until a person acts, who then waits to see it help.
STUCK_REST_S = 10.0
# Waits are stretched by up to this share, never shortened: a receiver's "not before" is kept.
_JITTER_SHARE = 0.25

_BUSY_TRIES_MAX = 3
_BUSY_WAIT_S = 1.0
_HICCUP_TRIES_MAX = 3
_HICCUP_WAIT_S = 0.1


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """The header in seconds from now: whole seconds or an HTTP date, at most 24 hours; None for anything else."""
    if value is None:
        return None
    text = value.strip()[:64]
    if text.isascii() and text.isdigit():
        return min(float(text), RETRY_AFTER_S_MAX)
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return min(max(0.0, (when - now).total_seconds()), RETRY_AFTER_S_MAX)


def in_place_wait_s(verdict: Verdict, status: int | None, retry_after: float | None, tries: int) -> float | None:
    """Seconds until the same request is sent again at once, after `tries` (1 or more); None: the answer is final.

    A receiver that is busy with this very event says when to ask. A receiver that answered, but with a passing failure,
    is asked again soon: a hiccup must not send a subscription behind. A receiver that does not answer is not.
    """
    if verdict is Verdict.BUSY and tries < _BUSY_TRIES_MAX:
        return max(0.05, _BUSY_WAIT_S if retry_after is None else retry_after)
    if verdict is Verdict.ENDPOINT and status is not None and status >= 429 and tries < _HICCUP_TRIES_MAX:
        wait = _HICCUP_WAIT_S * 4 ** (tries - 1)
        return wait if retry_after is None or retry_after <= wait else None
    return None


def _stretched(delay_s: float, retry_after: float | None, jitter: float) -> float:
    asked = min(max(0.0, retry_after), RETRY_AFTER_S_MAX) if retry_after is not None else 0.0
    return max(delay_s, asked) * (1 + _JITTER_SHARE * min(1.0, max(0.0, jitter)))


def next_attempt(
    attempts_made: int, retry_after: float | None, jitter: float, waits_s: Sequence[float] = RETRY_WAITS_S
) -> float | None:
    """Seconds until a parked delivery is tried again after `attempts_made` (1 or more) attempts; None: it is dead."""
    if attempts_made > len(waits_s):
        return None
    return _stretched(waits_s[max(0, attempts_made - 1)], retry_after, jitter)


@dataclass(frozen=True)
class EndpointLimits:
    """Limits for an endpoint that fails: `reliability.circuit_breaker` of the file."""

    threshold: int = 5  # failures in a row, after which a retry waits for at least `timeout_s`
    timeout_s: float = 30.0
    suspend_after: int = 10  # failures in a row


LIMITS = EndpointLimits()


def endpoint_backoff_s(
    failures: int, jitter: float, retry_after: float | None = None, limits: EndpointLimits = LIMITS
) -> float:
    """Seconds until a failing endpoint is tried again after `failures` (1 or more) in a row.

    1 s, doubling; after `threshold` failures at least `timeout_s`, doubling from there; at most five minutes, or
    `timeout_s` if that is longer.
    """
    opened = failures - limits.threshold
    first, doublings = (limits.timeout_s, opened) if opened >= 0 else (1.0, failures - 1)
    doubled = math.ldexp(first, min(max(0, doublings), 16))
    return _stretched(min(max(ENDPOINT_BACKOFF_S_MAX, limits.timeout_s), doubled), retry_after, jitter)


def should_suspend(failures: int, limits: EndpointLimits = LIMITS) -> bool:
    return failures >= limits.suspend_after
