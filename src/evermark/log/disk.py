"""Whether the disk of a log has the files written to it, and room for more."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from evermark.errors import DiskFullError, EngineError
from evermark.log.base import LogFile

# More than one small batch needs, its commit included.
ROOM_BYTES = 256 * 1024


@contextmanager
def full_disk_is_said(where: Path) -> Iterator[None]:
    """Turn "no space left" into an error that says where and what to do; anything else passes."""
    try:
        yield
    except Exception as error:
        # delta-rs reports the operating system's error only as text.
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise DiskFullError(
                f"no space left on the disk that holds {where}",
                hint="free some space or shorten log.retention; nothing was lost, work goes on when there is room",
            ) from error
        raise


def require_files(folder: Path, files: Iterable[LogFile]) -> None:
    """Raise `EngineError` unless this process can open every file in `folder`, at the size its writer stated.

    A task may have run where the same path is another disk: a commit that names its file would be an event lost.
    """
    for file in files:
        path = folder / file.path
        try:
            with path.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
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


def require_room(folder: Path) -> None:
    """Raise `DiskFullError` unless a little can be written into `folder`; leaves nothing behind."""
    # Tried, because the number of free bytes does not tell of quotas and reserves.
    with full_disk_is_said(folder), tempfile.TemporaryFile(dir=folder, prefix=".room-") as probe:
        probe.write(bytes(ROOM_BYTES))
        probe.flush()
        os.fsync(probe.fileno())
