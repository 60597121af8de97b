"""What `evermark doctor` says of a MongoDB deployment. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from evermark.durations import show
from evermark.errors import EvermarkError
from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.mongo.changes import Changes
from evermark.sources.mongo.connect import GRANT_HINT, Client, translated, where
from evermark.sources.mongo.deployment import Deployment, look_at, oplog_span
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.target import MongoTarget

_SPAN_S_MIN = 24 * 3600
_BRIEF_MS = 20
_NAMED_MAX = 20
# Documents as they were at one cluster time, outside of a transaction: copies and repairs read them so.
_SHOWS_A_TIME = 5


def examined(client: Client, target: MongoTarget, *, copies: bool = False) -> Iterator[Finding]:
    """Each look needs the look before it. `copies`: the file wants documents from before."""
    place = where(target.url.open())
    try:
        with translated(place, "asking who answers"):
            found = look_at(client, place)
        yield ok("server", f"MongoDB at {place} is {'' if found.is_sharded else 'the replica set '}{found.name}")
        yield from _streams(client, target, place, found)
        with translated(place, "asking for the version"):
            yield said_of_version(client.server_info()["version"], copies=copies)
    except EvermarkError as error:
        yield wrong("server", error.message, error.hint)
        return
    yield _oplog(client, place, found)
    yield from _images(client, target, place)


def _streams(client: Client, target: MongoTarget, place: str, found: Deployment) -> Iterator[Finding]:
    with Changes(client, place, target, Position(found.time + 1), await_ms=_BRIEF_MS) as changes:
        changes.next()
    said = f"the database {target.database}" if target.database else "the whole deployment"
    yield ok("changes", f"its user may read the changes of {said}")


def said_of_version(version: str, *, copies: bool) -> Finding:
    said = f"it is MongoDB {version}"
    if int(version.partition(".")[0]) >= _SHOWS_A_TIME:
        return ok("version", said)
    hint = f"upgrade it to {_SHOWS_A_TIME}.0 or newer"
    if copies:
        return wrong("version", f"{said}: `start: copy` needs {_SHOWS_A_TIME}.0", f"{hint}, or say `start: now`")
    return warning("version", f"{said}: `source backfill`, and closing a gap, need {_SHOWS_A_TIME}.0", hint)


def _oplog(client: Client, place: str, found: Deployment) -> Finding:
    if found.is_sharded:
        return ok("oplog", "each shard has its own: look at the span of each")
    try:
        with translated(place, "reading local.oplog.rs"):
            first, last = (each >> 32 for each in oplog_span(client))
    except EvermarkError as error:
        return warning("oplog", f"how far it reaches back is not known: {error.message}", GRANT_HINT)
    span = show(timedelta(seconds=last - first))
    if last - first < _SPAN_S_MIN:
        hint = "db.adminCommand({replSetResizeOplog: 1, size: <MB>, minRetentionHours: 24})"
        return warning("oplog", f"it reaches back {span}: a longer stop of Evermark is a gap", hint)
    return ok("oplog", f"it reaches back {span}")


def _images(client: Client, target: MongoTarget, place: str) -> Iterator[Finding]:
    """Collections that keep no images, though the settings ask for them."""
    if target.database is None or not ({target.after, target.before} & {"stored", "required"}):
        return
    try:
        with translated(place, "listing collections"):
            listed = list(client[target.database].list_collections())
    except EvermarkError as error:
        yield warning("images", error.message, GRANT_HINT)
        return
    without = [
        each["name"]
        for each in listed
        if each.get("type") == "collection"
        and target.wants(f"{target.database}.{each['name']}")
        and not each["options"].get("changeStreamPreAndPostImages", {}).get("enabled")
        and not each["name"].startswith("system.")
    ]
    for name in without[:_NAMED_MAX]:
        command = f'db.runCommand({{collMod: "{name}", changeStreamPreAndPostImages: {{enabled: true}}}})'
        grade = wrong if "required" in {target.after, target.before} else warning
        yield grade("images", f"{target.database}.{name} keeps no images of changed documents", command)
    if not without:
        yield ok("images", "all collections keep images of changed documents")
