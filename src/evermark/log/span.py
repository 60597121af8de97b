"""Where the events of some batches are, in log order, and what streams and operations they are of.

For subscriptions that are matched without Spark. Where Spark matches it finds the same rows (`evermark.spark.deliver`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evermark.log.opened import damage_is_said, opened
from evermark.log.read import in_batches
from evermark.log.row_reader import I64, code_of, row_groups
from evermark.log.window_search import in_order

Wanted = Callable[[pa.Table], pa.ChunkedArray]

_ORDERED = ("batch", "position")
_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("op", pa.string()),
        ("batch", pa.int64()),
        ("position", pa.string()),
        ("code", pa.int64()),
        ("number", pa.int64()),
    ]
)
_KEYS = (pa.field("key", pa.string()), pa.field("previous_key", pa.string()))


@dataclass(frozen=True)
class RowAddresses:
    """By row: the file's code, the row's number in it, and some columns of it."""

    codes: I64
    numbers: I64
    streams: pa.ChunkedArray
    ops: pa.ChunkedArray
    batches: pa.ChunkedArray  # null, as positions are, where the files hold nothing else and are in order
    positions: pa.ChunkedArray
    keys: pa.Table | None = None  # stream, op, key and previous key, where they were asked for


def row_addresses(
    paths: Sequence[str], partition: int, after: int, to: int, *, exact: bool, through: str = "", keys: bool = False
) -> RowAddresses:
    """The rows of the batches `after < batch <= to`. `exact`: the files hold nothing else.

    `through`: without rows of the first batch up to and with this position. `keys`: with their keys.
    """
    whole = exact and len(paths) == 1 and not through and not keys  # and so in log order as it is
    schema = pa.schema([*_SCHEMA, *_KEYS]) if keys else _SCHEMA

    def wanted(rows: pa.Table) -> pa.ChunkedArray:
        mine = in_batches(rows, partition, after, to)
        if through:
            first, past = pc.equal(rows["batch"], after + 1), pc.less_equal(rows["position"], through)
            mine = pc.and_(mine, pc.invert(pc.and_(first, past)))
        return mine

    tables = [schema.empty_table()]
    for path in paths:
        with damage_is_said(path), opened(path) as file:
            for group, first in row_groups(file, "batch", lambda s: s.max > after and s.min <= to):
                tables.append(_in_group(file, group, code_of(path), first, None if whole else wanted, schema))
    found = pa.concat_tables(tables)
    if not whole and not in_order(*(found[name] for name in _ORDERED)):
        found = found.take(pc.sort_indices(found, sort_keys=[(name, "ascending") for name in _ORDERED]))
    streams, ops, batches, positions = (found[name] for name in ("stream", "op", *_ORDERED))
    named = found.select(["stream", "op", *(field.name for field in _KEYS)]) if keys else None
    codes, numbers = (found[name].to_numpy() for name in ("code", "number"))
    return RowAddresses(codes, numbers, streams, ops, batches, positions, named)


def _in_group(
    file: pq.ParquetFile, group: int, code: int, first: int, wanted: Wanted | None, schema: pa.Schema
) -> pa.Table:
    named = schema.names[len(_SCHEMA) :]
    columns = ["stream", "op"] if wanted is None else ["stream", "op", "partition", *_ORDERED, *named]
    rows = file.read_row_group(group, columns=columns, use_threads=False)
    numbers = np.arange(first, first + rows.num_rows)
    if wanted is not None:
        mine = wanted(rows)
        rows, numbers = rows.filter(mine), numbers[mine.to_numpy()]
        ordered = [rows[name] for name in _ORDERED]
    else:
        ordered = [pa.nulls(len(numbers), _SCHEMA.field(name).type) for name in _ORDERED]
    codes = np.full(len(numbers), code, np.int64)
    # A file may be older than a column.
    keys = [rows[name] if name in rows.column_names else pa.nulls(len(numbers), pa.string()) for name in named]
    return pa.table([rows["stream"], rows["op"], *ordered, codes, numbers, *keys], schema=schema)
