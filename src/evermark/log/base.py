"""The log as ingest sees it: files described, committed by compare-and-set, made durable.

Contract (checked by `evermark.testing.LogContract` over every backend):

- `commit` succeeds iff the partition's tail is exactly `batch - 1` and no epoch above mine was seen; then the batch is
  in the log once. On success a second try with the same file names returns as if it were the first.
- `commit` refuses a batch with a file that this process cannot open at its stated size: an `EngineError`, and the log
  stays as it was. (Files in memory have no size that could differ.)
- `fence` makes it impossible for any older epoch to commit, even one that read the tail before the fence.
- Nothing is durable until `sync` returns. A crash of the machine may lose, but never tear, what was not synced.
- `tail.end` is the end position of the last commit; None when the log no longer knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class LogFile:
    """One Parquet file in the log's folder, written by a task and not yet committed."""

    path: str  # relative to the table's folder
    rows: int
    size: int
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tail:
    """The last commit of one partition. `batch = 0`: there is none yet."""

    batch: int
    epoch: int
    end: str | None
    rows: int | None = field(default=None, compare=False)  # of its batch, where that is known


@dataclass(frozen=True)
class Append:
    """One batch on its way into the log."""

    partition: int
    batch: int
    epoch: int
    start: str
    end: str
    files: Sequence[LogFile]

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files)


class AppendLog(Protocol):
    def tail(self, partition: int) -> Tail: ...

    def fence(self, partition: int, epoch: int) -> Tail: ...

    def fence_all(self, partitions: Sequence[int], epoch: int) -> Mapping[int, Tail]:
        """Fences each of them. After an error, some may be fenced."""

    def commit(self, append: Append) -> None: ...

    def sync(self) -> int:
        """Make every commit seen so far durable; returns the table version up to which it is."""
