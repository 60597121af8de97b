"""Making files durable on a local disk. delta-rs renames its commits into place and fsyncs nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evermark.errors import DiskFullError


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    sync_file(path)


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
