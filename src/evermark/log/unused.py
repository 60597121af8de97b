"""Files of a log that are no longer, or never were, part of it: noted on disk with the time, and removed later.

A reader that was given a list of files may read them for an hour. The process that replaced a file may not live that
long: so its note says since when the file is unused, and the next maintenance goes by it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from evermark.storage import Place, storage_of

FOLDER = "_unused"  # readers of Delta tables leave out names that begin so


@dataclass(frozen=True)
class _Note:
    names: tuple[str, ...]
    since: float
    orphans: bool


class UnusedFiles:
    def __init__(self, folder: Place) -> None:
        self._folder = folder / FOLDER
        self._notes: dict[str, _Note] = {}  # by the name of the note

    def names(self) -> set[str]:
        return {name for note in self._notes.values() for name in note.names}

    def look(self) -> None:
        """Learn of notes that other processes have written or removed."""
        storage = storage_of(self._folder)
        found = {each.name for each in storage.listed(self._folder, ".json")}
        self._notes = {name: note for name, note in self._notes.items() if name in found}
        for note in found - self._notes.keys():
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # a note that cannot be read is none
                said = json.loads(storage.read(self._folder / note))
                names = tuple(PurePath(str(name)).name for name in said["files"])
                self._notes[note] = _Note(names, float(said["since"]), bool(said["orphans"]))

    def note(self, names: Sequence[str], since: float, *, orphans: bool = False) -> None:
        storage, name = storage_of(self._folder), f"{since:.0f}-{uuid.uuid4().hex}.json"
        body = {"since": since, "orphans": orphans, "files": list(names)}
        storage.put(self._folder / name, json.dumps(body).encode())
        self._notes[name] = _Note(tuple(names), since, orphans)

    def due(self, before: float) -> Iterator[tuple[tuple[str, ...], bool]]:
        """The names of files that are unused since before that time, and whether they are orphans. A note goes when
        its files were removed by the caller.
        """
        for name, note in [(name, note) for name, note in self._notes.items() if note.since <= before]:
            yield note.names, note.orphans
            del self._notes[name]
            storage_of(self._folder).delete(self._folder / name)
