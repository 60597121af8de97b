"""Server-sent events as bytes (https://html.spec.whatwg.org/multipage/server-sent-events.html). Pure.

`data` is the webhook body of an event. An event that is too large, or cannot be rendered, is named by an event of type
`omitted`; `resync` says that events are missing, `stuck` and `unstuck` that a partition stands still, and goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.tail.place import Places, Point, Resync, Stuck, entry, id_before, id_of
from evermark.delivery.webhook.body import Rendering, render_sound

RETRY_MS = 2_000
EVENT_BYTES_MAX = 1024 * 1024


def opening(places: Places) -> bytes:
    """First of all a client learns where it stands, so that it can go on from there whatever happens next."""
    return f"retry: {RETRY_MS}\n".encode() + heartbeat(places)


def heartbeat(places: Places) -> bytes:
    """No event: it shows that the connection lives, and moves the client past events that it did not want."""
    return f": .\nid: {id_of(places)}\n\n".encode()


def ending() -> bytes:
    return f"retry: {RETRY_MS}\n: this instance stops; connect again, with the last id\n\n".encode()


def resync_event(resync: Resync, places: Places) -> bytes:
    return f"event: resync\nid: {id_of(places)}\ndata: {resync.as_json()}\n\n".encode()


def stuck_event(stuck: Stuck, places: Places, *, over: bool = False) -> bytes:
    kind = "unstuck" if over else "stuck"
    return f"event: {kind}\nid: {id_of(places)}\ndata: {stuck.as_json()}\n\n".encode()


def events(rows: pa.RecordBatch, place: SourcePartition, places: Places, *, historical: bool) -> list[bytes]:
    """The event of each row. `places`: of the client; the row's partition is taken from the row."""
    if not rows.num_rows:
        return []
    bodies, bad = render_sound(rows, Rendering(historical=historical))
    before, resync = b"id: " + id_before(places, place).encode(), places.get(place, Point()).resync
    batches, positions = rows.column("batch").to_pylist(), rows.column("position").to_pylist()
    found: list[bytes] = []
    for number, body in enumerate(bodies.to_pylist()):
        at = entry(place, Point(Cursor(batches[number] - 1, positions[number]), resync)).encode()
        if number in bad or len(body) > EVENT_BYTES_MAX:
            reason = bad.get(number) or f"the event has {len(body)} bytes, of at most {EVENT_BYTES_MAX}"
            found.append(b"event: omitted\n" + before + at + b"\ndata: " + _omitted(rows, number, reason) + b"\n\n")
        else:
            found.append(before + at + b"\ndata: " + _one_line(body) + b"\n\n")
    return found


def _one_line(body: bytes) -> bytes:
    """In JSON a line break can only stand between values: within a text it is escaped."""
    return body.replace(b"\n", b" ").replace(b"\r", b" ") if b"\n" in body or b"\r" in body else body


def _omitted(rows: pa.RecordBatch, number: int, reason: str) -> bytes:
    names: Sequence[str] = ("event_id", "source", "stream", "key", "op", "position")
    values = {name: rows.column(name)[number].as_py() for name in names}
    values["id"] = values.pop("event_id")
    said = {name: value[:1000] if isinstance(value, str) else value for name, value in values.items()}
    return json.dumps({"reason": reason[:500], "evermark": said}).encode()
