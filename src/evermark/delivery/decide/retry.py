"""The meaning of an answer, and when to try again. Pure: the time and the jitter are arguments.

| verdict  | from                                                            | what follows                          |
|----------|-----------------------------------------------------------------|---------------------------------------|
| ACCEPTED | 2xx                                                             | the event is delivered                |
| BUSY     | 409 with Retry-After                                            | again soon; spends no attempt         |
| ENDPOINT | no answer (DNS, connect, TLS, timeout, cut), 408, 425, 429, 5xx,| the subscription waits; no event is   |
|          | 1xx and 3xx, a refused address, a wrong setting of ours         | parked, no attempt spent              |
| GONE     | 410, `webhook-delivery: disable`                                | the subscription is disabled          |
| EVENT    | any other 4xx, `webhook-delivery: park`, too large, cannot be   | this event is parked and retried on   |
|          | rendered                                                        | the schedule                          |

A redirect is a failure of the endpoint: it is not followed, which would carry a signed body to an address that is not
configured, and it says nothing about the event. The `webhook-delivery` header is the receiver's explicit word and wins
over its status, except over 2xx: an accepted event stays accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum


class Verdict(StrEnum):
    ACCEPTED = "accepted"
    BUSY = "busy"
    ENDPOINT = "endpoint"
    GONE = "gone"
    EVENT = "event"


class Failure(StrEnum):
    """Why there is no answer."""

    DNS = "dns"
    CONNECT = "connect"
    TLS = "tls"
    TIMEOUT = "timeout"
    CUT = "cut"  # the connection ended before the answer
    PROTOCOL = "protocol"  # the answer is not HTTP
    DENIED = "denied"  # the address is not allowed
    CONFIG = "config"  # the subscription's url, secret or headers cannot be used
    TOO_LARGE = "too_large"
    UNSERIALISABLE = "unserialisable"


SCHEDULE_S: tuple[float, ...] = (5, 300, 1_800, 7_200, 18_000, 36_000, 36_000)
RETRY_AFTER_S_MAX = 24 * 3600.0
ENDPOINT_BACKOFF_S_MAX = 300.0
# Waits are stretched by up to this share, never shortened: a receiver's "not before" is kept.
_JITTER_SHARE = 0.25

_BUSY_TRIES_MAX = 3
_BUSY_WAIT_S = 1.0
_HICCUP_TRIES_MAX = 3
_HICCUP_WAIT_S = 0.1

_ENDPOINT_STATUSES = frozenset({408, 425, 429})
_EVENT_FAILURES = frozenset({Failure.TOO_LARGE, Failure.UNSERIALISABLE})


def classify(answer: int | Failure, headers: Mapping[str, str] | None = None) -> Verdict:
    """The verdict on an HTTP status, or on the lack of one. `headers` must find names without regard to case."""
    if isinstance(answer, Failure):
        return Verdict.EVENT if answer in _EVENT_FAILURES else Verdict.ENDPOINT
    if 200 <= answer < 300:
        return Verdict.ACCEPTED
    said = headers.get("webhook-delivery", "").strip().lower() if headers else ""
    if said == "disable":
        return Verdict.GONE
    if said == "park":
        return Verdict.EVENT
    if answer == 410:
        return Verdict.GONE
    if answer == 409 and headers and "retry-after" in headers:
        return Verdict.BUSY
    if 400 <= answer < 500 and answer not in _ENDPOINT_STATUSES:
        return Verdict.EVENT
    return Verdict.ENDPOINT


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
    is asked again shortly: a hiccup must not send a whole subscription behind. One that does not answer is not.
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
    attempts_made: int, retry_after: float | None, jitter: float, schedule: Sequence[float] = SCHEDULE_S
) -> float | None:
    """Seconds until a parked delivery is tried again after `attempts_made` (1 or more) attempts; None: it is dead."""
    if attempts_made > len(schedule):
        return None
    return _stretched(schedule[max(0, attempts_made - 1)], retry_after, jitter)


@dataclass(frozen=True)
class EndpointLimits:
    """How an endpoint that fails is met: `reliability.circuit_breaker` of the file."""

    threshold: int = 5  # failures in a row, after which a retry waits for at least `timeout_s`
    timeout_s: float = 30.0
    suspend_after: int = 10  # failures in a row


LIMITS = EndpointLimits()


def endpoint_backoff_s(
    failures: int, jitter: float, retry_after: float | None = None, limits: EndpointLimits = LIMITS
) -> float:
    """Seconds until a failing endpoint is tried again after `failures` (1 or more) in a row.

    1 s, doubling; after `threshold` of them at least `timeout_s`, doubling from there; at most five minutes, or
    `timeout_s` if that is longer.
    """
    opened = failures - limits.threshold
    first, doublings = (limits.timeout_s, opened) if opened >= 0 else (1.0, failures - 1)
    doubled = math.ldexp(first, min(max(0, doublings), 16))
    return _stretched(min(max(ENDPOINT_BACKOFF_S_MAX, limits.timeout_s), doubled), retry_after, jitter)


def should_suspend(failures: int, limits: EndpointLimits = LIMITS) -> bool:
    return failures >= limits.suspend_after
