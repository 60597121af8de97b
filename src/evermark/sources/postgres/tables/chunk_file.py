"""The file of a chunk of a table: its rows, with the table's description."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from evermark.event import TAKEN
from evermark.sources.chunk_file import draft_of, keep_draft, read_batches, unreadable, write_batches
from evermark.sources.copies import WAIT_S, Chunk, CopyStore, Fate, Mark, fate_of
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.tables.overlap import Overlap
from evermark.sources.postgres.tables.rows import CopiedRows, CopyMarks
from evermark.storage import Place

_COLUMNS = ("event_id", "stream", "key", "op", "payload", "flags")
_SCHEMA = pa.schema([TAKEN.field(name) for name in _COLUMNS])
_RELATION, _HASHED = b"evermark.relation", b"evermark.hashed"
_LOOK_EVERY_S = 0.02


def write_rows(path: Path, relation: bytes, hashed: Collection[str], batches: Iterable[pa.RecordBatch]) -> int:
    """Durable when this returns; how many rows. `hashed`: the columns whose values are."""
    about = {_RELATION: relation, _HASHED: json.dumps(sorted(hashed)).encode()}
    return write_batches(path, _SCHEMA.with_metadata(about), batches)


def rewrite(draft: Path, path: Path, overlap: Overlap, moved_id: Callable[[str], str]) -> int | None:
    """What is left of a draft beside newer changes, under its own name; None: all of it."""
    if not overlap:
        keep_draft(draft, path)
        return None
    with draft_of(draft) as (about, batches):
        return write_rows(path, *_about(about), (overlap.applied(batch, moved_id) for batch in batches))


def read_rows(path: Place, rows: int) -> CopiedRows:
    about, batches = read_batches(path, rows)
    try:
        return CopiedRows(*_about(about), batches)
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(path, type(error).__name__) from error


def _about(metadata: Mapping[bytes, bytes]) -> tuple[bytes, frozenset[str]]:
    return metadata[_RELATION], frozenset(json.loads(metadata[_HASHED]))


class FileMarks(CopyMarks):
    """Answers from State and the files. Waits a while for a task that is about to be ready, then gives its attempt up:
    State decides which of the two came first, and the answer stays."""

    def __init__(self, copies: CopyStore, folder: Place, wait_s: float = WAIT_S) -> None:
        self._copies, self._folder, self._wait_s = copies, folder, wait_s

    def rows_at(self, mark: Mark, lsn: int) -> CopiedRows | None:
        chunk = self._decided(mark)
        # A message that somebody sent again is no mark.
        if chunk is None or Position.parse(chunk.position).lsn != lsn:
            return None
        return read_rows(self._folder / chunk.file, chunk.rows)

    def _decided(self, mark: Mark, clock: Callable[[], float] = time.monotonic) -> Chunk | None:
        give_up_at = clock() + self._wait_s
        while True:
            chunk = self._copies.chunk(mark.copy, mark.number)
            fate = fate_of(chunk, mark.attempt)
            if fate is not Fate.PENDING:
                return chunk if fate is Fate.READY else None
            if clock() >= give_up_at:
                self._copies.give_up(mark)
            else:
                time.sleep(_LOOK_EVERY_S)
