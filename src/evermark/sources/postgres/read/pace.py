"""When to offer a new end, when to probe for changes first, and when to confirm. Pure: the clock comes in as a value.

Most WAL may not be ours: other tables, vacuum, our own checkpoint rows. Offering every move of the WAL would make a
batch of nothing for each; never offering foreign WAL would keep the slot from moving on. So a little WAL is probed, and
what held nothing is offered anyway after a while: the driver takes it as an empty batch, checkpoints and confirms it.
Peeks and advances read the WAL again from where the slot must restart. While another transaction stays open that can
be a lot: an expensive peek or advance is followed by a pause as long as it took.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PROBE_BYTES_MAX = 4 * 1024 * 1024
IDLE_OFFER_S = 10.0
EXPENSIVE_S = 0.1
POLL_S_MIN = 0.004
POLL_S_MAX = 0.025
EAGER_S = 1.0
CONFIRM_BYTES = 1024 * 1024
CONFIRM_EVERY_S = 1.0


class Verdict(Enum):
    WAIT = "wait"
    PROBE = "probe"
    OFFER = "offer"


@dataclass
class Offering:
    """Decides about the WAL beyond the caller's `after`, from what earlier probes found."""

    after: int = -1
    empty_upto: int = 0  # nothing of ours commits between `after` and here
    foreign_since: float | None = None  # when WAL beyond `after` was first seen
    cost_s: float = 0.0
    rest_until: float = float("-inf")
    active_at: float = float("-inf")

    def judge(self, after: int, flush: int, now: float) -> Verdict:
        if after != self.after:
            self.after, self.empty_upto, self.foreign_since = after, after, None
        if flush <= after:
            return Verdict.WAIT
        if self.foreign_since is None:
            self.foreign_since = now
        if now < self.rest_until:
            return Verdict.WAIT
        if flush - after >= PROBE_BYTES_MAX or now - self.foreign_since >= IDLE_OFFER_S:
            return self._offered(now)
        if flush <= self.empty_upto:
            return Verdict.WAIT
        if self.cost_s > EXPENSIVE_S:
            # A probe and then a read would pay twice. The price is forgotten by halves, then measured again.
            self.rest_until = now + self.cost_s
            self.cost_s /= 2
            return self._offered(now)
        return Verdict.PROBE

    def probed(self, upto: int, found: bool, cost_s: float, now: float) -> None:
        self.cost_s = cost_s
        if found:
            self._offered(now)
        else:
            self.empty_upto = max(self.empty_upto, upto)
            self.rest_until = now + cost_s

    def _offered(self, now: float) -> Verdict:
        self.active_at = now
        return Verdict.OFFER

    def pause_s(self, now: float) -> float:
        """How long to sleep before looking again: short after activity, longer when idle, the rest when resting."""
        quiet = now - self.active_at
        poll = POLL_S_MIN if quiet < EAGER_S else min(POLL_S_MAX, POLL_S_MIN * quiet / EAGER_S)
        return max(poll, self.rest_until - now)


@dataclass
class Confirming:
    """Decides whether a confirm is worth an advance of the slot now; what is held back stays `pending`."""

    pending: int | None = None
    lsn: int = -1
    cost_s: float = 0.0
    at: float = float("-inf")

    def due(self, target: int, now: float) -> bool:
        if target <= self.lsn:
            return False
        self.pending = max(target, self.pending or 0)
        elapsed = now - self.at
        enough = self.lsn < 0 or target - self.lsn >= CONFIRM_BYTES or elapsed >= CONFIRM_EVERY_S
        return enough and elapsed >= self.cost_s

    def done(self, target: int, cost_s: float, now: float) -> None:
        self.lsn, self.cost_s, self.at = target, cost_s, now
        if self.pending is not None and self.pending <= target:
            self.pending = None
