"""Common to tasks that post: outcomes travel back to the driver as JSON rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from evermark.delivery.model import Fate, Outcome, ParkedEvent, SourcePartition

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
