"""Parked deliveries, tried again on their schedule. Claim → POST → settle: a crash in between re-sends, never loses.

Rows that were parked for too long are given up, and so are the oldest rows of a bot's stream of which too many are
parked. They are counted, durably; the log still has the events. A few rows at a time: no other call waits for a long
transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from evermark import failpoint
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.decide.retry import next_attempt
from evermark.delivery.limits import RELEASED_MAX, RETRY_WAITS_S, WAITING_MAX
from evermark.delivery.model import Fate, Outcome, Parked, Subscription
from evermark.delivery.ports import BotStore, DeliveryStore
from evermark.delivery.webhook.base import Answer, OpenSecret, Sink, Try
from evermark.runtime import Log, Runtime, Task

CLAIM_LEASE_S = 60.0
ATTEMPT_DEADLINE_S = 30.0
# A turn waits so long for its answers; tries that take longer go on beside the next turns.
PATIENCE_S = 1.0
# Rows that are tried at a time, each subscription's in a thread. A claim takes a share of what is left, so that a few
# receivers that hang leave enough for the others.
UNDER_WAY_MAX = 500
SHARE = 5
# A receiver that is busy with this very event, or down, costs the event no attempt; it is asked again after this.
UNSPENT_DELAY_S = 30.0
SWEEP_ROWS = 1_000

Stopped = Callable[[], bool]
Tried = tuple[Parked, Answer]


@dataclass
class ParkedQueue:
    """Sends due rows from this process, without Spark: they are few, and bounded per subscription.

    The rows of each subscription are tried and settled by themselves, and nothing more of it is claimed meanwhile: a
    receiver that takes minutes holds up no other, and its rows are not sent twice when their claim runs out.
    """

    store: DeliveryStore
    sink: Sink
    open_secret: OpenSecret
    epoch: int
    runtime: Runtime
    log: Log
    on_tried: Callable[[Sequence[Tried]], None] = lambda _tried: None
    stopped: Stopped = lambda: False
    # Per subscription, with the number of its rows. Tries of a former epoch may be among them, whose queue looks too.
    under_way: dict[str, tuple[Task, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._settling = self.runtime.lock()  # one at a time: the connections to State are few

    def run(self) -> int:
        """Try due rows, up to a limit; returns how many were claimed."""
        for name, (task, _) in list(self.under_way.items()):
            if task.join(0.0):
                self.under_way.pop(name, None)
        others = dict(self.under_way)
        left = UNDER_WAY_MAX - sum(rows for _, rows in others.values())
        now, limit = self.runtime.now(), -(-left // SHARE)
        claimed = self.store.parked.claim(now, limit, CLAIM_LEASE_S, self.epoch, without=others)
        if not claimed:
            return 0
        failpoint.hit("queue.claimed")
        known = self.store.subscriptions()
        mine: dict[str, list[Parked]] = defaultdict(list)
        for p in claimed:
            # A subscription made anew since the claim has lost its rows: the new subscription never asked for them.
            if p.subscription in known and known[p.subscription].generation == p.generation:
                mine[p.subscription].append(p)
        if self.stopped():
            return 0
        until = self.runtime.monotonic() + PATIENCE_S
        begun: list[Task] = []
        for name, rows in mine.items():
            begun.append(self.runtime.spawn(f"retries of {name}"[:60], partial(self._try, known[name], rows)))
            self.under_way[name] = begun[-1], len(rows)
        for task in begun:
            task.join(max(0.0, until - self.runtime.monotonic()))
        return len(claimed)

    def finish(self) -> None:
        """Wait until nothing is under way any more."""
        for task, _ in list(self.under_way.values()):
            task.join()

    def _try(self, subscription: Subscription, rows: Sequence[Parked]) -> None:
        tries = [
            Try(
                subscription.spec,
                p.event.event,
                p.attempt + 1,
                self.open_secret,
                historical=True,
                replay_id=p.event.replay_id or None,
                probe=subscription.failures > 0,
                session=p.event.session,
            )
            for p in rows
        ]
        try:
            tried = list(zip(rows, self.sink.attempt(tries, ATTEMPT_DEADLINE_S), strict=True))
            with self._settling:
                self._settle(subscription, tried)
        except Exception as error:  # noqa: BLE001 - what is not settled is tried again when its claim has run out
            self.log.warning("retries are not settled", subscription=subscription.name, error=error)

    def _settle(self, subscription: Subscription, tried: Sequence[Tried]) -> None:
        failpoint.hit("queue.posted")
        taken = [parked.id for parked, answer in tried if answer.verdict is Verdict.ACCEPTED]
        if taken:
            self.store.parked.delivered(taken, self.epoch)
        for parked, answer in tried:
            if answer.verdict is not Verdict.ACCEPTED:
                self._put_back(parked, answer, subscription.spec.retry_waits_s)
        name, now, generation = subscription.name, self.runtime.now(), subscription.generation
        for outcome in endpoint_outcomes(subscription, tried):
            self.store.retried(name, outcome, now, self.epoch, generation=generation)
        failpoint.hit("queue.settled")
        self.on_tried(tried)

    def _put_back(self, parked: Parked, answer: Answer, waits_s: Sequence[float]) -> None:
        spent, delay = after_answer(parked.attempt, answer, self.runtime.random(), waits_s)
        self.store.parked.reschedule(
            parked,
            next_attempt_at=None if delay is None else self.runtime.now() + timedelta(seconds=delay),
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
            expire = partial(store.parked.expire, name, before, now, epoch, SWEEP_ROWS)
            removed += _until_few(expire, SWEEP_ROWS, stopped)
    return removed


def sweep_surplus(
    bots: BotStore, now: datetime, epoch: int, stopped: Stopped = lambda: False, keep: int = WAITING_MAX
) -> int:
    """Remove the oldest rows of bots' streams of which more than `keep` are parked. Returns how many.

    The streams are looked for once: that takes longer the more rows are parked.
    """
    return sum(
        _until_few(partial(bots.expire_surplus, surplus, now, epoch, SWEEP_ROWS), SWEEP_ROWS, stopped)
        for surplus in bots.surplus(keep)
    )


def release(bots: BotStore, now: datetime, epoch: int, stopped: Stopped = lambda: False) -> int:
    """Make due what waits for session keys although they are there. Returns how many rows."""
    return _until_few(partial(bots.release_keyed, now, epoch, RELEASED_MAX), RELEASED_MAX, stopped)


def _until_few(some: Callable[[], int], rows: int, stopped: Stopped) -> int:
    """Do it again as long as it is done to so many rows at a time; returns to how many in all."""
    whole = 0
    while not stopped():
        done = some()
        whole += done
        if done < rows:
            break
    return whole
