"""How much of a stream may wait for session keys. What is given up is counted, durably; the log still has it."""

from __future__ import annotations

from collections.abc import Callable

from evermark.delivery.bots.base import WAITING_MAX, BotStore

SWEEP_ROWS = 1_000


def sweep_waiting(
    store: BotStore, epoch: int, stopped: Callable[[], bool] = lambda: False, keep: int = WAITING_MAX
) -> int:
    """Remove the oldest where too much waits, a few rows at a time: nobody waits for a long transaction. What there is
    to remove is found once: that takes as long as there is much that waits."""
    removed = 0
    for surplus in store.waiting_beyond(keep):
        while not stopped():
            some = store.expire_waiting(surplus, epoch, SWEEP_ROWS)
            removed += some
            if some < SWEEP_ROWS:
                break
    return removed
