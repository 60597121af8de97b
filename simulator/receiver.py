"""Receivers with bad days: down, gone, slow, choosy, or taking an event and losing the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import SubscriptionSpec
from evermark.delivery.webhook.base import Answer
from evermark.delivery.webhook.body import delivery_ids
from simulator.account import Account
from simulator.promises import who
from simulator.source import Row

REFUSALS_FOREVER = 1_000


@dataclass
class Receiver:
    """Deduplicates by id, as a receiver must; what it is asked is checked by `account`."""

    account: Account
    rng: random.Random
    chance: Mapping[str, float]
    down_until: float = 0.0
    gone: bool = False
    slow_until: float = 0.0
    pace_s: float = 0.0  # for one request, while it is slow
    calm: bool = False
    before_replay: Callable[[SubscriptionSpec, Row, str], None] = lambda *_: None
    on_replayed: Callable[[SubscriptionSpec, Row, str], None] = lambda *_: None
    _refusals: dict[str, int] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)  # ids of deliveries

    def takes_s(self, now: float) -> float:
        """How long it needs for a request that comes now."""
        return self.pace_s if now < self.slow_until else 0.0

    def post(self, spec: SubscriptionSpec, rows: Sequence[Row], now: float, replay: str = "", *, stale: bool) -> Answer:
        """`stale`: whoever asks has lost the lease meanwhile."""
        if now < self.down_until:
            return Answer(Verdict.ENDPOINT, reason="connection refused")
        if self.gone:
            return Answer(Verdict.GONE, 410, "gone")
        for row in rows:
            if replay:
                self.before_replay(spec, row, replay)
            else:
                self.account.before_offer(spec, row, stale=stale)
        if not self.account.keys.are_known(spec):
            return Answer(Verdict.REFUSED, 401, "its signature is not known")
        refused = [row for row in rows if self._refuses(who(spec), row)]
        if refused:
            return Answer(Verdict.REFUSED, 400, "refused")
        for row, ident in zip(rows, delivery_ids([row.event_id for row in rows], replay or None), strict=True):
            if not replay:
                self.account.on_handled(spec, row)
            elif ident in self._taken:
                self.account.duplicates[who(spec)] += 1
            else:
                self.on_replayed(spec, row, replay)
            self._taken.add(ident)
        if not self.calm and self.rng.random() < self.chance["lost_answer"]:
            return Answer(Verdict.ENDPOINT, reason="the answer was lost")
        return Answer(Verdict.ACCEPTED, 200)

    def mend(self) -> None:
        """From now on it takes what it refused for ever."""
        self._refusals = dict.fromkeys(self._refusals, 0)

    def _refuses(self, one: str, row: Row) -> bool:
        if row.event_id not in self._refusals:
            count = 0
            if self.rng.random() < self.chance["refuse"]:
                count = self.rng.choice((1, 1, 2, 4, REFUSALS_FOREVER))
            self._refusals[row.event_id] = count
        left = self._refusals[row.event_id]
        if left == REFUSALS_FOREVER:
            self.account.queued.refused_forever[one].add(row.event_id)
            return True
        self._refusals[row.event_id] = max(0, left - 1)
        return left > 0
