"""Snapshots of a table: Parquet files of one moment, with a digest each and one of the whole."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from evermark.disk import sync_folder, write_whole
from evermark.errors import FormatError, NotFoundError
from evermark.replicas.base import ReplicaStore, Row
from evermark.replicas.event import Version, image_text
from evermark.replicas.exchange import Chunk, Manifest
from evermark.replicas.values import Table

CHUNK_ROWS = 50_000
CHUNK_BYTES_MAX = 512 * 1024 * 1024
_MANIFEST = "manifest.json"
_SCHEMA = pa.schema(
    [
        ("record_id", pa.string()),
        ("hlc", pa.int64()),
        ("origin_node_id", pa.string()),
        ("origin_seq", pa.int64()),
        ("data", pa.string()),  # the image as JSON; null for a tombstone
    ]
)


class Snapshots:
    """The snapshots that a node has made, in a folder. The newest of a table is kept, and the one before it."""

    def __init__(self, folder: Path, chunk_rows: int = CHUNK_ROWS) -> None:
        self._folder, self._chunk_rows = folder, chunk_rows

    def make(self, store: ReplicaStore, table: str, now_ms: int) -> Manifest:
        """One consistent cut, under writes; bounded memory."""
        name = f"{table}-{now_ms:013d}-{uuid.uuid4().hex[:8]}"
        draft = self._folder / f".{name}"
        draft.mkdir(parents=True)
        try:
            chunks: list[Chunk] = []
            with store.snapshot(table, self._chunk_rows) as (cut, lists):
                for rows in lists:
                    data = encoded(rows)
                    with open(draft / f"{len(chunks):06d}.parquet", "wb") as file:
                        file.write(data)
                        file.flush()
                        os.fsync(file.fileno())
                    chunks.append(Chunk(len(rows), len(data), hashlib.sha256(data).hexdigest()))
            form = store.tables()[table].as_json()
            manifest = Manifest(name, table, form, cut.held, cut.clock, now_ms, tuple(chunks))
            manifest = replace(manifest, digest=whole_digest(manifest))
            write_whole(draft / _MANIFEST, json.dumps(manifest.as_json()))
            draft.rename(self._folder / name)
            sync_folder(self._folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        for old in self._of(table)[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        return manifest

    def newest(self, table: str) -> Manifest | None:
        found = self._of(table)
        return None if not found else Manifest.from_json(json.loads((found[-1] / _MANIFEST).read_text()))

    def list(self) -> list[Manifest]:
        found = sorted(path for path in self._folder.glob("[!.]*") if (path / _MANIFEST).exists())
        return [Manifest.from_json(json.loads((path / _MANIFEST).read_text())) for path in found]

    def chunk(self, snapshot: str, number: int) -> bytes:
        path = self._folder / snapshot / f"{number:06d}.parquet"
        if path.parent.parent != self._folder or snapshot.startswith(".") or not path.is_file():
            raise NotFoundError(f"there is no chunk {number} of {snapshot[:120]!r}", hint="ask for a new snapshot")
        return path.read_bytes()

    def _of(self, table: str) -> Sequence[Path]:
        found = [manifest.id for manifest in self.list() if manifest.table == table]
        return [self._folder / name for name in sorted(found)]


def encoded(rows: Sequence[Row]) -> bytes:
    columns = [
        [row.record_id for row in rows],
        [row.version.hlc for row in rows],
        [row.version.origin for row in rows],
        [row.version.seq for row in rows],
        [image_text(row.image) for row in rows],
    ]
    made = pa.table([pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], _SCHEMA)
    out = io.BytesIO()
    pq.write_table(made, out, compression="zstd")
    return out.getvalue()


def decoded(table: Table, manifest: Manifest, number: int, data: bytes) -> list[Row]:
    """The rows of a chunk that a peer sent; refused unless it is what the manifest says, and fits the table."""
    wanted = manifest.chunks[number]
    if len(data) != wanted.size or hashlib.sha256(data).hexdigest() != wanted.digest:
        raise FormatError(f"chunk {number} of the snapshot {manifest.id} is damaged", hint="it is asked for again")
    try:
        found = pq.read_table(pa.BufferReader(data)).select(_SCHEMA.names).cast(_SCHEMA)
    except (pa.ArrowException, KeyError) as error:
        raise FormatError(f"chunk {number} of {manifest.id} cannot be read: {error}", hint="see the peer") from None
    if found.num_rows != wanted.rows:
        raise FormatError(f"chunk {number} of {manifest.id} has {found.num_rows} rows", hint="make a new snapshot")
    rows = []
    for record, hlc, origin, seq, data_text in zip(*(column.to_pylist() for column in found.columns), strict=True):
        table.checked_record(record)
        image = None if data_text is None else table.checked(json.loads(data_text), record)
        rows.append(Row(record, Version(hlc, origin, seq), image))
    return rows


def whole_digest(manifest: Manifest) -> str:
    text = json.dumps(replace(manifest, digest="").as_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def verified(manifest: Manifest, table: Table) -> Manifest:
    if whole_digest(manifest) != manifest.digest:
        raise FormatError(f"the manifest of the snapshot {manifest.id} is damaged", hint="make a new snapshot")
    if manifest.table != table.name or Table.from_json(table.name, manifest.form) != table:
        raise FormatError(f"the snapshot {manifest.id} is of a table with other columns", hint="compare the tables")
    if any(chunk.size > CHUNK_BYTES_MAX for chunk in manifest.chunks):
        raise FormatError(f"the snapshot {manifest.id} has chunks that are too large", hint="make it with smaller ones")
    return manifest
