"""When the requests of a subscription with a `rate` may be sent. Pure: time comes in as a value.

A process is given a stretch of time, half a second about, in which it alone may send, one request after another at
the rate. Stretches of one subscription never overlap, whichever process has them. A moment that was not used is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

STRETCH_S = 0.5
# No stretch is given away that begins later than this: the process that took it may be gone by then.
WAIT_S_MAX = 60.0


def requests_in_stretch(rate_per_s: float) -> int:
    """At least one: a subscription of one request a minute is given a minute for it."""
    return max(1, int(rate_per_s * STRETCH_S))


def takes_ahead(rate_per_s: float) -> bool:
    """Whether the next stretch is taken before this one's last request was sent. Not where a stretch is one request:
    that would be kept from others for a long time, and there is time enough to ask.
    """
    return requests_in_stretch(rate_per_s) > 1


@dataclass
class Stretch:
    begins_at: float
    requests: int
    rate_per_s: float

    def __post_init__(self) -> None:
        self._next = 0

    @property
    def is_used_up(self) -> bool:
        return self._next >= self.requests

    def next_at(self, now: float) -> float | None:
        """When the next request may be sent, not before `now`; None: there is none left. Takes it."""
        late = int((now - self.begins_at) * self.rate_per_s) if now > self.begins_at else 0
        number = max(self._next, late)
        if number >= self.requests:
            return None
        self._next = number + 1
        return max(now, self.begins_at + number / self.rate_per_s)
