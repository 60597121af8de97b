"""The log read on from a place, piece by piece, in log order, without Spark. A piece is small whatever a batch is."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from evermark.log.read import FileRange, LogReader
from evermark.log.row_reader import I64, ROWS, RowReader, require_codes
from evermark.log.span import row_addresses

_KEPT_BYTES_MAX = 32 * 1024 * 1024
_LEFT_MAX = 4
_LEFT_ROWS_MAX = 4_000_000


@dataclass(frozen=True)
class LogPiece:
    """Rows that follow each other. After them a reader is done with `batch`, and with the next one up to `through`."""

    rows: pa.RecordBatch
    batch: int
    through: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class _Left:
    """Rows whose addresses are known, and that were not asked for yet."""

    codes: I64
    numbers: I64
    to: int
    reader: RowReader
    paths: tuple[str, ...]


class PieceReader:
    """Of one source. Safe to use from several threads.

    A huge batch is looked through once and not for each of its pieces: what is left of it is kept for whoever goes on.
    """

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._left: OrderedDict[tuple[int, int, str], _Left] = OrderedDict()
        self._lock = threading.Lock()

    def first_batch(self, partition: int) -> int | None:
        """The first batch that the log has of a partition; None: it has none."""
        files = self._reader.files_if_any()
        return min((f.batch_min for f in files if f.partition_min <= partition <= f.partition_max), default=None)

    def next(self, partition: int, batch: int, through: str, to: int, rows_max: int, bytes_max: int) -> LogPiece:
        """Rows after (batch, through) up to and with batch `to`; at least one, if there is any."""
        key = (partition, batch, through)
        with self._lock:
            left = self._left.pop(key, None)
        left = left or self._found(partition, batch, through, to, rows_max)
        if left is None:
            return LogPiece(pa.RecordBatch.from_pylist([], schema=ROWS), to, "", ())
        count = min(rows_max, left.reader.rows_within(bytes_max), len(left.codes))
        rows = left.reader.pick(left.codes[:count], left.numbers[:count])
        if count == len(left.codes):
            return LogPiece(rows, left.to, "", left.paths)
        reached = rows.column("batch")[-1].as_py() - 1, rows.column("position")[-1].as_py()
        rest = _Left(left.codes[count:], left.numbers[count:], left.to, left.reader, left.paths)
        with self._lock:
            self._left[partition, *reached] = rest
            while len(self._left) > 1 and (len(self._left) > _LEFT_MAX or self._rows_left() > _LEFT_ROWS_MAX):
                self._left.popitem(last=False)
        return LogPiece(rows, *reached, left.paths)

    def _rows_left(self) -> int:
        return sum(len(left.codes) for left in self._left.values())

    def _found(self, partition: int, batch: int, through: str, to: int, rows_max: int) -> _Left | None:
        """The next rows that there are, and a few more; None if there are none."""
        while batch < to:
            chosen, end = few_files(self._reader.files_of(partition, batch, to), batch, to, rows_max)
            if not chosen:
                return None
            paths = tuple(file.path for file in chosen)
            require_codes(paths)
            found = row_addresses(paths, partition, batch, end, exact=False, through=through)
            if len(found.codes):
                reader = RowReader(paths, _KEPT_BYTES_MAX)
                return _Left(found.codes, found.numbers, end, reader, paths)
            batch, through = end, ""  # all of these batches were forgotten, or are done with
        return None


def few_files(files: Sequence[FileRange], after: int, to: int, rows_max: int) -> tuple[list[FileRange], int]:
    """The first of these files of a partition, so that all of some next batches are in them, and the last of these
    batches: about `rows_max` rows, or one batch.
    """
    chosen: list[FileRange] = []
    rows, end = 0, after
    for file in sorted(files, key=lambda f: (f.batch_min, f.batch_max)):
        if chosen and rows >= rows_max and file.batch_min > end:
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
