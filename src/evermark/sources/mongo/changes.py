"""One change stream, from a position on: its events in order, each at its position.

The driver goes on by itself after an election. What ends a stream for good is met here: a dropped database (the server
ends the stream; it is opened again behind it), and an event that is larger than the server can send. Such an event is
found by asking for single events, and asked for once more without its documents.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple, Self

from bson import Timestamp
from pymongo.change_stream import ChangeStream
from pymongo.errors import OperationFailure, PyMongoError

from evermark.errors import EvermarkError
from evermark.sources.mongo.connect import TOO_LARGE, Client, translate
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
_ENDINGS = ("dropDatabase", "invalidate")
_LARGE_TRIES = 40


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
    """Used by one thread. `thin`: events come without their documents; inserts with their size instead.

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
    ) -> None:
        self._client, self._place, self._target = client, place, target
        self._thin, self._await_ms = thin, await_ms
        self._next = start
        self._careful = False  # single events are asked for, to find the one that is too large
        self._stream: ChangeStream[Any] | None = None
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
                if error.code != TOO_LARGE or self._thin:
                    raise self._translated(error) from error
                self.close()
                # Only the first answer of a stream holds a single event, and says by its failure which one it is.
                change = self._without_documents() if self._careful and is_opening else None
                self._careful = change is None
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

    def _opened(self) -> ChangeStream[Any]:
        # A router answers before it has heard of all shards: only a later cluster time says that nothing is missing.
        self._may_end = not self._client.is_mongos
        where: dict[str, Any] = {"resume_after": {"_data": self._token}}
        self._opened_at = self._at.time
        if self._token is None:
            # Inside a cluster time the stream begins just before it: of the time where it begins, which may be one to
            # come, an answer without events says nothing.
            time = self._opened_at = self._next.time - (self._next.ordinal > 0)
            where = {"start_at_operation_time": Timestamp(time >> 32, time & 0xFFFFFFFF)}
            self._at = Position(time)
        target: Any = self._client if self._target.database is None else self._client[self._target.database]
        stream: ChangeStream[Any] = target.watch(
            _pipeline(self._target, thin=self._thin),
            full_document=None if self._thin else _AFTER[self._target.after],
            full_document_before_change=None if self._thin else _BEFORE[self._target.before],
            max_await_time_ms=self._await_ms,
            batch_size=1 if self._careful else ANSWER_EVENTS_MAX,
            **where,
        )
        return stream

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

    def _nothing_came(self, stream: ChangeStream[Any]) -> None:
        self._careful = False
        if self._may_end:
            self.whole_to = max(self.whole_to, self._next)
        token = stream.resume_token
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
        self._next, self._token = position, None
        self.whole_to = max(self.whole_to, position)

    def _without_documents(self) -> Change:
        """The event that follows the last one, which is too large."""
        start = Position(self._next.time)
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


def _pipeline(target: MongoTarget, *, thin: bool) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = []
    if target.collections:
        names = [dict(zip(("db", "coll"), stream.split(".", 1), strict=True)) for stream in target.collections]
        wanted = [
            {f"{field}.db": name["db"], f"{field}.coll": name["coll"]} for name in names for field in ("ns", "to")
        ]
        stages.append({"$match": {"$or": [*wanted, {"operationType": {"$in": list(_ENDINGS)}}]}})
    if thin:
        stages.append({"$project": {**_ENVELOPE, "size": _SIZE}})
    return stages
