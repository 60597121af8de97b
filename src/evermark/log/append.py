"""The Delta table of one source, from its owner's side.

The commit is a compare-and-set. Delta's application transactions alone do not fence: an equal or lower version is
accepted from a fresh handle. But delta-rs refuses a commit when the same application committed
after the handle's snapshot. So: refresh, require the exact tail on that snapshot, commit from the same handle.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, CommitProperties, Transaction

from evermark import failpoint
from evermark.disk import sync_file, sync_folder
from evermark.errors import ConflictError, StaleError
from evermark.log.base import Append, Tail
from evermark.log.disk import full_disk_is_said, require_files
from evermark.log.format import CommitNote, app_id, note_of, pack, stats_json, unpack
from evermark.log.table import NO_HOOKS, TableHandle, commit_file, last_checkpoint, missing_columns

_COMMIT_TRIES_MAX = 20
_NOTES_SEARCHED_MAX = 5_000


class DeltaLog:
    """`AppendLog` over a Delta table on a local disk. One owner, one thread at a time."""

    def __init__(self, folder: Path, *, pause: Callable[[float], None] = time.sleep) -> None:
        self.folder = folder
        self._handle = TableHandle(folder, create=True)
        self._synced: int | None = None
        self._pause = pause
        self._refusal: Exception | None = None

    def tail(self, partition: int) -> Tail:
        self._handle.refresh()
        epoch, batch = self._tail(partition)
        note = self._note(partition, batch) if batch else None
        return Tail(batch, epoch, note.end if note else None)

    def fence(self, partition: int, epoch: int) -> Tail:
        """Raise the partition's epoch in the log itself: an owner that read the tail before this can no longer commit.

        The new owner also gives an older table the columns that events have got since.
        """
        for _ in self._tries(partition):
            tail = self.tail(partition)
            if tail.epoch > epoch:
                raise _stale(self.folder, partition, epoch, tail.epoch)
            fenced = tail.epoch == epoch or self._try_commit([], partition, pack(epoch, tail.batch), {})
            if fenced and self._has_all_columns():
                break
        return Tail(tail.batch, epoch, tail.end)

    def commit(self, append: Append) -> None:
        mine = (append.epoch, append.batch)
        names = tuple(f.path for f in append.files)
        note = CommitNote(append.partition, append.batch, append.epoch, append.start, append.end, append.rows, names)
        actions = [
            AddAction(f.path, f.size, {}, int(time.time() * 1000), True, stats_json(f.rows, f.stats))
            for f in append.files
        ]
        for _ in self._tries(append.partition):
            self._handle.refresh()
            tail = self._tail(append.partition)
            if tail == mine and self._note(append.partition, append.batch) == note:
                break  # an earlier try went through, though its answer was lost
            require_tail(tail, append, str(self.folder))
            require_files(self.folder, append.files)
            if self._try_commit(actions, append.partition, pack(*mine), note.as_metadata()):
                break
        failpoint.hit("log.committed")

    def sync(self) -> int:
        """Contents before names, names before the commits that mention them; tasks have synced the batch's files.

        delta-rs renames its commits into place and fsyncs nothing.
        """
        with full_disk_is_said(self.folder):
            sync_folder(self.folder)
            version = self._newest_version()
            for path in self._unsynced(version):
                with suppress(FileNotFoundError):  # cleaned since, behind a checkpoint that is durable
                    sync_file(path)
            sync_folder(self.folder / "_delta_log")
            if self._synced is None:
                sync_folder(self.folder.parent)
        self._synced = version
        return version

    def _newest_version(self) -> int:
        """Looked up by name, which is cheaper than a refresh: commits are numbered without gaps."""
        known = self._handle.table.version()
        version = known
        while commit_file(self.folder, version + 1).exists():
            version += 1
        return version if version > known else int(self._handle.refresh().version())

    def _unsynced(self, version: int) -> list[Path]:
        if self._synced is None:
            return sorted((self.folder / "_delta_log").glob("*.json"))
        return [commit_file(self.folder, each) for each in range(self._synced + 1, version + 1)]

    def _tail(self, partition: int) -> tuple[int, int]:
        return unpack(self._handle.table.transaction_version(app_id(partition)) or 0)

    def _try_commit(self, actions: list[AddAction], partition: int, version: int, metadata: dict[str, str]) -> bool:
        table = self._handle.table
        properties = CommitProperties(
            app_transactions=[Transaction(app_id(partition), version, int(time.time() * 1000))],
            custom_metadata=metadata or None,
        )
        append = partial(table.create_write_transaction, list(actions), "append", table.schema())
        return self._went_through(partial(append, commit_properties=properties))

    def _has_all_columns(self) -> bool:
        """Add the columns that the table lacks. Files that have a column may come before the table knows it, and files
        without it stay: readers see nulls. So a crash at any point leaves a table that can be read, and the next owner
        adds what is missing.
        """
        missing = missing_columns(self._handle.refresh())
        return not missing or self._went_through(partial(self._handle.table.alter.add_columns, missing))

    def _went_through(self, commit: Callable[..., object]) -> bool:
        """False: a fresh snapshot has to show what really happened."""
        try:
            with full_disk_is_said(self.folder):
                commit(post_commithook_properties=NO_HOOKS)
        except (DeltaError, OSError) as error:
            self._refusal = error
            return False
        # An owner that slept through the cleaning of commits meets no conflict: its version is one no reader reads.
        return last_checkpoint(self.folder) <= self._handle.table.version()

    def _note(self, partition: int, batch: int) -> CommitNote | None:
        version = self._handle.table.version()
        for each in range(version, max(-1, version - _NOTES_SEARCHED_MAX), -1):
            try:
                actions = map(json.loads, commit_file(self.folder, each).read_text().splitlines())
            except FileNotFoundError:
                return None
            note = next((note_of(action["commitInfo"]) for action in actions if "commitInfo" in action), None)
            if isinstance(note, CommitNote) and note.partition == partition:
                return note if note.batch == batch else None
        return None

    def _tries(self, partition: int) -> Iterator[None]:
        for attempt in range(_COMMIT_TRIES_MAX):
            yield
            self._pause(random.uniform(0, 0.01 * 2 ** min(attempt, 6)))
        raise ConflictError(
            f"the log at {self.folder} refused {_COMMIT_TRIES_MAX} commits of partition {partition} in a row,"
            f" at last with: {str(self._refusal)[:300]}",
            hint="is another program writing to this table? Only its owner may",
        ) from self._refusal


def require_tail(tail: tuple[int, int], append: Append, where: str) -> None:
    """The compare of the compare-and-set; `tail` is (epoch, batch)."""
    epoch, batch = tail
    if epoch > append.epoch:
        raise _stale(where, append.partition, append.epoch, epoch)
    if batch != append.batch - 1:
        raise ConflictError(
            f"the log at {where} is at batch {batch} of partition {append.partition}; {append.batch} cannot follow",
            hint="another writer moved it; this one starts again from the log",
        )


def _stale(where: object, partition: int, mine: int, found: int) -> StaleError:
    return StaleError(
        f"the log at {where}, partition {partition}, belongs to epoch {found}; ours is {mine}",
        hint="another instance owns this source now; this one stops writing to it",
    )
