"""Events of block streams as rows of the log.

- `event_id` is the event's hash; `stream` and `key` are the stream's id, as the node writes it.
- Everything a stream carries is `op = message`, joins, leaves and settings too: receivers want them, and `control`
  means something else. Which it is says `kind` in the payload, beside `creator` and `tags`.
- How a stream was when it was first taken (its kind, its first members, its settings) is `op = schema`: no event tells
  it. It is logged, and delivered to nobody.
- So is who joined and left while a stream is taken again, and who is in it at the end of that: the log drops of the
  events themselves what it still has.
- What happened to a stream as a whole (deleted, recreated, lost) is `op = truncate`: what was known of it is void.
- What cannot be read is `op = poison`, with its bytes, under an id of its own: should the event come readable when its
  stream is compared with the log, it is not there yet.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import pyarrow as pa

from evermark.event import Op, taken_batch
from evermark.sources.blocks.chain import BlockEvent, Undecoded

BATCH_ROWS = 4096
BATCH_BYTES = 8 * 1024 * 1024
_TIME_US_MAX = 253_402_300_799_999_999  # the end of the year 9999: later ones are no times anybody can print
_SAFE = 2**53


class Rows:
    """Collects events into batches of bounded size."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {}
        self._bytes = 0
        self._clear()

    def _clear(self) -> None:
        names = ("event_id", "position", "stream", "op", "event_time", "payload", "bytes")
        self._columns = {name: [] for name in names}
        self._bytes = 0

    def add(self, stream: str, event: BlockEvent, position: str) -> Iterator[pa.RecordBatch]:
        if isinstance(event, Undecoded):
            made = hashlib.sha256(f"evermark.poison.1\n{stream}\n{event.hash}".encode()).hexdigest()
            payload = json.dumps({"event": event.hash, "reason": event.reason})
            yield from self._add(made, position, stream, Op.POISON, None, payload, event.raw)
            return
        at_us = event.at_us if event.at_us <= _TIME_US_MAX else None
        yield from self._add(event.hash, position, stream, Op.MESSAGE, at_us, envelope(event), None)

    def add_note(self, stream: str, note: dict[str, Any], position: str) -> Iterator[pa.RecordBatch]:
        """Something that happened to the stream, which no event of it tells."""
        payload = json.dumps(note, ensure_ascii=False, sort_keys=True)
        made = hashlib.sha256(f"evermark.note.1\n{stream}\n{payload}".encode()).hexdigest()
        yield from self._add(made, position, stream, Op.TRUNCATE, None, payload, None)

    def add_opening(
        self, stream: str, snapshot: Mapping[str, Any], position: str, block: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """How the stream was at the first block that is taken. Two that are alike are not the same: somebody may have
        left and come back in between."""
        payload = json.dumps(snapshot, ensure_ascii=False, sort_keys=True)
        made = hashlib.sha256(f"evermark.opening.1\n{stream}\n{block}\n{payload}".encode()).hexdigest()
        yield from self._add(made, position, stream, Op.SCHEMA, None, payload, None)

    def add_told(self, stream: str, event: BlockEvent, position: str) -> Iterator[pa.RecordBatch]:
        """A join or leave of a stream that is taken again, whether the log drops the event or not."""
        about = {"kind": event.kind.value, "member": event.member, "event": event.hash}
        yield from self.add_standing(stream, about, position)

    def add_standing(self, stream: str, about: Mapping[str, Any], position: str) -> Iterator[pa.RecordBatch]:
        """What holds at this place of the log, and at no other: it is never a repeat of an older one."""
        payload = json.dumps(about, ensure_ascii=False, sort_keys=True)
        made = hashlib.sha256(f"evermark.standing.1\n{stream}\n{position}\n{payload}".encode()).hexdigest()
        yield from self._add(made, position, stream, Op.SCHEMA, None, payload, None)

    def rest(self) -> Iterator[pa.RecordBatch]:
        rows = len(self._columns["event_id"])
        if rows:
            batch = taken_batch(self._columns | {"key": self._columns["stream"]}, rows)
            self._clear()
            yield batch

    def _add(
        self, event_id: str, position: str, stream: str, op: Op, at_us: int | None, payload: str, raw: bytes | None
    ) -> Iterator[pa.RecordBatch]:
        columns = self._columns
        ids = columns["event_id"]
        ids.append(event_id)
        columns["position"].append(position)
        columns["stream"].append(stream)
        columns["op"].append(op.value)
        columns["event_time"].append(at_us)
        columns["payload"].append(payload)
        columns["bytes"].append(raw)
        self._bytes += len(payload) + len(raw or b"")
        if len(ids) >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
            yield from self.rest()


def envelope(event: BlockEvent) -> str:
    """What a receiver is sent: the event without what the row says anyway; its payload as JSON if it is some."""
    about: dict[str, Any] = {"kind": event.kind.value, "creator": event.creator}
    if event.member:
        about["member"] = event.member
    if event.settings:
        about["settings"] = dict(event.settings)
    if event.tags:
        about["tags"] = dict(event.tags)
    text = _COMPACT.encode(about)
    return f'{text[:-1]},"payload":{_payload(event.payload)}}}'


def _payload(text: str) -> str:
    """An object or array as it was written; anything else as a text. Numbers beyond 2⁵³ become texts."""
    if text[:1] not in {"{", "["}:
        return _COMPACT.encode(text)
    if _LONG_NUMBER.search(text) is None:
        # Most texts: nothing in them may have to be written anew, it only has to be JSON.
        try:
            _STRICT.decode(text)
        except (ValueError, RecursionError):
            return _COMPACT.encode(text)
        return text
    return _with_long_numbers(text)


def _with_long_numbers(text: str) -> str:
    large: list[int] = []

    def whole(digits: str) -> Any:
        value = int(digits) if len(digits) < 20 else _SAFE
        if abs(value) < _SAFE:
            return value
        large.append(1)
        return digits

    try:
        value = json.loads(text, parse_int=whole, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _COMPACT.encode(text)
    return _COMPACT.encode(value) if large else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# Made once: `json.dumps` and `json.loads` with options make theirs anew for every event.
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_STRICT = json.JSONDecoder(parse_constant=_refuse)
_LONG_NUMBER = re.compile(r"\d{16}")  # 2**53 has sixteen digits
