"""Events in a file that was written before their batch was known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from evermark.event import taken_batch
from evermark.event_file import Fill, WrittenEvents
from evermark.sources.postgres.lsn import Incarnation, Position
from evermark.sources.postgres.tables.chunk_file import NOWHERE, ChunkAbout, read_rows, write_rows

ABOUT = ChunkAbout("shop", b"R\x00\x01", frozenset({"mail"}))
AT = Position(Incarnation(7_312_312_312, 1), 0x1234567)
TIME_US = 1_763_500_000_123_456


def written_events(folder: Path, *batches: pa.RecordBatch, source: str = "shop") -> WrittenEvents:
    """As a reader has it that has come to the mark."""
    count = write_rows(folder / "chunk", replace(ABOUT, source=source), batches)
    found = read_rows(folder / "chunk", count)
    ready, prefix = found.ready, str(AT)[:-8]
    assert ready is not None and (found.relation, found.hashed) == (ABOUT.relation, ABOUT.hashed)
    fill = Fill({"event_time": TIME_US, "schema_version": 3}, (str(NOWHERE)[:-8], prefix))

    def row_by_row() -> Iterator[pa.RecordBatch]:
        for batch in found.batches():
            columns = {name: batch.column(name) for name in batch.schema.names}
            yield taken_batch({**columns, "position": [f"{prefix}{n + 1:08x}" for n in range(len(batch))]}, len(batch))

    ends = (f"{prefix}{1:08x}", f"{prefix}{count:08x}")
    return WrittenEvents(ready.open, ready.source, count, ready.nbytes, fill, ends, row_by_row)
