"""A local disk, or one that is mounted. What is written here survives a power cut only in the right order of syncs."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evermark.disk import sync_file, sync_folder, write_whole
from evermark.errors import DiskFullError
from evermark.storage.base import Draft, Found, Place


@dataclass(frozen=True)
class LocalDraft:
    sink: Path

    def finish(self) -> int:
        sync_file(self.sink)
        return self.sink.stat().st_size

    def discard(self) -> None:
        self.sink.unlink(missing_ok=True)


class LocalDisk:
    """`Storage` over paths. Without state: there is one for all folders."""

    durable_at_once = False

    def read(self, file: Place) -> bytes:
        return _path(file).read_bytes()

    def readable(self, file: Place) -> str:
        return str(file)

    def size(self, file: Place) -> int:
        """Of a file that can be opened: a name alone is not enough."""
        with _path(file).open("rb") as opened:
            return os.fstat(opened.fileno()).st_size

    def exists(self, file: Place) -> bool:
        return _path(file).exists()

    def identity(self, file: Place) -> Hashable | None:
        try:
            found = _path(file).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def listed(self, folder: Place, suffix: str = "") -> list[Found]:
        found: list[Found] = []
        with suppress(FileNotFoundError), os.scandir(_path(folder)) as entries:
            for entry in entries:
                if entry.name.endswith(suffix):
                    with suppress(FileNotFoundError):  # gone since
                        if entry.is_file():
                            about = entry.stat()
                            found.append(Found(entry.name, about.st_size, about.st_mtime))
        return sorted(found, key=lambda each: each.name)

    def has_folder(self, folder: Place) -> bool:
        return _path(folder).is_dir()

    def folders(self, folder: Place) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(each.name for each in _path(folder).iterdir() if each.is_dir())
        return []

    def put_new(self, file: Place, body: bytes) -> bool:
        """Written whole under another name, made durable, and linked into its place, which fails if that is taken: no
        reader ever sees half a file, and of two writers one is told.
        """
        path = _path(file)
        # As delta-rs calls its own: programs that clean up know the name.
        temporary = path.with_name(f"_commit_{uuid.uuid4().hex}{path.suffix}.tmp")
        try:
            opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                while body:
                    body = body[os.write(opened, body) :]
                os.fsync(opened)
            finally:
                os.close(opened)
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        return True

    def put(self, file: Place, body: bytes) -> None:
        try:
            write_whole(_path(file), body.decode(), replace=True)
        except FileNotFoundError:
            self.make_folder(_path(file).parent)
            write_whole(_path(file), body.decode(), replace=True)

    def draft(self, file: Place) -> Draft:
        return LocalDraft(_path(file))

    def make_folder(self, folder: Place) -> None:
        """A folder is durable when its name in the folder above is; several may be new."""
        missing = [_path(folder)]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        missing[0].mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_folder(each.parent)

    def delete(self, file: Place) -> None:
        _path(file).unlink(missing_ok=True)

    def sync(self, *places: Place) -> None:
        for place in places:
            sync_file(_path(place))

    def now(self, folder: Place, here: float) -> float:
        return here

    def options(self) -> None:
        return None

    def trouble(self, error: Exception, where: Place) -> Exception | None:
        # delta-rs reports the operating system's error only as text.
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            return DiskFullError(
                f"no space left on the disk that holds {where}",
                hint="free some space or shorten log.retention; nothing was lost, work goes on when there is room",
            )
        return None


def _path(place: Place) -> Path:
    assert isinstance(place, Path)  # noqa: S101 - a url has another adapter
    return place
