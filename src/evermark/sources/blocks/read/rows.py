"""Events of block streams as rows of the log.

- `event_id` is the event's hash; `stream` and `key` are the stream's id, as the node writes it.
- Every event of a stream is `op = message`, joins, leaves and settings too: receivers want them, and `control` means a
  request to Evermark. `kind` in the payload says which it is, beside `creator` and `tags`.
- The kind, first members and settings of a stream that is first taken are a row of `op = schema`: no event tells them.
  The row is logged, and delivered to nobody.
- Joins and leaves of a stream that is taken again are such rows too, and its members at the end: the log drops rows of
  events that it still has.
- Changes of a stream as a whole (deleted, recreated, lost) are `op = truncate`: what was known of it is void.
- An event that cannot be read is `op = poison`, with its bytes, under an id of its own: should the event come readable
  when the stream is compared with the log, it is not dropped as a repeat of the poison.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import pyarrow as pa

from evermark.event import Op, taken_batch
from evermark.sources.blocks.chain import BlockEvent, Undecoded

BATCH_ROWS = 4096
BATCH_BYTES = 8 * 1024 * 1024
_TIME_US_MAX = 253_402_300_799_999_999  # the end of the year 9999: later times cannot be printed
_SAFE = 2**53


class Rows:
    """Collects events into batches of bounded size: take the batch whenever it is `full`, and at the end."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        names = ("event_id", "position", "stream", "op", "event_time", "payload", "bytes")
        self._columns: dict[str, list[Any]] = {name: [] for name in names}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._columns["event_id"])

    @property
    def full(self) -> bool:
        return len(self) >= BATCH_ROWS or self._bytes >= BATCH_BYTES

    def taken(self) -> pa.RecordBatch:
        """The rows so far, as a batch; collecting begins anew."""
        batch = taken_batch(self._columns | {"key": self._columns["stream"]}, len(self))
        self._clear()
        return batch

    def add(self, stream: str, event: BlockEvent, position: str) -> None:
        if isinstance(event, Undecoded):
            made = hashlib.sha256(f"evermark.poison.1\n{stream}\n{event.hash}".encode()).hexdigest()
            payload = json.dumps({"event": event.hash, "reason": event.reason})
            self._add(made, position, stream, Op.POISON, None, payload, event.raw)
            return
        at_us = event.at_us if event.at_us <= _TIME_US_MAX else None
        self._add(event.hash, position, stream, Op.MESSAGE, at_us, envelope(event), None)

    def add_note(self, stream: str, note: Mapping[str, Any], position: str) -> None:
        """A change of the stream as a whole, which no event tells."""
        self._add_own(Op.TRUNCATE, "note", stream, note, position)

    def add_opening(self, stream: str, snapshot: Mapping[str, Any], position: str, block: int = 0) -> None:
        """The stream's snapshot at the first block that is taken. Equal snapshots of two blocks are two rows: a member
        may have left and come back in between."""
        self._add_own(Op.SCHEMA, "opening", stream, snapshot, position, block)

    def add_join_or_leave(self, stream: str, event: BlockEvent, position: str) -> None:
        """Of a stream that is taken again, whether the log drops the event or not."""
        about = {"kind": event.kind.value, "member": event.member, "event": event.hash}
        self.add_membership(stream, about, position)

    def add_membership(self, stream: str, about: Mapping[str, Any], position: str) -> None:
        """A row that holds at this position of the log and at no other: it is never a repeat of an older row."""
        self._add_own(Op.SCHEMA, "standing", stream, about, position, position)

    def _add_own(self, op: Op, name: str, stream: str, about: Mapping[str, Any], position: str, *key: object) -> None:
        """A row of ours, under an id made from its content."""
        payload = json.dumps(about, ensure_ascii=False, sort_keys=True)
        text = "\n".join([f"evermark.{name}.1", stream, *map(str, key), payload])
        self._add(hashlib.sha256(text.encode()).hexdigest(), position, stream, op, None, payload, None)

    def _add(
        self, event_id: str, position: str, stream: str, op: Op, at_us: int | None, payload: str, raw: bytes | None
    ) -> None:
        row = (event_id, position, stream, op.value, at_us, payload, raw)
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)
        self._bytes += len(payload) + len(raw or b"")


def envelope(event: BlockEvent) -> str:
    """The event as receivers get it, without hash and time, which the row has; its payload as JSON if it is JSON."""
    about = {"kind": event.kind.value, "creator": event.creator}
    optional = {"member": event.member, "settings": event.settings, "tags": event.tags}
    text = _COMPACT.encode(about | {name: value for name, value in optional.items() if value})
    return f'{text[:-1]},"payload":{_payload(event.payload)}}}'


def _payload(text: str) -> str:
    """An object or array as it was written; any other text as a JSON string. Numbers beyond 2⁵³ become strings."""
    if text[:1] in {"{", "["}:
        try:
            if _LONG_NUMBER.search(text) is not None:
                return _with_long_numbers(text)
            _STRICT.decode(text)  # most payloads: they only have to be valid JSON
        except (ValueError, RecursionError):
            pass
        else:
            return text
    return _COMPACT.encode(text)


def _with_long_numbers(text: str) -> str:
    large: list[int] = []

    def whole(digits: str) -> Any:
        value = int(digits) if len(digits) < 20 else _SAFE
        if abs(value) < _SAFE:
            return value
        large.append(1)
        return digits

    value = json.loads(text, parse_int=whole, parse_constant=_refuse)
    return _COMPACT.encode(value) if large else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# Made once: `json.dumps` and `json.loads` with options make theirs anew for every event.
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_STRICT = json.JSONDecoder(parse_constant=_refuse)
_LONG_NUMBER = re.compile(r"\d{16}")  # 2**53 has sixteen digits
