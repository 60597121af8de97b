"""The log read on from a place, piece by piece, in log order, without Spark. A piece is small whatever a batch is."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from evermark.errors import FormatError, NotFoundError
from evermark.log.opened import GONE_HINT
from evermark.log.read import FileRange, LogReader
from evermark.log.row_reader import I64, ROWS, RowReader, require_codes
from evermark.log.span import row_addresses
from evermark.storage import Place

# What is read and looked through at a time, for pieces that are smaller.
_WINDOW_ROWS = 20_000
_WINDOW_BYTES_MAX = 16 * 1024 * 1024
# A file that is opened takes a millisecond, and a descriptor: a window of a thousand small ones would take a second.
_WINDOW_FILES = 32
# Files that were replaced stay for an hour.
_WINDOWS_MAX, _KEPT_ROWS_MAX, _KEPT_BYTES_MAX, _WINDOW_AGE_S = 8, 500_000, 64 * 1024 * 1024, 300.0


@dataclass(frozen=True)
class LogPiece:
    """Rows that follow each other. After them a reader is done with `batch`, and with the next one up to `through`."""

    rows: pa.RecordBatch
    batch: int
    through: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class _Window:
    """All rows of some batches in log order, by their addresses."""

    partition: int
    after: int
    to: int
    codes: I64
    numbers: I64
    batches: I64
    positions: pa.Array  # as it is: a batch may have millions of rows
    reader: RowReader
    paths: tuple[str, ...]
    made_at: float

    def holds(self, partition: int, batch: int) -> bool:
        return self.partition == partition and self.after <= batch < self.to

    def mark(self, row: int) -> tuple[int, str]:
        """Where a reader is that is done with a row."""
        return int(self.batches[row]) - 1, str(self.positions[row].as_py())

    def index_of(self, batch: int, through: str) -> int:
        """Of the first row after a place."""
        low, high = (int(n) for n in np.searchsorted(self.batches, [batch + 1, batch + 2]))
        if not through:
            return low
        return bisect_right(range(high), through, low, high, key=lambda row: self.positions[row].as_py())


class PieceReader:
    """Of one source. Safe to use from several threads. It is asked only for partitions of which something was taken: a
    log that is not there was lost, and is not empty.

    Large and merged files are looked through in windows, of which a few are kept: readers that are near each other, and
    the next pieces of the same reader, find their rows there.
    """

    def __init__(self, reader: LogReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._clock = clock
        self._windows: list[_Window] = []
        self._lock = threading.Lock()

    def first_batch(self, partition: int) -> int | None:
        """The first batch that the log has of a partition; None: it has none any more."""
        with _loss_is_said(self._reader.folder):
            files = self._reader.files()
        return min((f.batch_min for f in files if f.partition_min <= partition <= f.partition_max), default=None)

    def next(self, partition: int, batch: int, through: str, to: int, rows_max: int, bytes_max: int) -> LogPiece:
        """Rows after (batch, through) up to and with batch `to`; at least one, if there is any."""
        window = self._kept(partition, batch) or self._found(partition, batch, to)
        while window is not None:
            start, end = window.index_of(batch, through), int(np.searchsorted(window.batches, to, "right"))
            if start < end:
                rows = self._picked(window, start, min(rows_max, end - start), bytes_max)
                return self._piece(window, rows, start + rows.num_rows, min(to, window.to))
            # All of these batches were forgotten, or are done with.
            batch, through = min(to, window.to), ""
            window = self._found(partition, batch, to) if batch < to else None
        return LogPiece(pa.RecordBatch.from_pylist([], schema=ROWS), to, "", ())

    def _picked(self, window: _Window, start: int, count: int, bytes_max: int) -> pa.RecordBatch:
        """At most so many rows of a window; those before what cannot be read, if not all of them can."""
        try:
            with self._lock:  # a window's reader is for one thread at a time
                count = min(count, window.reader.rows_within(bytes_max))
                while True:
                    some = slice(start, start + count)
                    try:
                        return window.reader.pick(window.codes[some], window.numbers[some])
                    except FormatError:
                        if count == 1:
                            raise
                        count //= 2
        except FormatError:
            # Its reader has opened what is damaged; and what is put back is another file.
            with self._lock:
                self._windows = [one for one in self._windows if one is not window]
            raise

    def _piece(self, window: _Window, rows: pa.RecordBatch, next_row: int, to: int) -> LogPiece:
        if next_row == len(window.codes) or window.batches[next_row] > to:
            return LogPiece(rows, to, "", window.paths)
        with self._lock:
            self._windows = few_windows([window, *(one for one in self._windows if one is not window)])
        if window.batches[next_row] > window.batches[next_row - 1]:
            return LogPiece(rows, int(window.batches[next_row - 1]), "", window.paths)
        return LogPiece(rows, *window.mark(next_row - 1), window.paths)

    def _kept(self, partition: int, batch: int) -> _Window | None:
        with self._lock:
            oldest = self._clock() - _WINDOW_AGE_S
            self._windows = [one for one in self._windows if one.made_at >= oldest]
            return next((one for one in self._windows if one.holds(partition, batch)), None)

    def _found(self, partition: int, batch: int, to: int) -> _Window | None:
        """The batches that come next, those before what cannot be read; None if there are no files of them."""
        with _loss_is_said(self._reader.folder):
            files, files_max = self._reader.files_of(partition, batch, to), _WINDOW_FILES
        while True:
            chosen, end = few_files(files, batch, to, _WINDOW_ROWS, files_max)
            if not chosen:
                return None
            paths = tuple(file.path for file in chosen)
            require_codes(paths)
            try:
                found = row_addresses(paths, partition, batch, end, exact=False)
                break
            except FormatError:
                if files_max == 1:
                    raise
                files_max = max(1, min(files_max, len(paths)) // 2)
        batches, positions = found.batches.to_numpy(), found.positions.combine_chunks()
        reader = RowReader(paths, _WINDOW_BYTES_MAX)
        made_at = self._clock()
        return _Window(partition, batch, end, found.codes, found.numbers, batches, positions, reader, paths, made_at)


@contextmanager
def _loss_is_said(folder: Place) -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise FormatError(f"the log at {folder} is gone", hint=GONE_HINT) from error


def few_windows(windows: Sequence[_Window]) -> list[_Window]:
    """The first of them, and of the others as many as are not too large together."""
    kept, rows, size = list(windows[:1]), len(windows[0].codes), windows[0].reader.kept_bytes
    for one in windows[1:_WINDOWS_MAX]:
        rows, size = rows + len(one.codes), size + one.reader.kept_bytes
        if rows > _KEPT_ROWS_MAX or size > _KEPT_BYTES_MAX:
            break
        kept.append(one)
    return kept


def few_files(
    files: Sequence[FileRange], after: int, to: int, rows_max: int, files_max: int
) -> tuple[list[FileRange], int]:
    """The first of these files of a partition, so that all of some next batches are in them, and the last of these
    batches: about `rows_max` rows or `files_max` files, or one batch.
    """
    chosen: list[FileRange] = []
    rows, end = 0, after
    for file in sorted(files, key=lambda f: (f.batch_min, f.batch_max)):
        if chosen and (rows >= rows_max or len(chosen) >= files_max) and file.batch_min > end:
            return chosen, min(to, end)
        if not chosen and file.rows > rows_max:
            # A merged file has many batches: what is behind them need not be looked through.
            batches = file.batch_max - file.batch_min + 1
            few = max(1, rows_max * batches // file.rows)
            to = min(to, max(after, file.batch_min - 1) + few)
        if file.batch_min > to:
            break
        chosen.append(file)
        rows, end = rows + file.rows, max(end, file.batch_max)
    return chosen, to
