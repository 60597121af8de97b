"""The tables that a small log implies, found by going through its events one after the other, in this process.

Of few events a query costs more than the events do. What an event means is the rule of `implied_table.py`; where that
takes more than the events in their order (several partitions, a key that was left and is not told, two records that had
a key at the same time and may be one), `NotPlain` says so, and the query is asked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import EVENT, with_all_columns
from evermark.log.format import KEPT
from evermark.log.implied_table import POSTGRES_POSITION, TABLE
from evermark.log.kept_keys import KeyCheck, members
from evermark.log.large_values import Image, lacked, merging
from evermark.log.newest_rows import RECORD_OPS, NotPlain
from evermark.log.opened import damage_is_said, opened

# A file may be many times smaller than the values in it. Those are in memory several times over, and four times as
# large as texts of Python where one character of them is an unusual one.
VALUES_BYTES_MAX = 32 * 1024 * 1024
_VALUES = ("payload", "before")
_WALKED = (
    "key", "previous_key", "op", "payload", "before", "tx", "position", "event_id", "schema_version", "flags",
)  # fmt: skip
_READ = ("partition", "stream", "batch", "event_time", *_WALKED)
_EVENTS = pa.schema([EVENT.field(name) for name in _READ])
_POSTGRES = re.compile(POSTGRES_POSITION)
# Numbers that Spark may write in another way than they stand in an image.
_ODD_NUMBER = re.compile(r"-?[0-9]+[.eE][0-9.eE+-]*")


def small_tables(
    paths: Sequence[str], streams: Collection[str] | None = None, partition: int | None = None
) -> dict[str, pa.Table]:
    """The table of each of these streams (of all) that has an event: the columns of `TABLE`. Of a partition, its
    records, which a truncate in any other ends, too. Raises `NotPlain`."""
    events = _events(paths, streams, partition)
    names = events["stream"].to_pylist()
    begins = [row for row, name in enumerate(names) if not row or names[row - 1] != name]
    ends = [*begins, len(names)][1:]
    return {names[begin]: _table(events.slice(begin, end - begin)) for begin, end in zip(begins, ends, strict=True)}


def _events(paths: Sequence[str], streams: Collection[str] | None, partition: int | None) -> pa.Table:
    """By stream, and each in its order within a partition."""
    some, size = [_EVENTS.empty_table()], 0
    for path in paths:
        for raw in _row_groups(path):
            rows = with_all_columns(raw, _EVENTS).cast(_EVENTS)
            wanted = pc.is_in(rows["op"], pa.array(RECORD_OPS))
            if streams is not None:
                wanted = pc.and_(wanted, pc.is_in(rows["stream"], pa.array(list(streams), pa.string())))
            if partition is not None:
                is_mine = pc.or_(pc.equal(rows["op"], "truncate"), pc.equal(rows["partition"], partition))
                wanted = pc.and_(wanted, is_mine)
            some.append(rows.filter(wanted))
            size += sum(some[-1][name].nbytes for name in _VALUES)
            _require_few(size)
    events = pa.concat_tables(some)
    return events.take(pc.sort_indices(events, [(name, "ascending") for name in ("stream", "batch", "position")]))


def _row_groups(path: str) -> Iterator[pa.Table]:
    with damage_is_said(path), opened(path) as file:
        names = [name for name in _READ if name in file.schema_arrow.names]
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        columns = [group.column(at) for group in groups for at in range(group.num_columns)]
        _require_few(sum(each.total_uncompressed_size for each in columns if each.path_in_schema in _VALUES))
        for number in range(len(groups)):
            yield file.read_row_group(number, columns=names, use_threads=False)


def _require_few(size: int) -> None:
    if size > VALUES_BYTES_MAX:
        raise NotPlain(f"its values are more than {VALUES_BYTES_MAX >> 20} MiB")


def _table(events: pa.Table) -> pa.Table:
    """Of one stream."""
    if len(pc.unique(events["partition"])) > 1:
        raise NotPlain("its events are in several partitions")
    truncates = pc.indices_nonzero(pc.equal(events["op"], "truncate"))
    if len(truncates):
        last = truncates[-1].as_py()
        batch, position = events["batch"][last], events["position"][last]
        if pc.sum(pc.and_(pc.equal(events["batch"], batch), pc.equal(events["position"], position))).as_py() > 1:
            raise NotPlain("an event stands where a truncate stands")
        events = events.slice(last + 1)
    walk = _Walk()
    for number, row in enumerate(zip(*(events[name].to_pylist() for name in _WALKED), strict=True)):
        walk.step(number, _Event(*row))
    doubtful = events.take(pa.array(walk.doubtful, pa.int64()))
    if not KeyCheck().all_kept(*(doubtful[name].combine_chunks() for name in ("key", "payload", "before"))):
        raise NotPlain("its updates may have changed keys without saying so")
    there = sorted((each for each in walk.newest.values() if each is not None), key=itemgetter(0))
    rows = events.take(pa.array([number for number, _ in there], pa.int64()))
    payload = pa.array([walk.written(image) for _, image in there], pa.string())
    rows = rows.set_column(rows.schema.get_field_index("payload"), "payload", payload)
    return rows.select(TABLE).cast(pa.schema([KEPT.field(name) for name in TABLE]))


class _Event(NamedTuple):
    key: str | None
    previous_key: str | None
    op: str
    payload: str | None
    before: str | None
    tx: str | None
    position: str
    event_id: str
    schema_version: int | None
    flags: list[str] | None


class _Mark(NamedTuple):
    """What an event said of a key last."""

    tx: str | None
    gone: bool
    payload: str | None


@dataclass
class _Walk:
    """Of one stream in one partition, behind its last truncate. `newest`: of each key the number of the event that is
    its row, and the image, whole; None where it is gone."""

    newest: dict[str, tuple[int, Image | None] | None] = field(default_factory=dict)
    doubtful: list[int] = field(default_factory=list)  # they may have changed their keys
    _marks: dict[str, _Mark] = field(default_factory=dict)
    _images: dict[str, Image | None] = field(default_factory=dict)  # whole
    _payloads: dict[str, str | None] = field(default_factory=dict)  # as they came, by the event's own key

    def __post_init__(self) -> None:
        self._filled, self.written = merging()

    def step(self, number: int, event: _Event) -> None:
        key, left = event.key if event.key is not None else event.event_id, event.previous_key
        if left is not None and (left == key or event.key is None):
            raise NotPlain("an event says that a record left a key, and not for another one")
        if _may_have_moved(event) and event.before != self._payloads.get(key):
            self.doubtful.append(number)
        if event.key is not None:
            self._payloads[event.key] = event.payload
        lacks = lacked(event.flags)
        if event.op == "delete":
            self._gone(key, event)
        else:
            earlier = self._images.get(key if left is None else left) if lacks else None
            image: Image | None = event.payload
            if event.payload is not None and earlier is not None:
                image = self._filled(event.payload, earlier, lacks)
            self._marks[key] = _Mark(event.tx, False, event.payload)
            self._images[key], self.newest[key] = image, (number, image)
        if left is not None:
            older = self._marks.get(left)
            if older is None or not _is_other(older, event):
                self._gone(left, event)
            self._marks[left] = _Mark(event.tx, True, event.payload)

    def _gone(self, key: str, event: _Event) -> None:
        self._marks[key] = _Mark(event.tx, True, event.payload)
        self._images[key] = self.newest[key] = None


def _may_have_moved(event: _Event) -> bool:
    """Written by a trigger that did not tell a key that was left."""
    told = event.op == "update" and event.previous_key is None and event.key is not None
    images = event.payload is not None and event.before is not None
    return told and images and event.schema_version is not None and _POSTGRES.fullmatch(event.position) is not None


def _is_other(older: _Mark, event: _Event) -> bool:
    """Whether another record than the one that left a key has it by now: it took the key before, in the same
    transaction (a deferrable constraint)."""
    if older.tx is None or older.tx != event.tx or older.gone:
        return False
    if older.payload is None or event.before is None or older.payload == event.before:
        return False
    there, was = members(older.payload), members(event.before)
    if not there or not was:
        raise NotPlain("images of records that had a key at the same time are no objects")
    return not all(_is_same(value, there[name]) for name, value in was.items() if name in there)


def _is_same(one: Any, other: Any) -> bool:
    for value in (one, other):
        if isinstance(value, dict | list) or (one != other and _ODD_NUMBER.fullmatch(value or "")):
            raise NotPlain("records that had a key at the same time have values that are written in several ways")
    return bool(one == other)
