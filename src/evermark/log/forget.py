"""Events of some keys taken out of files of the log: what a person may ask for about another person's data.

Batch numbers and positions of all other events stay, so no reader's cursor means anything else than before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import EVENT, Op, with_all_columns
from evermark.log.base import LogFile
from evermark.log.compact import level_of
from evermark.log.opened import opened
from evermark.log.read import FileRange
from evermark.log.write import FileWriter
from evermark.storage import Place, trouble_is_said

_READ_ROWS = 32_768
_LOOKED_AT = ["stream", "key", "previous_key"]


@dataclass(frozen=True)
class Forgotten:
    """The events of one stream that have, or had, one of these keys."""

    stream: str
    keys: frozenset[str]

    def in_file(self, file: FileRange) -> int:
        """How many events of the file this is about."""
        with opened(file.path) as parquet:
            columns = [name for name in _LOOKED_AT if name in parquet.schema_arrow.names]
            batches = parquet.iter_batches(_READ_ROWS, columns=columns, use_threads=False)
            return sum(pc.sum(pc.or_(*self._marked(batch))).as_py() or 0 for batch in batches)

    def rest_of(self, folder: Place, file: FileRange) -> LogFile | None:
        """The file without them, durable and not yet committed; None: nothing is left of it."""
        level = level_of(file.path)
        name = f"p{file.partition_min}-{f'c{level}-' if level else ''}b{file.batch_min}"
        with trouble_is_said(folder):
            writer = FileWriter(folder, name)
            try:
                for batch in self._left(file):
                    writer.write(batch)
                if (rest := writer.finish()).rows:
                    return rest
            except BaseException:
                writer.discard()
                raise
            writer.discard()
        return None

    def _left(self, file: FileRange) -> Iterator[pa.RecordBatch]:
        with opened(file.path) as parquet:
            for found in parquet.iter_batches(_READ_ROWS, use_threads=False):
                batch = found if found.schema.equals(EVENT) else with_all_columns(found, EVENT).cast(EVENT)
                gone, left_behind = self._marked(batch)
                # A record that has another key now stays, without what it was before. One that came from another key
                # must not come back under it: it is told that it left, and nothing else.
                came = pc.and_(gone, pc.and_(pc.is_valid(batch.column("previous_key")), pc.invert(left_behind)))
                if pc.any(came).as_py():
                    batch = _set(batch, "key", came, batch.column("previous_key"))
                    batch = _set(batch, "op", came, pa.scalar(str(Op.DELETE), pa.string()))
                    for name in ("payload", "bytes"):
                        batch = _set(batch, name, came, None)
                    gone = pc.and_not(gone, came)
                for name in ("previous_key", "before"):
                    batch = _set(batch, name, pc.or_(left_behind, came), None)
                if (some := batch.filter(pc.invert(gone))).num_rows:
                    yield some

    def _marked(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """Which events have one of the keys, and which had one before."""
        keys = pa.array(sorted(self.keys), pa.string())
        mine = pc.equal(batch.column("stream"), self.stream)
        has = pc.and_(mine, pc.is_in(batch.column("key"), value_set=keys))
        if "previous_key" not in batch.schema.names:  # of a file from before there was such a column
            return has, pa.repeat(False, len(has))
        return has, pc.and_(mine, pc.is_in(batch.column("previous_key"), value_set=keys))


def _set(batch: pa.RecordBatch, name: str, where: pa.Array, value: pa.Array | pa.Scalar | None) -> pa.RecordBatch:
    at, field = batch.schema.get_field_index(name), EVENT.field(name)
    new = pa.scalar(None, field.type) if value is None else value
    return batch.set_column(at, field, pc.if_else(where, new, batch.column(at)))
