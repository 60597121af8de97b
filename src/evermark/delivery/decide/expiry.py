"""How long a subscription may be owed an event. What is passed over is counted, durably, with the cursor's move.

The time runs from when an event was taken, not from when it happened: an old row that is copied today is news. And not
from before the subscription was made: one that begins with the past is owed it from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from evermark.delivery.base import DeliveryStore, Fate, Outcome, Subscription
from evermark.delivery.webhook.base import Result
from evermark.delivery.work import BatchResult

SWEEP_ROWS = 1_000


def expires_before(subscription: Subscription, now: datetime) -> datetime | None:
    """Events taken before this are not delivered any more; None: all are."""
    ttl_s = subscription.spec.ttl_s
    if ttl_s <= 0:
        return None
    before = now - timedelta(seconds=ttl_s)
    return before if subscription.since is not None and subscription.since < before else None


def without_expired(rows: pa.RecordBatch, before: datetime | None) -> tuple[pa.RecordBatch, dict[int, pa.Array]]:
    """The rows that are still to be delivered, and the positions of those of each batch that are not."""
    if before is None or not rows.num_rows:
        return rows, {}
    late = pc.fill_null(
        pc.less(rows.column("ingested_at"), pa.scalar(before, rows.schema.field("ingested_at").type)), False
    )
    if not pc.any(late).as_py():
        return rows, {}
    batches, positions = (rows.column(name).filter(late) for name in ("batch", "position"))
    found = {batch: positions.filter(pc.equal(batches, batch)) for batch in pc.unique(batches).to_pylist()}
    return rows.filter(pc.invert(late)), found


def with_expired(name: str, results: Sequence[Result], late: Mapping[int, pa.Array]) -> list[BatchResult]:
    """What became of one subscription's rows of one place, those among them that were too old included.

    Of a batch that is not done, those count that stand up to where it got: the others come again.
    """
    found: list[BatchResult] = []
    left = dict(late)
    for result in results:
        outcome, through, positions = result.outcome, result.through, left.pop(result.batch, None)
        if positions is not None and outcome.fate is Fate.DONE:
            outcome, through = replace(outcome, expired=len(positions)), max(through or "", pc.max(positions).as_py())
        elif positions is not None and through is not None:
            outcome = replace(outcome, expired=pc.sum(pc.less_equal(positions, through)).as_py())
        found.append(BatchResult(name, result.batch, outcome, through))
    for batch, positions in left.items():
        outcome = Outcome(name, Fate.DONE, expired=len(positions))
        found.append(BatchResult(name, batch, outcome, pc.max(positions).as_py()))
    return found


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
