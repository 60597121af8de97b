"""Parked rows that are given up: parked for too long, or too many of one stream waiting for session keys.

They are counted, durably; the log still has the events. A few rows at a time: no other call waits for a long
transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

from evermark.delivery.base import WAITING_MAX
from evermark.delivery.ports import BotStore, DeliveryStore

SWEEP_ROWS = 1_000

Stopped = Callable[[], bool]


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


def sweep_waiting(bots: BotStore, epoch: int, stopped: Stopped = lambda: False, keep: int = WAITING_MAX) -> int:
    """Remove the oldest rows of streams in which more than `keep` wait for keys. Returns how many.

    The streams are looked for once: that takes longer the more rows wait.
    """
    surpluses = bots.waiting_beyond(keep)
    return sum(_until_few(partial(bots.expire_waiting, surplus, epoch, SWEEP_ROWS), stopped) for surplus in surpluses)


def _until_few(remove: Callable[[], int], stopped: Stopped) -> int:
    removed = 0
    while not stopped():
        some = remove()
        removed += some
        if some < SWEEP_ROWS:
            break
    return removed
