"""Keeping the log quick: compaction, Delta's checkpoints, cleaning of `_delta_log`, old and orphaned files, retention.

Runs beside the writer, from its own handle, and conflicts with no append. Two processes that maintain one table cannot
remove the same file twice: each commit counts up an application of its own, so the second is refused. New files are
durable before they are committed, and the commit is durable before an old file goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from evermark.errors import BusyError, FormatError
from evermark.log.base import LogFile
from evermark.log.commits import Action, commit_actions, put_commit, read_commit, require_protocol
from evermark.log.compact import groups_to_merge, merge, unreadable
from evermark.log.disk import require_files
from evermark.log.forget import Forgotten
from evermark.log.format import FORGOTTEN_APP_ID, MAINTENANCE_APP_ID, MaintenanceNote
from evermark.log.kept_shelf import forget_kept, remove_forgotten
from evermark.log.read import FileRange, LogReader, files_at
from evermark.log.table import DELTA_CHECKPOINT_EVERY, TableHandle, commit_file, last_delta_checkpoint
from evermark.log.unused import UnusedFiles
from evermark.storage import Place, storage_of, trouble_is_said

if TYPE_CHECKING:
    import deltalake

# The owner of a source runs a round every second while its log grows. In one that does not, only time brings work.
EVERY_S_MIN = 1.0
EVERY_S_MAX = 60.0
ORPHAN_AGE_S = 24 * 3600.0
REPLACED_AGE_S = 3600.0
SCAN_EVERY_S = 600.0
# For the notes of recent batches, and for readers that are in the middle of opening the table.
# There may be a hundred commits a second.
KEPT_COMMITS = 1_000
_COMMIT_TRIES_MAX = 100
_FORGET_TRIES_MAX = 20
_GROUPS_MAX = 16  # per round: the next round comes soon
# Of files that were removed by somebody else so many are known, and so many are looked for again in each round.
_LOST_MAX = 1_000
_ASKED_MAX = 20
# A round may fail because of a moment: of a store that is away, of another process that was quicker.
FAILURES_MAX = 3

LeastCursors = Callable[[], dict[int, int]]


def next_round_s(last_s: float, *, has_grown: bool, did_something: bool | None, others_append: bool) -> float:
    """How long after a round the next round is due. `last_s`: how long after its predecessor the last round came.

    `has_grown`: by this instance. `others_append`: other instances may append as well, and do not say so.
    `did_something`: None where the round failed.
    """
    if has_grown or did_something:
        return EVERY_S_MIN
    if did_something is None or others_append:
        return min(2 * last_s, EVERY_S_MAX)
    return EVERY_S_MAX


def is_unwell(failures: int) -> bool:
    """Whether rounds have failed so often in a row that a person should know: the log grows slower with every commit,
    and nothing leaves it. Pure.
    """
    return failures >= FAILURES_MAX


@dataclass
class MaintenanceReport:
    compacted: int = 0
    replaced_removed: int = 0
    orphans_removed: int = 0
    retained_out_rows: int = 0
    commits_cleaned: int = 0
    lost: tuple[str, ...] = ()  # files of the table that are not in its folder, as far as is known

    def counts(self) -> dict[str, int]:
        """What was done, without what was not."""
        return {what: count for what, count in vars(self).items() if isinstance(count, int) and count}


@dataclass
class Maintenance:
    """Of one table. Since when a file is unused is written down beside the log (`UnusedFiles`): no file is taken from a
    reader that was given it less than an hour ago, and every file goes in the end, though owners change.
    """

    folder: Place
    retention: timedelta | None = None
    clock: Callable[[], float] = time.time
    _scanned_at: float | None = None
    _listed: tuple[int, list[FileRange]] = (-1, [])  # a version, and its files
    _lost: frozenset[str] = frozenset()  # by their names; looked for with the orphans, and where merging met them
    _damaged: dict[str, FormatError] = field(default_factory=dict)  # by their names, until the next look at the folder

    def __post_init__(self) -> None:
        self._reader = LogReader(self.folder)
        self._unused = UnusedFiles(self.folder)

    def run(self, least_cursors: LeastCursors | None = None) -> MaintenanceReport:
        """One round. `least_cursors`: asked, if a file is old enough to go, for the batch that every reader is done
        with, per partition; retention stops there.
        """
        report = MaintenanceReport()
        with trouble_is_said(self.folder):
            is_scan_due = self._scanned_at is None or self.clock() - self._scanned_at >= SCAN_EVERY_S
            if is_scan_due:
                self._unused.look()
                self._damaged.clear()  # they may have been put back
            # What makes room first: on a full disk all else fails, and nothing after it would be done.
            self._remove(report)
            if self.retention is not None and least_cursors is not None:
                self._remove_old(report, self.retention, least_cursors)
            damaged = self._compact(report)
            self._delta_checkpoint(report)
            if is_scan_due:
                self._scanned_at = self.clock()
                self._look_through_folder()
                remove_forgotten(self.folder, self.clock(), lambda: self._handle.counted(FORGOTTEN_APP_ID))
            elif self._lost:
                asked = frozenset(sorted(self._lost)[:_ASKED_MAX])
                self._lost = self._lost - asked | self._still_lost(asked)
        if damaged is not None:
            raise damaged  # all else is done
        report.lost = tuple(sorted(self._lost))
        return report

    def forget(self, what: Forgotten) -> int:
        """Take these events out of the table; how many. Their old files go in an hour, as replaced files do.

        Compaction may replace files meanwhile: then only the new ones are looked at again.
        """
        forget_kept(self.folder)  # in any case: a call before this one may have died before it came to that
        looked: dict[str, tuple[int, LogFile | None]] = {}  # by path: how many events, and what is left of the file
        tried: set[str] = set()
        for _ in range(_FORGET_TRIES_MAX):
            table = self._handle.refresh()
            there = {file.path: file for file in self._files(table)}
            hits = {path for path, (count, _) in looked.items() if count}
            if tried and tried == hits and not hits & there.keys() and self._has_all(looked, there):
                break  # the commit went through, though it did not seem so
            # What was written for files that are gone is left to the search for orphans.
            looked = {path: found for path, found in looked.items() if path in there}
            for path, file in there.items():
                if path not in looked:
                    count = what.in_file(file)
                    looked[path] = (count, what.rest_of(self.folder, file, list(there.values())) if count else None)
            tried = {path for path, (count, _) in looked.items() if count}
            if not tried:
                return 0
            rests = [rest for count, rest in looked.values() if rest is not None]
            storage_of(self.folder).sync(self.folder)
            require_files(self.folder, rests)
            note = MaintenanceNote("forget", len(rests), len(tried))
            count = (table.transaction_version(FORGOTTEN_APP_ID) or 0) + 1
            gone = [there[path] for path in tried]
            if self._commit(table, note, rests, gone, data_change=True, counts={FORGOTTEN_APP_ID: count}):
                break
        else:
            raise BusyError(
                f"the log at {self.folder} was compacted at each of {_FORGET_TRIES_MAX} tries",
                hint="try again in a while",
            )
        storage_of(self.folder).sync(self.folder / "_delta_log")
        forget_kept(self.folder)
        return sum(count for count, _ in looked.values())

    def missing(self) -> list[FileRange]:
        """The files of the table that are not in its folder, in log order."""
        present = {each.name for each in storage_of(self.folder).listed(self.folder, ".parquet")}
        lost = self._still_lost(self._used() - present)
        found = [file for file in self._files(self._handle.refresh()) if Path(file.path).name in lost]
        return sorted(found, key=lambda file: (file.partition_min, file.batch_min))

    def give_up(self, files: Sequence[FileRange]) -> None:
        """Take files that are missing out of the table: from here on readers pass over their events."""
        forget_kept(self.folder)
        for _ in range(_FORGET_TRIES_MAX):
            table = self._handle.refresh()
            there = {file.path for file in self._files(table)}
            gone = [file for file in files if file.path in there]
            note = MaintenanceNote("give up", 0, len(gone))
            if not gone or self._commit(table, note, [], gone, data_change=True):
                break
        else:
            raise BusyError(
                f"the log at {self.folder} was compacted at each of {_FORGET_TRIES_MAX} tries",
                hint="try again in a while",
            )
        storage_of(self.folder).sync(self.folder / "_delta_log")
        forget_kept(self.folder)

    def _has_all(self, looked: Mapping[str, tuple[int, LogFile | None]], there: Mapping[str, FileRange]) -> bool:
        names = {Path(path).name for path in there}
        return all(rest is None or rest.path in names for _, rest in looked.values())

    @cached_property
    def _handle(self) -> TableHandle:
        return TableHandle(self.folder)

    def _files(self, table: deltalake.DeltaTable) -> list[FileRange]:
        """Every file of the table as it was opened."""
        version = table.version()
        if self._listed[0] != version:
            self._listed = (version, files_at(self.folder, table))
        return self._listed[1]

    def _compact(self, report: MaintenanceReport) -> FormatError | None:
        """Returns why some files could not be merged, if they are there and damaged."""
        files = self._reader.files()
        if self._damaged:  # those that were given up, or that retention removed, are nobody's trouble any more
            names = {Path(file.path).name for file in files}
            self._damaged = {name: error for name, error in self._damaged.items() if name in names}
        if not groups_to_merge(self._there(files)):
            return next(iter(self._damaged.values()), None)
        table = self._handle.refresh()
        groups, merged = [], []
        for group in groups_to_merge(self._there(self._files(table)))[:_GROUPS_MAX]:
            try:
                merged.append(merge(self.folder, group))
            except FormatError as error:
                # The next round merges the others without them.
                lost = self._still_lost(Path(file.path).name for file in group)
                self._lost |= lost
                if not lost:
                    self._damaged |= dict.fromkeys(unreadable(group), error) or {Path(group[0].path).name: error}
            else:
                groups.append(group)
        damaged = next(iter(self._damaged.values()), None)
        if not merged:
            return damaged
        storage_of(self.folder).sync(self.folder)
        require_files(self.folder, merged)  # the files they replace are removed in an hour
        replaced = [file for group in groups for file in group]
        note = MaintenanceNote("compact", len(merged), len(replaced))
        # From the snapshot that listed them: if another process was quicker since then, this commit fails.
        if self._commit(table, note, merged, replaced, data_change=False):
            report.compacted += len(replaced)
        return damaged

    def _there(self, files: Iterable[FileRange]) -> list[FileRange]:
        apart = self._lost | self._damaged.keys()
        return [file for file in files if Path(file.path).name not in apart] if apart else list(files)

    def _commit(
        self,
        table: deltalake.DeltaTable,
        note: MaintenanceNote,
        added: Sequence[LogFile],
        removed: Sequence[FileRange],
        *,
        data_change: bool,
        counts: Mapping[str, int] | None = None,
    ) -> bool:
        turn = (table.transaction_version(MAINTENANCE_APP_ID) or 0) + 1
        gone = [(Path(file.path).name, file.size) for file in removed]
        metadata = note.as_metadata()
        applications = {**(counts or {}), MAINTENANCE_APP_ID: turn}
        actions = commit_actions(applications, added, metadata, gone, data_change=data_change)
        if not self._put(table.version(), actions):
            # Another process was quicker; the next round sees its files. If this commit went through after all,
            # its new files are in use: so they are left to the search for orphans.
            return False
        self._unused.note([name for name, _ in gone], self.clock())
        return True

    def _put(self, version: int, actions: Sequence[Action]) -> bool:
        """Commit after all appends that have come since `version`; False if files may have been removed since."""
        for _ in range(_COMMIT_TRIES_MAX):
            while (others := read_commit(self.folder, version + 1)) is not None:
                for action in others:
                    if "protocol" in action:
                        require_protocol(action["protocol"], self.folder)
                    if action.get("txn", {}).get("appId") == MAINTENANCE_APP_ID:
                        return False
                version += 1
            # A process that slept through the cleaning of commits meets no conflict: nobody reads its version.
            if last_delta_checkpoint(self.folder) > version:
                return False
            if put_commit(self.folder, version + 1, actions):
                return last_delta_checkpoint(self.folder) <= version + 1
        return False

    def _delta_checkpoint(self, report: MaintenanceReport) -> None:
        """A Delta checkpoint, made durable, lets the commits before it go. All it speaks of must be durable before."""
        last = last_delta_checkpoint(self.folder)
        self._reader.files()
        if self._reader.version - last < DELTA_CHECKPOINT_EVERY:
            return
        table = self._handle.refresh()
        version = table.version()
        storage, log = storage_of(self.folder), self.folder / "_delta_log"
        storage.sync(self.folder)
        for each in range(max(0, last), version + 1):
            with suppress(FileNotFoundError):
                storage.sync(commit_file(self.folder, each))
        storage.sync(log)
        table.create_checkpoint()
        names = [found.name for found in storage.listed(log)]
        made = [name for name in names if name.startswith(f"{version:020d}.checkpoint") and name.endswith(".parquet")]
        if not made:
            return
        storage.sync(*(log / name for name in (*made, "_last_checkpoint")), log)
        for name in names:
            number = name[:20]
            if number.isdigit() and int(number) < version - KEPT_COMMITS and not name.endswith(".torn"):
                storage.delete(log / name)
                report.commits_cleaned += 1

    def _remove(self, report: MaintenanceReport) -> None:
        """Files whose hour is over. A file that is in use again, because its replacement was set aside, stays."""
        used: set[str] | None = None  # listed once, and only if there is something to remove
        for names, orphans in self._unused.due(self.clock() - REPLACED_AGE_S):
            used = self._used() if used is None else used
            storage = storage_of(self.folder)
            gone = [name for name in names if name not in used and storage.exists(self.folder / name)]
            for name in gone:
                storage.delete(self.folder / name)
            report.orphans_removed += len(gone) if orphans else 0
            report.replaced_removed += 0 if orphans else len(gone)

    def _used(self) -> set[str]:
        return {Path(file.path).name for file in files_at(self.folder, self._handle.refresh())}

    def _look_through_folder(self) -> None:
        """Files that were never committed, and replaced files that another process did not live to note. And the other
        way round: files of the table that are not there.
        """
        storage = storage_of(self.folder)
        present = storage.listed(self.folder, ".parquet")
        used = self._used()
        self._lost = self._still_lost(sorted(used - {each.name for each in present})[:_LOST_MAX])
        known = used | self._unused.names()
        unknown = [each for each in present if each.name not in known]
        log = self.folder / "_delta_log"
        drafts = storage.listed(log, ".tmp")  # of commits: one that was killed left it
        if not unknown and not drafts:
            return
        # A task's file may be committed in a moment: only its age tells that it will not be.
        now = storage.now(self.folder, self.clock())
        for draft in drafts:
            if now - draft.modified >= ORPHAN_AGE_S:
                storage.delete(log / draft.name)
        found = [each.name for each in unknown if now - each.modified >= ORPHAN_AGE_S]
        if found:
            self._unused.note(found, self.clock(), orphans=True)

    def _still_lost(self, names: Iterable[str]) -> frozenset[str]:
        """Those that are in the table and not in its folder. A file may have come after the folder was listed, and go
        when it was replaced.
        """
        storage = storage_of(self.folder)
        gone = {name for name in names if not storage.exists(self.folder / name)}
        return frozenset(gone & self._used() if gone else ())

    def _remove_old(self, report: MaintenanceReport, retention: timedelta, least_cursors: LeastCursors) -> None:
        horizon = datetime.fromtimestamp(self.clock(), UTC) - retention
        if not any(is_before(file, horizon) for file in self._reader.files()):
            return
        table = self._handle.refresh()
        files = self._files(table)
        gone = collected(files, horizon, least_cursors()) if any(is_before(file, horizon) for file in files) else []
        if gone and self._commit(table, MaintenanceNote("retain", 0, len(gone)), [], gone, data_change=True):
            report.retained_out_rows += sum(f.rows for f in gone)
            forget_kept(self.folder)


def is_before(file: FileRange, horizon: datetime) -> bool:
    return file.ingested_at_max is not None and file.ingested_at_max < horizon


def collected(files: Sequence[FileRange], horizon: datetime, least_cursors: dict[int, int]) -> list[FileRange]:
    """The files that go: the oldest batches of each partition, up to the first one that stays.

    Merged files overlap large ones that were left out of the merge, so a file may be old that holds later batches than
    one that is young: without its earlier neighbour's events readers would see a hole, and a table of the past.
    """
    gone = {file.path: file for file in files if may_be_collected(file, horizon, least_cursors)}
    while True:
        stays: dict[int, int] = {}  # by partition: the first batch of the files that stay
        for file in files:
            if file.path not in gone:
                for partition in _partitions(file):
                    stays[partition] = min(stays.get(partition, file.batch_min), file.batch_min)
        held = [
            path
            for path, file in gone.items()
            if any(stays.get(p, file.batch_max + 1) <= file.batch_max for p in _partitions(file))
        ]
        if not held:
            return list(gone.values())
        for path in held:
            del gone[path]


def _partitions(file: FileRange) -> range:
    return range(file.partition_min, file.partition_max + 1)


def may_be_collected(file: FileRange, horizon: datetime, least_cursors: dict[int, int]) -> bool:
    """Whole files only, taken before the horizon, and passed by every reader of every partition in them."""
    return is_before(file, horizon) and all(
        least_cursors.get(partition, -1) >= file.batch_max for partition in _partitions(file)
    )
