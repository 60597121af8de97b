"""A source of several partitions that several instances may read: each partition is a file to which lines are added."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from evermark.event import taken_batch
from evermark.sources.base import Limit, Slice, Source

_LINE = 8  # bytes; the file's length says how many events there are
_POLL_S = 0.05


class NumberFiles(Source):
    def __init__(self, folder: str, partitions: int) -> None:
        self.folder, self._partitions = Path(folder), partitions

    def partitions(self) -> Sequence[int]:
        return range(self._partitions)

    def divisible(self) -> bool:
        return True

    def earliest(self, partition: int) -> str:
        return f"{0:012d}"

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        deadline = time.monotonic() + limit.wait_s
        while True:
            ends = {p: f"{min(self.count(p), int(at) + limit.rows_max):012d}" for p, at in after.items()}
            if ends != dict(after) or time.monotonic() >= deadline:
                return ends
            time.sleep(_POLL_S)

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        return [Slice(partition, start, end)] if start < end else []

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        numbers = range(int(piece.start), int(piece.end))
        columns: dict[str, object] = {
            "event_id": [event_id(piece.partition, n) for n in numbers],
            "position": [f"{n:012d}" for n in numbers],
            "stream": ["numbers"] * len(numbers),
            "key": [str(n) for n in numbers],
            "op": ["insert"] * len(numbers),
        }
        yield taken_batch(columns, len(numbers))

    def count(self, partition: int) -> int:
        path = self.folder / f"{partition}.txt"
        return path.stat().st_size // _LINE if path.exists() else 0

    def add(self, partition: int) -> None:
        with (self.folder / f"{partition}.txt").open("ab") as out:
            out.write(b"." * (_LINE - 1) + b"\n")


def event_id(partition: int, number: int) -> str:
    return f"{partition}-{number}"
