"""Where the events of a stretch of time are, in the order of (event_time, event_id).

For replays without a predicate: times, ids, streams and operations are compared column by column, in the task that
reads the rows afterwards. Spark's way to the same answer is `evermark.spark.replay.places`, which knows predicates too
and takes several times as long; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evermark.log.opened import opened
from evermark.log.row_reader import I64, code_of, row_groups

_BY_TIME = [("event_time", "ascending"), ("event_id", "ascending")]


@dataclass(frozen=True)
class Stretch:
    """Which events: after (`after_us`, `after_id`), or with `after_us` itself when there is no id, up to `to_us`."""

    after_us: int
    after_id: str | None
    to_us: int
    ops: frozenset[str]
    streams: frozenset[str] | None = None  # None: all
    heads: Mapping[int, int] | None = None  # None: the files hold nothing beyond them


def find(paths: Sequence[str], stretch: Stretch, rows_max: int | None = None) -> tuple[I64, I64]:
    """The code of the file and the row number in it of each event, at most `rows_max`."""
    found = _found(paths, stretch, _TIMES)
    if not _rises(found["event_time"]):  # ids take longer than all the rest: they are read where times do not decide
        found = _sorted(_found(paths, stretch, _IDS), ["code", "number"])
    codes, numbers = (found[name].to_numpy()[:rows_max] for name in ("code", "number"))
    return codes, numbers


def find_with_keys(paths: Sequence[str], stretch: Stretch, rows_max: int) -> pa.Table:
    """The same with the events' times, ids, streams, operations and keys, for a reader of some keys alone."""
    return _sorted(_found(paths, stretch, _KEYS), _KEYS.names).slice(0, rows_max)


_PLACE = [("code", pa.int64()), ("number", pa.int64())]
_TIMES = pa.schema([*_PLACE, ("event_time", pa.int64())])
_IDS = pa.schema([*_TIMES, ("event_id", pa.string())])
_KEYS = pa.schema([*_IDS, *((name, pa.string()) for name in ("stream", "op", "key", "previous_key"))])


def _sorted(found: pa.Table, names: list[str]) -> pa.Table:
    if in_order(found["event_time"], found["event_id"]):
        return found
    return found.select(names).take(pc.sort_indices(found, sort_keys=_BY_TIME))


def _found(paths: Sequence[str], stretch: Stretch, schema: pa.Schema) -> pa.Table:
    tables = (rows for path in paths for rows in _in_file(path, stretch, schema))
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def _in_file(path: str, stretch: Stretch, schema: pa.Schema) -> Iterator[pa.Table]:
    code = code_of(path)

    def may_hold(statistics: pq.Statistics) -> bool:
        # As numbers: a database's calendar is wider than Python's.
        return bool(statistics.min_raw <= stretch.to_us and statistics.max_raw >= stretch.after_us)

    with opened(path, read_dictionary=["op", "stream"]) as file:
        for group, first in row_groups(file, "event_time", may_hold):
            yield _wanted(_Group(file, group), stretch, code, first, schema)


class _Group(dict[str, pa.ChunkedArray]):
    """The columns of a row group, read when they are asked for."""

    def __init__(self, file: pq.ParquetFile, number: int) -> None:
        self._file, self._number = file, number

    def __missing__(self, name: str) -> pa.ChunkedArray:
        rows = self._file.read_row_group(self._number, columns=[name], use_threads=False)
        if name not in rows.column_names:  # the file is older than the column
            return self.setdefault(name, pa.chunked_array([pa.nulls(rows.num_rows, pa.string())]))
        return self.setdefault(name, rows[name])


def _wanted(rows: _Group, stretch: Stretch, code: int, first: int, schema: pa.Schema) -> pa.Table:
    times = rows["event_time"].cast(pa.int64())
    wanted = pc.and_(pc.greater_equal(times, stretch.after_us), pc.less_equal(times, stretch.to_us))
    if stretch.after_id is not None and pc.any(pc.equal(times, stretch.after_us)).as_py():
        later = pc.or_(pc.greater(times, stretch.after_us), pc.greater(rows["event_id"], stretch.after_id))
        wanted = pc.and_(wanted, later)
    wanted = pc.and_(wanted, _among(rows["op"], stretch.ops))
    if stretch.streams is not None:
        wanted = pc.and_(wanted, _among(rows["stream"], stretch.streams))
    if stretch.heads is not None:
        known = pa.repeat(False, len(times))
        for partition, batch in stretch.heads.items():
            mine = pc.and_(pc.equal(rows["partition"], partition), pc.less_equal(rows["batch"], batch))
            known = pc.or_(known, mine)
        wanted = pc.and_(wanted, known)
    mine = pc.fill_null(wanted, False)
    numbers = np.flatnonzero(mine.to_numpy()) + first
    others = [rows[name].filter(mine).cast(pa.string()) for name in schema.names[len(_TIMES) :]]
    return pa.table([np.full(len(numbers), code, np.int64), numbers, times.filter(mine), *others], schema=schema)


def _among(column: pa.ChunkedArray, values: frozenset[str]) -> pa.ChunkedArray:
    """Whether each value is one of `values`; a column of few different texts, read as numbers into a list of them."""
    chosen = pa.array(sorted(values), pa.string())
    found = [pc.is_in(chunk.dictionary, chosen).take(chunk.indices) for chunk in column.chunks]
    return pa.chunked_array(found, pa.bool_())


def _rises(times: pa.ChunkedArray) -> bool:
    """Whether each time is later than the time before."""
    numbers = times.to_numpy()
    return bool((numbers[1:] > numbers[:-1]).all())


def in_order(one: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    """Whether rows are ordered by two columns. The usual case: a log is written in order, more or less."""
    rows = len(one)
    if rows < 2:
        return True
    before, after = one.slice(0, rows - 1), one.slice(1)
    if not pc.all(pc.less_equal(before, after)).as_py():
        return False
    tied = pc.equal(before, after)
    return bool(pc.all(pc.or_(pc.invert(tied), pc.less(other.slice(0, rows - 1), other.slice(1)))).as_py())
