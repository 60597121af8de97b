"""Copying the documents of collections beside the change stream: what a Spark task does, and how a collection is cut.

For each chunk a task reads the documents of its keys as they were at one cluster time, into a draft. Then State places
the chunk: behind that time and behind all that the stream's reader may have read. What was changed since the draft, up
to the cluster time of the place, is read once more, as of that time. So the chunk shows its documents exactly as they
are where it stands, whatever the events in front of it tell. Nothing is written to the deployment.

Keys are compared as the index over `_id` orders them, across all types of BSON, and kept as the bytes they came in.
"""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pyarrow.compute as pc
from bson import Code, Timestamp, json_util
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure

from evermark import failpoint
from evermark.errors import BusyError, GapError
from evermark.event import Op
from evermark.sources.chunk_file import draft_of, keep_draft, write_batches, written_attempt, written_in_turn
from evermark.sources.copies import (
    Bounds,
    Chunk,
    ChunkWork,
    Copying,
    CopyPlace,
    CopyStore,
    KeyText,
    Mark,
    row_id,
    rows_of_chunk,
)
from evermark.sources.mongo.changes import Change, Changes
from evermark.sources.mongo.connect import Client, open_client, translated, where
from evermark.sources.mongo.copied import SCHEMA, ReadHorizon, Standing, about, firsts
from evermark.sources.mongo.deployment import look_at
from evermark.sources.mongo.events import partition_for, shown_bytes, undecoded
from evermark.sources.mongo.positions import Position, room_for
from evermark.sources.mongo.target import MongoTarget
from evermark.sources.mongo.values import OPTIONS, UNDECODED, as_json, decoded, key_text
from evermark.storage import Place, storage_of

_DOCUMENTS_MAX = 20_000  # of a chunk: a document takes several times as long as a row of a table
_BATCH_ROWS = 2000
_BATCH_BYTES = 8 * 1024 * 1024
_AGAIN_AT_ONCE = 500  # documents that were changed meanwhile, in one question
_CHANGED_MAX = 1_000_000
# The cluster time of a deployment where nothing happens moves every ten seconds.
_CLOSED_WAIT_S = 25.0
_BRIEF_MS = 20
_BY_ID = {"_id": 1}
# The documents of that time are gone, or the collection itself is another one since; a new attempt takes a new time.
_PASSES = (175, 239, 246)
# JavaScript at the server, and what is the server's own.
_REFUSED = ("$where", "$function", "$accumulator", "$_internal")
_LENIENT = OPTIONS.with_options(unicode_decode_error_handler="replace")
_CHANGE_OPS = (Op.INSERT, Op.UPDATE, Op.DELETE)


class DocumentsCopying(Copying):
    """Picklable; `horizon` stays with the reader."""

    def __init__(self, target: MongoTarget, place: CopyPlace, horizon: ReadHorizon | None = None) -> None:
        self._target, self._place, self._horizon = target, place, horizon
        self.folder = place.folder

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._target, self._place)

    @property
    def streams(self) -> Sequence[str]:
        return self._target.collections

    @property
    def wanted(self) -> Sequence[str]:
        return self.streams if self._place.all_wanted else ()

    @property
    def partitions(self) -> Sequence[int]:
        return range(self._target.partitions)

    def reads(self, stream: str) -> bool:
        return self._target.wants(stream)

    def stream(self, text: str) -> str:
        database = self._target.database
        found = text if database is None or text in self.streams else f"{database}.{text}"
        if not all(found.partition(".")) or not self.reads(found):
            named = ", ".join(self.streams) or f"those of {database or 'all databases, written database.collection'}"
            raise ValueError(f"{text} is no collection of this source, which reads {named}")
        return found

    def condition(self, text: str) -> str:
        condition_of(text)
        return text

    def plan(self, stream: str) -> list[Bounds]:
        """Up to the greatest key there is: documents behind it come later, and the stream tells them."""
        place = where(self._target.url.open())
        database, _, collection = stream.partition(".")
        with closing(open_client(self._target.url)) as client, _reading(place, f"looking at {stream}"):
            said = client[database].command("collStats", collection)
            most = min(_DOCUMENTS_MAX, self._place.chunk_rows_max)
            rows = rows_of_chunk(int(said.get("size", 0)), int(said.get("count", 0)), most)
            return list(pairwise([None, *_edges(client, stream, rows)]))

    def watch(self, epoch: int | None) -> bool:
        return self._horizon is not None and self._horizon.watch(epoch)

    def write(self, works: Sequence[ChunkWork], epoch: int, until_s: float) -> Iterator[ChunkWork]:
        storage_of(self.folder).make_folder(self.folder)
        with closing(self._place.open()) as copies, closing(open_client(self._target.url)) as client:
            writer = ChunkWriter(client, self._target, copies, self.folder, epoch)
            yield from written_in_turn(works, writer.write, until_s, "the reader of changes")

    def compare(self, position: str, checkpoint: str) -> bool | None:
        return checkpoint > position

    def firsts(self, chunk: Chunk) -> Mapping[int, str]:
        return firsts(Standing(chunk.position, chunk.file, chunk.rows), self.folder)


class ChunkWriter:
    """One task's connection. Chunks are written one after another."""

    def __init__(self, client: Client, target: MongoTarget, copies: CopyStore, folder: Place, epoch: int) -> None:
        self._client, self._target, self._copies, self._folder, self._epoch = client, target, copies, folder, epoch
        self._at = where(target.url.open())

    def write(self, work: ChunkWork) -> bool:
        """Whether the chunk is ready; if not, its attempt was given up by a reader meanwhile."""
        return written_attempt(self._copies, work, self._folder, self._epoch, partial(self._written, work))

    def _written(self, work: ChunkWork, mark: Mark, draft: Path, path: Path) -> tuple[str, int] | None:
        shown_at, rows = self._scan(work, draft)
        failpoint.hit("copy.scanned")
        position = self._place(mark, shown_at, rows)
        if position is None:
            return None
        failpoint.hit("copy.marked")
        time_at = Position.parse(position).time
        changed = self._changed(work.stream, shown_at, time_at)
        if changed:
            rows = self._renewed(work, draft, path, changed, time_at)
        else:
            keep_draft(draft, path)
        return position, rows

    def _scan(self, work: ChunkWork, draft: Path) -> tuple[int, int]:
        """The documents of the chunk into a draft: as of which cluster time, and how many."""
        with _reading(self._at, f"copying {work.stream}"):
            shown_at = look_at(self._client, self._at).time
            query: dict[str, Any] = _between(work.bounds)
            if work.condition:
                query = {"$and": [query, condition_of(work.condition)]}
            found = _found(self._client, work.stream, query, shown_at, hint=_BY_ID)
            return shown_at, write_batches(draft, self._schema(work.stream), self._batches(work, found))

    def _place(self, mark: Mark, shown_at: int, rows: int) -> str | None:
        room, partitions = max(1, rows), self._target.partitions

        def choose(horizon: str | None) -> tuple[str, str]:
            if horizon is None:
                raise BusyError("no chunk can be placed: reading has not said how far it is", hint="it is tried again")
            at = room_for(room, shown_at, Position.parse(horizon))
            return at.text(partitions), at.after(room).text(partitions)

        return self._copies.place(mark, choose, self._epoch)

    def _changed(self, stream: str, since: int, upto: int) -> dict[str, Any]:
        """The documents that were changed behind one cluster time, up to another: the `_id` of each, by key."""
        found: dict[str, Any] = {}
        if upto <= since:
            return found
        target, give_up_at = replace(self._target, collections=(stream,)), time.monotonic() + _CLOSED_WAIT_S
        start = Position(since + 1)
        try:
            with Changes(self._client, self._at, target, start, thin=True, await_ms=_BRIEF_MS) as changes:
                while changes.whole_to.closed < upto:
                    change = changes.next()
                    if change is not None and change.position.time <= upto:
                        self._note(change, stream, found)
                    elif change is None and time.monotonic() > give_up_at:
                        raise BusyError(f"copying {stream}: the deployment at {self._at} is behind its stream's reader")
        except GapError as error:
            raise BusyError(f"copying {stream}: {error.message}", hint="it is tried again, from now") from error
        return found

    def _note(self, change: Change, stream: str, found: dict[str, Any]) -> None:
        for row in change.rows(self._target):
            if row.stream != stream:
                continue  # the other name of a collection that was renamed, or a database that was dropped
            if row.op not in _CHANGE_OPS or row.key is None or len(found) >= _CHANGED_MAX:
                raise BusyError(f"copying {stream}: it was dropped, renamed or filled anew meanwhile")
            found[row.key] = RawBSONDocument(change.event.sent)["documentKey"]["_id"]

    def _renewed(self, work: ChunkWork, draft: Path, path: Path, changed: Mapping[str, Any], shown_at: int) -> int:
        """The draft, with changed documents as they are now, and without documents that are gone."""
        keys = pa.array(list(changed), pa.string())
        stale: list[Any] = []

        def batches(old: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in old:
                is_stale = pc.is_in(batch.column("key"), value_set=keys)
                stale.extend(changed[key] for key in batch.column("key").filter(is_stale).to_pylist())
                yield batch.filter(pc.invert(is_stale))
            for first in range(0, len(stale), _AGAIN_AT_ONCE):
                query = {"$or": [{"_id": {"$eq": each}} for each in stale[first : first + _AGAIN_AT_ONCE]]}
                yield from self._batches(work, _found(self._client, work.stream, query, shown_at))

        with _reading(self._at, f"copying {work.stream}"), draft_of(draft) as (_, old):
            return write_batches(path, self._schema(work.stream), batches(old))

    def _schema(self, stream: str) -> pa.Schema:
        return SCHEMA.with_metadata(about(stream, self._target.hidden.get(stream)))

    def _batches(self, work: ChunkWork, documents: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        some: list[tuple[Any, ...]] = []
        size = 0
        for document in documents:
            row = self._row(work, document)
            if row[-1] in work.told:
                continue
            some.append(row)
            size += len(row[4] or "") + len(row[5] or b"")
            if len(some) >= _BATCH_ROWS or size >= _BATCH_BYTES:
                yield _batch(some)
                some, size = [], 0
        if some:
            yield _batch(some)

    def _row(self, work: ChunkWork, document: Any) -> tuple[Any, ...]:
        """As the columns of `SCHEMA`."""
        stream, raw, shown = work.stream, document.sent, None
        try:
            value = decoded(raw)
            if (hidden := self._target.hidden.get(stream)) is not None:
                value = hidden.in_document(value)
            key, op, payload = key_text(value["_id"]), Op.READ, as_json(value)
        except UNDECODED as error:
            key, op = key_text(bson.decode(raw, _LENIENT)["_id"]), Op.POISON
            payload = as_json({"reason": undecoded(error)})
            shown = shown_bytes(raw, stream, self._target)
        # Not to be taken for the id of a change, which leads to its cluster time.
        id_ = f"copy{row_id(work.copy, stream, key)}"
        return id_, stream, key, op.value, payload, shown, partition_for(stream, key, self._target.partitions)


def condition_of(text: str) -> dict[str, Any]:
    """A condition that a person wrote, in Extended JSON. Raises `ValueError` with what is wrong with it."""
    try:
        found = json_util.loads(text)
    except (ValueError, TypeError, bson.errors.BSONError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    expected = 'expected a filter as for find, for example {"total": {"$gt": 100}}'
    if trouble := _trouble(found) if isinstance(found, dict) else expected:
        raise ValueError(trouble)
    return dict(found)


def _trouble(value: Any) -> str:
    if isinstance(value, Code):
        return "a condition cannot have JavaScript"
    if isinstance(value, dict):
        refused = next((name for name in value if name.startswith(_REFUSED)), None)
        return f"a condition cannot have {refused}" if refused else _trouble(list(value.values()))
    return next(filter(None, map(_trouble, value)), "") if isinstance(value, list) else ""


def _edges(client: Client, stream: str, rows: int) -> Iterator[KeyText]:
    """Every so many keys one, and the last."""
    after: KeyText | None = None
    asked: dict[str, Any] = {"projection": _BY_ID, "hint": _BY_ID, "limit": 1}
    while edge := _key(_found(client, stream, _between((after, None)), sort=_BY_ID, skip=rows - 1, **asked)):
        yield edge
        after = edge
    last = _key(_found(client, stream, {}, sort={"_id": -1}, **asked))
    if last is not None and last != after:
        yield last


def _key(found: Iterator[Any]) -> KeyText | None:
    return next(((base64.b64encode(each.sent).decode(),) for each in found), None)


def _between(bounds: Bounds) -> dict[str, Any]:
    """As a filter. In an expression values of all types are compared, in the order of the index, which is used."""
    after, upto = bounds
    wanted = [{"$gt": ["$_id", _literal(after)]}] if after is not None else []
    if upto is not None:
        wanted.append({"$lte": ["$_id", _literal(upto)]})
    return {"$expr": {"$and": wanted}} if wanted else {}


def _literal(key: KeyText) -> RawBSONDocument:
    """`{"_id": value}` as `{"$literal": value}`, byte by byte."""
    raw = base64.b64decode(key[0])
    body = raw[4:5] + b"$literal\0" + raw[9:]
    return RawBSONDocument(struct.pack("<i", len(body) + 4) + body)


def _found(
    client: Client, stream: str, query: Mapping[str, Any], shown_at: int | None = None, **more: Any
) -> Iterator[Any]:
    database, _, collection = stream.partition(".")
    command = {"find": collection, "filter": query, "batchSize": _BATCH_ROWS, **more}
    if shown_at is not None:
        at = Timestamp(shown_at >> 32, shown_at & 0xFFFFFFFF)
        command["readConcern"] = {"level": "snapshot", "atClusterTime": at}
    yield from client[database].cursor_command(command, codec_options=client.codec_options)


def _batch(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


@contextmanager
def _reading(place: str, doing: str) -> Iterator[None]:
    with translated(place, doing):
        try:
            yield
        except OperationFailure as error:
            if error.code not in _PASSES:
                raise
            raise BusyError(
                f"{doing} at {place}: the server did not keep the documents as they were",
                hint="it is tried again; if that goes on, raise minSnapshotHistoryWindowInSeconds",
            ) from error
