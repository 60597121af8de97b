"""One change stream, from a position on: its events in order, each at its position.

A stream that breaks, as in an election, is an error: who answers then may be another deployment, and may know less than
the server before, so the driver must not go on by itself. What ends a stream for good is met here: a dropped database
(the server ends the stream; it is opened again behind it), and an event that is larger than the server can send. Such
an event is found by asking for single events, and asked for once more without its documents; so is one of which the
server has no image.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NamedTuple, Self

from bson import Timestamp
from pymongo.command_cursor import CommandCursor
from pymongo.errors import OperationFailure, PyMongoError

from evermark.errors import EvermarkError, UnreachableError
from evermark.sources.mongo.connect import NO_IMAGE, TOO_LARGE, Client, translate
from evermark.sources.mongo.events import Row, rows_in, rows_of, too_large
from evermark.sources.mongo.positions import COPIED, Position, time_of_token
from evermark.sources.mongo.target import MongoTarget
from evermark.sources.mongo.values import Document

# How long the server waits for a change before it says that there is none; so long the end of a transaction, which
# only the next answer shows, may be waited for.
AWAIT_MS = 250
# Without a bound an answer has 16 MB, tens of thousands of events: of most pieces far more than they want.
ANSWER_EVENTS_MAX = 1_000
# All of an event but its documents.
_ENVELOPE = dict.fromkeys(
    ("operationType", "clusterTime", "wallTime", "ns", "to", "documentKey", "lsid", "txnNumber"), 1
)
_SIZE = {"$bsonSize": "$fullDocument"}
_AFTER = {"lookup": "updateLookup", "stored": "whenAvailable", "required": "required", "changes": None}
_BEFORE = {"none": None, "stored": "whenAvailable", "required": "required"}
# As MongoDB 6.0 wrote them, and before; a server of 7.0 does it so for routers that are older.
_OLD_TOKENS: dict[str, Any] = {"$_generateV2ResumeTokens": False}
_ENDINGS = ("dropDatabase", "invalidate")
_LARGE_TRIES = 40
_SILENCE_S_MAX = 60.0


class Change(NamedTuple):
    """An event as the server sent it. `end` is the position after it."""

    position: Position
    end: Position
    token: str
    operation: str
    event: Document
    fields: dict[str, Any]  # of the event
    in_transaction: bool
    is_too_large: bool = False

    def rows(self, target: MongoTarget) -> list[Row]:
        if self.is_too_large:
            return [too_large(self.event.sent, self.position, self.token, target)]
        return rows_of(self.event, self.fields, self.position, self.token, target)


class Changes:
    """Used by one thread. `thin`: events come without their documents; inserts with their size instead. `old_tokens`:
    with the tokens that the server gave before it was upgraded to MongoDB 7.0.

    Every event before `whole_to` has been given, and no transaction stands across it. Where the server has looked
    through a cluster time, and has no more of it, `whole_to` is behind all its events (`Position.closed`).
    """

    def __init__(
        self,
        client: Client,
        place: str,
        target: MongoTarget,
        start: Position,
        *,
        thin: bool = False,
        await_ms: int = AWAIT_MS,
        old_tokens: bool = False,
    ) -> None:
        self._client, self._place, self._target = client, place, target
        self._thin, self._await_ms = thin, await_ms
        self._options: dict[str, Any] = _OLD_TOKENS if old_tokens else {}
        self._next = self._begins = start  # where events are given from; where a stream without a token is opened
        self._careful = False  # single events are asked for, to find the one that is too large
        self._stream: CommandCursor[Any] | None = None
        self._token: str | None = None  # of the event after which a stream that is opened again begins
        self._at = start  # where the next event stands if it has the cluster time of the last one
        self._opened_at = start.time
        self._may_end = True  # whether an answer without events says that the last transaction is whole
        self.whole_to = start

    def next(self) -> Change | None:
        """The next event; None when there is none for now."""
        while True:
            is_opening = self._stream is None
            try:
                stream = self._stream = self._stream or self._opened()
                event = stream.try_next()
            except OperationFailure as error:
                if error.code not in (TOO_LARGE, *NO_IMAGE) or self._thin:
                    raise self._translated(error) from error
                self.close()
                # Only the first answer of a stream holds a single event, and says by its failure which one it is.
                change = self._without_documents() if self._careful and is_opening else None
                self._careful = change is None
                # The image of an event that was taken before may have expired since.
                if change is not None and error.code in NO_IMAGE and change.position >= self._next:
                    raise self._translated(error) from error
            except PyMongoError as error:
                raise self._translated(error) from error
            else:
                if event is None:
                    self._nothing_came(stream)
                    return None
                change = self._placed(event)
                if self._careful:
                    self.close()
            if change is None:
                continue
            if change.position >= self._next:  # not before the position where reading began
                self._passed(change)
                return change
            self._leave_ended(change)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(PyMongoError):
                stream.close()

    def _opened(self) -> CommandCursor[Any]:
        # A router answers before it has heard of all shards: only a later cluster time says that nothing is missing.
        self._may_end = not self._client.is_mongos
        where: dict[str, Any] = {"resumeAfter": {"_data": self._token}}
        self._opened_at = self._at.time
        if self._token is None:
            time = self._opened_at = self._begins.opened_at
            where = {"startAtOperationTime": Timestamp(time >> 32, time & 0xFFFFFFFF)}
            self._at = Position(time)
        # `watch` would go on by itself after an error; a cursor does not.
        return self._client[self._target.database or "admin"].aggregate(
            _pipeline(self._target, where, thin=self._thin),
            maxAwaitTimeMS=self._await_ms,
            batchSize=1 if self._careful else ANSWER_EVENTS_MAX,
            **self._options,
        )

    def _placed(self, event: Document) -> Change:
        fields = dict(event.items())  # the document itself takes a look at each of them for more than decoding took
        time, operation, token = fields["clusterTime"], fields["operationType"], fields["_id"]["_data"]
        at = Position(time.time << 32 | time.inc)
        if at.time == self._at.time:
            at = self._at
        self._at, self._token = Position(at.time, at.ordinal + rows_in(operation)), token
        return Change(at, self._at, token, operation, event, fields, "txnNumber" in fields)

    def _passed(self, change: Change) -> None:
        self.whole_to = max(self.whole_to, Position(change.position.time) if change.in_transaction else change.end)
        self._next = change.end
        self._leave_ended(change)

    def _leave_ended(self, change: Change) -> None:
        """The server gives nothing after an `invalidate`, and refuses to go on from its token."""
        if change.operation == "invalidate":
            self.close()
            self._begin_at(Position(change.position.time + 1))

    def _nothing_came(self, stream: CommandCursor[Any]) -> None:
        self._careful = False
        if self._may_end:
            self.whole_to = max(self.whole_to, self._next)
        token = stream._post_batch_resume_token  # noqa: SLF001 - how far the server has looked is told nowhere else
        time = time_of_token(token["_data"]) if token is not None else None
        if time is not None:
            is_seen = self._may_end and time > self._opened_at
            seen_to = Position(time, COPIED if is_seen else 0)
            if seen_to > self._next:
                self._begin_at(seen_to)
        if not stream.alive:
            self.close()

    def _begin_at(self, position: Position) -> None:
        """Every event before this position was given; a stream that is opened again begins here."""
        self._begins, self._token = position, None
        self._next = max(self._next, position)  # what is met on the way to where reading began lies before it
        self.whole_to = max(self.whole_to, position)

    def _without_documents(self) -> Change:
        """The first event behind the place where the stream was opened, which is too large; perhaps one from before
        the position where reading began."""
        start = Position(self._opened_at)
        with Changes(self._client, self._place, self._target, start, thin=True, await_ms=self._await_ms) as thin:
            thin._token, thin._at = self._token, self._at
            for _ in range(_LARGE_TRIES):
                change = thin.next()
                if change is not None:
                    self._token, self._at = change.token, change.end
                    return change._replace(is_too_large=True)
        raise EvermarkError(f"reading changes at {self._place}: an event that is too large cannot be found again")

    def _translated(self, error: PyMongoError) -> EvermarkError:
        self.close()
        return translate(error, self._place, "reading changes")


def require_sound(place: str, heard_at: float, change: Change | None) -> None:
    """Silence proves nothing: a server that is slow is asked again later."""
    if change is None and time.monotonic() - heard_at > _SILENCE_S_MAX:
        raise UnreachableError(f"MongoDB at {place} gave nothing for {_SILENCE_S_MAX:.0f} s, though it has changes")


def _pipeline(target: MongoTarget, where: dict[str, Any], *, thin: bool) -> list[dict[str, Any]]:
    options = dict(where)
    if target.database is None:
        options["allChangesForCluster"] = True
    images = {"fullDocument": _AFTER[target.after], "fullDocumentBeforeChange": _BEFORE[target.before]}
    if not thin:
        options |= {name: image for name, image in images.items() if image is not None}
    stages: list[dict[str, Any]] = [{"$changeStream": options}]
    if target.collections:
        names = [dict(zip(("db", "coll"), stream.split(".", 1), strict=True)) for stream in target.collections]
        wanted = [
            {f"{field}.db": name["db"], f"{field}.coll": name["coll"]} for name in names for field in ("ns", "to")
        ]
        stages.append({"$match": {"$or": [*wanted, {"operationType": {"$in": list(_ENDINGS)}}]}})
    if thin:
        stages.append({"$project": {**_ENVELOPE, "size": _SIZE}})
    return stages
