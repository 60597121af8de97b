"""Log rows as JSON, kept with parked deliveries: the body is rendered from them at every attempt."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from evermark.delivery.webhook.body import REQUIRED, UNRENDERABLE
from evermark.errors import FormatError
from evermark.event import EVENT

_TIMES = ("event_time", "ingested_at")
# Without the raw bytes: only poison has them, and poison is not delivered.
_KEPT = pa.schema(
    [pa.field(f.name, pa.string() if f.name in _TIMES else f.type, f.nullable) for f in EVENT if f.name != "bytes"]
)


def row_json(events: pa.Table | pa.RecordBatch, row: int) -> str:
    """One log row as text."""
    try:
        values: dict[str, Any] = events.slice(row, 1).to_pylist()[0]
        kept = {name: _kept(values.get(name)) for name in _KEPT.names}
        return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
    except UNRENDERABLE:
        # No row rather than a wrong one: `row_from_json` refuses it, and the log still has the event.
        return json.dumps({"event_id": text_of(events.column("event_id")[row]), "unreadable": True})


def text_of(value: pa.Scalar) -> str | None:
    """A text to be compared, not sent: bytes that are not UTF-8 are replaced."""
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError:
        plain = value.value if isinstance(value, pa.DictionaryScalar) else value
        text = plain.cast(pa.binary()).as_py().decode("utf-8", "replace")
    return text


def texts_of(column: pa.Array | pa.ChunkedArray) -> list[str | None]:
    try:
        texts: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:
        texts = [text_of(value) for value in column]
    return texts


def _kept(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    return value


def row_from_json(text: str) -> pa.RecordBatch:
    """The inverse of `row_json`; times stay texts."""
    try:
        values = json.loads(text)
        if absent := [name for name in REQUIRED if values.get(name) is None]:
            raise FormatError(f"a parked event cannot be read: it was kept without {', '.join(absent)}")
        return pa.RecordBatch.from_pylist([{name: values.get(name) for name in _KEPT.names}], schema=_KEPT)
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as problem:
        raise FormatError(f"a parked event cannot be read: {type(problem).__name__}") from None
