"""What tasks that post have in common: results travel back to the driver as JSON rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from evermark.delivery.base import Fate, Outcome, ParkedEvent, Place, SubscriptionSpec
from evermark.delivery.sinks.base import Lane

ROW = pa.schema([pa.field("row", pa.string())])
ROW_DDL = "row string"


def rows_batch(rows: Iterable[Mapping[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([json.dumps(row) for row in rows], pa.string())], schema=ROW)


def outcome_fields(outcome: Outcome) -> dict[str, Any]:
    return {
        "subscription": outcome.subscription,
        "fate": outcome.fate,
        "accepted": outcome.accepted,
        "reason": outcome.reason,
        "retry_after_s": outcome.retry_after_s,
        "parked": [asdict(p) for p in outcome.parked],
    }


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    parked = tuple(ParkedEvent(**{**p, "place": Place(**p["place"])}) for p in row["parked"])
    return Outcome(row["subscription"], Fate(row["fate"]), row["accepted"], parked, row["reason"], row["retry_after_s"])


def both(one: Outcome, other: Outcome) -> Outcome:
    """The outcome of two pieces of one subscription's work, the first one first."""
    worse = other if one.fate is Fate.DONE else one
    return Outcome(
        one.subscription,
        worse.fate,
        one.accepted + other.accepted,
        one.parked + other.parked,
        worse.reason,
        worse.retry_after_s,
    )


def now_held(spec: SubscriptionSpec, parked: Iterable[ParkedEvent]) -> set[tuple[Place, str]]:
    """Keys whose next events must wait: what one chunk of a job parks holds back the chunks after it."""
    return {(event.place, event.key) for event in parked if event.key is not None} if spec.ordered else set()


def held_lanes(rows: pa.RecordBatch, waiting: set[tuple[Place, str]]) -> dict[Lane, str]:
    """The lanes among these rows whose key has something parked."""
    held: dict[Lane, str] = {}
    if waiting:
        names = ("source", "partition", "stream", "key")
        for source, partition, stream, key in zip(*(rows.column(n).to_pylist() for n in names), strict=True):
            if key is not None and (Place(source, partition), key) in waiting:
                held[source, stream, key] = "an earlier one of its key"
    return held
