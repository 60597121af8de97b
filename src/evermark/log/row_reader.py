"""Rows of log files by their number in the file: for readers that were told which rows, and in which order.

Spark finds, matches and orders rows by a few columns; the whole rows, payloads included, need not travel through the
JVM to be sent. They are read here, column by column, by the task that needs them.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from evermark.errors import EngineError, FormatError
from evermark.event import EVENT, with_all_columns
from evermark.log.opened import damage_is_said, opened

# Raw bytes are poison's, and poison is not delivered.
COLUMNS = tuple(name for name in EVENT.names if name != "bytes")
# Few different texts in many rows: read as numbers into a list of them, which is how they lie in the file.
_CODED = ("source", "stream", "op")
ROWS = pa.schema(
    [
        EVENT.field(name).with_type(pa.dictionary(pa.int32(), pa.string())) if name in _CODED else EVENT.field(name)
        for name in COLUMNS
    ]
)
KEPT_BYTES_MAX = 256 * 1024 * 1024

I64 = npt.NDArray[np.int64]

# The same in Spark SQL: how a task names a file in eight bytes instead of fifty.
_CODE_SQL = "crc32(_metadata.file_name)"
ROW_ADDRESS = ("_file", "_row")
ROW_ADDRESS_SQL = (f"{_CODE_SQL} as {ROW_ADDRESS[0]}", f"_metadata.row_index as {ROW_ADDRESS[1]}")


def code_of(path: str) -> int:
    return zlib.crc32(Path(path).name.encode())


def require_codes(paths: Sequence[str]) -> None:
    """Codes must tell these files apart."""
    if len({code_of(path) for path in paths}) != len(paths):
        raise EngineError("two log files have the same code", hint="it goes on when they have been merged")


def row_groups(
    file: pq.ParquetFile, column: str, may_hold: Callable[[pq.Statistics], bool]
) -> Iterator[tuple[int, int]]:
    """The number and the first row of each row group that may hold what is looked for, by the range of one column."""
    at, first = file.metadata.schema.names.index(column), 0
    for group in range(file.metadata.num_row_groups):
        described = file.metadata.row_group(group)
        statistics = described.column(at).statistics
        if statistics is None or not statistics.has_min_max or may_hold(statistics):
            yield group, first
        first += described.num_rows


class RowReader:
    """Reads each row group once, as long as rows are asked for nearly in the order of the files."""

    def __init__(self, paths: Sequence[str], kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._paths = {code_of(path): path for path in paths}
        # Beside each file the first row of each row group, and the number of rows.
        self._files: dict[int, tuple[pq.ParquetFile, I64]] = {}
        self._kept: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self.kept_bytes = 0
        self._kept_bytes_max = kept_bytes_max

    def rows_within(self, bytes_max: int) -> int:
        """How many rows may be picked at a time so that they are no more than this, by the heaviest row group."""
        means = [
            group.total_byte_size / max(1, group.num_rows)
            for code in self._paths
            for metadata in (self._file(code)[0].metadata,)
            for group in map(metadata.row_group, range(metadata.num_row_groups))
        ]
        return max(1, int(bytes_max / max(1.0, *means))) if means else 1

    def weights(self, codes: I64, numbers: I64) -> npt.NDArray[np.float64]:
        """About how many bytes each of these rows has: the mean of its row group."""
        found = np.empty(len(codes), np.float64)
        for code in _values(codes):
            file, starts = self._file(code)
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            means = np.array([group.total_byte_size / max(1, group.num_rows) for group in groups])
            mine = codes == code
            found[mine] = means[np.searchsorted(starts, numbers[mine], side="right") - 1]
        return found

    def pick(self, codes: I64, numbers: I64) -> pa.RecordBatch:
        """The rows in the given order, with the columns of `ROWS`."""
        pieces: list[pa.RecordBatch] = []
        where: list[I64] = []
        for code in _values(codes):
            mine = np.flatnonzero(codes == code)
            _, starts = self._file(code)
            groups = np.searchsorted(starts, numbers[mine], side="right") - 1
            for group in _values(groups):
                chosen = mine[groups == group]
                pieces += self._rows(code, group, numbers[chosen] - starts[group])
                where.append(chosen)
        came = np.concatenate([np.empty(0, np.int64), *where])
        if bool((np.diff(came) > 0).all()):  # most logs are in the order of time
            return _one(pieces)
        order = np.empty(len(codes), np.int64)
        order[came] = np.arange(len(codes))
        return _one(pieces).take(pa.array(order))

    def _rows(self, code: int, group: int, numbers: I64) -> list[pa.RecordBatch]:
        table = self._group(code, group)
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first == len(numbers) - 1 and bool((np.diff(numbers) == 1).all()):
            picked = table.slice(first, len(numbers))
        else:
            picked = table.take(pa.array(numbers))
        found: list[pa.RecordBatch] = picked.to_batches()
        return found

    def _file(self, code: int) -> tuple[pq.ParquetFile, I64]:
        if code not in self._files:
            if code not in self._paths:
                raise FormatError("rows of a file that was not asked for", hint="report this, with the log")
            parquet = opened(self._paths[code], read_dictionary=list(_CODED))
            sizes = [parquet.metadata.row_group(n).num_rows for n in range(parquet.metadata.num_row_groups)]
            self._files[code] = parquet, np.cumsum([0, *sizes])
        return self._files[code]

    def _group(self, code: int, group: int) -> pa.Table:
        key = (code, group)
        table = self._kept.get(key)
        if table is None:
            # In one piece: taking rows out of many pieces is slow.
            file = self._file(code)[0]
            with damage_is_said(self._paths[code]):
                read = file.read_row_group(group, columns=list(COLUMNS), use_threads=False)
            table = with_all_columns(read, ROWS).cast(ROWS).combine_chunks()
            self._kept[key] = table
            self.kept_bytes += table.nbytes
            while self.kept_bytes > self._kept_bytes_max and len(self._kept) > 1:
                _, old = self._kept.popitem(last=False)
                self.kept_bytes -= old.nbytes
        self._kept.move_to_end(key)
        return table


def _values(numbers: I64) -> list[int]:
    """The distinct numbers, ascending. Mostly they come so, and then nothing has to be looked up."""
    steps = np.diff(numbers)
    rising = not bool((steps < 0).any())
    found = numbers[np.concatenate([numbers[:1] == numbers[:1], steps > 0])] if rising else np.unique(numbers)
    return list(map(int, found))


def _one(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)
