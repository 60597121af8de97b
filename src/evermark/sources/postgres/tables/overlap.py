"""Rows of a snapshot beside the changes that came after it: which of them still have to be told. Pure.

The rows are told at a mark in the stream. A row that was changed between the snapshot and the mark is told by its
change, which stands before the mark: told again, it would be older than that. One change does not tell a whole row: an
update that left out large values. Then the row of the snapshot is told with the newer values, and has the large ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import Op

_BLANKS = " \t\n\r"
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)  # Python refuses to read very long numbers


@dataclass(frozen=True)
class Change:
    op: str
    key: str | None
    previous_key: str | None = None
    partial: str | None = None  # the payload, if it lacks columns


@dataclass(frozen=True)
class _Standing:
    """A row of the snapshot that the stream has told in part: the key it had, and the payloads, in order."""

    origin: str
    partials: tuple[str, ...] = ()


@dataclass
class Overlap:
    """What happened to rows of one table after the snapshot, and before the mark."""

    _touched: dict[str, _Standing | None] = field(default_factory=dict)  # by the key of now; None: told whole, or gone
    _emptied: bool = False

    def __bool__(self) -> bool:
        return bool(self._touched) or self._emptied

    @classmethod
    def of(cls, changes: Iterable[Change]) -> Overlap:
        found = cls()
        for change in changes:
            found._see(change)
        return found

    def _see(self, change: Change) -> None:
        if change.op == Op.TRUNCATE:
            self._emptied = True
        if change.key is None:
            return
        before = change.key if change.previous_key is None else change.previous_key
        standing = self._touched.get(before, _Standing(before))
        if change.previous_key is not None:
            self._touched[change.previous_key] = None
        if change.op != Op.UPDATE or change.partial is None or standing is None:
            self._touched[change.key] = None
        else:
            self._touched[change.key] = _Standing(standing.origin, (*standing.partials, change.partial))

    def applied(self, batch: pa.RecordBatch, moved_id: Callable[[str], str]) -> pa.RecordBatch:
        """The rows that are to be told at the mark. One whose key was changed is told under its new key, which may be
        another chunk's, too: `moved_id` gives it an id of its own."""
        if self._emptied:
            return batch.slice(0, 0)
        told = {row.origin: (key, row.partials) for key, row in self._touched.items() if row is not None}
        gone = pa.array(self._touched.keys() - told.keys(), pa.string())
        batch = batch.filter(pc.invert(pc.is_in(batch.column("key"), value_set=gone)))
        partly = pc.is_in(batch.column("key"), value_set=pa.array(told.keys(), pa.string()))
        rows = np.flatnonzero(partly.to_numpy(zero_copy_only=False)).tolist()
        if not rows:
            return batch
        ids, keys, payloads = (batch.column(name).to_pylist() for name in ("event_id", "key", "payload"))
        for row in rows:
            key, partials = told[keys[row]]
            payloads[row] = completed(payloads[row], partials)
            if key != keys[row]:
                keys[row], ids[row] = key, moved_id(key)
        for name, values in (("event_id", ids), ("key", keys), ("payload", payloads)):
            at = batch.schema.get_field_index(name)
            batch = batch.set_column(at, batch.schema.field(at), pa.array(values, pa.string()))
        return batch


def completed(whole: str, newer: Iterable[str]) -> str:
    """A JSON object with the members of newer ones in their place; values stay as they are written."""
    found = dict(_members(whole))
    for each in newer:
        found.update(_members(each))
    return "{" + ",".join(f"{name}:{value}" for name, value in found.items()) + "}"


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Names and values of an object as it is written: `{"a":1,"b": [2, 3] }`. The blanks around a value belong to it: a
    column of type json keeps them."""
    at = 1
    while text[at] != "}":
        _, colon = _DECODER.raw_decode(text, at)
        _, end = _DECODER.raw_decode(text, _past_blanks(text, colon + 1))
        end = _past_blanks(text, end)
        yield text[at:colon], text[colon + 1 : end]
        at = end + (text[end] == ",")


def _past_blanks(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at
