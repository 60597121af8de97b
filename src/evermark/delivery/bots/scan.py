"""Rows of the log that may tell of membership, found without looking into every payload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evermark.event import Op

# A payload may be written with spaces or without; whatever this finds too much is parsed and left out.
_TELLS = r'"kind"\s*:\s*"(join|leave)"'
_COLUMNS = ["stream", "op", "partition", "batch", "position", "payload"]
_PIECE_ROWS = 65_536


def telling(paths: Sequence[str], partition: int, after: int, to: int) -> list[dict[str, Any]]:
    """Such rows of the batches `after < batch <= to` of a partition, in log order."""
    found = [row for path in paths for row in _in_file(path, partition, after, to)]
    return sorted(found, key=lambda row: (row["batch"], row["position"]))


def streams_in(paths: Sequence[str]) -> frozenset[str]:
    """The streams that some files have events of."""
    found: set[str] = set()
    for path in paths:
        with pq.ParquetFile(path) as file:
            for piece in file.iter_batches(_PIECE_ROWS, columns=["stream"], use_threads=False):
                found.update(pc.unique(piece.column("stream")).to_pylist())
    return frozenset(found)


def _in_file(path: str, partition: int, after: int, to: int) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        at = file.metadata.schema.names.index("batch")
        for group in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(group).column(at).statistics
            known = statistics is not None and statistics.has_min_max
            if known and (statistics.max <= after or statistics.min > to):
                continue
            # Piece by piece: a file may hold millions of events, with payloads of any size.
            for piece in file.iter_batches(_PIECE_ROWS, row_groups=[group], columns=_COLUMNS, use_threads=False):
                yield from piece.filter(_mine(piece, partition, after, to)).to_pylist()


def _mine(piece: pa.RecordBatch, partition: int, after: int, to: int) -> pa.Array:
    batch, op = piece.column("batch"), piece.column("op")
    within = pc.and_(pc.greater(batch, after), pc.less_equal(batch, to))
    within = pc.and_(within, pc.equal(piece.column("partition"), partition))
    said = pc.fill_null(pc.match_substring_regex(piece.column("payload"), _TELLS), False)
    tells = pc.and_(pc.equal(op, str(Op.MESSAGE)), said)
    whole = pc.is_in(op, value_set=pa.array([str(Op.TRUNCATE), str(Op.SCHEMA)]))
    return pc.and_(within, pc.or_(tells, whole))
