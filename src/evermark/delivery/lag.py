"""How far behind a reader of the log is, in events and in time, by the statistics of the log's files. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from evermark.delivery.base import CursorVector
from evermark.log.read import FileRange


@dataclass(frozen=True)
class Lag:
    """`events` are those of all streams, wanted or not. Where batches were merged into one file, both are estimates."""

    events: int = 0
    oldest: datetime | None = None  # when the first of them happened


def lag_of(cursors: CursorVector, heads: CursorVector, files: Mapping[str, Sequence[FileRange]]) -> Lag:
    """What lies between `cursors` and `heads`. A place that has no cursor is all before the reader."""
    events = 0.0
    moments: list[datetime] = []
    for place, head in heads.items():
        after = cursors.get(place, 0)
        if after >= head:
            continue
        for file in files.get(place.source, ()):
            mine = file.partition_min <= place.partition <= file.partition_max
            if not mine or file.batch_max <= after or file.batch_min > head:
                continue
            events += file.rows * _share(file, after, head) / (file.partition_max - file.partition_min + 1)
            if (first := _first(file, after)) is not None:
                moments.append(first)
    return Lag(round(events), min(moments, default=None))


def _share(file: FileRange, after: int, head: int) -> float:
    batches = file.batch_max - file.batch_min + 1
    return (min(file.batch_max, head) - max(file.batch_min, after + 1) + 1) / batches


def _first(file: FileRange, after: int) -> datetime | None:
    """When the first event after a batch happened, batches taken as evenly spread over the file's time."""
    if file.event_time_min is None or file.event_time_max is None:
        return file.ingested_at_max
    passed = max(0, after + 1 - file.batch_min) / (file.batch_max - file.batch_min + 1)
    return file.event_time_min + (file.event_time_max - file.event_time_min) * passed
