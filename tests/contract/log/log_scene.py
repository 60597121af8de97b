"""A log of one source on a real disk, filled with events that can be told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from evermark.event import taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import Append, LogFile
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.storage import Place, readable

TIME = datetime(2026, 11, 1, 12, 0, 0, 123_456, tzinfo=UTC)


def position(batch: int, row: int = 0) -> str:
    return f"{batch:08}:{row:04}"


def events(partition: int, batch: int, rows: int = 1, times: Sequence[datetime | None] | None = None) -> pa.RecordBatch:
    return taken_batch(
        {
            "event_id": [f"{partition}-{batch}-{row}" for row in range(rows)],
            "position": [position(batch, row) for row in range(rows)],
            "stream": ["public.orders"] * rows,
            "key": [str(row) for row in range(rows)],
            "op": ["insert"] * rows,
            "event_time": list(times) if times is not None else [TIME] * rows,
            "payload": ["{}"] * rows,
            "flags": [["repaired"]] * rows,
        },
        rows,
    )


def write(folder: Place, batch: int, rows: int = 1, partition: int = 0) -> LogFile:
    file = BatchWriter(folder, "shop", partition, batch).write_all([events(partition, batch, rows)])
    assert file is not None
    return file


def append(files: Sequence[LogFile], batch: int, epoch: int = 1, partition: int = 0) -> Append:
    return Append(partition, batch, epoch, position(batch), position(batch + 1), tuple(files))


def fill(log: DeltaLog, last: int, *, first: int = 1, rows: int = 1, partition: int = 0) -> None:
    for batch in range(first, last + 1):
        log.commit(append([write(log.folder, batch, rows, partition)], batch, partition=partition))


def ids(folder: Place) -> Counter[str]:
    """What a reader that comes just now sees, each id with how often."""
    return Counter(
        event_id
        for file in LogReader(folder).files()
        for event_id in pq.read_table(readable(file.path), columns=["event_id"])["event_id"].to_pylist()
    )


def expected(last: int, *, rows: int = 1, partition: int = 0) -> Counter[str]:
    return Counter(f"{partition}-{batch}-{row}" for batch in range(1, last + 1) for row in range(rows))
