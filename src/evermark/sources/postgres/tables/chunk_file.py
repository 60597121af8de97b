"""The file of a chunk of a table: its rows, with the table's description.

It is a file of the log but for what its writer cannot know: the batch, the version of the table, and the commit of the
mark. So the reader that comes to the mark need not write the rows again (`evermark.event_file`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evermark.event import EVENT, TAKEN
from evermark.event_file import BLANKS, EventFileWriter
from evermark.sources.chunk_file import disk_of, keep_draft, read_batches, unreadable, written_whole
from evermark.sources.copies import WAIT_S, Chunk, CopyStore, Fate, Mark, fate_of
from evermark.sources.postgres.lsn import Incarnation, Position, positions
from evermark.sources.postgres.tables.overlap import Overlap
from evermark.sources.postgres.tables.rows import CopiedRows, CopyMarks, ReadyFile
from evermark.storage import Place, storage_of

_COLUMNS = ("event_id", "stream", "key", "op", "payload", "flags")
_RELATION, _HASHED, _SOURCE = b"evermark.relation", b"evermark.hashed", b"evermark.source"
_BATCH_ROWS = 32 * 1024
_LOOK_EVERY_S = 0.02
# Where a row stands before its mark is committed: nowhere that could be.
NOWHERE = Position(Incarnation((1 << 64) - 1, (1 << 32) - 1), (1 << 64) - 1)
_PARTITION = 0


@dataclass(frozen=True)
class ChunkAbout:
    """`relation`: the table's description, as pgoutput writes it; `hashed`: the columns whose values are."""

    source: str
    relation: bytes
    hashed: frozenset[str]

    def as_metadata(self) -> dict[bytes, bytes]:
        # Metadata of a Parquet file is text.
        told = {_SOURCE: self.source, _RELATION: self.relation.hex(), _HASHED: json.dumps(sorted(self.hashed))}
        return {name: value.encode() for name, value in told.items()}

    @classmethod
    def of(cls, metadata: Mapping[bytes, bytes]) -> ChunkAbout:
        relation = bytes.fromhex(metadata[_RELATION].decode())
        return cls(metadata[_SOURCE].decode(), relation, frozenset(json.loads(metadata[_HASHED])))


def write_rows(path: Path, about: ChunkAbout, batches: Iterable[pa.RecordBatch]) -> int:
    """Durable when this returns; how many rows."""
    with written_whole(path):
        with disk_of(path):
            to = EventFileWriter(str(path), blanks=True, about=about.as_metadata())
        try:
            first = 1
            for batch in batches:  # an error of where they come from is none of this disk
                with disk_of(path):
                    to.write(_placed(batch, about.source, first))
                first += batch.num_rows
            with disk_of(path):
                to.flush()
        finally:
            with disk_of(path):
                to.close()
    return to.rows


def _placed(batch: pa.RecordBatch, source: str, first: int) -> pa.RecordBatch:
    """As rows of the log, with blanks."""
    rows = batch.num_rows
    ordinals = np.arange(first, first + rows, dtype=np.uint32)
    made = {
        "source": pa.repeat(source, rows),
        "partition": pa.repeat(pa.scalar(_PARTITION, pa.int32()), rows),
        "position": positions(NOWHERE.incarnation, np.full(rows, NOWHERE.lsn, np.uint64), ordinals),
    }
    for name, blank in BLANKS.items():
        made[name] = pa.repeat(pa.scalar(blank, pa.int64()).cast(EVENT.field(name).type), rows)
    arrays = []
    for field in EVENT:
        known = made.get(field.name)
        if known is None:
            known = batch.column(field.name) if field.name in _COLUMNS else pa.nulls(rows, field.type)
        arrays.append(known)
    return pa.RecordBatch.from_arrays(arrays, schema=EVENT)


def rewrite(draft: Path, path: Path, overlap: Overlap, moved_id: Callable[[str], str]) -> int | None:
    """What is left of a draft beside newer changes, under its own name; None: all of it."""
    if not overlap:
        keep_draft(draft, path)
        return None
    with pa.memory_map(str(draft)) as file:
        about = ChunkAbout.of(pq.read_metadata(file).metadata)
        rows = write_rows(path, about, (overlap.applied(batch, moved_id) for batch in _batches(file)))
    draft.unlink()
    return rows


def read_rows(path: Place, rows: int) -> CopiedRows:
    try:
        with _opened(path) as file:
            found, size = pq.read_metadata(file), file.size()
    except OSError as error:
        raise unreadable(path, type(error).__name__) from error
    except pa.ArrowInvalid:
        return _older_rows(path, rows)
    try:
        about = ChunkAbout.of(found.metadata or {})
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(path, type(error).__name__) from error
    if found.num_rows != rows:
        raise unreadable(path, f"it has {found.num_rows} rows instead of {rows}")

    def batches() -> Iterator[pa.RecordBatch]:
        with _opened(path) as file:
            yield from _batches(file)

    ready = ReadyFile(lambda: _opened(path), about.source, rows, size, str(NOWHERE))
    return CopiedRows(about.relation, about.hashed, batches, ready if rows else None)


def _older_rows(path: Place, rows: int) -> CopiedRows:
    """Of a program from before chunks were files of the log: an Arrow IPC file."""
    about, batches = read_batches(path, rows)
    try:
        return CopiedRows(about[_RELATION], frozenset(json.loads(about[_HASHED])), lambda: batches)
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(path, type(error).__name__) from error


def _opened(path: Place) -> pa.NativeFile:
    found = storage_of(path).readable(path)
    return pa.memory_map(found) if isinstance(found, str) else found


def _batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Few columns, in the words of TAKEN."""
    schema = pa.schema([TAKEN.field(name) for name in _COLUMNS])
    for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=list(_COLUMNS), use_threads=False):
        yield pa.RecordBatch.from_arrays([batch.column(name) for name in _COLUMNS], schema=schema)


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
