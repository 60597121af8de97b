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
_IMAGES = {"insert": Op.INSERT, "update": Op.UPDATE, "replace": Op.UPDATE, "delete": Op.DELETE}
_OF_A_WHOLE = ("drop", "rename")
_TOLD = ("dropDatabase", "invalidate")


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
    return ".".join(ns[part] for part in ("db", "coll") if part in ns) if ns else ""


def partition_of(row: Row, partitions: int) -> int:
    return partition_for(row.stream, row.key, partitions)


def partition_for(stream: str, key: str | None, partitions: int) -> int:
    """All changes of a document are in one partition, in their order."""
    if partitions == 1:
        return 0
    return zlib.crc32(f"{stream}\n{key or ''}".encode()) % partitions


def rows_of(event: Document, at: Position, token: str, target: MongoTarget) -> list[Row]:
    """The rows of one event that stands at this position."""
    try:
        fields = dict(event.items())
        if isinstance(fields["_id"], RawBSONDocument):
            fields = decoded(event.sent)
        return list(_Event(fields, event.sent, at, token, target).rows())
    except UNDECODED as error:
        reason = f"it cannot be decoded: {type(error).__name__}: {error}"[:500]
        return [_poison(event.sent, at, token, target, reason)]


def too_large(raw: bytes, at: Position, token: str, target: MongoTarget) -> Row:
    """An event that is larger than the server can send, from what it sends without the documents."""
    operation = RawBSONDocument(raw).get("operationType")
    reason = f"the {operation} with its documents is larger than 16 MB: the server cannot send it"
    return _poison(raw, at, token, target, reason)


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


class _Event:
    def __init__(self, event: dict[str, Any], raw: bytes, at: Position, token: str, target: MongoTarget) -> None:
        self._event, self._raw, self._at, self._token, self._target = event, raw, at, token, target
        self._stream = stream_of(event.get("ns"))
        wall = event.get("wallTime")
        us = int(wall) * 1000 if wall is not None else at.seconds * 1_000_000
        self._time_us = us if 0 <= us <= _TIME_US_MAX else None

    def rows(self) -> Iterator[Row]:
        operation = self._event.get("operationType")
        if operation in _IMAGES:
            yield self._of_document(_IMAGES[operation], operation)
        elif operation in _OF_A_WHOLE:
            yield from self._of_collection(operation)
        elif operation in _TOLD:
            yield self._row(Op.SCHEMA, as_json({"kind": operation}))
        else:
            reason = f"events of the kind {str(operation)[:80]!r} are not known to this version"
            yield _poison(self._raw, self._at, self._token, self._target, reason)

    def _of_document(self, op: Op, operation: str) -> Row:
        event, flags = self._event, []
        after, before = event.get("fullDocument"), event.get("fullDocumentBeforeChange")
        update, hidden = event.get("updateDescription"), self._target.hidden.get(self._stream)
        if hidden is not None:
            after, before = hidden.in_document(after), hidden.in_document(before)
            update = hidden.in_update(update)
        payload = as_json(after) if after is not None else None
        if operation == "replace":
            flags.append("replaced")
        elif operation == "update" and after is None:
            flags.append("partial")
            payload = as_json(update)
        elif operation == "update" and self._target.after == "lookup":
            flags.append("looked_up")
        return self._row(
            op,
            payload,
            key=key_text(event["documentKey"]["_id"]),
            before=as_json(before) if before is not None else None,
            flags=flags,
        )

    def _of_collection(self, operation: str) -> Iterator[Row]:
        if operation == "drop":
            yield self._row(Op.TRUNCATE, as_json({"kind": "drop"}), flags=["dropped"])
            return
        # What the new name held before is gone, too; what it holds now is told by no event.
        new, flags = stream_of(self._event.get("to")), ["renamed"]
        if self._target.wants(self._stream):
            yield self._row(Op.TRUNCATE, as_json({"kind": "rename", "to": new}), flags=flags)
        if self._target.wants(new):
            row = self._row(Op.TRUNCATE, as_json({"kind": "rename", "from": self._stream}), flags=flags)
            second = Position(self._at.time, self._at.ordinal + 1)
            yield row._replace(
                event_id=event_id(self._at.time, f"{self._token} to"),
                position=second.text(self._target.partitions),
                stream=new,
            )

    def _row(
        self,
        op: Op,
        payload: str | None,
        *,
        key: str | None = None,
        before: str | None = None,
        flags: Sequence[str] = (),
    ) -> Row:
        return Row(
            event_id(self._at.time, self._token),
            self._at.text(self._target.partitions),
            self._stream,
            key,
            op.value,
            self._transaction(),
            self._time_us,
            payload,
            before,
            flags or None,
            None,
        )

    def _transaction(self) -> str | None:
        number, session = self._event.get("txnNumber"), self._event.get("lsid")
        if number is None or session is None:
            return None
        text = number["$numberLong"] if isinstance(number, dict) else number
        return f"{bytes(session['id']).hex()}:{text}"
