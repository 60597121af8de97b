"""The circuit breaker: a value and the functions that move it. No clock, no I/O.

    closed ──(threshold failures in a row)──▶ open ──(timeout passed: one probe)──▶ half-open
      ▲                                        ▲                                     │   │
      └────────────────(success)───────────────┼─────────────────────────────────────┘   │
                                               └──────────────(failure)──────────────────┘

The value is small enough to be kept durably wherever the thing it protects keeps its state, so that a restart does
not forget that a far side is down. Times are seconds of the wall clock, because they outlive the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True)
class Breaker:
    phase: Phase = Phase.CLOSED
    failures: int = 0  # in a row
    since: float = 0.0  # when it opened, or when the last probe was let through


@dataclass(frozen=True)
class Limits:
    threshold: int = 5
    timeout_s: float = 30.0


CLOSED = Breaker()
DEFAULT = Limits()


def ask(breaker: Breaker, now: float, limits: Limits = DEFAULT) -> tuple[bool, Breaker]:
    """May a call be made? Keep the breaker that comes back: letting a probe through changes it.

    A probe whose result never came (its process died) is followed by another one after the same timeout, and a
    clock that was set back lets a probe through early rather than keeping the breaker open for the difference.
    """
    if breaker.phase is Phase.CLOSED:
        return True, breaker
    if 0 <= now - breaker.since < limits.timeout_s:
        return False, breaker
    return True, Breaker(Phase.HALF_OPEN, breaker.failures, now)


def succeeded(breaker: Breaker) -> Breaker:
    return breaker if breaker == CLOSED else CLOSED


def failed(breaker: Breaker, now: float, limits: Limits = DEFAULT) -> Breaker:
    """One more failure. Calls that began before the breaker opened may fail late: they do not prolong the wait."""
    failures = breaker.failures + 1
    if breaker.phase is Phase.OPEN:
        return Breaker(Phase.OPEN, failures, breaker.since)
    if breaker.phase is Phase.HALF_OPEN or failures >= limits.threshold:
        return Breaker(Phase.OPEN, failures, now)
    return Breaker(Phase.CLOSED, failures, breaker.since)


def to_json(breaker: Breaker) -> dict[str, str | int | float]:
    return {"phase": breaker.phase.value, "failures": breaker.failures, "since": breaker.since}


def from_json(value: Mapping[str, object]) -> Breaker:
    """The inverse of `to_json`; what cannot be read is a closed breaker, which costs a few calls and no events."""
    phase, failures, since = value.get("phase"), value.get("failures"), value.get("since")
    if phase not in set(Phase) or not isinstance(failures, int) or not isinstance(since, (int, float)):
        return CLOSED
    return Breaker(Phase(str(phase)), max(0, failures), float(since))
