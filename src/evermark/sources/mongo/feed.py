"""The changes of a deployment as they come: one stream and one thread for all partitions that are followed.

The stream begins at the least position of the partitions; each partition leaves out what comes before its own. What has
come is kept, within bounds, until it is taken. Rows are given out when their transaction is whole. A transaction larger
than a feed may hold ends the feed: then the source is asked, and reads it piece by piece.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from evermark.errors import BusyError, EvermarkError
from evermark.sources.base import Fed, Feed
from evermark.sources.mongo.changes import Change, Changes
from evermark.sources.mongo.copied import Standing
from evermark.sources.mongo.events import Row, partition_of
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.target import MongoTarget

# As much is read ahead. Fewer rows than those after which a source is asked instead.
ROWS_MAX = 20_000
BYTES_MAX = 32 * 1024 * 1024
TRANSACTION_BYTES_MAX = 64 * 1024 * 1024
# A position that no event moves is moved this often: an idle partition must not fall behind the oplog.
IDLE_EVERY_S = 10.0
_CLOSE_S_MAX = 5.0

Cut = Callable[[str, str, int], tuple[str, list[Standing]]]
Merged = Callable[[Iterator[Row], Sequence[Standing], int], Iterator[pa.RecordBatch]]


@dataclass
class _Part:
    start: Position
    wake: Callable[[], None]
    confirmed: Callable[[str], None]
    taken: str
    rows: list[Row] = field(default_factory=list)
    idle_at: float = field(default_factory=lambda: time.monotonic() - IDLE_EVERY_S)


class SharedFeed:
    """`join` for each partition, then read: the stream is opened when the first of them is asked for events.

    `cut` is `ReadHorizon.cut`, where there are copies; `merged` puts the rows of chunks between the others.
    """

    def __init__(
        self,
        target: MongoTarget,
        open_at: Callable[[Position], Changes],
        cut: Cut,
        merged: Merged,
        has_much: Callable[[Position], bool],
    ) -> None:
        self._target, self._open_at, self._cut, self._merged = target, open_at, cut, merged
        self._has_much = has_much
        self._changed = threading.Condition()
        self._parts: dict[int, _Part] = {}
        self._rows = self._bytes = 0
        self._whole_to = Position(0)
        self._unheard = False  # somebody found nothing, and wants to be woken
        self._error: EvermarkError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def joinable(self) -> bool:
        return self._thread is None and not self._closed

    def join(self, partition: int, start: Position, wake: Callable[[], None], confirmed: Callable[[str], None]) -> Feed:
        self._parts[partition] = _Part(start, wake, confirmed, start.text(self._target.partitions))
        return _PartFeed(self, partition)

    def next(self, partition: int) -> Fed | None:
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="feed mongo", daemon=True)
                self._thread.start()
            part, whole_to = self._parts[partition], self._whole_to
        # Not under the lock: State may be asked.
        end, chunks = self._cut(part.taken, whole_to.text(self._target.partitions), whole_to.closed)
        with self._changed:
            count = bisect_left(part.rows, end, key=lambda row: row.position)
            idle = end > part.taken and time.monotonic() - part.idle_at >= IDLE_EVERY_S
            if count or chunks or idle:
                rows, part.rows = part.rows[:count], part.rows[count:]
                self._rows -= count
                self._bytes -= sum(row.size for row in rows)
                part.taken, part.idle_at = end, time.monotonic()
                self._changed.notify_all()
                return _FedRows(partial(self._merged, iter(rows), chunks, partition), end)
            if self._error is not None:
                raise self._error
            self._unheard = True
            return None

    def confirm(self, partition: int, end: str) -> None:
        self._parts[partition].confirmed(end)

    def leave(self, partition: int) -> None:
        """The stream ends with the last of its partitions."""
        with self._changed:
            self._parts.pop(partition, None)
            self._closed = self._closed or not self._parts
            self._changed.notify_all()
        if self._closed and self._thread is not None:
            self._thread.join(_CLOSE_S_MAX)  # it may wait for a server that is silent; then it ends by itself

    # the thread that reads

    def _run(self) -> None:
        try:
            with self._changed:
                start = min((part.start for part in self._parts.values()), default=None)
            if start is None:  # all of them left before it began
                return
            with self._open_at(start) as changes:  # the client may fail to find its servers
                while not self._closed:
                    self._take_in(changes.next(), changes)
        except EvermarkError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - told to the loop that reads
            self._fail(EvermarkError(f"following changes: {type(error).__name__}: {error}"[:500]))

    def _take_in(self, change: Change | None, changes: Changes) -> None:
        rows = change.rows(self._target) if change is not None else ()
        with self._changed:
            for row in rows:
                part = self._parts.get(partition_of(row, self._target.partitions))
                if part is not None and row.position >= part.taken:
                    part.rows.append(row)
                    self._rows += 1
                    self._bytes += row.size
            self._whole_to = changes.whole_to
            wakes = [part.wake for part in self._parts.values()] if self._unheard and self._has_whole() else []
            self._unheard = self._unheard and not wakes
            is_full = self._is_full()
        for wake in wakes:
            wake()
        if is_full and change is not None and self._has_much(change.position):
            # One stream is enough for what comes; what has come long ago is read by several.
            raise BusyError("there is much to read, and it is old: it is read by tasks, side by side")
        with self._changed:
            while not self._closed and self._is_full():
                self._changed.wait()

    def _has_whole(self) -> bool:
        whole_to = self._whole_to.text(self._target.partitions)
        return any(part.rows and part.rows[0].position < whole_to for part in self._parts.values())

    def _is_full(self) -> bool:
        if self._rows < ROWS_MAX and self._bytes < BYTES_MAX:
            return False
        if self._has_whole():
            return True
        if self._bytes >= TRANSACTION_BYTES_MAX:
            size = f"{TRANSACTION_BYTES_MAX >> 20} MiB"
            raise BusyError(f"a transaction is larger than {size}: its changes are asked for, piece by piece")
        return False

    def _fail(self, error: EvermarkError) -> None:
        with self._changed:
            self._error = error
            wakes = [part.wake for part in self._parts.values()]
        for wake in wakes:
            wake()


class _PartFeed(Feed):
    def __init__(self, shared: SharedFeed, partition: int) -> None:
        self._shared, self._partition = shared, partition

    def next(self) -> Fed | None:
        return self._shared.next(self._partition)

    def confirm(self, end: str) -> None:
        self._shared.confirm(self._partition, end)

    def close(self) -> None:
        self._shared.leave(self._partition)


class _FedRows(Fed):
    def __init__(self, batches: Callable[[], Iterator[pa.RecordBatch]], end: str) -> None:
        self._batches, self._end = batches, end

    def batches(self) -> Iterator[pa.RecordBatch]:
        return self._batches()

    def end(self) -> str:
        return self._end
