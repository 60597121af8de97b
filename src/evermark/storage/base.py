"""The port: files at places, which are paths of a local disk or urls of an object store.

Contract (checked by `evermark.testing.contracts.storage.StorageContract` over every adapter):

- A file is there whole or not at all. Only `put` replaces one; `put_new` never does.
- Of several `put_new` of one place exactly one succeeds, also between machines. Bodies of different writers differ: a
  store whose answer was lost is asked again, and a file that has our body is ours.
- A file, once it was put or its draft was finished, has durable contents; its name is durable when its folder was
  synced, and the folder's own name when the folder above was. On an object store both are durable at once, and `sync`
  has nothing to do.
- What is put can be listed and read at once, by everybody.
- `delete` of what is not there succeeds. `read`, `size` and `readable` of what is not there raise `FileNotFoundError`.
- All other trouble is an `EvermarkError` on an object store, never with a credential in its text, and an `OSError` on a
  disk, which `trouble_is_said` turns into ours where it is a full disk.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")
_URL = re.compile(rf"({'|'.join(SCHEMES)})://([^/]+)/*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Url:
    """A place in an object store. A value: safe to show and to send, for it says nothing of who may read it."""

    root: str  # scheme and bucket: s3://acme
    key: str = ""

    def __truediv__(self, name: str) -> Url:
        return Url(self.root, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(self.root, self.key.rpartition("/")[0])


Place = Path | Url


def is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


def place_of(text: str | Place) -> Place:
    """A path, or the url of an object store, as it is written in `log.path`."""
    if not isinstance(text, str):
        return text
    found = _URL.fullmatch(text)
    return Url(f"{found[1]}://{found[2]}", found[3].rstrip("/")) if found else Path(text)


@dataclass(frozen=True)
class Found:
    """A file as it was listed."""

    name: str
    size: int
    modified: float  # by the clock of `Storage.now`


class Draft(Protocol):
    """A file that is being written."""

    @property
    def sink(self) -> Any:
        """What a writer of pyarrow takes: a path, or a file to write to."""

    def finish(self) -> int:
        """What was written is the file, its contents durable; its size. The writer was closed before."""

    def discard(self) -> None:
        """There is no file. May be called at any time."""


class Storage(Protocol):
    durable_at_once: bool  # nothing is ever there in part, not after a power cut either

    def read(self, file: Place) -> bytes: ...

    def readable(self, file: Place) -> str | pa.NativeFile:
        """What a reader of pyarrow takes; of a large file only what is asked for is fetched."""

    def size(self, file: Place) -> int: ...

    def exists(self, file: Place) -> bool: ...

    def identity(self, file: Place) -> Hashable | None:
        """Tells a file that is never replaced from another one that has its name since; None: there is none."""

    def listed(self, folder: Place, suffix: str = "") -> list[Found]:
        """The files of a folder whose names end so, in the order of their names; none where there is no folder."""

    def has_folder(self, folder: Place) -> bool: ...

    def folders(self, folder: Place) -> list[str]:
        """The names of the folders in it, in order."""

    def put_new(self, file: Place, body: bytes) -> bool:
        """Whether this is the file now; False: there is another."""

    def put(self, file: Place, body: bytes) -> None:
        """A small text. Its name and its folder are durable, too."""

    def draft(self, file: Place) -> Draft: ...

    def make_folder(self, folder: Place) -> None: ...

    def delete(self, file: Place) -> None: ...

    def sync(self, *places: Place) -> None:
        """Make contents of files and names in folders durable, in this order."""

    def now(self, folder: Place, here: float) -> float:
        """The time by which `Found.modified` is to be judged, where it is `here` by our own clock."""

    def options(self) -> dict[str, str] | None:
        """How delta-rs reaches this storage: credentials in the open, for this process alone."""

    def trouble(self, error: Exception, where: Place) -> Exception | None:
        """The error in words of ours; None: it says enough, or is no trouble of the storage's."""


@contextmanager
def trouble_of(storage: Storage, where: Place) -> Iterator[None]:
    """Turn what the storage or a library above it raises into an error that says where and what to do."""
    try:
        yield
    except Exception as error:
        said = storage.trouble(error, where)
        if said is None:
            raise
        # What a store's library says may tell who asked: it is not for tracebacks either.
        raise said from (error if isinstance(where, Path) else None)
