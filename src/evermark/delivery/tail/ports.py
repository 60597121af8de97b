"""What the live tail needs: a log that may be read up to some batch, and a report of what is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.tail.place import Resync, Trouble
from evermark.errors import EvermarkError
from evermark.log.pieces import LogPiece


class TailLog(Protocol):
    """The log, and how far it may be read."""

    def heads(self) -> Mapping[SourcePartition, int]: ...

    def troubles(self, *, afresh: bool = False) -> Mapping[SourcePartition, Trouble]: ...

    def first_batch(self, place: SourcePartition) -> int | None:
        """Of a partition that has a head; None: retention has removed all there was."""

    def piece(self, place: SourcePartition, after: Cursor, to: int, rows_max: int, bytes_max: int) -> LogPiece: ...

    def batch_at(self, place: SourcePartition, since: str) -> int: ...


class TailReport(Protocol):
    """What becomes of the tail; for the metrics and the log."""

    def clients(self, change: int) -> None: ...

    def sent(self, events: int) -> None: ...

    def fell_back(self) -> None: ...

    def resync(self, resync: Resync) -> None: ...

    def failed(self, error: Exception) -> None: ...

    def stuck(self, place: SourcePartition, error: EvermarkError, hub: frozenset[str]) -> None:
        """Clients of a hub, known by its sources, cannot go on there, as the log cannot be read, and not for a moment
        only. Told again with every try."""

    def unstuck(self, place: SourcePartition, hub: frozenset[str]) -> None:
        """They can, or none of them tries any more."""
