"""How long a subscription may be owed an event. What is passed over is counted, durably, with the cursor's move.

The time runs from when an event was taken, not from when it happened: an old row that is copied today is news. And not
from before the subscription was made: one that begins with the past is owed it from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evermark.delivery.base import DeliveryStore, Subscription

SWEEP_ROWS = 1_000


def expires_before(subscription: Subscription, now: datetime) -> datetime | None:
    """Events taken before this are not delivered any more; None: all are."""
    ttl_s = subscription.spec.ttl_s
    if ttl_s <= 0:
        return None
    before = now - timedelta(seconds=ttl_s)
    return before if subscription.since is not None and subscription.since < before else None


def without_expired(rows: pa.RecordBatch, before: datetime | None) -> tuple[pa.RecordBatch, dict[int, int]]:
    """The rows that are still to be delivered, and how many of each batch are not."""
    if before is None or not rows.num_rows:
        return rows, {}
    late = pc.fill_null(
        pc.less(rows.column("ingested_at"), pa.scalar(before, rows.schema.field("ingested_at").type)), False
    )
    if not pc.any(late).as_py():
        return rows, {}
    batches, counts = np.unique(rows.column("batch").filter(late).to_numpy(), return_counts=True)
    return rows.filter(pc.invert(late)), dict(zip(batches.tolist(), counts.tolist(), strict=True))


def sweep(store: DeliveryStore, now: datetime, epoch: int, stopped: Callable[[], bool] = lambda: False) -> int:
    """Remove what has been parked for too long, a few rows at a time: nobody waits for a long transaction."""
    removed = 0
    parked = store.parked_counts()
    for name, subscription in store.subscriptions().items():
        ttl_s = subscription.spec.ttl_s
        before = now - timedelta(seconds=ttl_s)
        if ttl_s <= 0 or name not in parked:
            continue
        while not stopped():
            some = store.expire(name, before, now, epoch, SWEEP_ROWS)
            removed += some
            if some < SWEEP_ROWS:
                break
    return removed
