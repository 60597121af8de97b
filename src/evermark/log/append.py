"""The Delta table of one source, from its owner's side.

The commit is a compare-and-set. Delta's application transactions alone do not fence: an equal or lower version is
accepted. So: read the commits that have come since (of other partitions, a fence, compaction), require the exact tail,
and put the next commit if its version is still free; if it is not, read that one too, and decide again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from deltalake.exceptions import DeltaError, TableNotFoundError

from evermark import failpoint
from evermark.errors import ConflictError, StaleError
from evermark.log.base import Append, LogFile, Tail
from evermark.log.commits import Action, commit_actions, put_commit, read_commit, require_protocol
from evermark.log.disk import require_files
from evermark.log.format import CommitNote, FenceNote, app_id, note_of, pack, unpack
from evermark.log.opened import gone
from evermark.log.table import (
    NO_HOOKS,
    TableHandle,
    commit_file,
    commit_identity,
    last_delta_checkpoint,
    missing_columns,
)
from evermark.storage import Place, storage_of, trouble_is_said

_COMMIT_TRIES_MAX = 20
_NOTES_SEARCHED_MAX = 5_000


class DeltaLog:
    """`AppendLog` over a Delta table. One owner, one thread at a time."""

    def __init__(self, folder: Place, *, taken: int = 0, pause: Callable[[float], None] = time.sleep) -> None:
        """Where there is no table it is made; but `taken`, the last batch known to have been in it, must be 0 then."""
        self.folder = folder
        try:
            self._handle = TableHandle(folder, create=taken == 0)
        except TableNotFoundError:
            raise gone(folder, f"batch {taken} was in it") from None
        self._version = -1  # up to which commits are known
        self._applications: dict[str, int] = {}  # as the commits that we have read left them
        self._notes: dict[int, CommitNote] = {}  # the last seen of each partition
        self._synced: int | None = None
        self._pause = pause
        self._refusal: Exception | None = None
        self._open()

    def tail(self, partition: int) -> Tail:
        self._catch_up()
        epoch, batch = self._tail(partition)
        return self._noted(partition, batch, epoch)

    def _noted(self, partition: int, batch: int, epoch: int) -> Tail:
        note = self._note(partition, batch) if batch else None
        return Tail(batch, epoch, note.end, note.rows) if note else Tail(batch, epoch, None)

    def fence(self, partition: int, epoch: int) -> Tail:
        return self.fence_all([partition], epoch)[partition]

    def fence_all(self, partitions: Sequence[int], epoch: int) -> dict[int, Tail]:
        """Raise the partitions' epochs in the log itself, by one commit: an owner that read a tail before this can no
        longer commit.

        The new owner also gives an older table the columns that events have got since.
        """
        for _ in self._tries(partitions):
            self._catch_up()
            found = {partition: self._tail(partition) for partition in partitions}
            for partition, (other, _) in found.items():
                if other > epoch:
                    raise _stale(self.folder, partition, epoch, other)
            # Nothing slow in between: owners of other partitions commit meanwhile, and would always be quicker.
            wanted = {app_id(p): pack(epoch, batch) for p, (other, batch) in found.items() if other != epoch}
            if (not wanted or self._try_commit(wanted, (), FenceNote(len(wanted)))) and self._has_all_columns():
                break
        return {p: self._noted(p, batch, epoch) for p, (_, batch) in found.items()}

    def commit(self, append: Append) -> None:
        mine = (append.epoch, append.batch)
        names = tuple(f.path for f in append.files)
        note = CommitNote(append.partition, append.batch, append.epoch, append.start, append.end, append.rows, names)
        for _ in self._tries([append.partition]):
            self._catch_up()
            tail = self._tail(append.partition)
            if tail == mine and self._note(append.partition, append.batch) == note:
                break  # an earlier try went through, though its answer was lost
            require_tail(tail, append, str(self.folder))
            require_files(self.folder, append.files)
            if self._try_commit({app_id(append.partition): pack(*mine)}, append.files, note):
                break
        failpoint.hit("log.committed")

    def sync(self) -> int:
        """Contents before names, names before the commits that mention them; tasks have synced the batch's files, and
        our commits are synced before they have their names. delta-rs, which maintenance uses, syncs nothing.
        """
        storage = storage_of(self.folder)
        if storage.durable_at_once:
            self._own.clear()
            return self._version
        with trouble_is_said(self.folder):
            self._catch_up()  # first: these commits name files, too
            storage.sync(self.folder)
            for path in self._unsynced(self._version):
                with suppress(FileNotFoundError):  # cleaned since, behind a Delta checkpoint that is durable
                    storage.sync(path)
            storage.sync(self.folder / "_delta_log")
            if self._synced is None:
                storage.sync(self.folder.parent)
        self._synced = self._version
        self._own.clear()
        return self._version

    def _unsynced(self, version: int) -> list[Place]:
        if self._synced is None:
            log = self.folder / "_delta_log"
            return [log / found.name for found in storage_of(self.folder).listed(log, ".json")]
        others = (each for each in range(self._synced + 1, version + 1) if each not in self._own)
        return [commit_file(self.folder, each) for each in others]

    def _open(self) -> None:
        """Know the table by its snapshot: at first, and when commits that we have not read were cleaned away."""
        table = self._handle.refresh()
        protocol = table.protocol()
        require_protocol(
            {"minWriterVersion": protocol.min_writer_version, "writerFeatures": protocol.writer_features}, self.folder
        )
        self._has_columns = not missing_columns(table)
        self._version = int(table.version())
        self._at = commit_identity(self.folder, self._version)
        self._looked_to = self._version  # later commits are known, this one and those before it are not
        self._applications.clear()
        self._notes.clear()
        self._own: set[int] = set()  # commits of ours that `sync` has not seen yet

    def _catch_up(self) -> None:
        """Read the commits that have come since. Opens the table anew if another commit has the version we are at."""
        if self._at != commit_identity(self.folder, self._version):
            self._open()
            self._synced = None  # another log was put in its place: nothing is known of it
        while (actions := read_commit(self.folder, self._version + 1)) is not None:
            self._learn(self._version + 1, actions)
        if self._is_left_behind():
            self._open()

    def _is_left_behind(self) -> bool:
        """Whether we slept through the cleaning of commits that we have not read. A store has no other word for a log
        that was taken away under us, so there our own last commit is looked for: cleaning takes that one first.
        """
        storage = storage_of(self.folder)
        if storage.durable_at_once:
            return not storage.exists(commit_file(self.folder, self._version))
        return last_delta_checkpoint(self.folder) > self._version

    def _learn(self, version: int, actions: Iterable[Action]) -> None:
        for action in actions:
            if "protocol" in action:
                require_protocol(action["protocol"], self.folder)
            elif "metaData" in action:
                self._has_columns = False  # until it was looked at again
            elif "txn" in action:
                self._applications[action["txn"]["appId"]] = action["txn"]["version"]
            elif "commitInfo" in action and isinstance(note := note_of(action["commitInfo"]), CommitNote):
                self._notes[note.partition] = note
        self._version, self._at = version, commit_identity(self.folder, version)

    def _tail(self, partition: int) -> tuple[int, int]:
        application = app_id(partition)
        if application not in self._applications:
            checkpoint = last_delta_checkpoint(self.folder)
            self._look_back(lambda: application in self._applications, checkpoint)
            if application not in self._applications:
                self._applications[application] = self._in_table(application) if self._looked_to >= 0 else 0
        return unpack(self._applications[application])

    def _in_table(self, application: str) -> int:
        """The library reads all commits since the Delta checkpoint for each that it is asked for."""
        with trouble_is_said(self.folder):
            return self._handle.counted(application)  # commits that the handle was opened with may be cleaned away

    def _look_back(self, is_found: Callable[[], bool], to: int) -> None:
        """Learn from the commits between `to` and the version at which the table was opened, the newest first: each is
        read once, for whichever partition. Ends where one was cleaned away."""
        while not is_found() and self._looked_to > to:
            if (actions := read_commit(self.folder, self._looked_to)) is None:
                return
            for action in actions:
                if "txn" in action:
                    self._applications.setdefault(action["txn"]["appId"], action["txn"]["version"])
                elif "commitInfo" in action and isinstance(note := note_of(action["commitInfo"]), CommitNote):
                    self._notes.setdefault(note.partition, note)
            self._looked_to -= 1

    def _try_commit(
        self, applications: Mapping[str, int], files: Sequence[LogFile], note: CommitNote | FenceNote
    ) -> bool:
        """False: another commit has our version, and what it says has to be seen first."""
        actions = commit_actions(applications, files, note.as_metadata())
        version = self._version + 1
        with trouble_is_said(self.folder):
            if not put_commit(self.folder, version, actions):
                return False
        # An owner that slept through the cleaning of commits meets no conflict: its version is one no reader reads. It
        # must not be read by us either, as if it were the log's: the next try begins with the newest version.
        if last_delta_checkpoint(self.folder) > version:
            self._open()
            return False
        self._own.add(version)
        self._learn(version, actions)
        return True

    def _has_all_columns(self) -> bool:
        """Add the columns that the table lacks; False: whether they are there now is to be seen on a fresh snapshot.

        Files that have a column may come before the table knows it, and files without it stay: readers see nulls. So a
        crash at any point leaves a table that can be read, and the next owner adds what is missing.
        """
        missing = missing_columns(self._handle.refresh()) if not self._has_columns else []
        if not missing:
            self._has_columns = True
            return True
        try:
            with trouble_is_said(self.folder):
                self._handle.table.alter.add_columns(missing, post_commithook_properties=NO_HOOKS)
        except (DeltaError, OSError) as error:
            self._refusal = error
            return False
        return last_delta_checkpoint(self.folder) <= self._handle.table.version()

    def _note(self, partition: int, batch: int) -> CommitNote | None:
        # In a bucket each commit is a request: of a partition that was idle for long the checkpoint says where it ends.
        is_store = storage_of(self.folder).durable_at_once
        to = last_delta_checkpoint(self.folder) if is_store else self._version - _NOTES_SEARCHED_MAX
        self._look_back(lambda: partition in self._notes, max(-1, to))
        note = self._notes.get(partition)
        return note if note is not None and note.batch == batch else None

    def _tries(self, partitions: Sequence[int]) -> Iterator[None]:
        for attempt in range(_COMMIT_TRIES_MAX):
            yield
            self._pause(random.uniform(0, 0.01 * 2 ** min(attempt, 6)))
        last = f", at last with: {str(self._refusal)[:300]}" if self._refusal is not None else ""
        which = f"partition {', '.join(map(str, partitions))}"
        raise ConflictError(
            f"the log at {self.folder} refused {_COMMIT_TRIES_MAX} commits of {which} in a row{last}",
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
