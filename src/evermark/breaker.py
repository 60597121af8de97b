"""A circuit breaker: after some failures in a row it opens, and lets one try through after a while. Pure.

| state | set by | calls |
|---|---|---|
| closed | a success | go through |
| open | `threshold` failures in a row, or a failed try while half open | are refused for `timeout_s` |
| half open | time | the next one goes through, and decides |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True)
class BreakerLimits:
    threshold: int = 5
    timeout_s: float = 30.0


@dataclass
class Breaker:
    """Time comes in as a value, on any clock that does not go back."""

    limits: BreakerLimits = BreakerLimits()
    failures: int = 0  # in a row
    failed_at: float = 0.0

    def state(self, now: float) -> BreakerState:
        if self.failures < self.limits.threshold:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.wait_s(now) > 0 else BreakerState.HALF_OPEN

    def wait_s(self, now: float) -> float:
        """For how long calls are refused; 0: the next may be made."""
        if self.failures < self.limits.threshold:
            return 0.0
        return max(0.0, self.failed_at + self.limits.timeout_s - now)

    def failed(self, now: float) -> None:
        self.failures += 1
        self.failed_at = now

    def succeeded(self) -> None:
        self.failures = 0
