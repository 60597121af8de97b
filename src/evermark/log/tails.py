"""The tails of a log's partitions, for readers that only need the numbers."""

from __future__ import annotations

from pathlib import Path

from evermark.log.format import app_id, unpack
from evermark.log.table import TableHandle


class LogTails:
    """Keeps its handle: a refresh costs milliseconds, reopening several times that."""

    def __init__(self, folder: Path) -> None:
        self._handle = TableHandle(folder)

    def batch(self, partition: int) -> int:
        """The last batch committed."""
        return unpack(self._handle.refresh().transaction_version(app_id(partition)) or 0)[1]
