"""Which secret a receiver checks signatures with while secrets are rotated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from evermark.delivery.model import SubscriptionSpec
from simulator.broken import require
from simulator.promises import who

_CHANGEOVER_S_MAX = 20.0


@dataclass
class _Ring:
    made: list[str]  # the oldest first
    ends: dict[str, datetime] = field(default_factory=dict)
    used: int = 0  # the receiver's present one
    changes_at: datetime | None = None  # when it takes the newest; None: it has


class Keys:
    """A receiver changes over when it likes, as long as the secret it has is still good."""

    def __init__(self, rng: random.Random, clock: Callable[[], datetime]) -> None:
        self._rng = rng
        self._clock = clock
        self._rings: dict[str, _Ring] = {}

    def begin(self, spec: SubscriptionSpec) -> None:
        if spec.secrets:
            self._rings[who(spec)] = _Ring(list(spec.secrets))

    def rotate(self, one: str, secret: str, until: datetime | None) -> None:
        ring, now = self._ring(one), self._clock()
        if until is not None:
            ring.ends.update({old: min(until, ring.ends.get(old, until)) for old in ring.made})
        ring.made.append(secret)
        end = ring.ends.get(ring.made[ring.used])
        overlap_s = _CHANGEOVER_S_MAX if end is None else (end - now).total_seconds()
        ring.changes_at = datetime.fromtimestamp(now.timestamp() + overlap_s * self._rng.random(), now.tzinfo)

    def retire(self, one: str) -> None:
        """Nobody ends an overlap before the receiver has changed over."""
        ring = self._rings[one]
        ring.used, ring.changes_at = len(ring.made) - 1, None

    def are_known(self, spec: SubscriptionSpec) -> bool:
        """Whether the receiver knows the signature; not if the request was made before its secret was."""
        if not spec.secrets:
            return True
        ring = self._ring(who(spec))
        mine, newest = ring.made[ring.used], ring.made.index(spec.secrets[0])
        if mine in spec.secrets:
            return True
        require(ring.used > newest, f"{spec.name} was sent nothing signed with {mine}, which is still good")
        return False

    def _ring(self, one: str) -> _Ring:
        ring = self._rings[one]
        if ring.changes_at is not None and ring.changes_at <= self._clock():
            ring.used, ring.changes_at = len(ring.made) - 1, None
        return ring
