"""How long a subscription may be owed an event. Events passed over are counted, durably, with the cursor's move. Pure.

The time runs from when an event was taken, not from when it happened: an old row that is copied today is news. And not
from before the subscription was made: for a subscription that begins with past events, it runs from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from evermark.delivery.model import Fate, Outcome, SourcePartition, Subscription
from evermark.delivery.work import Result


def expires_before(subscription: Subscription, now: datetime) -> datetime | None:
    """Events taken before this are not delivered any more; None: all are."""
    ttl_s = subscription.spec.ttl_s
    if ttl_s <= 0:
        return None
    before = now - timedelta(seconds=ttl_s)
    return before if subscription.since is not None and subscription.since < before else None


def without_expired(
    rows: pa.RecordBatch, before: datetime, oldest: datetime | None = None
) -> tuple[pa.RecordBatch, dict[int, pa.Array]]:
    """The rows that are still to be delivered, and per batch the positions of the rows that are not. `oldest`: none of
    these rows was taken earlier, if that is known.
    """
    if not rows.num_rows or (oldest is not None and oldest >= before):
        return rows, {}
    late = pc.fill_null(
        pc.less(rows.column("ingested_at"), pa.scalar(before, rows.schema.field("ingested_at").type)), False
    )
    if not pc.any(late).as_py():
        return rows, {}
    batches, positions = (rows.column(name).filter(late) for name in ("batch", "position"))
    found = {batch: positions.filter(pc.equal(batches, batch)) for batch in pc.unique(batches).to_pylist()}
    return rows.filter(pc.invert(late)), found


def with_expired(
    name: str, place: SourcePartition, results: Sequence[Result], late: Mapping[int, pa.Array]
) -> list[Result]:
    """The results of one subscription's rows of one partition, rows that were too old included.

    In an unfinished batch only expired rows up to where it got count: the others come again.
    """
    found: list[Result] = []
    left = dict(late)
    for result in results:
        outcome, through, positions = result.outcome, result.through, left.pop(result.batch, None)
        if positions is not None and outcome.fate is Fate.DONE:
            outcome, through = replace(outcome, expired=len(positions)), max(through or "", pc.max(positions).as_py())
        elif positions is not None and through is not None:
            outcome = replace(outcome, expired=pc.sum(pc.less_equal(positions, through)).as_py())
        found.append(result if positions is None else replace(result, outcome=outcome, through=through))
    for batch, positions in left.items():
        outcome = Outcome(name, Fate.DONE, expired=len(positions))
        found.append(Result(place, batch, outcome, pc.max(positions).as_py()))
    return found
