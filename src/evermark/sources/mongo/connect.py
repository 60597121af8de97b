"""Connections to a MongoDB deployment, and what its errors mean to us. No message holds the url: it has a password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pymongo
from pymongo import errors as driver

from evermark.errors import (
    BusyError,
    ConfigError,
    DeniedError,
    DiskFullError,
    EvermarkError,
    GapError,
    SetupError,
    UnreachableError,
)
from evermark.sources.mongo.values import Document

if TYPE_CHECKING:
    from evermark.secrets import Hidden

Client = pymongo.MongoClient[Any]

RECOVER_HINT = "see `evermark doctor`, then `evermark source recover`"
GRANT_HINT = "grant it: docs/mongo.md, `What the user may do`, has the line to run"

_SELECTION_MS = 10_000
_CONNECT_MS = 10_000
# A getMore answers within its wait; a server that is silent for longer is gone.
_SOCKET_MS = 60_000
TOO_LARGE = 10334
_HISTORY_LOST = (286,)
_CURSOR_DIED = (43, 136, 237, 280)
_DENIED = (13, 18, 8000)
_NOT_A_SET = (40573,)
NO_IMAGE = (47, 51771)
_SNAPSHOT_GONE = (239, 246)
_FULL = (14031,)
_TEXT_MAX = 400


def open_client(url: Hidden) -> Client:
    text = url.open()
    try:
        return pymongo.MongoClient(text, document_class=Document, appname="evermark", **_defaults(text))
    except (driver.PyMongoError, ValueError) as error:
        if (failed := _failed_lookup(error)) is not None:
            raise _unknown_hosts(failed, f"opening MongoDB at {where(text)}") from None
        # The driver's own text may quote the part of the url that it could not read.
        raise ConfigError(
            f"the url of MongoDB at {where(text)} cannot be used ({type(error).__name__})",
            hint="mongodb://user:password@host:27017/?replicaSet=name;"
            " write : / ? @ % in a password as %3A %2F %3F %40 %25",
        ) from None


def _defaults(url: str) -> dict[str, Any]:
    """Options that the url does not name."""
    ours = {
        "serverSelectionTimeoutMS": _SELECTION_MS,
        "connectTimeoutMS": _CONNECT_MS,
        "socketTimeoutMS": _SOCKET_MS,
    }
    return {name: ms for name, ms in ours.items() if f"{name.lower()}=" not in url.lower()}


def where(url: str) -> str:
    """The hosts of a url; never its user or password."""
    place, _, options = url.partition("://")[2].partition("?")
    if "@" in options:  # a password with a bare ? in it, perhaps: what stands before it may be its beginning
        return "an unreadable url"
    return place.rpartition("@")[2].partition("/")[0][:200] or "an unreadable url"


def translate(error: Exception, place: str, doing: str) -> EvermarkError:
    """An error of the driver, in our words."""
    text = f"{doing} at {place}: {_said(error)}"
    code = error.code if isinstance(error, driver.OperationFailure) else None
    if code in _HISTORY_LOST:
        return GapError(
            f"{doing} at {place}: the oplog does not hold the changes that come next any more", hint=RECOVER_HINT
        )
    if code in _DENIED:
        return DeniedError(text, hint=GRANT_HINT if code == 13 else "check the user and password of the url")
    if code in _NOT_A_SET:
        return SetupError(
            f"MongoDB at {place} is not a replica set: it has no change streams",
            hint="start it with --replSet and run rs.initiate(); one member is enough",
        )
    if code in NO_IMAGE:
        return SetupError(
            f"{doing} at {place}: the server has no image of a changed document, and `required` asks for it",
            hint="db.runCommand({collMod: …, changeStreamPreAndPostImages: {enabled: true}}), or say `stored`",
        )
    if code in _SNAPSHOT_GONE:
        return SetupError(
            f"{doing} at {place}: the server did not keep the documents as they were for long enough",
            hint="db.adminCommand({setParameter: 1, minSnapshotHistoryWindowInSeconds: 3600})",
        )
    if code in _FULL:
        return DiskFullError(text, hint="the database server has no space left")
    if code in _CURSOR_DIED or isinstance(error, driver.CursorNotFound):
        return BusyError(text, hint="the stream ended; it is opened again where the log ends")
    if isinstance(error, (driver.ConnectionFailure, driver.WaitQueueTimeoutError)):
        return UnreachableError(text, hint="is it up, and reachable? has the set a primary?")
    if isinstance(error, driver.PyMongoError) and error.has_error_label("ResumableChangeStreamError"):
        return UnreachableError(text, hint="the stream is opened again where the log ends")
    if (failed := _failed_lookup(error)) is not None:
        return _unknown_hosts(failed, f"{doing} at {place}")
    if isinstance(error, driver.ConfigurationError):
        return SetupError(f"{doing} at {place}: {type(error).__name__}", hint="check the options of the url")
    return EvermarkError(f"{text} [{code or type(error).__name__}]")


def _failed_lookup(error: Exception) -> BaseException | None:
    """What failed when the hosts of a mongodb+srv url were asked for: the driver calls all of that a wrong setting."""
    # Some versions of the driver hide the cause; it is the context all the same.
    cause = error.__cause__ or error.__context__ if isinstance(error, driver.ConfigurationError) else None
    is_lookup = isinstance(cause, OSError) or type(cause).__module__.partition(".")[0] == "dns"
    return cause if is_lookup else None


def _unknown_hosts(failed: BaseException, doing: str) -> UnreachableError:
    return UnreachableError(
        f"{doing}: its hosts cannot be looked up in DNS ({type(failed).__name__})",
        hint="is the name in the url right, and does it have SRV records? is the DNS server up?",
    )


@contextmanager
def translated(place: str, doing: str) -> Iterator[None]:
    try:
        yield
    except driver.PyMongoError as error:
        raise translate(error, place, doing) from error


def _said(error: Exception) -> str:
    details = error.details if isinstance(error, driver.OperationFailure) else None
    text = str(details.get("errmsg", "")) if details else str(error)
    return text.strip()[:_TEXT_MAX] or type(error).__name__
