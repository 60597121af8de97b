"""Events of a change stream as rows of the log.

- `stream` is `database.collection`, `key` the document's `_id` (values.py), `tx` a transaction's session and number.
- `event_id` is the cluster time and a hash of the resume token: the same at every reading, and it leads to the event.
- `payload` is the document after the change, `before` the one before it, where the server has them. An update without
  a document tells its changes, and is flagged `partial`. A document that was looked up afterwards may be younger
  than its update, and is flagged `looked_up`.
- A replaced document is an `update`, flagged `replaced`. Collections that are dropped or renamed are a `truncate` of
  their streams, flagged `dropped` or `renamed`.
- An event that cannot be decoded, or is of a kind we do not know, is `poison`, with its bytes.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from bson.raw_bson import RawBSONDocument

from evermark.event import Op, taken_batch
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.target import MongoTarget
from evermark.sources.mongo.values import UNDECODED, Document, as_json, decoded, key_text

_BATCH_ROWS = 4096
_BATCH_BYTES = 8 * 1024 * 1024
_TIME_US_MAX = 253_402_300_799_999_999
_DIGEST_CHARS = 24
_TIME_CHARS = 16
_IMAGES = {"insert": "insert", "update": "update", "replace": "update", "delete": "delete"}
_OF_A_WHOLE = ("drop", "rename", "dropDatabase", "invalidate")


class Row(NamedTuple):
    """Columns of an event, as far as a change stream fills them."""

    event_id: str
    position: str
    stream: str
    key: str | None
    op: str
    tx: str | None
    event_time: int | None
    payload: str | None
    before: str | None
    flags: Sequence[str] | None
    bytes: bytes | None

    @property
    def size(self) -> int:
        return 200 + len(self.payload or "") + len(self.before or "") + len(self.bytes or b"")


def batched(rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
    """Cut by bytes as well as by number: a document may have 16 MB."""
    some: list[Row] = []
    size = 0
    for row in rows:
        some.append(row)
        size += row.size
        if len(some) >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield _batch(some)
            some, size = [], 0
    if some:
        yield _batch(some)


def _batch(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
    return taken_batch({**columns, "event_time": pa.array(columns["event_time"], pa.int64())}, len(rows))


def event_id(time: int, token: str) -> str:
    return f"{time:016x}{hashlib.sha256(token.encode()).hexdigest()[:_DIGEST_CHARS]}"


def time_of_event(id_: str) -> int | None:
    """The cluster time of an event of a change stream; None for any other id."""
    if len(id_) != _TIME_CHARS + _DIGEST_CHARS:
        return None
    try:
        return int(id_[:_TIME_CHARS], 16)
    except ValueError:
        return None


def rows_in(operation: str) -> int:
    """How many rows an event becomes: as many ordinals belong to it."""
    return 2 if operation == "rename" else 1


def stream_of(ns: Any) -> str:
    if not ns:
        return ""
    collection = ns.get("coll")
    return str(ns["db"]) if collection is None else f"{ns['db']}.{collection}"


def partition_of(row: Row, partitions: int) -> int:
    return partition_for(row.stream, row.key, partitions)


def partition_for(stream: str, key: str | None, partitions: int) -> int:
    """All changes of a document are in one partition, in their order."""
    if partitions == 1:
        return 0
    return zlib.crc32(f"{stream}\n{key or ''}".encode()) % partitions


def rows_of(event: Document, fields: dict[str, Any], at: Position, token: str, target: MongoTarget) -> list[Row]:
    """The rows of one event that stands at this position."""
    try:
        if isinstance(fields["_id"], RawBSONDocument):
            fields = decoded(event.sent)
        operation = fields.get("operationType")
        if operation in _IMAGES:
            return [_of_document(fields, operation, at, token, target)]
        if operation in _OF_A_WHOLE:
            return list(_of_collection(fields, operation, at, token, target))
        reason = f"events of the kind {str(operation)[:80]!r} are not known to this version"
    except UNDECODED as error:
        reason = undecoded(error)
    return [_poison(event.sent, at, token, target, reason)]


def too_large(raw: bytes, at: Position, token: str, target: MongoTarget) -> Row:
    """An event that is larger than the server can send, from what it sends without the documents."""
    operation = RawBSONDocument(raw).get("operationType")
    reason = f"the {operation} with its documents is larger than 16 MB: the server cannot send it"
    return _poison(raw, at, token, target, reason)


def undecoded(error: Exception) -> str:
    """The reason of poison."""
    return f"it cannot be decoded: {type(error).__name__}: {error}"[:500]


def shown_bytes(raw: bytes, stream: str, target: MongoTarget) -> bytes | None:
    """Of what cannot be decoded; None where the bytes would show what is to be hidden."""
    return raw if not target.hidden or (stream and stream not in target.hidden) else None


def _whose(raw: bytes) -> tuple[str, str | None]:
    """Stream and key of an event whose documents cannot be decoded, as far as they can be."""
    event = RawBSONDocument(raw)
    try:
        stream = stream_of(event.get("ns"))
        return stream, key_text(decoded(bytes(event["documentKey"].raw))["_id"]) if "documentKey" in event else None
    except UNDECODED:
        return "", None


def _poison(raw: bytes, at: Position, token: str, target: MongoTarget, reason: str) -> Row:
    stream, key = _whose(raw)
    id_ = event_id(at.time, token)
    payload = as_json({"reason": reason})
    return Row(
        id_,
        at.text(target.partitions),
        stream,
        key,
        Op.POISON,
        None,
        at.seconds * 1_000_000,
        payload,
        None,
        None,
        shown_bytes(raw, stream, target),
    )


def _of_document(fields: dict[str, Any], operation: str, at: Position, token: str, target: MongoTarget) -> Row:
    stream, flags = stream_of(fields.get("ns")), None
    after, before = fields.get("fullDocument"), fields.get("fullDocumentBeforeChange")
    update = fields.get("updateDescription")
    hidden = target.hidden.get(stream)
    if hidden is not None:
        after, before = hidden.in_document(after), hidden.in_document(before)
        update = hidden.in_update(update)
    payload = as_json(after) if after is not None else None
    if operation == "replace":
        flags = ["replaced"]
    elif operation == "update" and after is None:
        flags, payload = ["partial"], as_json(update)
    elif operation == "update" and target.after == "lookup":
        flags = ["looked_up"]
    return Row(
        event_id(at.time, token),
        at.text(target.partitions),
        stream,
        key_text(fields["documentKey"]["_id"]),
        _IMAGES[operation],
        _transaction(fields) if "txnNumber" in fields else None,
        _time_us(fields, at),
        payload,
        as_json(before) if before is not None else None,
        flags,
        None,
    )


def _of_collection(
    fields: dict[str, Any], operation: str, at: Position, token: str, target: MongoTarget
) -> Iterator[Row]:
    stream = stream_of(fields.get("ns"))

    def row(op: Op, told: dict[str, str], flag: str | None = None) -> Row:
        id_, flags = event_id(at.time, token), [flag] if flag is not None else None
        transaction, when = _transaction(fields), _time_us(fields, at)
        where = at.text(target.partitions)
        return Row(id_, where, stream, None, op.value, transaction, when, as_json(told), None, flags, None)

    if operation == "drop":
        yield row(Op.TRUNCATE, {"kind": "drop"}, "dropped")
    elif operation != "rename":
        yield row(Op.SCHEMA, {"kind": operation})
    else:
        # What the new name held before is gone, too; what it holds now is told by no event.
        new = stream_of(fields.get("to"))
        if target.wants(stream):
            yield row(Op.TRUNCATE, {"kind": "rename", "to": new}, "renamed")
        if target.wants(new):
            second = Position(at.time, at.ordinal + 1)
            yield row(Op.TRUNCATE, {"kind": "rename", "from": stream}, "renamed")._replace(
                event_id=event_id(at.time, f"{token} to"), position=second.text(target.partitions), stream=new
            )


def _time_us(fields: dict[str, Any], at: Position) -> int | None:
    wall = fields.get("wallTime")
    us = int(wall) * 1000 if wall is not None else at.seconds * 1_000_000
    return us if 0 <= us <= _TIME_US_MAX else None


def _transaction(fields: dict[str, Any]) -> str | None:
    number, session = fields.get("txnNumber"), fields.get("lsid")
    if number is None or session is None:
        return None
    text = number["$numberLong"] if isinstance(number, dict) else number
    return f"{bytes(session['id']).hex()}:{text}"
