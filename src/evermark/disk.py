"""Files that survive a power cut: a rename or a new file is on the disk only when its folder was synced, too."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


sync_folder = sync_file


def write_whole(path: Path, text: str, *, replace: bool = False, mode: int = 0o666) -> None:
    """Write a file whole and durable, or not at all, also when two processes begin at once.

    Raises `FileExistsError` when there is a file, unless it may `replace` it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            draft.replace(path)
        else:
            os.link(draft, path)
        sync_folder(path.absolute().parent)
    finally:
        draft.unlink(missing_ok=True)
