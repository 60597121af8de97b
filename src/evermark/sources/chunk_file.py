"""The file of a chunk: rows of a copy between the task that writes them and the reader that comes to them."""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from evermark import failpoint
from evermark.disk import sync_file, sync_folder
from evermark.errors import BusyError, DiskFullError, EvermarkError
from evermark.sources.copies import ChunkWork, CopyStore, Mark
from evermark.storage import Place, storage_of, trouble_is_said

# Of an attempt, its draft and its file: writes the file; where it stands and how many rows it has. None: given up.
WriteAttempt = Callable[[Mark, Path, Path], tuple[str, int] | None]


def written_in_turn(
    works: Sequence[ChunkWork], write: Callable[[ChunkWork], bool], until_s: float, reader: str
) -> Iterator[ChunkWork]:
    """`Copying.write`: chunks one after another, each yielded before it is begun."""
    over_at = time.monotonic() + until_s
    for number, work in enumerate(works):
        if number and time.monotonic() > over_at:
            break
        yield work
        if not write(work):
            raise BusyError(
                f"a chunk of {work.stream} was not ready when {reader} had waited for it",
                hint="it is written again; if that goes on, the disk or the server is too slow",
            )


def written_attempt(copies: CopyStore, work: ChunkWork, folder: Place, epoch: int, write: WriteAttempt) -> bool:
    """A new attempt of a chunk, ready; False: it was given up by a reader meanwhile."""
    mark = Mark(work.copy, work.number, copies.begin(work.copy, work.number, epoch))
    failpoint.hit("copy.begun")
    place = folder / mark.file
    written = _written_here(mark, place, write) if isinstance(place, Path) else _uploaded(mark, place, write)
    if written is None:
        return False
    position, rows = written
    if not copies.ready(mark, position, rows, epoch):
        storage_of(place).delete(place)
        return False
    failpoint.hit("copy.ready")
    return True


def _written_here(mark: Mark, path: Path, write: WriteAttempt) -> tuple[str, int] | None:
    draft = path.with_suffix(".draft")
    try:
        return write(mark, draft, path)
    finally:
        draft.unlink(missing_ok=True)  # what is left of a failed attempt would fill a full disk further


def _uploaded(mark: Mark, place: Place, write: WriteAttempt) -> tuple[str, int] | None:
    """Written on the local disk, where a draft can be read again, and put when it is whole."""
    with tempfile.TemporaryDirectory(prefix="evermark-copy-") as folder:
        path = Path(folder) / mark.file
        written = _written_here(mark, path, write)
        if written is not None:
            with trouble_is_said(place), path.open("rb") as file:
                draft = storage_of(place).draft(place)
                try:
                    shutil.copyfileobj(file, draft.sink)
                    draft.finish()
                except BaseException:
                    draft.discard()
                    raise
    return written


@contextmanager
def written_whole(path: Path) -> Iterator[None]:
    """The file that is written meanwhile is durable afterwards; or it is not there, if that failed."""
    try:
        yield
        with disk_of(path):
            sync_file(path)
            sync_folder(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)  # each attempt has a name of its own: nobody would come back for a half of it
        raise


def write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Durable when this returns; how many rows."""
    rows = 0
    with written_whole(path):
        with disk_of(path):
            to = pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        try:
            for batch in batches:  # an error of where they come from is none of this disk
                some = batch.select(schema.names)
                rows += some.num_rows
                if some.num_rows:
                    with disk_of(path):
                        to.write_batch(some)
        finally:
            with disk_of(path):
                to.close()
    return rows


def keep_draft(draft: Path, path: Path) -> None:
    """A draft as it is, under the name of the file."""
    with disk_of(path):
        draft.rename(path)
        sync_folder(path.parent)


@contextmanager
def draft_of(draft: Path) -> Iterator[tuple[Mapping[bytes, bytes], Iterator[pa.RecordBatch]]]:
    """What a draft says of itself, and its rows. It is gone afterwards."""
    with pa.memory_map(str(draft)) as data, pa.ipc.open_file(data) as found:
        yield found.schema.metadata, (found.get_batch(number) for number in range(found.num_record_batches))
    draft.unlink()


def read_batches(path: Place, rows: int) -> tuple[Mapping[bytes, bytes], Iterator[pa.RecordBatch]]:
    """What the file says of itself, and its rows, of which there must be so many."""
    try:
        data: Any = pa.memory_map(str(path)) if isinstance(path, Path) else storage_of(path).readable(path)
        found = pa.ipc.open_file(data)
    except (OSError, pa.ArrowInvalid) as error:
        raise unreadable(path, type(error).__name__) from error

    def batches() -> Iterator[pa.RecordBatch]:
        there = 0
        with data, found:
            for number in range(found.num_record_batches):
                batch = found.get_batch(number)
                there += batch.num_rows
                yield batch
        if there != rows:  # the caller takes none of these rows, then
            raise unreadable(path, f"it has {there} rows instead of {rows}")

    return found.schema.metadata or {}, batches()


def unreadable(path: Place, why: str) -> EvermarkError:
    return EvermarkError(
        f"{path}, rows of a copy, cannot be read: {why}",
        hint="bring the file back; without it these rows are lost to the log: `evermark source backfill` copies anew",
    )


@contextmanager
def disk_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no space left to write {path}", hint="make room; it is tried again") from error
        raise EvermarkError(f"{path} cannot be written: {error.strerror}", hint="check the folder's rights") from error
