"""Session keys that events wait for, asked for by a signed webhook to their bot. The bot's answer changes nothing."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from evermark import failpoint
from evermark.delivery.model import KeyWanted, Subscription
from evermark.delivery.ports import BotStore
from evermark.delivery.webhook.base import Answer, OpenSecret, Sink, Try

ASKS_MAX = 50  # at a time
ASK_TIMEOUT_S = 5.0
DEADLINE_S = 10.0
REST = 9  # times as long as a look took


@dataclass
class KeyAsker:
    """Notes first, then asks: a crash in between asks once less, and never twice within `KEY_ASKED_EVERY`."""

    store: BotStore
    known: Callable[[], dict[str, Subscription]]
    sink: Sink
    open_secret: OpenSecret
    epoch: int
    clock: Callable[[], datetime]
    on_asked: Callable[[Sequence[tuple[KeyWanted, Answer]]], None] = lambda _asked: None
    timer: Callable[[], float] = time.monotonic  # for how long a look took: the clock may be set meanwhile

    _not_before: float = field(default=-math.inf, init=False)

    def run(self) -> int:
        """Ask for missing keys, up to a limit; returns for how many."""
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


def ask_event(wanted: KeyWanted, now: datetime) -> str:
    """A row as the log would have it; its stream and operation make its type `evermark.session_key.wanted`."""
    told = now.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    since = wanted.since.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    about = {"device": wanted.device, "session": wanted.session, "stream": wanted.stream, "since": since}
    named = hashlib.sha256(f"{wanted.subscription}\x00{wanted.session}\x00{wanted.asks}\x00{told}".encode())
    return json.dumps(
        {
            "event_id": f"session-key-{named.hexdigest()[:32]}",
            "source": "evermark",
            "partition": 0,
            "position": "",
            "batch": 0,
            "stream": "evermark.session_key",
            "op": "wanted",
            "event_time": told,
            "ingested_at": told,
            "payload": json.dumps(about, ensure_ascii=False),
            "flags": [],
        },
        ensure_ascii=False,
    )
