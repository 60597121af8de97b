"""Which events of a job have to keep their order among themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import Op

I64 = npt.NDArray[np.int64]
_FEW = 16


@dataclass(frozen=True)
class Keys:
    """Which rows must keep their order: rows of one line. Mostly a line is a key; rows that change their record's key
    join two keys, and with them all keys that other rows join to these. A truncate joins all rows of its stream."""

    of: I64  # a number for the key of each row
    left: Mapping[int, int]  # rows that took a key away from their record: the number of that key
    lines: I64

    def held_by(self, row: int) -> tuple[int, ...]:
        """The keys that the row waits behind and holds back."""
        key = int(self.of[row])
        return (key, self.left[row]) if row in self.left else (key,)


def keys_of(events: pa.Table | pa.RecordBatch) -> Keys:
    changed = _changed(events)
    if events.num_rows == 1 and not len(changed):  # of thousands of subscriptions each may want one event
        alone = np.array([-1 if events.column("key").null_count else 0], np.int64)
        return Keys(alone, {}, alone)
    if not len(changed):
        return _of_few(events) if events.num_rows <= _FEW else _by_column(events)
    names = ["source", "stream", "key"]
    now = pa.table([_plain(events.column(name)) for name in names], names=names)
    moved = pa.table([_plain(events.column(name)) for name in (*names[:2], "previous_key")], names=names)
    numbers = key_numbers(pa.concat_tables([now, moved.take(pa.array(changed))]))
    of, left = numbers[: events.num_rows], numbers[events.num_rows :]
    lines = _behind_truncates(events, _joined(of, of[changed], left))
    return Keys(of, dict(zip(changed.tolist(), left.tolist(), strict=True)), lines)


def _by_column(events: pa.Table | pa.RecordBatch) -> Keys:
    numbers = key_numbers(events)
    return Keys(numbers, {}, _behind_truncates(events, numbers))


def _of_few(events: pa.Table | pa.RecordBatch) -> Keys:
    """As `_by_column`, value by value: of thousands of subscriptions each may want a few events."""
    names = ("source", "stream", "key", "op") if "op" in events.schema.names else ("source", "stream", "key")
    try:
        rows = list(zip(*(events.column(name).to_pylist() for name in names), strict=True))
    except UnicodeDecodeError:  # a key of bytes that are no text
        return _by_column(events)
    truncated = {row[:2] for row in rows if row[-1] == Op.TRUNCATE and len(names) == 4}
    numbers: dict[tuple[str | None, ...], int] = {}
    first: dict[tuple[str | None, ...], int] = {}  # by stream with a truncate, the line of its first row
    of, lines = [], []
    for n, row in enumerate(rows):
        number = -1 - n if row[2] is None else numbers.setdefault(row[:3], len(numbers))
        of.append(number)
        lines.append(first.setdefault(row[:2], number) if row[:2] in truncated else number)
    return Keys(np.array(of, np.int64), {}, np.array(lines, np.int64))


def _behind_truncates(events: pa.Table | pa.RecordBatch, lines: I64) -> I64:
    """One line for all rows of a stream with a truncate: a truncate is of every key."""
    if "op" not in events.schema.names:
        return lines
    truncates = pc.equal(_plain(events.column("op")), str(Op.TRUNCATE)).to_numpy(zero_copy_only=False)
    if not truncates.any():
        return lines
    source, stream = _codes(events, "source"), _codes(events, "stream")
    streams = source * (int(stream.max(initial=0)) + 1) + stream
    joined = lines.copy()
    for each in np.unique(streams[truncates]).tolist():
        rows = np.flatnonzero(streams == each)
        joined[rows] = lines[rows[0]]
    return joined


def _changed(events: pa.Table | pa.RecordBatch) -> I64:
    """The rows that changed their record's key."""
    if "previous_key" not in events.schema.names:
        return np.empty(0, np.int64)
    column = events.column("previous_key")
    if column.null_count == events.num_rows:
        return np.empty(0, np.int64)
    return np.flatnonzero(pc.is_valid(column).to_numpy(zero_copy_only=False))


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column


def _joined(of: I64, some: I64, others: I64) -> I64:
    """The number of the first of all keys that are joined, for each row."""
    parent: dict[int, int] = {}

    def first(key: int) -> int:
        while (above := parent.setdefault(key, key)) != key:
            parent[key] = key = parent[above]
        return key

    for one, other in zip(some.tolist(), others.tolist(), strict=True):
        low, high = sorted((first(one), first(other)))
        parent[high] = low
    lines = of.copy()
    for row in np.flatnonzero(np.isin(of, list(parent))).tolist():
        lines[row] = first(int(of[row]))
    return lines


def key_numbers(events: pa.Table | pa.RecordBatch) -> I64:
    """A number per row, equal for rows of one (source, stream, key); rows without a key have numbers of their own."""
    source, stream, key = (_codes(events, name) for name in ("source", "stream", "key"))
    numbers: I64 = (source * (int(stream.max(initial=0)) + 1) + stream) * (int(key.max(initial=0)) + 1) + key
    keyless = key < 0
    numbers[keyless] = -1 - np.flatnonzero(keyless)
    return numbers


def _codes(events: pa.Table | pa.RecordBatch, name: str) -> I64:
    column = events.column(name)
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    encoded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    codes: I64 = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes
