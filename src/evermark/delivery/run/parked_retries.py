"""Parked deliveries, tried again on their schedule. Claim → POST → settle: a crash in between re-sends, never loses.

Rows that were parked for too long are given up, and so are the oldest rows of a bot's stream of which too many are
parked. They are counted, durably; the log still has the events. A few rows at a time: no other call waits for a long
transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from evermark import failpoint
from evermark.delivery.base import RETRY_WAITS_S, WAITING_MAX, Fate, Outcome, Parked, Subscription
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.decide.retry import next_attempt
from evermark.delivery.ports import BotStore, DeliveryStore
from evermark.delivery.webhook.base import Answer, OpenSecret, Sink, Try

CLAIM_LIMIT = 100
CLAIM_LEASE_S = 60.0
ATTEMPT_DEADLINE_S = 30.0
# A receiver that is busy with this very event, or down, costs the event no attempt; it is asked again after this.
UNSPENT_DELAY_S = 30.0
SWEEP_ROWS = 1_000

Stopped = Callable[[], bool]
Tried = tuple[Parked, Answer]


@dataclass
class ParkedQueue:
    """Sends due rows from this process, without Spark: they are few, and bounded per subscription."""

    store: DeliveryStore
    sink: Sink
    open_secret: OpenSecret
    epoch: int
    clock: Callable[[], datetime]
    jitter: Callable[[], float]
    on_tried: Callable[[Sequence[Tried]], None] = lambda _tried: None

    def run(self) -> int:
        """Try due rows, up to a limit; returns how many were claimed."""
        claimed = self.store.parked.claim(self.clock(), CLAIM_LIMIT, CLAIM_LEASE_S, self.epoch)
        if not claimed:
            return 0
        failpoint.hit("queue.claimed")
        known = self.store.subscriptions()
        # A subscription made anew since the claim has lost its rows: the new subscription never asked for them.
        mine = [p for p in claimed if p.subscription in known and known[p.subscription].generation == p.generation]
        tries = [
            Try(
                known[p.subscription].spec,
                p.event.event,
                p.attempt + 1,
                self.open_secret,
                historical=True,
                replay_id=p.event.replay_id or None,
                probe=known[p.subscription].failures > 0,
                session=p.event.session,
            )
            for p in mine
        ]
        tried = list(zip(mine, self.sink.attempt(tries, ATTEMPT_DEADLINE_S), strict=True))
        failpoint.hit("queue.posted")
        taken = [parked.id for parked, answer in tried if answer.verdict is Verdict.ACCEPTED]
        if taken:
            self.store.parked.delivered(taken, self.epoch)
        for parked, answer in tried:
            if answer.verdict is not Verdict.ACCEPTED:
                self._put_back(parked, answer, known[parked.subscription].spec.retry_waits_s)
        for name in sorted({parked.subscription for parked in mine}):
            generation = known[name].generation
            for outcome in endpoint_outcomes(known[name], [one for one in tried if one[0].subscription == name]):
                self.store.retried(name, outcome, self.clock(), self.epoch, generation=generation)
        failpoint.hit("queue.settled")
        self.on_tried(tried)
        return len(claimed)

    def _put_back(self, parked: Parked, answer: Answer, waits_s: Sequence[float]) -> None:
        spent, delay = after_answer(parked.attempt, answer, self.jitter(), waits_s)
        self.store.parked.reschedule(
            parked,
            next_attempt_at=None if delay is None else self.clock() + timedelta(seconds=delay),
            attempts=parked.attempt + spent,
            reason=answer.reason,
            status=answer.status,
            epoch=self.epoch,
        )


def endpoint_outcomes(subscription: Subscription, tried: Sequence[Tried]) -> list[Outcome]:
    """The outcomes of one subscription's retries, all together: one failure, however many rows failed.

    A replay never disturbs first deliveries: its retries count only if the receiver says that it is gone.
    """
    name = subscription.name
    gone = [answer for _, answer in tried if answer.verdict is Verdict.GONE]
    if gone:
        return [Outcome(name, Fate.GONE, reason=gone[0].reason)]
    mine = [answer for parked, answer in tried if not parked.event.replay_id]
    outcomes: list[Outcome] = []
    refused = any(answer.verdict is Verdict.REFUSED and answer.status is not None for answer in mine)
    if subscription.failures and (refused or any(answer.verdict is Verdict.ACCEPTED for answer in mine)):
        outcomes.append(Outcome(name, Fate.DONE, accepted=1))
    failed = [answer for answer in mine if answer.verdict is Verdict.ENDPOINT and not answer.ours]
    if failed:
        waits = [answer.retry_after_s for answer in failed if answer.retry_after_s is not None]
        wait_s = max(waits, default=None)
        outcomes.append(Outcome(name, Fate.ENDPOINT_FAILED, reason=failed[0].reason, retry_after_s=wait_s))
    return outcomes


def after_answer(
    attempts_before: int, answer: Answer, jitter: float, waits_s: Sequence[float] = RETRY_WAITS_S
) -> tuple[int, float | None]:
    """(attempts spent, seconds to wait or None for dead). Only a fault of the event spends an attempt."""
    if answer.verdict is Verdict.REFUSED:
        return 1, next_attempt(attempts_before + 1, answer.retry_after_s, jitter, waits_s)
    return 0, max(UNSPENT_DELAY_S, answer.retry_after_s or 0.0) * (1 + 0.25 * jitter)


def sweep(store: DeliveryStore, now: datetime, epoch: int, stopped: Stopped = lambda: False) -> int:
    """Remove rows that have been parked for longer than their subscription's ttl. Returns how many."""
    parked = store.parked.counts()
    removed = 0
    for name, subscription in store.subscriptions().items():
        ttl_s = subscription.spec.ttl_s
        if ttl_s > 0 and name in parked:
            before = now - timedelta(seconds=ttl_s)
            removed += _until_few(partial(store.parked.expire, name, before, now, epoch, SWEEP_ROWS), stopped)
    return removed


def sweep_surplus(
    bots: BotStore, now: datetime, epoch: int, stopped: Stopped = lambda: False, keep: int = WAITING_MAX
) -> int:
    """Remove the oldest rows of bots' streams of which more than `keep` are parked. Returns how many.

    The streams are looked for once: that takes longer the more rows are parked.
    """
    return sum(
        _until_few(partial(bots.expire_surplus, surplus, now, epoch, SWEEP_ROWS), stopped)
        for surplus in bots.surplus(keep)
    )


def _until_few(remove: Callable[[], int], stopped: Stopped) -> int:
    removed = 0
    while not stopped():
        some = remove()
        removed += some
        if some < SWEEP_ROWS:
            break
    return removed
