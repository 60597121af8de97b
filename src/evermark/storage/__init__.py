"""Where the log is kept: a folder of a local disk, or a bucket of an object store. `base.py` has the port."""

from __future__ import annotations

from evermark.storage.base import Place, Storage, Url, is_url, place_of
from evermark.storage.local import LocalDisk
from evermark.storage.registry import readable, storage_of, trouble_is_said

__all__ = ["LocalDisk", "Place", "Storage", "Url", "is_url", "place_of", "readable", "storage_of", "trouble_is_said"]
