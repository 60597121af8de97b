"""Keys that events wait for, asked for by a signed webhook to their bot. What it answers changes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from evermark import failpoint
from evermark.delivery.base import Subscription
from evermark.delivery.bots.base import BotStore, KeyWanted
from evermark.delivery.bots.keys import ask_event
from evermark.delivery.webhook.base import Answer, OpenSecret, Sink, Try

ASKS_MAX = 50  # at a time
ASK_TIMEOUT_S = 5.0
DEADLINE_S = 10.0
REST = 9  # times what a look took


@dataclass
class KeyAsker:
    """Notes first, then asks: a crash in between asks once less, and never twice within `ASK_EVERY`."""

    store: BotStore
    known: Callable[[], dict[str, Subscription]]
    sink: Sink
    open_secret: OpenSecret
    epoch: int
    clock: Callable[[], datetime]
    on_asked: Callable[[Sequence[tuple[KeyWanted, Answer]]], None] = lambda _asked: None
    timer: Callable[[], float] = time.monotonic  # how long a look took: the clock may be set meanwhile

    _not_before: float = field(default=-math.inf, init=False)

    def run(self) -> int:
        """Ask for what is missing, up to a limit; returns for how many keys."""
        began = self.timer()
        if began < self._not_before:
            return 0
        now = self.clock()
        wanted = self.store.keys_wanted(now, ASKS_MAX, self.epoch)
        looked = self.timer()
        # Where very many keys are missing, looking for them must not keep State busy.
        self._not_before = looked + REST * (looked - began)
        if not wanted:
            return 0
        failpoint.hit("keys.noted")
        known = self.known()
        mine = [one for one in wanted if one.subscription in known]
        tries = [
            Try(replace(spec, timeout_s=min(spec.timeout_s, ASK_TIMEOUT_S)), ask_event(one, now), 1, self.open_secret)
            for one in mine
            for spec in [known[one.subscription].spec]
        ]
        self.on_asked(list(zip(mine, self.sink.attempt(tries, DEADLINE_S), strict=True)))
        return len(mine)
