"""Parked deliveries, tried again on their schedule. Claim → POST → settle: a crash in between re-sends, never loses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from evermark import failpoint
from evermark.delivery.base import DeliveryStore, Parked
from evermark.delivery.retry import Verdict, next_attempt
from evermark.delivery.sinks.base import Answer, OpenSecret, Sink, Try

CLAIM_LIMIT = 100
CLAIM_LEASE_S = 60.0
ATTEMPT_DEADLINE_S = 30.0
# A receiver that is busy with this very event, or down, costs the event no attempt; it is asked again after this.
UNSPENT_DELAY_S = 30.0


@dataclass
class ParkedQueue:
    """Sends what is due from where it stands: parked deliveries are few, and bounded per subscription."""

    store: DeliveryStore
    sink: Sink
    open_secret: OpenSecret
    epoch: int
    clock: Callable[[], datetime]
    jitter: Callable[[], float]

    def run(self) -> int:
        """Try what is due, up to a limit; returns how many were claimed."""
        claimed = self.store.claim(self.clock(), CLAIM_LIMIT, CLAIM_LEASE_S, self.epoch)
        if not claimed:
            return 0
        failpoint.hit("queue.claimed")
        known = self.store.subscriptions()
        mine = [p for p in claimed if p.subscription in known]
        tries = [
            Try(
                known[p.subscription].spec,
                p.event.event,
                p.attempt + 1,
                self.open_secret,
                historical=True,
                replay_id=p.event.replay_id or None,
            )
            for p in mine
        ]
        answers = self.sink.attempt(tries, ATTEMPT_DEADLINE_S)
        failpoint.hit("queue.posted")
        taken = [p.id for p, answer in zip(mine, answers, strict=True) if answer.verdict is Verdict.ACCEPTED]
        if taken:
            self.store.delivered(taken, self.epoch)
        for parked, answer in zip(mine, answers, strict=True):
            if answer.verdict is not Verdict.ACCEPTED:
                self._put_back(parked, answer)
        failpoint.hit("queue.settled")
        return len(claimed)

    def _put_back(self, parked: Parked, answer: Answer) -> None:
        spent, delay = after_answer(parked.attempt, answer, self.jitter())
        self.store.reschedule(
            parked,
            next_attempt_at=None if delay is None else self.clock() + timedelta(seconds=delay),
            attempts=parked.attempt + spent,
            reason=answer.reason,
            status=answer.status,
            epoch=self.epoch,
        )


def after_answer(attempts_before: int, answer: Answer, jitter: float) -> tuple[int, float | None]:
    """(attempts spent, seconds to wait or None for dead). Only a fault of the event spends an attempt."""
    if answer.verdict is Verdict.EVENT:
        return 1, next_attempt(attempts_before + 1, answer.retry_after_s, jitter)
    return 0, max(UNSPENT_DELAY_S, answer.retry_after_s or 0.0) * (1 + 0.25 * jitter)
