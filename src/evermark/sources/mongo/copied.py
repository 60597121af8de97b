"""Copied documents in the stream: which chunks stand in a range of it, and their rows.

Nothing in the oplog tells where a chunk stands: State does. So before the reader goes on to a position it says so
(`CopyStore.reach`), and no chunk is placed before that position afterwards: a range that was read once has the same
chunks at every reading. A chunk that has its place and is not ready is waited for, and given up after a while.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from evermark.errors import BusyError, SetupError
from evermark.event import TAKEN, taken_batch
from evermark.sources.chunk_file import read_batches
from evermark.sources.copies import WAIT_S, Chunk, ChunkState, CopyPlace, CopyStore, Mark
from evermark.sources.mongo.events import Row, batched
from evermark.sources.mongo.hidden import HiddenFields
from evermark.sources.mongo.positions import Position, partitions_in
from evermark.sources.mongo.target import MongoTarget
from evermark.storage import Place

PARTITION = "partition"
COLUMNS = ("event_id", "stream", "key", "op", "payload", "bytes")
SCHEMA = pa.schema([*(TAKEN.field(name) for name in COLUMNS), pa.field(PARTITION, pa.int32())])
_HIDDEN, _STREAM = b"evermark.hidden", b"evermark.stream"
# Rows of chunks that one batch takes, and the rows of one chunk more. Fewer than those after which a source is asked.
_ROWS_MAX = 20_000


class Standing(NamedTuple):
    """A chunk that is ready, and where it stands."""

    position: str
    file: str
    rows: int

    @property
    def end(self) -> Position:
        return Position.parse(self.position).after(max(1, self.rows))


def about(stream: str, hidden: HiddenFields | None) -> Mapping[bytes, bytes]:
    """What the file of a chunk says of itself: whose documents it has, and what they do not show."""
    named = {"exclude": hidden.exclude, "hash": hidden.hash} if hidden is not None else {}
    return {_STREAM: stream.encode(), _HIDDEN: json.dumps(named).encode()}


class ReadHorizon:
    """How far reading may have come, over all partitions, for the loop that places chunks. One for each owner's term.

    It begins without knowing whether there are copies: then State is asked for chunks. Once `watch` was called it is
    known whether any are under way.
    """

    def __init__(
        self, place: CopyPlace, partitions: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place, self._partitions, self._clock = place, len(partitions), clock
        self._unbegun = set(partitions)
        self._lock = threading.Lock()  # reading and copying are two threads
        self._store: CopyStore | None = None
        self._reached = ""
        self._epoch: int | None = None
        self._quiet = False  # nothing is copied, and nothing waits to be read
        self._waits: dict[Mark, float] = {}  # until when a chunk is waited for

    def begin(self, partition: int, position: str) -> None:
        with self._lock:
            self._go_to(position)
            self._unbegun.discard(partition)

    def watch(self, epoch: int | None) -> bool:
        """As `Copying.watch`. Where reading has not begun, nobody knows how far the log is."""
        with self._lock:
            self._quiet = epoch is None
            if epoch is None or self._unbegun:
                self._epoch = None
                return False
            if epoch != self._epoch:
                self._opened().reach(self._place.source, self._reached, epoch)
                self._epoch = epoch
            return True

    def cut(self, start: str, upto: str, closed: int) -> tuple[str, list[Standing]]:
        """How far reading goes from `start` on, and the chunks on the way. All events before `upto` can be read, and
        all of the cluster times up to `closed`: it goes further only for chunks, and less far for one to wait for."""
        with self._lock:
            end = max(start, upto)
            self._go_to(end)
            found: list[Standing] = []
            rows = 0
            for chunk in () if self._quiet else self._opened().placed(self._place.source, start):
                if Position.parse(chunk.position).time > closed:
                    break
                if rows >= _ROWS_MAX or not self._is_ready(chunk):
                    end = min(end, chunk.position)
                    break
                standing = Standing(chunk.position, chunk.file, chunk.rows)
                end = max(end, standing.end.text(self._partitions))
                found.append(standing)
                rows += chunk.rows
            return end, found

    def standing(self, start: str, end: str) -> list[Standing]:
        """The chunks of a range that was cut."""
        with self._lock:
            chunks = [] if self._quiet else self._opened().placed(self._place.source, start)
        found = [chunk for chunk in chunks if chunk.position < end]
        if any(chunk.state is not ChunkState.READY for chunk in found):
            raise BusyError("a chunk of a copy is not decided, and its range is read", hint="report this")
        return [Standing(chunk.position, chunk.file, chunk.rows) for chunk in found]

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _go_to(self, position: str) -> None:
        if position <= self._reached:
            return
        if self._epoch is not None:
            self._opened().reach(self._place.source, position, self._epoch)
        self._reached = position

    def _is_ready(self, chunk: Chunk) -> bool:
        mark = Mark(chunk.copy, chunk.number, chunk.attempt)
        if chunk.state is ChunkState.READY:
            self._waits.pop(mark, None)
            return True
        if self._clock() >= self._waits.setdefault(mark, self._clock() + WAIT_S):
            self._opened().give_up(mark)
            del self._waits[mark]
        return False

    def _opened(self) -> CopyStore:
        if self._store is None:
            self._store = self._place.open()
        return self._store


def with_chunks(
    rows: Iterator[Row], chunks: Sequence[Standing], partition: int, folder: Place, target: MongoTarget
) -> Iterator[pa.RecordBatch]:
    """Events and the rows of chunks, in the order of their positions."""
    for chunk in chunks:
        later: list[Row] = []
        yield from batched(_before(rows, chunk.position, later))
        yield from chunk_rows(chunk, partition, folder, target)
        rows = chain(later, rows)
    yield from batched(rows)


def _before(rows: Iterator[Row], upto: str, later: list[Row]) -> Iterator[Row]:
    """The rows before a position; the first behind it goes into `later`."""
    for row in rows:
        if row.position >= upto:
            later.append(row)
            return
        yield row


def chunk_rows(chunk: Standing, partition: int, folder: Place, target: MongoTarget) -> Iterator[pa.RecordBatch]:
    """The rows of one partition, each where it stands."""
    said, batches = read_batches(folder / chunk.file, chunk.rows)
    _require_hidden(said, target)
    at = Position.parse(chunk.position)
    first = 0
    for batch in batches:
        numbers = np.flatnonzero(batch.column(PARTITION).to_numpy() == partition)
        rows = len(numbers)
        if rows:
            some = batch.take(pa.array(numbers))
            texts = [at.after(first + int(number)).text(target.partitions) for number in numbers]
            times = pa.array(np.full(rows, at.seconds * 1_000_000, np.int64))
            named = {name: some.column(name) for name in COLUMNS}
            yield taken_batch({**named, "position": texts, "event_time": times}, rows)
        first += batch.num_rows


def firsts(chunk: Standing, folder: Place) -> dict[int, str]:
    """The position of the first row in each partition that has one."""
    at, partitions = Position.parse(chunk.position), partitions_in(chunk.position)
    found: dict[int, str] = {}
    first = 0
    for batch in read_batches(folder / chunk.file, chunk.rows)[1]:
        for number, partition in enumerate(batch.column(PARTITION).to_pylist(), first):
            found.setdefault(partition, at.after(number).text(partitions))
        first += batch.num_rows
    return found


def _require_hidden(said: Mapping[bytes, bytes], target: MongoTarget) -> None:
    """Fields that are to be hidden since the chunk was written are not shown."""
    stream, hides = said[_STREAM].decode(), json.loads(said[_HIDDEN])
    wanted, gone = target.hidden.get(stream, HiddenFields()), set(hides.get("exclude", ()))
    shown = sorted({*wanted.exclude} - gone | {*wanted.hash} - gone - {*hides.get("hash", ())})
    if shown:
        raise SetupError(
            f"documents of {stream} that were copied, and wait to be taken, show the field {shown[0]}, which is to be"
            " hidden since",
            hint="take it out of `exclude` and `hash` until `evermark status` shows no copy of the collection",
        )
