"""The webhook body, version 1 (docs/formats.md), rendered from log rows.

`payload` and `before` are JSON text already, and are spliced in as they are: parsing and writing them again would
cost more than all the rest, and could change numbers on the way. The log guarantees that they are JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from json.encoder import encode_basestring as _quote
from typing import TypeAlias
from urllib.parse import quote as percent_quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from evermark.errors import FormatError
from evermark.event import TIMESTAMP

REQUIRED = ("event_id", "source", "partition", "position", "batch", "stream", "op")

_YEAR_1_US = -62_135_596_800_000_000
_YEAR_10000_US = 253_402_300_800_000_000
_MINUTE_US = 60_000_000

WEBHOOK_ID_CHARS_MAX = 256
_PLAIN_ID = re.compile(r"[!-~]*")


class Style(StrEnum):
    STANDARD = "standard"
    CLOUDEVENTS = "cloudevents"
    RAW = "raw"


@dataclass(frozen=True)
class Rendering:
    """Everything about a body that is not in the event."""

    style: Style = Style.STANDARD
    historical: bool = False
    attempt: int = 1
    replay_id: str | None = None


# Errors that rendering may raise for the values of an event.
UNRENDERABLE = (FormatError, pa.ArrowException, ValueError, TypeError, OverflowError)


def render(events: pa.Table | pa.RecordBatch, how: Rendering) -> list[bytes]:
    """The body of each event, column by column: about a microsecond each, where a loop takes five."""
    if events.num_rows == 0:
        return []
    bodies: list[bytes] = render_column(events, how).to_pylist()
    return bodies


def render_column(events: pa.Table | pa.RecordBatch, how: Rendering, after: str = "") -> pa.Array:
    """The same, as a column of binary values, with `after` behind each; at least one event."""
    _require_columns(events)
    columns = _Columns(events)
    if how.style is Style.STANDARD:
        parts = _standard(columns, how)
    elif how.style is Style.CLOUDEVENTS:
        parts = _cloudevent(columns, how)
    else:
        parts = columns.json("payload")
    return _joined([*parts, after] if after else parts, events.num_rows)


def render_sound(events: pa.Table | pa.RecordBatch, how: Rendering, after: str = "") -> tuple[pa.Array, dict[int, str]]:
    """The same where some events cannot be rendered: which, and why. They are few, and are found by halving.

    Bodies are kept as they were rendered: an event that works beside one neighbour may fail beside another.
    """
    _require_columns(events)
    bad: dict[int, str] = {}

    def rendered(start: int, rows: int) -> list[pa.Array]:
        try:
            return [render_column(events.slice(start, rows), how, after)]
        except UNRENDERABLE as problem:
            if rows > 1:
                return rendered(start, rows // 2) + rendered(start + rows // 2, rows - rows // 2)
            bad[start] = problem.message if isinstance(problem, FormatError) else type(problem).__name__
            return [pa.array([after.encode()], pa.binary())]

    pieces = rendered(0, events.num_rows)
    return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces), bad


def _require_columns(events: pa.Table | pa.RecordBatch) -> None:
    if absent := [name for name in REQUIRED if name not in events.schema.names]:
        raise FormatError(f"events to deliver lack the columns {', '.join(absent)}", hint="select all log columns")


# A piece of a body: the same text in every row, or a text per row.
Part: TypeAlias = str | pa.Array
Parts: TypeAlias = list[Part]


def _standard(column: _Columns, how: Rendering) -> Parts:
    delivery: Parts = []
    if how.replay_id is not None:
        delivery = ['"delivery":', *column.text("event_id", after=f".{how.replay_id}"), ","]
    return [
        '{"type":', *column.event_type(), ',"timestamp":', *column.time(), ',"data":', *column.json("payload"),
        ',"evermark":{"v":1,"id":', *column.text("event_id"), ",", *delivery,
        '"source":', *column.text("source"), ',"stream":', *column.text("stream"), ',"key":', *column.text("key"),
        *column.text_if_any(',"previous_key":', "previous_key"),
        ',"op":', *column.text("op"), ',"before":', *column.json("before"), ',"tx":', *column.text("tx"),
        ',"schema":', *column.number("schema_version"), ',"position":', *column.text("position"),
        ',"historical":', json.dumps(how.historical), ',"flags":', *column.flags(), f',"attempt":{how.attempt}}}}}',
    ]  # fmt: skip


def _cloudevent(column: _Columns, how: Rendering) -> Parts:
    suffix = "" if how.replay_id is None else f".{how.replay_id}"
    return [
        '{"specversion":"1.0","id":', *column.text("event_id", after=suffix),
        ',"source":', *column.text("source", before="/evermark/"), ',"type":', *column.event_type(),
        ',"time":', *column.time(), ',"datacontenttype":"application/json","evermarkkey":', *column.text("key"),
        *column.text_if_any(',"evermarkpreviouskey":', "previous_key"),
        ',"evermarkposition":', *column.text("position"), ',"evermarkhistorical":', json.dumps(how.historical),
        ',"data":', *column.json("payload"), "}",
    ]  # fmt: skip


@dataclass(frozen=True)
class _Text:
    """A column of texts, with the facts that decide how it is written as JSON."""

    column: pa.Array
    same: str | None  # the text that all rows have: most names come with every event
    escapes: bool  # whether a text may have characters that JSON escapes

    @staticmethod
    def of(column: pa.Array) -> _Text:
        coded = pa.types.is_dictionary(column.type)
        if coded and len(column.dictionary) == 1 and not column.null_count:
            return _Text(column, str(column.dictionary[0].as_py()), escapes=True)
        texts = _strings(column)
        same = _same(texts)
        if isinstance(same, str):
            return _Text(texts, same, escapes=True)
        return _Text(texts, None, _needs_escapes(_strings(column.dictionary) if coded else texts))

    @property
    def part(self) -> Part:
        return self.column if self.same is None else self.same

    def quoted(self, before: str = "", after: str = "") -> Parts:
        if self.same is not None:
            return [_quote(before + self.same + after)]
        if self.escapes:
            texts = self.column.to_pylist()
            quoted = ["null" if text is None else _quote(before + text + after) for text in texts]
            return [pa.array(quoted, pa.string())]
        around = _quote(before)[:-1], _quote(after)[1:]
        if self.column.null_count:
            return [_or_null(pc.binary_join_element_wise(around[0], self.column, around[1], ""))]
        return [around[0], self.column, around[1]]


class _Columns:
    """The columns of some log rows as JSON."""

    def __init__(self, events: pa.Table | pa.RecordBatch) -> None:
        self._events = events
        self._names = frozenset(events.schema.names)
        self._texts: dict[str, _Text] = {}

    def _column(self, name: str) -> pa.Array | None:
        """A column in one piece; None when it has no value."""
        if name not in self._names:
            return None
        column = self._required(name)
        return None if column.null_count == len(column) else column

    def _required(self, name: str) -> pa.Array:
        column = self._events.column(name)
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

    def _text(self, name: str) -> _Text:
        """A column that says something. Some are written twice."""
        if name not in self._texts:
            self._texts[name] = _Text.of(self._required(name))
        return self._texts[name]

    def text(self, name: str, before: str = "", after: str = "") -> Parts:
        return ["null"] if self._column(name) is None else self._text(name).quoted(before, after)

    def text_if_any(self, name: str, column: str) -> Parts:
        """A field with its name, in the rows that have a value; in the others there is nothing at all."""
        if self._column(column) is None:
            return []
        texts = self._required(column).to_pylist()
        return [pa.array(["" if text is None else name + _quote(text) for text in texts], pa.string())]

    def event_type(self) -> Parts:
        stream, op = self._text("stream"), self._text("op")
        if stream.same is not None and op.same is not None:
            return [_quote(f"{stream.same}.{op.same}")]
        return _Text.of(pc.binary_join_element_wise(stream.part, op.part, ".")).quoted()

    def json(self, name: str) -> Parts:
        column = self._column(name)
        return ["null"] if column is None else [_or_null(_strings(column))]

    def number(self, name: str) -> Parts:
        column = self._column(name)
        return ["null"] if column is None else [_or_null(_same(column.cast(pa.string())))]

    def flags(self) -> Parts:
        column = self._column("flags")
        if column is None or len(column.flatten()) == 0:
            return ["[]"]
        return [pa.array([json.dumps(flags or []) for flags in column.to_pylist()], pa.string())]

    def time(self) -> Parts:
        happened, ingested = self._column("event_time"), self._column("ingested_at")
        if happened is None:
            happened = ingested
        elif ingested is not None and happened.null_count:
            happened = pc.coalesce(happened, ingested)
        if happened is None:
            return ["null"]
        quick = None if happened.null_count else _quick_times(happened)
        return _Text.of(_time_texts(happened)).quoted() if quick is None else ['"', *quick, '"']


def _strings(column: pa.Array) -> pa.Array:
    return column if column.type == pa.string() else column.cast(pa.string())


def _same(column: pa.Array) -> Part:
    """One text when all rows have it: most names come with every event."""
    if column.null_count == 0 and column[0].equals(column[-1]) and pc.all(pc.equal(column, column[0])).as_py():
        return str(column[0].as_py())
    return column


def _or_null(part: Part) -> Part:
    return part if isinstance(part, str) or part.null_count == 0 else pc.fill_null(part, "null")


def _needs_escapes(column: pa.Array) -> bool:
    data = column.buffers()[2]
    if data is None:
        return False
    # Offsets are looked at because a slice shares the buffer of the whole.
    at = np.frombuffer(column.buffers()[1], np.int32)
    octets = np.frombuffer(data, np.uint8)[at[column.offset] : at[column.offset + len(column)]]
    raw = octets.tobytes()  # bytes find a character quickest
    return bool(octets.min(initial=255) < 0x20) or b'"' in raw or b"\\" in raw


def _quick_times(column: pa.Array) -> Parts | None:
    """RFC 3339 without its quotes; None where it would not be right. Most of a body's rendering was its time."""
    if pa.types.is_string(column.type):
        return None
    times = column.cast(TIMESTAMP).cast(pa.int64()).to_numpy()
    first, last = int(times.min()), int(times.max())
    if first < _YEAR_1_US or last >= _YEAR_10000_US:
        return None
    minute = first // _MINUTE_US * _MINUTE_US
    if last < minute + _MINUTE_US:
        # As most neighbours are: they differ in ten characters. 1SSffffff becomes SS.ffffff.
        octets, ends = _fixed(pa.array(times - minute + 100_000_000).cast(pa.string()), len("1SSffffff"))
        octets[:, 0:2] = octets[:, 1:3]
        octets[:, 2] = ord(".")
        before = np.datetime_as_string(np.datetime64(minute, "us"), unit="m") + ":"
        return [before, _from_fixed(octets, ends), "Z"]
    # Arrow writes "2026-11-15 01:02:03.000004", and that quickly; with a zone it would take ten times as long.
    octets, ends = _fixed(column.cast(pa.timestamp("us")).cast(pa.string()), len("2026-11-15 01:02:03.000004"))
    octets[:, len("2026-11-15")] = ord("T")
    return [_from_fixed(octets, ends), "Z"]


def _fixed(column: pa.Array, size: int) -> tuple[npt.NDArray[np.uint8], pa.Buffer]:
    """The characters of texts that are all of this size, a row each, and where each ends."""
    _, ends, texts = column.buffers()
    return np.frombuffer(texts, np.uint8, count=len(column) * size).reshape(-1, size).copy(), ends


def _from_fixed(octets: npt.NDArray[np.uint8], ends: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(octets), [None, ends, pa.py_buffer(octets)])


def _time_texts(column: pa.Array) -> pa.Array:
    """RFC 3339 in UTC, always with six digits. Texts are times that were rendered before."""
    if pa.types.is_string(column.type):
        return column
    encoded = column.cast(TIMESTAMP).dictionary_encode()
    values = encoded.dictionary.to_numpy(zero_copy_only=False).astype("datetime64[us]")
    return pa.array(np.datetime_as_string(values, unit="us", timezone="UTC")).take(encoded.indices)


def _joined(parts: Sequence[Part], rows: int) -> pa.Array:
    """The parts one after another, row by row; neighbouring texts are put together first."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    if len(merged) == 1 and isinstance(merged[0], str):
        return pa.repeat(pa.scalar(merged[0].encode(), pa.binary()), rows)
    scalars = [pa.scalar(part, pa.string()) if isinstance(part, str) else part for part in merged]
    whole = scalars[0] if len(scalars) == 1 else pc.binary_join_element_wise(*scalars, "")
    return whole.cast(pa.binary())


def content_type(style: Style, bundled: bool) -> str:
    if style is Style.CLOUDEVENTS:
        return f"application/cloudevents{'-batch' if bundled else ''}+json; charset=utf-8"
    return "application/json"


# The text before and after the events of a bundle, which are separated by commas.
AROUND = {Style.STANDARD: (b'{"events":[', b"]}"), Style.CLOUDEVENTS: (b"[", b"]"), Style.RAW: (b"[", b"]")}
BUNDLE_BYTES_AROUND = 16


def bundle(bodies: Sequence[bytes], style: Style = Style.STANDARD) -> bytes:
    before, after = AROUND[style]
    return before + b",".join(bodies) + after


def delivery_ids(event_ids: Sequence[str], replay_id: str | None = None) -> list[str]:
    """The `webhook-id` of each event: its id, and for a replay the replay's id too. Always fit for a header."""
    texts = list(event_ids) if replay_id is None else [f"{event_id}.{replay_id}" for event_id in event_ids]
    if _PLAIN_ID.fullmatch("".join(texts)) and max(map(len, texts), default=0) <= WEBHOOK_ID_CHARS_MAX and all(texts):
        return texts
    return [_header_text(text) for text in texts]


def _header_text(text: str) -> str:
    if not text or _PLAIN_ID.fullmatch(text) is None:
        text = "%" + percent_quote(text, safe="")
    if len(text) > WEBHOOK_ID_CHARS_MAX:
        text = "sha256-" + hashlib.sha256(text.encode()).hexdigest()
    return text


def bundle_id(event_ids: Sequence[str], replay_id: str | None = None) -> str:
    """The `webhook-id` of a bundle: the same events in the same order, of the same replay, give the same id."""
    texts = [event_id.encode() for event_id in event_ids]
    return bundle_id_of(b"".join(texts), np.array([len(text) for text in texts], "<i4"), replay_id)


def bundle_id_of(text: bytes | memoryview, sizes: npt.NDArray[np.int32], replay_id: str | None = None) -> str:
    """The same, of the events' ids as they lie in a column: one after another, and how long each is."""
    digest = hashlib.sha256(text)
    digest.update(sizes.astype("<i4", copy=False).tobytes())
    digest.update((replay_id or "").encode())
    return "bundle-" + digest.hexdigest()[:40]
