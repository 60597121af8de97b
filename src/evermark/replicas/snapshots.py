"""Snapshots of a table: Parquet files of one moment, with a digest each and one of the whole.

Chunks that a node takes from a peer are set aside as files as well, until all are there: an interrupted snapshot goes
on with the chunks that are missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evermark.disk import sync_folder, write_whole
from evermark.errors import BusyError, ConflictError, FormatError, NotFoundError
from evermark.replicas.base import Cut, ReplicaStore
from evermark.replicas.columns import NUMBER_MAX, checked, schema_of
from evermark.replicas.exchange import Chunk, Manifest
from evermark.replicas.values import Table

CHUNK_ROWS = 50_000
CHUNK_BYTES_MAX = 512 * 1024 * 1024
UNPACKED_BYTES_MAX = 4 * CHUNK_BYTES_MAX  # of a chunk: some hundred rows may have values of megabytes each
_MANIFEST, _FINISHED, _OFFERED = "manifest.json", "finished", "offered"
PIECE_BYTES = 8 * 1024 * 1024
_PACKERS = 2
_CODEC = "lz4_raw"


class Snapshots:
    """The snapshots that a node has made, in a folder, and what it takes of others'. The newest two of each table are
    kept."""

    def __init__(self, folder: Path, chunk_rows: int = CHUNK_ROWS, piece_bytes: int = PIECE_BYTES) -> None:
        self.folder, self._chunk_rows, self._piece_bytes = folder, chunk_rows, piece_bytes
        self._growing: dict[Path, list[_Growing]] = {}

    def make(self, store: ReplicaStore, table: str, now_ms: int) -> Manifest:
        """One consistent cut, under writes; bounded memory. `BusyError` while another is being made of the table."""
        with self._making(table):
            return self._made(store, table, now_ms)

    @contextmanager
    def _making(self, table: str) -> Iterator[None]:
        """A peer that waited in vain for a large snapshot asks again: that must not begin another one beside it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f".making.{table}", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(f"a snapshot of {table} is being made", hint="ask again in a while") from None
            for draft in self.folder.glob(f".{table}-*"):  # of a process that died: nobody else makes one now
                shutil.rmtree(draft, ignore_errors=True)
            yield

    def make_native(self, store: ReplicaStore, table: str, now_ms: int) -> Manifest:
        """As `make`, but as SQLite files (`native`), cut into pieces. `NotNative`"""
        with self._making(table):
            return self._made(store, table, now_ms, is_native=True)

    def _made(self, store: ReplicaStore, table: str, now_ms: int, *, is_native: bool = False) -> Manifest:
        name = f"{table}-{now_ms:013d}-{uuid.uuid4().hex[:8]}"
        draft = self.folder / f".{name}"
        draft.mkdir(parents=True)
        try:
            cut, chunks, files = (self._dumped if is_native else self._written)(store, table, draft)
            form = store.tables()[table].as_json()
            manifest = Manifest(name, table, form, cut.held, cut.clock, now_ms, tuple(chunks), files=files)
            manifest = replace(manifest, digest=whole_digest(manifest))
            write_whole(draft / _MANIFEST, json.dumps(manifest.as_json()))
            draft.rename(self.folder / name)
            sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        kept = [*self._of(table, is_native=False)[-2:], *self._of(table, is_native=True)[-2:]]
        for old in self.folder.glob(f"{table}-*"):  # also snapshots of another format
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)
        return manifest

    def _written(self, store: ReplicaStore, table: str, draft: Path) -> tuple[Cut, list[Chunk], tuple[int, ...]]:
        chunks: list[Chunk] = []
        with store.snapshot(table, self._chunk_rows) as (cut, lists):
            for rows in lists:
                data = encoded(rows)
                _write(draft / _file(len(chunks)), data)
                chunks.append(Chunk(rows.num_rows, len(data), hashlib.sha256(data).hexdigest()))
        return cut, chunks, ()

    def _dumped(self, store: ReplicaStore, table: str, draft: Path) -> tuple[Cut, list[Chunk], tuple[int, ...]]:
        packed: dict[Path, list[Chunk]] = {}
        with ThreadPoolExecutor(_PACKERS) as threads:

            def pack(file: Path) -> None:
                starts = range(0, file.stat().st_size, self._piece_bytes)
                names = [_piece(file, at) for at in range(len(starts))]
                packed[file] = list(threads.map(partial(_pack, file, self._piece_bytes), starts, names))
                file.unlink()

            cut, files = store.dump(table, draft, pack)
        chunks: list[Chunk] = []
        for file in files:  # a piece is called by its number, which nobody knew while other files were made
            for at, chunk in enumerate(packed[file]):
                _piece(file, at).rename(draft / _file(len(chunks), is_native=True))
                chunks.append(chunk)
        return cut, chunks, tuple(len(packed[file]) for file in files)

    def newest(self, table: str, *, is_native: bool = False) -> Manifest | None:
        found = [each for each in self.list() if each.table == table and bool(each.files) == is_native]
        return max(found, key=lambda manifest: manifest.id, default=None)

    def note_finished(self, manifest: Manifest, now_ms: int) -> None:
        """A snapshot is made: from now on it grows old."""
        self._note(manifest, _FINISHED, str(now_ms))

    def finished_ms(self, manifest: Manifest) -> int:
        try:
            return int((self.folder / manifest.id / _FINISHED).read_text())
        except (FileNotFoundError, ValueError):  # the process died just after it had made the snapshot
            return manifest.made_ms

    def note_offered(self, manifest: Manifest) -> None:
        """Somebody who still waited was told of this snapshot."""
        self._note(manifest, _OFFERED, "")

    def is_offered(self, manifest: Manifest) -> bool:
        return (self.folder / manifest.id / _OFFERED).exists()

    def _note(self, manifest: Manifest, name: str, text: str) -> None:
        with suppress(FileNotFoundError):  # it may be thrown away already
            write_whole(self.folder / manifest.id / name, text, replace=True)

    def list(self) -> list[Manifest]:
        """The snapshots that this version can give. What another version left is removed with the next."""
        found: list[Manifest] = []
        for path in sorted(self.folder.glob(f"[!.]*/{_MANIFEST}")):
            with suppress(FormatError):
                found.append(Manifest.from_json(json.loads(path.read_text())))
        return found

    def chunk(self, snapshot: str, number: int) -> bytes:
        for is_native in (False, True):
            path = self.folder / snapshot / _file(number, is_native=is_native)
            if path.parent.parent == self.folder and not snapshot.startswith(".") and path.is_file():
                return path.read_bytes()
        raise NotFoundError(f"there is no chunk {number} of {snapshot[:120]!r}", hint="ask for a new snapshot")

    def missing(self, peer: str, manifest: Manifest) -> Sequence[int]:
        """The chunks of a peer's snapshot that are still to be taken. What was taken of another one is thrown away."""
        folder = self._taken(peer, manifest)
        for old in self.folder.glob(f".taken.{peer}.{manifest.table}.*"):
            if old != folder:
                self._growing.pop(old, None)
                shutil.rmtree(old, ignore_errors=True)
        if not folder.exists():  # another process of this node may be done with it
            self._growing.pop(folder, None)
            folder.mkdir(parents=True, exist_ok=True)
        return [number for number in range(len(manifest.chunks)) if not _is_there(folder, manifest, number)]

    def take(self, peer: str, manifest: Manifest, number: int, data: bytes) -> None:
        """Set a chunk aside; refused if it is not what the manifest says. It is checked once more when it is read: one
        that a power cut spoilt is asked for again, so nothing need be synced here."""
        _undamaged(manifest, number, data)
        folder = self._taken(peer, manifest)
        draft = folder / f".{_chunk_file(manifest, number)}"
        draft.write_bytes(data)
        draft.rename(folder / _chunk_file(manifest, number))
        for file in self._growing_in(folder, manifest):
            file.take(number, data)

    def taken(self, peer: str, manifest: Manifest, table: Table) -> Iterator[pa.Table]:
        """The rows of a snapshot of which no chunk is missing."""
        folder = self._taken(peer, manifest)
        for number in range(len(manifest.chunks)):
            data = _set_aside(folder, manifest, number)
            try:
                rows = decoded(table, manifest, number, data)
            except FormatError:
                if not _is_undamaged(manifest, number, data):
                    _throw_away(folder, manifest, number)
                raise
            yield rows

    def taken_files(self, peer: str, manifest: Manifest) -> Sequence[Path]:
        """The files of a snapshot of which no chunk is missing, put together."""
        folder = self._taken(peer, manifest)
        files = self._growing_in(folder, manifest)
        with ThreadPoolExecutor(len(files)) as threads:
            return list(threads.map(_Growing.whole, files))

    def _growing_in(self, folder: Path, manifest: Manifest) -> Sequence[_Growing]:
        if folder not in self._growing:
            for left in folder.glob("*.db"):  # of a process that died
                _remove_unless_locked(left)
            ends = list(itertools.accumulate(manifest.files))
            spans = map(range, [0, *ends], ends)
            self._growing[folder] = [_Growing(folder, manifest, numbers) for numbers in spans]
        return self._growing[folder]

    def done_with(self, peer: str, manifest: Manifest) -> None:
        self._growing.pop(self._taken(peer, manifest), None)
        shutil.rmtree(self._taken(peer, manifest), ignore_errors=True)

    def _taken(self, peer: str, manifest: Manifest) -> Path:
        # By its digest, which was checked: what a peer calls its snapshot is no name for a folder.
        return self.folder / f".taken.{peer}.{manifest.table}.{manifest.digest}"

    def _of(self, table: str, *, is_native: bool) -> Sequence[Path]:
        found = [each.id for each in self.list() if each.table == table and bool(each.files) == is_native]
        return [self.folder / name for name in sorted(found)]


class _Growing:
    """A file that is put together while its pieces arrive, in their order; the pieces that an earlier process had set
    aside come from there. It is this process's own, and locked: another one may be taking the same snapshot."""

    def __init__(self, folder: Path, manifest: Manifest, numbers: range) -> None:
        self._folder, self._manifest, self._numbers = folder, manifest, numbers
        self._path = folder / f"{numbers.start:06d}.{uuid.uuid4().hex}.db"
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - as long as this lives
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._next, self._size = numbers.start, 0

    def take(self, number: int, data: bytes) -> None:
        """A piece that was checked. A piece out of turn is left for the end."""
        if number == self._next and number in self._numbers:
            left = memoryview(_unpacked(self._manifest, number, data))
            size = self._size + len(left)
            self._file.seek(self._size)  # behind the last that was written whole: the disk may have been full
            while left:
                left = left[self._file.write(left) :]
            self._next, self._size = number + 1, size

    def whole(self) -> Path:
        for number in range(self._next, self._numbers.stop):
            data = _set_aside(self._folder, self._manifest, number)
            try:
                _undamaged(self._manifest, number, data)
            except FormatError:
                _throw_away(self._folder, self._manifest, number)
                raise
            self.take(number, data)
        return self._path


def _file(number: int, *, is_native: bool = False) -> str:
    return f"{number:06d}.{'lz4' if is_native else 'parquet'}"


def _chunk_file(manifest: Manifest, number: int) -> str:
    return _file(number, is_native=bool(manifest.files))


def _is_there(folder: Path, manifest: Manifest, number: int) -> bool:
    """A power cut leaves files without their contents, which were not synced, and many of them at once."""
    try:
        return (folder / _chunk_file(manifest, number)).stat().st_size == manifest.chunks[number].size
    except FileNotFoundError:
        return False


def _set_aside(folder: Path, manifest: Manifest, number: int) -> bytes:
    try:
        return (folder / _chunk_file(manifest, number)).read_bytes()
    except FileNotFoundError:
        raise ConflictError(
            f"{manifest.table}: chunk {number} of the snapshot {manifest.id} was thrown away meanwhile",
            hint="another process of this node syncs with the same peer: it is tried again",
        ) from None


def _remove_unless_locked(path: Path) -> None:
    with suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _throw_away(folder: Path, manifest: Manifest, number: int) -> None:
    """A chunk that was spoilt by this disk: it is asked for again."""
    (folder / _chunk_file(manifest, number)).unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _piece(file: Path, at: int) -> Path:
    return file.with_name(f"{file.name}.{at}")


def _pack(file: Path, size: int, start: int, name: Path) -> Chunk:
    with open(file, "rb") as opened:
        opened.seek(start)
        piece = opened.read(size)
    data: bytes = len(piece).to_bytes(8, "big") + pa.compress(piece, codec=_CODEC, asbytes=True)
    _write(name, data)
    return Chunk(0, len(data), hashlib.sha256(data).hexdigest())


def _unpacked(manifest: Manifest, number: int, data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "big")
    try:
        if size > PIECE_BYTES:
            raise ValueError("it is too large")
        made: bytes = pa.decompress(data[8:], size, _CODEC, asbytes=True)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise FormatError(f"chunk {number} of {manifest.id} cannot be read: {error}", hint="see the peer") from None
    return made


def encoded(rows: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(rows, out, compression="zstd", compression_level=1)
    return out.getvalue()


def decoded(table: Table, manifest: Manifest, number: int, data: bytes) -> pa.Table:
    """The rows of a chunk that a peer sent; refused unless it is what the manifest says, and fits the table."""
    return decoded_chunk(table, manifest.id, number, manifest.chunks[number], data)


def decoded_chunk(table: Table, snapshot: str, number: int, wanted: Chunk, data: bytes) -> pa.Table:
    """As `decoded`, for callers that kept only what the manifest says of this chunk. Live rows come first."""
    if not _is_as_said(wanted, data):
        raise _damaged(snapshot, number)
    try:
        found = _unpacked_rows(schema_of(table), wanted.rows, data)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise FormatError(f"chunk {number} of {snapshot} cannot be read: {error}", hint="see the peer") from None
    if found.num_rows != wanted.rows:
        raise FormatError(f"chunk {number} of {snapshot} has {found.num_rows} rows", hint="make a new snapshot")
    return checked(table, found, "the peer is damaged")


def _unpacked_rows(schema: pa.Schema, rows: int, data: bytes) -> pa.Table:
    """The rows of a Parquet file, of which nothing is unpacked before it is known to become no larger than it may."""
    file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=schema.names)  # texts that come again stay one
    groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
    size = sum(group.column(at).total_uncompressed_size for group in groups for at in range(group.num_columns))
    if file.metadata.num_rows != rows or max(size, rows * len(schema) * 8) > UNPACKED_BYTES_MAX:
        raise ValueError(f"it has {file.metadata.num_rows} rows, and {size} bytes when it is unpacked")
    found = file.read(columns=schema.names).select(schema.names)
    if sum(map(_plain_bytes, found.columns)) > UNPACKED_BYTES_MAX:
        raise ValueError(f"it has more than {UNPACKED_BYTES_MAX} bytes when it is unpacked")
    found = found.cast(schema)
    found.validate(full=True)  # also that texts are UTF-8, which nothing else asks
    return found


def _plain_bytes(column: pa.ChunkedArray) -> int:
    """How large a column is when each of its texts stands for itself."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    sizes = [pc.sum(pc.binary_length(each.dictionary).take(each.indices)).as_py() or 0 for each in column.chunks]
    return sum(sizes)


def _undamaged(manifest: Manifest, number: int, data: bytes) -> None:
    if not _is_undamaged(manifest, number, data):
        raise _damaged(manifest.id, number)


def _damaged(snapshot: str, number: int) -> FormatError:
    return FormatError(f"chunk {number} of the snapshot {snapshot} is damaged", hint="it is asked for again")


def _is_undamaged(manifest: Manifest, number: int, data: bytes) -> bool:
    return _is_as_said(manifest.chunks[number], data)


def _is_as_said(wanted: Chunk, data: bytes) -> bool:
    return len(data) == wanted.size and hashlib.sha256(data).hexdigest() == wanted.digest


def whole_digest(manifest: Manifest) -> str:
    text = json.dumps(replace(manifest, digest="").as_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def verified(manifest: Manifest, table: Table) -> Manifest:
    if whole_digest(manifest) != manifest.digest:
        raise FormatError(f"the manifest of the snapshot {manifest.id} is damaged", hint="make a new snapshot")
    if manifest.table != table.name or Table.from_json(table.name, manifest.form) != table:
        raise FormatError(f"the snapshot {manifest.id} is of a table with other columns", hint="compare the tables")
    if sum(manifest.files) != (len(manifest.chunks) if manifest.files else 0) or len(manifest.files) not in (0, 2):
        raise FormatError(f"the snapshot {manifest.id} is of other files than it should", hint="see the peer")
    if not 0 <= manifest.clock < NUMBER_MAX:
        raise FormatError(f"the snapshot {manifest.id} has an impossible clock", hint="see the peer")
    if any(chunk.size > CHUNK_BYTES_MAX for chunk in manifest.chunks):
        raise FormatError(f"the snapshot {manifest.id} has chunks that are too large", hint="make it with smaller ones")
    return manifest
