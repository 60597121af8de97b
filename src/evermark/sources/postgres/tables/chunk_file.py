"""The file of a chunk: rows of a copy between the task that writes them and the reader that meets their mark."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from evermark.disk import sync_file, sync_folder
from evermark.errors import DiskFullError, EvermarkError
from evermark.event import TAKEN
from evermark.sources.copies import Chunk, CopyStore, Fate, Mark, fate_of
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.tables.overlap import Overlap
from evermark.sources.postgres.tables.rows import CopiedRows, CopyMarks

_COLUMNS = ("event_id", "stream", "key", "op", "payload", "flags")
_SCHEMA = pa.schema([TAKEN.field(name) for name in _COLUMNS])
_RELATION, _HASHED = b"evermark.relation", b"evermark.hashed"
# A task has its mark read back and says so: a moment. One that takes longer has most likely died.
WAIT_S = 10.0
_LOOK_EVERY_S = 0.02


def write_rows(path: Path, relation: bytes, hashed: Collection[str], batches: Iterable[pa.RecordBatch]) -> int:
    """Durable when this returns; how many rows. `hashed`: the columns whose values are."""
    rows = 0
    schema = _SCHEMA.with_metadata({_RELATION: relation, _HASHED: json.dumps(sorted(hashed)).encode()})
    with _disk(path), pa.ipc.new_file(str(path), schema, options=_options()) as to:
        for batch in batches:
            some = batch.select(_COLUMNS)
            rows += some.num_rows
            if some.num_rows:
                to.write_batch(some)
    with _disk(path):
        sync_file(path)
        sync_folder(path.parent)
    return rows


def rewrite(draft: Path, path: Path, overlap: Overlap, moved_id: Callable[[str], str]) -> int | None:
    """What is left of a draft beside newer changes, under its own name; None: all of it."""
    if not overlap:
        with _disk(path):
            draft.rename(path)
            sync_folder(path.parent)
        return None
    with pa.memory_map(str(draft)) as data, pa.ipc.open_file(data) as found:
        relation, hashed = _about(found)
        batches = (overlap.applied(found.get_batch(n), moved_id) for n in range(found.num_record_batches))
        rows = write_rows(path, relation, hashed, batches)
    draft.unlink()
    return rows


def read_rows(path: Path, rows: int) -> CopiedRows:
    try:
        data = pa.memory_map(str(path))
        found = pa.ipc.open_file(data)
        relation, hashed = _about(found)
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, type(error).__name__) from error

    def batches() -> Iterator[pa.RecordBatch]:
        there = 0
        with data, found:
            for number in range(found.num_record_batches):
                batch = found.get_batch(number)
                there += batch.num_rows
                yield batch
        if there != rows:  # whoever takes these rows takes none of them, then
            raise _unreadable(path, f"it has {there} rows instead of {rows}")

    return CopiedRows(relation, hashed, batches())


def _about(found: pa.ipc.RecordBatchFileReader) -> tuple[bytes, frozenset[str]]:
    metadata = found.schema.metadata
    return metadata[_RELATION], frozenset(json.loads(metadata[_HASHED]))


class FileMarks(CopyMarks):
    """Answers from State and the files. Waits a while for a task that is about to be ready, then gives its attempt up:
    State decides which of the two came first, and the answer stays."""

    def __init__(self, copies: CopyStore, folder: Path, wait_s: float = WAIT_S) -> None:
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


def _options() -> pa.ipc.IpcWriteOptions:
    return pa.ipc.IpcWriteOptions(compression="lz4")


def _unreadable(path: Path, why: str) -> EvermarkError:
    return EvermarkError(
        f"{path}, rows of a copy, cannot be read: {why}",
        hint="bring the file back; without it these rows are lost to the log: `evermark source backfill` copies anew",
    )


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no space left to write {path}", hint="make room; it is tried again") from error
        raise EvermarkError(f"{path} cannot be written: {error.strerror}", hint="check the folder's rights") from error
