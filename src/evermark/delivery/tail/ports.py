"""What the live tail needs: a log that may be read up to some batch, and a report of what is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from evermark.delivery.base import Cursor, SourcePartition
from evermark.delivery.tail.place import Resync, Trouble
from evermark.log.pieces import LogPiece


class TailLog(Protocol):
    """The log, and how far it may be read."""

    def heads(self) -> Mapping[SourcePartition, int]: ...

    def troubles(self, *, afresh: bool = False) -> Mapping[SourcePartition, Trouble]: ...

    def first_batch(self, place: SourcePartition) -> int | None: ...

    def piece(self, place: SourcePartition, after: Cursor, to: int, rows_max: int, bytes_max: int) -> LogPiece: ...

    def batch_at(self, place: SourcePartition, since: str) -> int: ...


class TailReport(Protocol):
    """What becomes of the tail; for the metrics and the log."""

    def clients(self, change: int) -> None: ...

    def sent(self, events: int) -> None: ...

    def fell_back(self) -> None: ...

    def resync(self, resync: Resync) -> None: ...

    def failed(self, error: Exception) -> None: ...
