"""Which adapter a place has. Stores are opened once a process, when they are first used: never before a fork."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from evermark.storage.access import access_to
from evermark.storage.base import Place, Storage, is_url, place_of, trouble_of
from evermark.storage.local import LocalDisk

if TYPE_CHECKING:
    import pyarrow as pa

_LOCAL = LocalDisk()
_OPENED: dict[tuple[object, ...], Storage] = {}


def storage_of(place: Place) -> Storage:
    if isinstance(place, Path):
        return _LOCAL
    access = access_to(place.root)
    # The process, because connections do not survive a fork.
    known = (os.getpid(), place.root, access)
    if known not in _OPENED:
        from evermark.storage.objects import ObjectStore

        _OPENED[known] = ObjectStore(place.root, access)
    return _OPENED[known]


def trouble_is_said(where: Place) -> AbstractContextManager[None]:
    """Trouble of the disk or store that holds this becomes an error that says where and what to do."""
    return trouble_of(storage_of(where), where)


def readable(path: str) -> str | pa.NativeFile:
    """What a reader of Parquet takes for a file of the log, whose path or url this is."""
    if not is_url(path):
        return path
    place = place_of(path)
    return storage_of(place).readable(place)
