"""Checkpoints in MongoDB: one document for each partition, replaced if it still holds what was last seen there.

`_id` is `<source>/partition-<number>`, `token` the position; `batch` and `epoch` fence. `timestamp` and `updated_at`
are the server's time of the save (docs/formats.md). A write is answered when a majority has it on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pymongo
from pymongo import errors as driver
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.kinds import CheckpointConfig, MongoConfig
from evermark.checkpoints.outside import OutsideCheckpoints, Stored
from evermark.errors import ConfigError, DeniedError, EvermarkError, FormatError, UnreachableError
from evermark.secrets import opened
from evermark.state.connection import State

HERE = "mongodb://127.0.0.1:27017/"
TIMEOUT_MS = 3000
_DENIED = (13, 18, 8000)
_PARTITIONS_MAX = 10_000
T = TypeVar("T")
Collection = pymongo.collection.Collection[dict[str, Any]]


def open_in_mongo(settings: CheckpointConfig, state: State) -> OutsideCheckpoints:
    return OutsideCheckpoints(_rows(settings, state.schema))


def look(settings: CheckpointConfig, schema: str, _is_new: bool) -> None:
    _rows(settings, schema).list("")


def _rows(settings: CheckpointConfig, schema: str) -> MongoRows:
    return MongoRows(settings.mongo, settings.mongo.database or schema.replace("$", "-"))


class MongoRows:
    """`ComparedRows` in one collection. Connects when it is first used."""

    def __init__(self, settings: MongoConfig, database: str) -> None:
        self._settings = settings
        self._database = database
        self._opened: Collection | None = None
        self._lock = threading.Lock()

    def get(self, source: str, partition: int) -> Stored | None:
        found = self._ask("reading a checkpoint", lambda rows: rows.find_one({"_id": _id(source, partition)}))
        return (_checkpoint(found), None) if found else None

    def list(self, source: str) -> dict[int, Checkpoint]:
        begin = f"{source}/partition-"
        within = {"_id": {"$gte": begin, "$lt": begin + ":"}}  # a colon follows the digits
        found = self._ask("listing checkpoints", lambda rows: list(rows.find(within, limit=_PARTITIONS_MAX)))
        numbered = ((each["_id"].removeprefix(begin), each) for each in found)
        return dict(sorted((int(number), _checkpoint(each)) for number, each in numbered if number.isdecimal()))

    def swap(self, source: str, partition: int, new: Checkpoint, old: Stored | None) -> Stored | None:
        held = _fields(old[0]) if old else {"epoch": {"$exists": False}}
        change = {"$set": _fields(new), "$currentDate": {"updated_at": True, "timestamp": {"$type": "timestamp"}}}

        def save(rows: Collection) -> bool:
            try:
                done = rows.update_one({"_id": _id(source, partition), **held}, change, upsert=old is None)
            except driver.DuplicateKeyError:  # another has begun it
                return False
            return bool(done.matched_count or done.upserted_id)

        return (new, None) if self._ask("saving a checkpoint", save) else None

    def delete(self, source: str, partition: int) -> None:
        self._ask("deleting a checkpoint", lambda rows: rows.delete_one({"_id": _id(source, partition)}))

    def _ask(self, doing: str, call: Callable[[Collection], T]) -> T:
        try:
            return call(self._rows())
        except driver.PyMongoError as error:
            raise _translated(error, doing) from None

    def _rows(self) -> Collection:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> Collection:
        text = opened(self._settings.url) if self._settings.url is not None else HERE
        names = ("serverSelectionTimeoutMS", "connectTimeoutMS", "socketTimeoutMS")
        ours: dict[str, Any] = {name: TIMEOUT_MS for name in names if f"{name.lower()}=" not in text.lower()}
        try:
            client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(text, appname="evermark", **ours)
        except (driver.PyMongoError, ValueError) as error:
            # The driver's own text may quote the part of the url that it could not read.
            raise ConfigError(
                f"reliability.checkpoint.mongo.url cannot be used ({type(error).__name__})",
                hint="mongodb://user:password@host:27017/?replicaSet=name;"
                " write : / ? @ % in a password as %3A %2F %3F %40 %25",
            ) from None
        return client[self._database].get_collection(
            self._settings.collection,
            read_preference=pymongo.ReadPreference.PRIMARY,
            read_concern=ReadConcern("majority"),
            write_concern=WriteConcern("majority", wtimeout=TIMEOUT_MS, j=True),
        )


def _id(source: str, partition: int) -> str:
    return f"{source}/partition-{partition}"


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"token": checkpoint.position, "batch": checkpoint.batch, "epoch": checkpoint.epoch}


def _checkpoint(found: dict[str, Any]) -> Checkpoint:
    try:
        return Checkpoint(str(found["token"]), int(found["batch"]), int(found["epoch"]))
    except (KeyError, TypeError, ValueError):
        raise FormatError(
            f"the document {str(found.get('_id'))[:200]!r} among the checkpoints in MongoDB is none",
            hint="is the collection shared with another program? `evermark checkpoint reset` forgets it",
        ) from None


def _translated(error: driver.PyMongoError, doing: str) -> EvermarkError:
    code = error.code if isinstance(error, driver.OperationFailure) else None
    text = f"{doing} in MongoDB: {type(error).__name__}" + (f" [{code}]" if code else "")
    if code in _DENIED:
        return DeniedError(text, hint="the user of reliability.checkpoint.mongo.url needs readWrite on its database")
    return UnreachableError(text, hint="is MongoDB up, reachable, and has its set a primary?")
