"""Fields that leave the deployment as a hash, or not at all. Pure; no document is changed, a copy is made.

A path names a field as MongoDB does, `address.street`; through an array it means the field of every element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evermark.sources.mongo.values import as_json

_GONE = object()
_Change = Callable[[Any], Any]


@dataclass(frozen=True)
class HiddenFields:
    exclude: tuple[str, ...] = ()
    hash: tuple[str, ...] = ()

    def in_document(self, document: Any) -> Any:
        for path, change in self._changes():
            document = _changed(document, path, change)
        return document

    def in_update(self, description: Any) -> Any:
        """What an update without a document tells: new values by path, an array's index among its parts."""
        values = description.get("updatedFields") if isinstance(description, dict) else None
        if values is None:
            return description
        for path, change in self._changes():
            found = {name: _changed_at(name, value, path, change) for name, value in values.items()}
            values = {name: value for name, value in found.items() if value is not _GONE}
        return {**description, "updatedFields": values}

    def _changes(self) -> list[tuple[Sequence[str], _Change]]:
        gone: list[tuple[Sequence[str], _Change]] = [(path.split("."), lambda _: _GONE) for path in self.exclude]
        return [*gone, *((path.split("."), _hashed) for path in self.hash)]


def _hashed(value: Any) -> Any:
    if value is None:
        return None
    text = value if isinstance(value, str) else as_json(value)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _changed(value: Any, path: Sequence[str], change: _Change) -> Any:
    if isinstance(value, list):
        return [_changed(each, path, change) for each in value]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    new = change(value[path[0]]) if len(path) == 1 else _changed(value[path[0]], path[1:], change)
    return {
        name: new if name == path[0] else each for name, each in value.items() if name != path[0] or new is not _GONE
    }


def _changed_at(name: str, value: Any, path: Sequence[str], change: _Change) -> Any:
    parts = [part for part in name.split(".") if not part.isdigit()]
    if parts[: len(path)] == list(path):
        return change(value)
    if parts == list(path[: len(parts)]):
        return _changed(value, path[len(parts) :], change)
    return value
