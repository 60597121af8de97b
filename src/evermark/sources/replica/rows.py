"""Events of a replica as events of the log."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from evermark.event import Op, taken_batch
from evermark.replicas.columns import images_of
from evermark.replicas.event import Event, Image, Operation
from evermark.replicas.values import Kind, Table
from evermark.sources.copies import row_ids
from evermark.sources.replica.plan import position

_OPS = {Operation.CREATE: Op.INSERT, Operation.UPDATE: Op.UPDATE, Operation.DELETE: Op.DELETE}
_EXACT_MAX = 2**53


def batch_of(table: Table, events: Sequence[Event], at: int) -> pa.RecordBatch:
    """Events of one table that follow each other from position `at` on."""
    columns: dict[str, object] = {
        "event_id": [event.id for event in events],
        "position": [position(at + number) for number in range(len(events))],
        "stream": [table.name] * len(events),
        "key": [key_text(table, event.record_id) for event in events],
        "op": [_OPS[event.operation].value for event in events],
        "origin": [event.version.origin for event in events],
        "origin_seq": [event.version.seq for event in events],
        "event_time": [_time(event.timestamp) for event in events],
        "payload": [None if event.image is None else payload(table, event.image) for event in events],
    }
    return taken_batch(columns, len(events))


def copied_batch(table: Table, live: pa.Table, copy: str, at: int, made_ms: int) -> pa.RecordBatch:
    """Rows of a snapshot that follow each other from position `at` on, as a copy tells them. Of a row's version the log
    has what it has of events: the origin and the number of the change that made the row as it is."""
    records, rows = record_columns(table, live), live.num_rows
    columns = {
        **records,
        "event_id": row_ids(copy, table.name, pa.array(records["key"], pa.string())),
        "position": [position(at + number) for number in range(rows)],
        "origin": live["origin_node_id"],
        "origin_seq": live["origin_seq"],
        "event_time": [_time(made_ms)] * rows,
    }
    return taken_batch(columns, rows)


def record_columns(table: Table, live: pa.Table) -> dict[str, Any]:
    """Of rows of a snapshot, as they are."""
    images = images_of(table, live)
    return {
        "stream": [table.name] * len(images),
        "key": [key_text(table, record) for record in images],
        "op": [Op.READ.value] * len(images),
        "payload": [payload(table, image) for image in images.values()],
    }


def _time(timestamp_ms: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError):
        return None  # the clock of its origin is centuries ahead


def payload(table: Table, image: Image) -> str:
    """By name, as events have them: rows of a snapshot are compared with what events told, as texts."""
    return _json({column: value_of(table.columns[column], text) for column, text in sorted(image.items())})


def key_text(table: Table, record: str) -> str:
    """As every source writes keys: the text of one column, or several as an object."""
    if len(table.key) == 1:
        return record
    texts = zip(table.key, table.key_texts(record), strict=True)
    return json.dumps({column: value_of(table.columns[column], text) for column, text in texts}, sort_keys=True)


def value_of(kind: Kind, text: str | None) -> Any:
    """The value in JSON: integers beyond 2^53 and numerics are strings, bytes are hex, infinities are their names."""
    if text is None:
        return None
    if kind is Kind.INTEGER:
        number = int(text)
        return number if abs(number) <= _EXACT_MAX else text
    if kind is Kind.REAL:
        real = float(text)
        return real if math.isfinite(real) else text
    return text == "true" if kind is Kind.BOOLEAN else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
