"""Fields that leave the deployment as a hash, or not at all. Pure; no document is changed, a copy is made.

A path names a field as MongoDB does, `address.street`; through an array it means the field of every element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bson.dbref import DBRef

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
            found = {name: _changed_at(name.split("."), value, path, change) for name, value in values.items()}
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
    if isinstance(value, DBRef):
        value = dict(value.as_doc())
    if isinstance(value, list):
        return [_changed(each, path, change) for each in value]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    new = change(value[path[0]]) if len(path) == 1 else _changed(value[path[0]], path[1:], change)
    return {
        name: new if name == path[0] else each for name, each in value.items() if name != path[0] or new is not _GONE
    }


def _changed_at(parts: Sequence[str], value: Any, path: Sequence[str], change: _Change) -> Any:
    rests = _rests(parts, path)
    if () in rests:
        return change(value)
    for rest in sorted(rests):
        value = _changed(value, rest, change)
    return value


def _rests(parts: Sequence[str], path: Sequence[str]) -> set[tuple[str, ...]]:
    """What is left of the path where an update's name leads to; empty: for the field itself, or inside it.

    A number in the name is an array's index or a field's name, and the update does not say which: it is read as both.
    """
    if not parts or not path:
        return {tuple(path)}
    as_field = _rests(parts[1:], path[1:]) if parts[0] == path[0] else set()
    return as_field | (_rests(parts[1:], path) if parts[0].isdigit() else set())
