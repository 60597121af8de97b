"""A gap in a partition, closed with the documents as they are: all of them, as of one cluster time.

The server shows every collection as it was at that time (`readConcern: snapshot`), for as long as it keeps old
versions: five minutes, unless `minSnapshotHistoryWindowInSeconds` says otherwise. Reading goes on behind that time.

A collection that goes is told in one partition, and ends the documents of all. Partitions that were repaired before
this one have compared theirs as of an earlier time: collections that went since are looked for in the oplog, from the
least place on where a partition stands, or went on after its repair, and to which the oplog reaches back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import bson
import pyarrow as pa
from bson import Timestamp

from evermark.errors import BusyError, GapError, IdentityError, UnreachableError
from evermark.event import TAKEN, Op
from evermark.sources.base import Gap, Repair, Slice, Whereabouts
from evermark.sources.mongo.changes import Changes, require_sound
from evermark.sources.mongo.connect import RECOVER_HINT, Client, open_client, translated, where
from evermark.sources.mongo.deployment import look_at
from evermark.sources.mongo.events import Row, batched, partition_of, shown_bytes, undecoded
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.target import MongoTarget
from evermark.sources.mongo.values import OPTIONS, UNDECODED, as_json, decoded, key_text

_BRIEF_MS = 20
_GOING = ("drop", "rename")
_OWN_DATABASES = ("admin", "config", "local")
_BATCH_DOCUMENTS = 1000
_LENIENT = OPTIONS.with_options(unicode_decode_error_handler="replace")


class DocumentsGap(Gap):
    """All documents of one partition at one cluster time. A piece is a collection."""

    is_state = True

    def __init__(
        self,
        target: MongoTarget,
        partition: int,
        time: int,
        streams: Sequence[str],
        truncates: pa.Table | None = None,
        told_anew: Sequence[str] = (),
        after: Sequence[Position] = (),
    ) -> None:
        self.target, self.partition, self.time, self.truncates = target, partition, time, truncates
        self.told_anew = told_anew
        self.pieces = tuple(Slice(partition, "", self.position, {"stream": stream}) for stream in streams)
        at = [] if truncates is None else [Position.parse(one).after(1) for one in truncates["position"].to_pylist()]
        self._behind = max((one.ordinal for one in (*at, *after) if one.time == time), default=0)

    @property
    def position(self) -> str:
        return Position(self.time + 1).text(self.target.partitions)

    def covers(self, stream: str) -> bool:
        return self.target.wants(stream)

    def positions(self, first: int, count: int) -> pa.Array:
        """Ordinals of the cluster time that the documents are shown at. What the log has of it, or will have, stands in
        front: truncates of all partitions, and, where nothing happened since, what was read or copied."""
        first += self._behind
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
        raw, shown = document.sent, None
        try:
            value = decoded(raw)
            if (hidden := self.target.hidden.get(stream)) is not None:
                value = hidden.in_document(value)
            key, op, payload = key_text(value["_id"]), Op.READ, as_json(value)
        except UNDECODED as error:
            key, op = key_text(bson.decode(raw, _LENIENT)["_id"]), Op.POISON
            payload = as_json({"reason": undecoded(error)})
            shown = shown_bytes(raw, stream, self.target)
        time_us = (self.time >> 32) * 1_000_000
        return Row("", "", stream, key, op.value, None, time_us, payload, None, None, shown)


class DocumentsRepair(Repair):
    def __init__(self, target: MongoTarget, partition: int) -> None:
        self._target, self._partition = target, partition

    def begin(
        self,
        stopped: Callable[[], bool],
        left_at: str | None = None,
        whereabouts: Callable[[], Whereabouts] | None = None,
    ) -> Gap:
        place = where(self._target.url.open())
        with closing(open_client(self._target.url)) as client, translated(place, "looking for documents"):
            now = look_at(client, place).time
            if left_at is not None and Position.parse(left_at).time > now + 1:
                raise IdentityError(f"MongoDB at {place} is behind its checkpoint: it was restored", hint=RECOVER_HINT)
            known, gone = whereabouts() if whereabouts is not None else Whereabouts({}), list[Row]()
            if self._target.partitions > 1:
                gone, now = self._gone(client, place, known, now, stopped)
            mine, told_anew = self._told(gone, known)
            truncates = pa.Table.from_batches(batched(iter(mine)), TAKEN)
            after = [Position.parse(row.position).after(1) for row in gone]
            if self._partition in known.at:
                after.append(Position.parse(known.at[self._partition]))
            streams = _streams(client, self._target)
            return DocumentsGap(self._target, self._partition, now, streams, truncates, told_anew, after)

    def _told(self, gone: Sequence[Row], known: Whereabouts) -> tuple[list[Row], list[str]]:
        """The ends of collections that are told here; and the collections whose end another partition is yet to tell.
        It will stand behind what the log has of documents that came again as they were."""
        mine: list[Row] = []
        untold: set[str] = set()
        for row in gone:
            teller = partition_of(row, self._target.partitions)
            if teller == self._partition:
                mine.append(row)
            elif known.at.get(teller, "") <= row.position:
                untold.add(row.stream)
        return mine, sorted(untold)

    def _gone(
        self, client: Client, place: str, known: Whereabouts, now: int, stopped: Callable[[], bool]
    ) -> tuple[list[Row], int]:
        """Collections that went, as all partitions tell them, and up to which time."""
        for since in _places(known, now):
            found = self._ends(client, place, since, now, stopped)
            if found is None:
                continue  # what went between this place and the next is told by nobody: docs/limits.md
            # That may have taken a while, and the server keeps documents as they were for minutes only.
            upto = look_at(client, place).time
            later = self._ends(client, place, Position(now + 1), upto, stopped)
            if later is None:
                raise BusyError(f"the oplog of MongoDB at {place} forgot what was being looked through")
            return [*found, *later], upto
        return [], now

    def _ends(
        self, client: Client, place: str, since: Position, now: int, stopped: Callable[[], bool]
    ) -> list[Row] | None:
        """Collections that went from `since` to `now`; None: the oplog does not reach back so far."""
        found: list[Row] = []
        heard_at = time.monotonic()
        try:
            with Changes(client, place, self._target, since, thin=True, await_ms=_BRIEF_MS) as changes:
                while (seen_to := changes.whole_to).closed < now:
                    if stopped():
                        raise UnreachableError(f"stopped while the oplog of MongoDB at {place} was looked through")
                    change = changes.next()
                    if change is None and changes.whole_to == seen_to:
                        require_sound(place, heard_at, None)
                        continue
                    heard_at = time.monotonic()  # also if all that came is how far the server has looked
                    if change is None:
                        continue
                    if change.position.time > now:
                        break
                    if change.operation in _GOING:
                        found += change.rows(self._target)
        except GapError:
            return None
        return found

    def finish(self, position: str) -> None:
        """Nothing was made at the server, so reading can go on there at any time."""

    def abandon(self) -> None: ...

    def close(self) -> None: ...


def _places(known: Whereabouts, now: int) -> list[Position]:
    """From where collections that went are looked for: the first of these places that the oplog reaches back to."""
    found = {Position.parse(text) for text in (*known.at.values(), *known.repaired)}
    return sorted(position for position in found if position.time <= now)


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
