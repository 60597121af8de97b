"""Whether the disk or store of a log has the files written to it, and room for more."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from evermark.errors import EngineError
from evermark.log.base import LogFile
from evermark.log.opened import gone
from evermark.storage import Place, storage_of, trouble_is_said

# More than one small batch needs, its commit included.
ROOM_BYTES = 256 * 1024


def require_files(folder: Place, files: Iterable[LogFile]) -> None:
    """Raise `EngineError` unless this process can open every file in `folder`, at the size its writer stated.

    A task may have run where the same path is another disk: a commit that names its file would be an event lost.
    """
    for file in files:
        path = folder / file.path
        try:
            size = storage_of(folder).size(path)
        except OSError as error:
            found = f"cannot be opened here: {(error.strerror or str(error)).lower()}"
        else:
            if size == file.size:
                continue
            found = f"has {size} bytes here"
        raise EngineError(
            f"a task wrote the log file {path} of {file.size} bytes, and it {found}",
            hint="nothing was committed, and the events are read again; do all Spark executors see this disk"
            " under this path? Does another program touch the log's folder?",
        )


def require_room(folder: Place) -> None:
    """Raise `DiskFullError` unless a little can be written into `folder`; leaves nothing behind. A store is asked by
    the next try itself."""
    if not isinstance(folder, Path):
        return
    if not folder.exists():
        raise gone(folder)
    # Tried, because the number of free bytes does not tell of quotas and reserves.
    with trouble_is_said(folder), tempfile.TemporaryFile(dir=folder, prefix=".room-") as probe:
        probe.write(bytes(ROOM_BYTES))
        probe.flush()
        os.fsync(probe.fileno())
