"""What tasks that post have in common: results travel back to the driver as JSON rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from evermark.delivery.base import Fate, HeldKey, Outcome, ParkedEvent, SourcePartition, SubscriptionSpec
from evermark.delivery.webhook.base import Lane
from evermark.delivery.webhook.parked_json import texts_of

ROW = pa.schema([pa.field("row", pa.string())])
ROW_DDL = "row string"


def rows_batch(rows: Iterable[Mapping[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([json.dumps(row) for row in rows], pa.string())], schema=ROW)


def outcome_fields(outcome: Outcome) -> dict[str, Any]:
    return {
        "subscription": outcome.subscription,
        "fate": outcome.fate,
        "accepted": outcome.accepted,
        "expired": outcome.expired,
        "reason": outcome.reason,
        "retry_after_s": outcome.retry_after_s,
        "parked": [asdict(p) for p in outcome.parked],
    }


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    parked = tuple(ParkedEvent(**{**p, "place": SourcePartition(**p["place"])}) for p in row["parked"])
    return Outcome(
        row["subscription"],
        Fate(row["fate"]),
        row["accepted"],
        parked,
        row["reason"],
        row["retry_after_s"],
        row["expired"],
    )


def now_held(spec: SubscriptionSpec, parked: Iterable[ParkedEvent]) -> Counter[HeldKey]:
    """Keys whose next events must wait: what one chunk of a job parks holds back the chunks after it."""
    keyed = parked if spec.ordered else ()
    return Counter(key for event in keyed for key in event.held_keys)


def held_lanes(rows: pa.RecordBatch, waiting: Mapping[HeldKey, int]) -> dict[Lane, int]:
    """The lanes among these rows whose key has something parked, and how much."""
    held: dict[Lane, int] = {}
    if waiting:
        places = list(map(SourcePartition, rows.column("source").to_pylist(), rows.column("partition").to_pylist()))
        streams = texts_of(rows.column("stream"))
        found = {
            lane
            for name in ("key", "previous_key")
            if name in rows.schema.names and rows.column(name).null_count < rows.num_rows
            for lane in zip(places, streams, texts_of(rows.column(name)), strict=True)
        }
        for place, stream, key in waiting.keys() & found:
            held[place.source, stream, key] = held.get((place.source, stream, key), 0) + waiting[place, stream, key]
    return held
