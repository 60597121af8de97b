"""The newest event of every key of a stream, by Arrow alone: for the streams whose table is just that.

It is, where all events of the stream are in one partition, none is a truncate, and none changed a key or might have
(`implied_table.py` has the whole rule; an update whose two images both have its key changed none). Whether it is so is
seen on the way; if not, `NotPlain` says why. Where the newest event lacks large values, the events before it are looked
at, too, as long as they are not many.

Files are read from the newest to the oldest. Of each the columns that tell a key are read; payloads only where a key is
met for the first time. Keys are split into buckets, so that the memory of a task has a bound.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import UNKNOWN, with_all_columns
from evermark.log.format import KEPT
from evermark.log.kept_keys import KeyCheck
from evermark.log.large_values import Unfinished
from evermark.log.opened import opened
from evermark.log.row_reader import ROWS as _FIELDS

RECORD_OPS = ("insert", "update", "delete", "read", "truncate")
# Events that are looked at together: a batch is never in two looks. One that is larger is left to Spark.
RUN_ROWS = 1_000_000
RUN_ROWS_MAX = 16_000_000
BUCKET_ROWS = 32_000_000
BUCKETS_MAX = 16
# Of records that lack values: events that are looked at as Python has them, and their images.
UNFINISHED_MAX = 200_000
UNFINISHED_BYTES_MAX = 64 * 1024 * 1024
_READERS = 2
_GROUP_ROWS = 65_536
_GROUP_BYTES = 32 * 1024 * 1024
_LIGHT = ("partition", "stream", "op", "key", "previous_key", "batch", "schema_version", "before", "flags")
_HEAVY = ("payload", "event_time", "schema_version", "event_id", "position", "tx")

Mask = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


_Read = TypeVar("_Read")


class NotPlain(Exception):
    """The stream's table is more than the newest event of every key."""


@dataclass(frozen=True)
class Part:
    """A row group of a log file, and the batches in it."""

    path: str
    group: int
    rows: int
    batch_min: int
    batch_max: int
    size: int = 0  # of its values, as they are before they are compressed


@dataclass(frozen=True)
class Wanted:
    """Which events: of the stream, after a batch of each partition (all of a partition that is not named)."""

    stream: str
    after: Mapping[int, int]
    bucket: int = 0
    buckets: int = 1


def buckets_for(rows: int) -> int:
    """Into how many parts the keys of a log with so many events are split; 0: too many for this way."""
    buckets = max(1, -(-rows // BUCKET_ROWS))
    return buckets if buckets <= BUCKETS_MAX else 0


def parts_of(paths: Sequence[str]) -> list[Part]:
    """Every row group of the files; read by the driver, once."""
    found = []
    for path in paths:
        with opened(path) as file:
            metadata = file.metadata
        at = metadata.schema.names.index("batch")
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            statistics = group.column(at).statistics
            if statistics is None or not statistics.has_min_max:
                raise NotPlain(f"{Path(path).name} has no statistics")
            ends = int(statistics.min), int(statistics.max)
            found.append(Part(path, number, group.num_rows, *ends, group.total_byte_size))
    return found


def runs_of(parts: Sequence[Part]) -> list[list[Part]]:
    """The row groups in runs from the newest to the oldest. All of a batch is in one run."""
    runs: list[list[Part]] = []
    low = 0
    for part in sorted(parts, key=lambda p: (p.batch_max, p.batch_min), reverse=True):
        if runs and (part.batch_max >= low or sum(p.rows for p in runs[-1]) < RUN_ROWS):
            runs[-1].append(part)
            low = min(low, part.batch_min)
        else:
            runs.append([part])
            low = part.batch_min
    if any(sum(part.rows for part in run) > RUN_ROWS_MAX for run in runs):
        raise NotPlain("a batch, or several that lie across each other, is too large to be looked at by one task")
    return runs


@dataclass(frozen=True)
class _Keys:
    """What one row group says of keys: row keys, batches and numbers of the rows that count, and which lack a value."""

    key: pa.Array
    batch: I64
    row: I64
    lacks: Mask
    partitions: frozenset[int] = frozenset()


class NewestRows:
    """Of one bucket of keys. `batches` gives KEPT rows; afterwards `partitions` has the partitions that had events.
    `images`: of records by their row keys, from before all events that are wanted; in pieces, each record in one.

    Two threads read while a third one looks keys up: Arrow does both without holding Python up.
    """

    def __init__(
        self, wanted: Wanted, images: Callable[[list[str]], Iterable[Mapping[str, str | None]]] = lambda _: ()
    ) -> None:
        self._wanted = wanted
        self._images = images
        self._key_check = KeyCheck()
        self._unfinished = Unfinished()
        self._looked_at, self._looked_at_bytes = 0, 0  # of unfinished records
        self._seen = pa.array([], pa.string())
        self._open = threading.local()
        self.partitions: set[int] = set()

    def batches(self, runs: Sequence[Sequence[Part]]) -> Iterator[pa.Table]:
        with ThreadPoolExecutor(_READERS, "newest rows") as readers:
            try:
                ahead = [readers.submit(self._light, part) for part in runs[0]] if runs else []
                for number, run in enumerate(runs):
                    found, ahead = ahead, []
                    if number + 1 < len(runs):
                        ahead = [readers.submit(self._light, part) for part in runs[number + 1]]
                    yield from self._run(readers, run, [each.result() for each in found])
                if keys := self._unfinished.keys():
                    for images in self._images(keys):
                        yield _kept(self._unfinished.filled(images))
                    if rest := self._unfinished.rest():
                        yield _kept(rest)
            finally:
                readers.shutdown(cancel_futures=True)
                self._open = threading.local()

    def _run(self, readers: ThreadPoolExecutor, run: Sequence[Part], found: Sequence[_Keys]) -> Iterator[pa.Table]:
        self.partitions.update(*(each.partitions for each in found))
        if len(self.partitions) > 1:
            raise NotPlain("its events are in several partitions")
        coded = pa.chunked_array([each.key for each in found], pa.string()).combine_chunks().dictionary_encode()
        if isinstance(coded, pa.ChunkedArray):
            coded = coded.combine_chunks()
        names, codes = coded.dictionary, coded.indices.to_numpy(zero_copy_only=False)
        if not len(codes):
            return
        batch = np.concatenate([each.batch for each in found])
        newest = np.full(len(names), -1, np.int64)
        np.maximum.at(newest, codes, batch)
        fresh = ~np.asarray(pc.is_in(names, value_set=self._seen).to_numpy(zero_copy_only=False), bool)
        self._seen = pa.concat_arrays([self._seen, names.filter(pa.array(fresh))])
        # Several rows of a key in its newest batch: their positions decide, which are read before the rest.
        stays = fresh[codes] & (batch == newest[codes])
        if len(apart := self._apart(names, codes[stays & np.concatenate([each.lacks for each in found])])):
            theirs = np.isin(codes, apart)
            stays &= ~theirs
            rows = [row for part, numbers in _by_part(run, found, theirs) for row in self._events(part, numbers)]
            if whole := self._unfinished.add(rows):
                yield _kept(whole)
        left = np.flatnonzero(stays)
        if len(twice := left[np.bincount(codes[left], minlength=len(names))[codes[left]] > 1]):
            rivals = np.zeros(len(codes), bool)
            rivals[twice] = True
            positions = list(_read_ahead(readers, self._positions, _by_part(run, found, rivals)))
            stays[twice[~_is_last(codes[twice], pa.concat_arrays(positions))]] = False
        yield from _gathered(_read_ahead(readers, self._heavy, _by_part(run, found, stays)))

    def _apart(self, names: pa.Array, lacking: npt.NDArray[np.int32]) -> I64:
        """The numbers of keys whose newest event, or one as new, lacks values, and of those looked for already."""
        looked_for = pc.is_in(names, value_set=pa.array(self._unfinished.keys(), pa.string()))
        return np.union1d(lacking, np.flatnonzero(looked_for.to_numpy(zero_copy_only=False)))

    def _events(self, part: Part, row: I64) -> list[dict[str, Any]]:
        table = self._read(part, (*_HEAVY, "partition", "batch", "op", "key", "flags")).take(pa.array(row))
        self._looked_at += len(row)
        self._looked_at_bytes += pc.sum(pc.binary_length(table["payload"])).as_py() or 0
        if self._looked_at > UNFINISHED_MAX or self._looked_at_bytes > UNFINISHED_BYTES_MAX:
            raise NotPlain("many updates of it left out large values")
        gone = {"gone": pc.equal(table["op"].cast(pa.string()), "delete")}
        told = {"row_key": pc.coalesce(table["key"], table["event_id"])} | gone
        for name, column in told.items():
            table = table.append_column(name, column)
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows

    def _light(self, part: Part) -> _Keys:
        """After a look at what the events are."""
        wanted = self._wanted
        table = self._read(part, _LIGHT)
        mine = _is(table["stream"], {wanted.stream}) & _is(table["op"], set(RECORD_OPS))
        batch = table["batch"].to_numpy()
        partition = table["partition"].to_numpy()
        for number, after in wanted.after.items():
            mine &= (partition != number) | (batch > after)
        if not mine.any():
            return _Keys(pa.array([], pa.string()), batch[:0], np.empty(0, np.int64), np.empty(0, bool))
        _require_plain(table, mine)
        key = _one(table["key"])
        if key.null_count:
            key = pc.coalesce(key, _one(self._read(part, ("event_id",))["event_id"]))
        partitions = frozenset(int(number) for number in np.unique(partition[mine]))
        if wanted.buckets > 1:
            mine &= _bucket(key, wanted.buckets) == wanted.bucket
        # All buckets together look at all updates.
        if len(rows := np.flatnonzero(_may_have_moved(table) & mine)):
            payload = self._read(part, ("payload",))["payload"]
            told = [_one(column).take(pa.array(rows)) for column in (table["key"], payload, table["before"])]
            if not self._key_check.all_kept(*told):
                raise NotPlain("its updates may have changed keys without saying so")
        lacks = _lacking(_one(table["flags"]))
        if mine.all():
            return _Keys(key, batch, np.arange(len(batch)), lacks, partitions)
        row = np.flatnonzero(mine)
        return _Keys(key.take(pa.array(row)), batch[row], row, lacks[row], partitions)

    def _positions(self, part: Part, row: I64) -> pa.Array:
        return _one(self._read(part, ("position",))["position"]).take(pa.array(row))

    def _heavy(self, part: Part, row: I64) -> pa.Table:
        """KEPT rows."""
        table = self._read(part, (*_HEAVY, "partition", "batch", "op", "key"))
        few = table if len(row) == table.num_rows else table.take(pa.array(row))
        coded = _one(few["op"])
        op = coded.dictionary.take(coded.indices)
        columns = {name: few[name] for name in ("partition", "key", *_HEAVY, "batch")} | {
            "op": op,
            "row_key": pc.coalesce(few["key"], few["event_id"]),
            "gone": pc.equal(op, "delete"),
        }
        rows = few.num_rows
        return pa.table([columns.get(f.name, pa.nulls(rows, f.type)) for f in KEPT], schema=KEPT)

    def _read(self, part: Part, columns: Sequence[str]) -> pa.Table:
        """Each thread has files of its own."""
        if getattr(self._open, "path", None) != part.path:
            self._open.file = opened(part.path, read_dictionary=["stream", "op"])
            self._open.path = part.path
        file = self._open.file
        names = [name for name in columns if name in file.schema_arrow.names]
        table = file.read_row_group(part.group, columns=names, use_threads=False)
        return with_all_columns(table, pa.schema([_FIELDS.field(name) for name in columns]))


def _one(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def _is(column: pa.ChunkedArray, values: set[str]) -> Mask:
    """Which rows have one of the values, in a column that is read as numbers into a list of texts."""
    coded = _one(column)
    chosen = np.array([value in values for value in coded.dictionary.to_pylist()], bool)
    return chosen[coded.indices.to_numpy(zero_copy_only=False)] if len(chosen) else np.zeros(len(coded), bool)


def _require_plain(table: pa.Table, mine: Mask) -> None:
    if (_is(table["op"], {"truncate"}) & mine).any():
        raise NotPlain("it was truncated")
    if table["previous_key"].null_count < len(mine) and (_valid(table["previous_key"]) & mine).any():
        raise NotPlain("a record of it got another key")


def _lacking(flags: pa.Array) -> Mask:
    found = np.zeros(len(flags), bool)
    if len(texts := flags.flatten()):
        is_lack = pc.starts_with(texts, UNKNOWN).to_numpy(zero_copy_only=False)
        found[pc.list_parent_indices(flags).to_numpy()[is_lack.astype(bool)]] = True
    return found


def _may_have_moved(table: pa.Table) -> Mask:
    """The updates that tell what was before, and may come from a program that did not tell a key that was left."""
    if table["before"].null_count == len(table) or table["schema_version"].null_count == len(table):
        return np.zeros(len(table), bool)
    told = _valid(table["before"]) & _valid(table["schema_version"])
    return _is(table["op"], {"update"}) & told & _valid(table["key"])


def _valid(column: pa.ChunkedArray) -> Mask:
    return np.asarray(pc.is_valid(column).to_numpy(), bool)


def _bucket(key: pa.Array, buckets: int) -> npt.NDArray[np.int64]:
    """By the last bytes of the key and its length: any rule does, as long as a key has one bucket."""
    _, offsets, data = key.buffers()
    ends = np.frombuffer(offsets, np.int32)[key.offset : key.offset + len(key) + 1].astype(np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    sizes = np.diff(ends)
    last = np.where(sizes > 0, text[np.maximum(ends[1:] - 1, 0)], 0).astype(np.int64)
    other = np.where(sizes > 1, text[np.maximum(ends[1:] - 2, 0)], 0).astype(np.int64)
    return (last + 7 * other + sizes) % buckets


def _by_part(run: Sequence[Part], found: Sequence[_Keys], wanted: Mask) -> Iterator[tuple[Part, I64]]:
    """The numbers of the wanted rows of each part that has one; `wanted` is of the rows of all parts."""
    end = 0
    for part, each in zip(run, found, strict=True):
        begin, end = end, end + len(each.row)
        if wanted[begin:end].any():
            yield part, each.row[wanted[begin:end]]


def _read_ahead(
    readers: ThreadPoolExecutor, read: Callable[[Part, I64], _Read], asked: Iterable[tuple[Part, I64]]
) -> Iterator[_Read]:
    """In the order in which it is asked for; few parts wait in memory."""
    waiting: deque[Future[_Read]] = deque()
    for part, row in asked:
        waiting.append(readers.submit(read, part, row))
        if len(waiting) > _READERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _is_last(codes: npt.NDArray[np.int32], positions: pa.Array) -> Mask:
    """Which rows are at the greatest position of their key."""
    order = pc.sort_indices(
        pa.table({"code": codes, "position": positions}), [("code", "ascending"), ("position", "ascending")]
    ).to_numpy()
    found = np.zeros(len(codes), bool)
    found[order[np.append(codes[order][1:] != codes[order][:-1], True)]] = True
    return found


def _gathered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """In pieces of many rows, as files of the log may have few each; but not of many bytes."""
    piece: list[pa.Table] = []
    rows, size = 0, 0
    for table in tables:
        piece.append(table)
        rows, size = rows + table.num_rows, size + table.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield from _cut(piece)
            piece, rows, size = [], 0, 0
    yield from _cut(piece)


def _cut(tables: Sequence[pa.Table]) -> Iterator[pa.Table]:
    whole = pa.concat_tables([KEPT.empty_table(), *tables])
    for first in range(0, whole.num_rows, _GROUP_ROWS):
        yield whole.slice(first, _GROUP_ROWS)


def _kept(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=KEPT)
