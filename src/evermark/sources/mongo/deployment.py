"""What a MongoDB deployment says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from evermark.errors import SetupError
from evermark.sources.mongo.connect import Client


@dataclass(frozen=True)
class Deployment:
    time: int  # the cluster time of its last write
    name: str
    is_sharded: bool


def look_at(client: Client, place: str) -> Deployment:
    """Raises `SetupError` where there are no change streams."""
    said = client.admin.command("hello")
    is_sharded = said.get("msg") == "isdbgrid"
    time = said.get("operationTime")
    if time is None or not (is_sharded or said.get("setName")):
        raise SetupError(
            f"MongoDB at {place} is not a replica set: it has no change streams",
            hint="start it with --replSet and run rs.initiate(); one member is enough",
        )
    return Deployment(time.time << 32 | time.inc, str(said.get("setName", "a sharded cluster")), is_sharded)


def oplog_span(client: Client) -> tuple[int, int]:
    """The cluster times of the oldest and the newest entry of the oplog. A router has none to show."""
    if client.is_mongos:
        raise SetupError("a sharded cluster has an oplog in each shard, and shows none", hint="say `start: now`")
    oplog = client.local["oplog.rs"]
    ends = [oplog.find({}, {"ts": 1}).sort("$natural", order).limit(1).next()["ts"] for order in (1, -1)]
    first, last = (end.time << 32 | end.inc for end in ends)
    return first, last
