"""Events and errors as bytes: Arrow streams compressed with zstd, and JSON for what is small."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from evermark.errors import (
    BusyError,
    ConflictError,
    DeniedError,
    EvermarkError,
    FormatError,
    Kind,
    NotFoundError,
    SetupError,
    UnreachableError,
)
from evermark.replicas.event import ORIGIN, UUID, Event, Operation, Version, image_text
from evermark.replicas.exchange import Evicted
from evermark.replicas.paging import Coverage, SnapshotRequired
from evermark.replicas.ranges import held_as_json, held_from
from evermark.replicas.values import Table

EVENTS_MAX = 10_000
BODY_BYTES_MAX = 128 * 1024 * 1024
_NOTE = b"evermark"
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("operation_type", pa.string()),
        ("record_id", pa.string()),
        ("data", pa.string()),
        ("timestamp", pa.int64()),
        ("origin_node_id", pa.string()),
        ("origin_seq", pa.int64()),
        ("hlc", pa.int64()),
    ]
)


def events_to_bytes(events: Sequence[Event], note: Mapping[str, Any]) -> bytes:
    """Events of one table; `note` says what goes with them."""
    columns = [
        [event.id for event in events],
        [str(event.operation) for event in events],
        [event.record_id for event in events],
        [image_text(event.image) for event in events],
        [event.timestamp for event in events],
        [event.version.origin for event in events],
        [event.version.seq for event in events],
        [event.version.hlc for event in events],
    ]
    schema = _SCHEMA.with_metadata({_NOTE: json.dumps(dict(note)).encode()})
    batch = pa.record_batch([pa.array(column, each.type) for column, each in zip(columns, schema, strict=True)], schema)
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    made: bytes = out.getvalue().to_pybytes()
    return made


def note_of(body: bytes) -> dict[str, Any]:
    """What goes with the events, without reading them."""
    try:
        with pa.ipc.open_stream(body) as reader:
            note = json.loads((reader.schema.metadata or {})[_NOTE])
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise _unreadable(str(error)) from None
    if not isinstance(note, dict):
        raise _unreadable("its note is no mapping")
    return note


def events_from_bytes(body: bytes, table: Table) -> list[Event]:
    """The events of a body, each checked against the table: nothing of a peer's is trusted."""
    try:
        if unpacked_bytes(body) > BODY_BYTES_MAX:
            raise _unreadable("it has too many events")
        with pa.ipc.open_stream(body) as reader:
            if not reader.schema.equals(_SCHEMA):  # one with a dictionary might say a large text ten thousand times
                raise _unreadable("its columns are others")
            found: list[Event] = []
            for batch in reader:
                if len(found) + batch.num_rows > EVENTS_MAX or batch.nbytes > BODY_BYTES_MAX:
                    raise _unreadable("it has too many events")
                batch.validate(full=True)
                columns = [batch.column(name).to_pylist() for name in _SCHEMA.names]
                found += [_event(table, row) for row in zip(*columns, strict=True)]
            return found
    except (pa.ArrowException, KeyError, TypeError, ValueError, struct.error) as error:
        raise _unreadable(str(error)) from None


def unpacked_bytes(body: bytes) -> int:
    """How large the buffers of an Arrow stream are, by what they say of themselves: Arrow makes room for that much, and
    tells nobody before. A buffer that is compressed begins with its length when it is not; -1 if it is as it is."""
    total = 0
    for message in pa.ipc.MessageReader.open_stream(body):
        if message.type == "schema":
            continue
        if message.type != "record batch":
            raise _unreadable(f"it has a {message.type[:40]} in it")
        head, data = message.metadata.to_pybytes(), memoryview(message.body)
        batch = _followed(head, _place_of(head, _followed(head, 0), 2))
        buffers, packed = _place_of(head, batch, 2), _place_of(head, batch, 3)
        count_at = _followed(head, buffers)
        for at in range(struct.unpack_from("<I", head, count_at)[0]):
            start, size = struct.unpack_from("<qq", head, count_at + 4 + 16 * at)
            unpacked = struct.unpack_from("<q", data, start)[0] if packed and size else -1
            total += max(0, unpacked if unpacked != -1 else size)
    return total


def _followed(head: bytes, at: int) -> int:
    """Where an offset of a flatbuffer leads."""
    return at + int(struct.unpack_from("<I", head, at)[0])


def _place_of(head: bytes, table: int, field: int) -> int:
    """Where a field of a flatbuffer's table stands; 0 if it is left out."""
    fields = table - struct.unpack_from("<i", head, table)[0]
    if 4 + 2 * field >= struct.unpack_from("<H", head, fields)[0]:
        return 0
    behind = struct.unpack_from("<H", head, fields + 4 + 2 * field)[0]
    return table + int(behind) if behind else 0


def _event(table: Table, row: tuple[Any, ...]) -> Event:
    event_id, operation, record, data, timestamp, origin, seq, hlc = row
    if None in (event_id, operation, record, timestamp, origin, seq, hlc):
        raise _unreadable("an event lacks a field")
    if not UUID.fullmatch(event_id) or not ORIGIN.fullmatch(origin) or operation not in set(Operation):
        raise _unreadable("an event has an id, an origin or an operation that is none")
    if not (0 < seq < 2**62 and 0 < hlc < 2**62 and 0 <= timestamp < 2**50):
        raise _unreadable("an event has an impossible number or time")
    try:
        image = None if data is None else table.checked(json.loads(data), record)
    except ValueError:
        raise _unreadable("an image is no JSON") from None
    if image is None:
        table.checked_record(record)
    return Event(event_id, table.name, Operation(operation), record, image, timestamp, Version(hlc, origin, seq))


def coverage_as_json(coverage: Coverage) -> dict[str, Any]:
    return {
        "covered": held_as_json(coverage.covered),
        "lacks": held_as_json(coverage.lacks),
        "more": coverage.more,
    }


def coverage_from(note: Mapping[str, Any]) -> Coverage:
    try:
        return Coverage(held_from(note["covered"]), held_from(note["lacks"]), bool(note["more"]))
    except KeyError as error:
        raise _unreadable(f"it does not say what it covers: {error}") from None


def _unreadable(why: str) -> FormatError:
    return FormatError(f"what a peer sent cannot be read: {why[:200]}", hint="it is damaged, or of another version")


_CODES: Mapping[str, tuple[int, type[EvermarkError]]] = {
    "snapshot_required": (409, SnapshotRequired),
    "evicted": (410, Evicted),
    Kind.BUSY: (503, BusyError),
    Kind.UNREACHABLE: (503, UnreachableError),
    Kind.DENIED: (401, DeniedError),
    Kind.NOT_FOUND: (404, NotFoundError),
    Kind.CONFLICT: (409, ConflictError),
    Kind.FORMAT: (400, FormatError),
    Kind.SETUP: (422, SetupError),
}


def error_as_json(error: EvermarkError) -> tuple[int, dict[str, str]]:
    code = next((code for code, (_, kind) in _CODES.items() if type(error) is kind), "failed")
    return _CODES.get(code, (500, EvermarkError))[0], {"code": code, "message": error.message, "hint": error.hint}


def error_from(peer: str, value: Any) -> EvermarkError:
    if not isinstance(value, dict):
        return FormatError(f"{peer} answers something else than a replica does", hint="is the url right?")
    kind = _CODES.get(str(value.get("code")), (0, EvermarkError))[1]
    return kind(f"{peer}: {str(value.get('message'))[:500]}", hint=str(value.get("hint", ""))[:500])
