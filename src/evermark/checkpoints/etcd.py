"""Checkpoints in etcd: one key for each partition, `<prefix><source>/partition-<number>`, replaced by transactions.

The value is JSON (docs/formats.md). etcd answers a write when a majority has it on disk.
"""

from __future__ import annotations

import json
from typing import Any

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.kinds import CheckpointConfig
from evermark.checkpoints.outside import OutsideCheckpoints, Stored
from evermark.errors import FormatError
from evermark.etcd.claim import Claim, require_readable
from evermark.etcd.client import EtcdClient, end_of, in_base64
from evermark.state.connection import State
from evermark.state.identity import identity_of

VERSION = 1
_PARTITIONS_MAX = 10_000


def open_in_etcd(settings: CheckpointConfig, state: State) -> OutsideCheckpoints:
    client, prefix = _place(settings, state.schema)
    return OutsideCheckpoints(EtcdRows(client, prefix, Claim(client, prefix, lambda: identity_of(state))))


def look(settings: CheckpointConfig, schema: str, is_new: bool) -> None:
    client, prefix = _place(settings, schema)
    require_readable(client, prefix, "reading checkpoints", is_new=is_new)


def _place(settings: CheckpointConfig, schema: str) -> tuple[EtcdClient, str]:
    prefix = settings.etcd.prefix or f"/{schema}/checkpoints/"
    return EtcdClient(settings.etcd, "reliability.checkpoint.etcd"), prefix


class EtcdRows:
    """`ComparedRows` in etcd."""

    def __init__(self, etcd: EtcdClient, prefix: str, claim: Claim) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._claim = claim

    def get(self, source: str, partition: int) -> Stored | None:
        self._claim.require()
        key = self._key(source, partition)
        found = self._etcd.ask("reading a checkpoint", lambda client: client.get(key, metadata=True, limit=1))
        return _stored(*found[0]) if found else None

    def list(self, source: str) -> dict[int, Checkpoint]:
        self._claim.require()
        begin = f"{self._prefix}{source}/partition-"
        found = self._etcd.ask(
            "listing checkpoints",
            lambda client: client.get(begin, metadata=True, range_end=end_of(begin), limit=_PARTITIONS_MAX),
        )
        rows = ((metadata["key"].decode().removeprefix(begin), value, metadata) for value, metadata in found)
        return dict(
            sorted((int(number), _stored(value, metadata)[0]) for number, value, metadata in rows if number.isdecimal())
        )

    def swap(self, source: str, partition: int, new: Checkpoint, old: Stored | None) -> Stored | None:
        self._claim.require()
        key, value = self._key(source, partition), json.dumps({"v": VERSION, **vars(new)}).encode()
        compare = {
            "key": in_base64(key.encode()),
            "result": "EQUAL",
            "target": "MOD",
            "mod_revision": old[1] if old else 0,
        }
        put = {"request_put": {"key": in_base64(key.encode()), "value": in_base64(value)}}
        answer = self._etcd.transaction("saving a checkpoint", [compare], [put])
        return (new, int(answer["header"]["revision"])) if answer.get("succeeded") else None

    def delete(self, source: str, partition: int) -> None:
        self._claim.require()
        key = self._key(source, partition)
        self._etcd.ask("deleting a checkpoint", lambda client: client.delete(key))

    def _key(self, source: str, partition: int) -> str:
        return f"{self._prefix}{source}/partition-{partition}"


def _stored(value: bytes, metadata: Any) -> Stored:
    try:
        found = json.loads(value)
        version = found.pop("v")
        if version == VERSION:
            return Checkpoint(str(found["position"]), int(found["batch"]), int(found["epoch"])), int(
                metadata["mod_revision"]
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        version = "damaged"
    raise FormatError(
        f"the checkpoint {metadata['key'].decode(errors='replace')} in etcd has version {str(version)[:20]}; this"
        f" program knows {VERSION}",
        hint="is the prefix shared with another program? `evermark checkpoint reset` forgets it",
    )
