"""The rule that keeps an event's id once in the log.

A slice that is read may hold events the log already has, for two reasons: a crash came after a batch was committed and
before its end was checkpointed (`repeats_to`), or the source itself may give an event again at a later position
(`Source.may_repeat_from`). Where either is possible, the ids in the log from that position on are looked up before the
slice is written, and its events with such an id are dropped and counted. Everywhere else nothing is looked up:
positions only grow, so an event cannot come twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc


class LoggedIds(Protocol):
    def ids_from(self, partition: int, position: str) -> pa.Array:
        """The ids of the partition's events at this position and after it."""


def repeats_to(position: str | None, logged_to: str | None) -> str | None:
    """Up to which position the log holds events that reading on at `position` gives again; None: it holds none.

    `logged_to` is the greatest position in the log's last batch.
    """
    return logged_to if position is not None and logged_to is not None and position <= logged_to else None


def excluded_from(start: str, may_repeat_from: str, repeats_to: str | None) -> str | None:
    """From which position on the log's ids are excluded from a slice that begins at `start`; None: no id is."""
    if may_repeat_from < start:
        return may_repeat_from
    return start if repeats_to is not None and start <= repeats_to else None


class Deduplicated:
    """The batches of one slice without the events that the log has; `dropped` counts these events."""

    def __init__(
        self, batches: Iterator[pa.RecordBatch], logged: LoggedIds, partition: int, excluded_from: str | None
    ) -> None:
        self._batches = batches
        self._known = logged.ids_from(partition, excluded_from) if excluded_from is not None else None
        self.dropped = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            if self._known is None:
                yield batch
                continue
            kept = batch.filter(pc.invert(pc.is_in(batch.column("event_id"), value_set=self._known)))
            self.dropped += batch.num_rows - kept.num_rows
            yield kept
