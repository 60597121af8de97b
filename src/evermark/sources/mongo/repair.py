"""A gap in a partition, closed with the documents as they are: all of them, as of one cluster time.

The server shows every collection as it was at that time (`readConcern: snapshot`), for as long as it keeps old
versions: five minutes, unless `minSnapshotHistoryWindowInSeconds` says otherwise. Reading goes on behind that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import bson
import pyarrow as pa
from bson import Timestamp

from evermark.errors import IdentityError
from evermark.event import Op
from evermark.sources.base import Gap, Repair, Slice
from evermark.sources.mongo.connect import RECOVER_HINT, Client, open_client, translated, where
from evermark.sources.mongo.deployment import look_at
from evermark.sources.mongo.events import Row, batched, partition_of
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.target import MongoTarget
from evermark.sources.mongo.values import OPTIONS, UNDECODED, as_json, decoded, key_text

_OWN_DATABASES = ("admin", "config", "local")
_BATCH_DOCUMENTS = 1000
_LENIENT = OPTIONS.with_options(unicode_decode_error_handler="replace")


class DocumentsGap(Gap):
    """All documents of one partition at one cluster time. A piece is a collection."""

    is_state = True

    def __init__(self, target: MongoTarget, partition: int, time: int, streams: Sequence[str]) -> None:
        self.target, self.partition, self.time = target, partition, time
        self.pieces = tuple(Slice(partition, "", self.position, {"stream": stream}) for stream in streams)

    @property
    def position(self) -> str:
        return Position(self.time + 1).text(self.target.partitions)

    def covers(self, stream: str) -> bool:
        return self.target.wants(stream)

    def positions(self, first: int, count: int) -> pa.Array:
        """Ordinals of the cluster time that the documents are shown at: the log has no event of it."""
        return pa.array([Position(self.time, first + number).text(self.target.partitions) for number in range(count)])

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        with closing(open_client(self.target.url)) as client:
            yield from batched(self._rows(client, piece.detail["stream"]))

    def _rows(self, client: Client, stream: str) -> Iterator[Row]:
        database, _, collection = stream.partition(".")
        place = where(self.target.url.open())
        at = Timestamp(self.time >> 32, self.time & 0xFFFFFFFF)
        with translated(place, f"reading the documents of {stream}"):
            found = client[database].cursor_command(
                {
                    "find": collection,
                    "batchSize": _BATCH_DOCUMENTS,
                    "readConcern": {"level": "snapshot", "atClusterTime": at},
                },
                codec_options=client.codec_options,
            )
            for document in found:
                row = self._row(stream, document)
                if partition_of(row, self.target.partitions) == self.partition:
                    yield row

    def _row(self, stream: str, document: Any) -> Row:
        try:
            value = decoded(document.sent)
            if (hidden := self.target.hidden.get(stream)) is not None:
                value = hidden.in_document(value)
            key, payload = key_text(value["_id"]), as_json(value)
        except UNDECODED:
            key = key_text(bson.decode(document.sent, _LENIENT)["_id"])
            payload = as_json({"reason": "the document cannot be decoded"})
        time_us = (self.time >> 32) * 1_000_000
        return Row("", "", stream, key, Op.READ.value, None, time_us, payload, None, None, None)


class DocumentsRepair(Repair):
    def __init__(self, target: MongoTarget, partition: int) -> None:
        self._target, self._partition = target, partition

    def begin(self, stopped: Callable[[], bool], left_at: str | None = None) -> Gap:
        place = where(self._target.url.open())
        with closing(open_client(self._target.url)) as client, translated(place, "looking for documents"):
            now = look_at(client, place).time
            if left_at is not None and Position.parse(left_at).time > now + 1:
                raise IdentityError(f"MongoDB at {place} is behind its checkpoint: it was restored", hint=RECOVER_HINT)
            return DocumentsGap(self._target, self._partition, now, _streams(client, self._target))

    def finish(self, position: str) -> None:
        """Nothing was made at the server, so reading can go on there at any time."""

    def abandon(self) -> None: ...

    def close(self) -> None: ...


def _streams(client: Client, target: MongoTarget) -> list[str]:
    """The collections that are read and are there."""
    databases = [target.database] if target.database is not None else client.list_database_names()
    named = [
        f"{database}.{each['name']}"
        for database in databases
        if database not in _OWN_DATABASES
        for each in client[database].list_collections(filter={"type": "collection"})
        if not each["name"].startswith("system.")
    ]
    return sorted(stream for stream in named if target.wants(stream))
