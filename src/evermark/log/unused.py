"""Files of a log that are no longer, or never were, part of it: noted on disk with the time, and removed later.

A reader that was given a list of files may read them for an hour. The process that replaced a file may not live that
long: so its note says since when the file is unused, and whoever maintains the log next goes by it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evermark.disk import write_whole

FOLDER = "_unused"  # readers of Delta tables leave out names that begin so


@dataclass(frozen=True)
class _Note:
    names: tuple[str, ...]
    since: float
    orphans: bool


class UnusedFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._notes: dict[Path, _Note] = {}

    def names(self) -> set[str]:
        return {name for note in self._notes.values() for name in note.names}

    def look(self) -> None:
        """Learn of notes that other processes have written or removed."""
        found = set(self._folder.glob("*.json"))
        self._notes = {path: note for path, note in self._notes.items() if path in found}
        for path in found - self._notes.keys():
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # a note that cannot be read is none
                said = json.loads(path.read_text())
                names = tuple(Path(str(name)).name for name in said["files"])
                self._notes[path] = _Note(names, float(said["since"]), bool(said["orphans"]))

    def note(self, names: Sequence[str], since: float, *, orphans: bool = False) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{since:.0f}-{uuid.uuid4().hex}.json"
        write_whole(path, json.dumps({"since": since, "orphans": orphans, "files": list(names)}))
        self._notes[path] = _Note(tuple(names), since, orphans)

    def due(self, before: float) -> Iterator[tuple[tuple[str, ...], bool]]:
        """The names of files that are unused since before that time, and whether they are orphans. A note goes when
        its files were removed by the caller.
        """
        for path, note in [(path, note) for path, note in self._notes.items() if note.since <= before]:
            yield note.names, note.orphans
            del self._notes[path]
            path.unlink(missing_ok=True)
