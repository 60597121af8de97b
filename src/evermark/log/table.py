"""Opening a source's Delta table, and keeping it open.

A **Delta checkpoint** sums up the commits of a table up to one of them; it has nothing to do with the checkpoint of a
source's partition. A kept handle replays every commit since the last Delta checkpoint it knows, at each refresh and at
each commit, and it does not notice a checkpoint made at or before its own version. So a handle is opened anew when
maintenance has made a newer one: a batch's cost then depends on the commits since the last checkpoint, not on all
commits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable

import deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import PostCommitHookProperties

from evermark.errors import EvermarkError, FormatError
from evermark.event import EVENT
from evermark.log import format as log_format
from evermark.log.opened import PLAYBOOK
from evermark.storage import Place, storage_of, trouble_is_said

# Maintenance makes a Delta checkpoint every so many commits, and handles look for it after as many.
DELTA_CHECKPOINT_EVERY = 100
_REOPEN_TRIES = 3

# Maintenance makes Delta checkpoints and cleans, in an order that survives a power cut; no commit does by the way.
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_SAID_MAX = 200  # characters of what the library says


def commit_file(folder: Place, version: int) -> Place:
    return folder / "_delta_log" / f"{version:020d}.json"


def commit_identity(folder: Place, version: int) -> Hashable | None:
    """Tells a commit from another that has its version, after it was set aside or the table was replaced; None: there
    is none.
    """
    return storage_of(folder).identity(commit_file(folder, version))


def last_delta_checkpoint(folder: Place) -> int:
    """The version of the newest Delta checkpoint that is announced; -1 when there is none."""
    try:
        return int(json.loads(storage_of(folder).read(folder / "_delta_log" / "_last_checkpoint"))["version"])
    except (FileNotFoundError, ValueError, KeyError):
        return -1


def open_table(folder: Place) -> deltalake.DeltaTable:
    """The existing table at `folder`, if this program can read it."""
    table = _table_at(folder)
    found = table.metadata().configuration.get("evermark.format")
    if found != str(log_format.FORMAT_VERSION):
        raise FormatError(
            f"the log at {folder} has format {found!r}; this program knows {log_format.FORMAT_VERSION}",
            hint="upgrade Evermark, or point log.path at a log it made",
        )
    return table


def _table_at(folder: Place) -> deltalake.DeltaTable:
    try:
        with trouble_is_said(folder):
            return deltalake.DeltaTable(str(folder), storage_options=storage_of(folder).options())
    except TableNotFoundError:
        pass
    except DeltaError as error:
        said = re.split(r"[\n\[{]", str(error))[0].strip(" ,:")[:_SAID_MAX]  # without its dumps of objects
        raise EvermarkError(
            f"the log at {folder} cannot be read: {said}",
            hint=f"commits of it are missing or damaged: put them back from a copy; {PLAYBOOK}",
        ) from error
    raise TableNotFoundError(f"there is no table at {folder}")


def open_or_create(folder: Place) -> deltalake.DeltaTable:
    try:
        return open_table(folder)
    except TableNotFoundError:
        pass
    with trouble_is_said(folder):
        storage_of(folder).make_folder(folder)
        deltalake.DeltaTable.create(
            str(folder),
            schema=EVENT,
            storage_options=storage_of(folder).options(),
            mode="ignore",
            configuration=log_format.TABLE_CONFIGURATION,
            raise_if_key_not_exists=False,
            post_commithook_properties=NO_HOOKS,
        )
    return open_table(folder)


def missing_columns(table: deltalake.DeltaTable) -> list[deltalake.Field]:
    """The columns of an event that a table made by an older program does not have."""
    known = {field.name for field in table.schema().fields}
    return [field for field in deltalake.Schema.from_arrow(EVENT).fields if field.name not in known]


class TableHandle:
    """A table kept open. One thread at a time."""

    def __init__(self, folder: Place, *, create: bool = False) -> None:
        self.folder = folder
        self._base = last_delta_checkpoint(folder)
        self.table = open_or_create(folder) if create else open_table(folder)
        self._at = commit_identity(folder, self.table.version())

    def refresh(self) -> deltalake.DeltaTable:
        """The table at its newest version."""
        if not self._has_news():
            return self.table
        if self._is_gone(self.table.version()):
            self._reopen()
        for _ in range(_REOPEN_TRIES):
            try:
                self.table.update_incremental()
                break
            except DeltaError:
                # Maintenance cleaned away a commit just as this handle was reading it: the Delta checkpoint has it.
                self._reopen()
            except OSError:  # a store that does not answer, in the words of its library
                with trouble_is_said(self.folder):
                    raise
        else:
            with trouble_is_said(self.folder):
                self.table.update_incremental()
        if (
            self.table.version() - self._base >= DELTA_CHECKPOINT_EVERY
            and last_delta_checkpoint(self.folder) > self._base
        ):
            self._reopen()
        self._at = commit_identity(self.folder, self.table.version())
        return self.table

    def counted(self, application: str) -> int:
        """The newest version of an application; 0 where there is none."""
        try:
            return self.refresh().transaction_version(application) or 0
        except DeltaError:
            # The library reads commits to answer, and maintenance has cleaned one away: the Delta checkpoint has it.
            self._reopen()
            return self.table.transaction_version(application) or 0

    def _has_news(self) -> bool:
        """Whether there is a later commit, or another one at our version. Versions have no holes; a commit that was
        cleaned away is in a Delta checkpoint, which was announced before: so the commit is looked for first.
        """
        version = self.table.version()
        there = storage_of(self.folder).exists
        if there(commit_file(self.folder, version + 1)) or last_delta_checkpoint(self.folder) > version:
            return True
        return self._is_gone(version)

    def _is_gone(self, version: int) -> bool:
        """Whether the commit that this handle is at was cleaned away, or another log is there, or none."""
        is_other = self._at != commit_identity(self.folder, version)
        storage = storage_of(self.folder)
        return is_other or (storage.durable_at_once and not storage.exists(commit_file(self.folder, version)))

    def _reopen(self) -> None:
        self._base = last_delta_checkpoint(self.folder)
        try:
            self.table = open_table(self.folder)
        except TableNotFoundError:
            raise FormatError(
                f"the log at {self.folder} is gone: it was there when it was opened",
                hint=f"stop all instances, put it back from a copy and start again; {PLAYBOOK}",
            ) from None
        self._at = commit_identity(self.folder, self.table.version())
