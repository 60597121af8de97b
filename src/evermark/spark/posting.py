"""Common to tasks that post: outcomes travel back to the driver as JSON rows."""

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
    """As JSON, but for `reached`: the driver finds out how far a subscription got."""
    return {**vars(outcome), "parked": [asdict(event) for event in outcome.parked], "reached": None}


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    parked = tuple(ParkedEvent(**{**event, "place": SourcePartition(**event["place"])}) for event in row["parked"])
    reason, retry_after_s, expired, took_s = row["reason"], row["retry_after_s"], row["expired"], row["took_s"]
    fate, accepted = Fate(row["fate"]), row["accepted"]
    return Outcome(row["subscription"], fate, accepted, parked, reason, retry_after_s, expired, took_s=took_s)


def now_held(spec: SubscriptionSpec, parked: Iterable[ParkedEvent]) -> Counter[HeldKey]:
    """Keys whose next events must wait: events parked in one chunk of a job hold back the chunks after it."""
    keyed = parked if spec.ordered else ()
    return Counter(key for event in keyed for key in event.held_keys)


def held_lanes(rows: pa.RecordBatch, waiting: Mapping[HeldKey, int]) -> dict[Lane, int]:
    """The lanes among these rows whose key has parked events, and how many."""
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
