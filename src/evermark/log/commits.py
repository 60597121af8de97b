"""Commits of a Delta table, read and written as the files they are: JSON lines, numbered without gaps, put if absent.

A commit written through a library costs a snapshot of the table, some ten milliseconds; the protocol asks for one small
file, which is put where none is yet (`Storage.put_new`): no reader ever sees half a commit, and of two writers one is
told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evermark.errors import FormatError
from evermark.log.base import LogFile
from evermark.log.format import stats_json
from evermark.log.table import commit_file
from evermark.storage import Place, storage_of

# What writers must understand of the tables that we make: no features, nothing that a commit would have to say.
_WRITER_VERSION_MAX = 2

Action = dict[str, Any]


def read_commit(folder: Place, version: int) -> list[Action] | None:
    """The actions of a commit; None where there is no such file."""
    try:
        text = storage_of(folder).read(commit_file(folder, version)).decode()
    except FileNotFoundError:
        return None
    return [json.loads(line) for line in text.splitlines() if line]


def put_commit(folder: Place, version: int, actions: Iterable[Mapping[str, Any]]) -> bool:
    """Write the commit with this version, its contents durable; its name is not yet. False if another has it."""
    body = "\n".join(json.dumps(action, separators=(",", ":")) for action in actions).encode()
    return storage_of(folder).put_new(commit_file(folder, version), body)


def commit_actions(
    applications: Mapping[str, int],
    files: Sequence[LogFile],
    metadata: Mapping[str, str],
    removed: Sequence[tuple[str, int]] = (),
    *,
    data_change: bool = True,
) -> list[Action]:
    """A commit that adds these files, removes others (path and size) and moves applications' versions, as delta-rs
    writes it.
    """
    now = int(time.time() * 1000)
    info = {
        "timestamp": now,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append", "partitionBy": "[]"},
        "engineInfo": "evermark",
        **metadata,
    }
    added = [
        {
            "path": file.path,
            "partitionValues": {},
            "size": file.size,
            "modificationTime": now,
            "dataChange": data_change,
            "stats": stats_json(file.rows, file.stats),
        }
        for file in files
    ]
    # A tombstone without a time leaves with the next Delta checkpoint: the files themselves are ours to remove, by age.
    gone = [
        {"path": path, "dataChange": data_change, "deletionTimestamp": 0, "extendedFileMetadata": False, "size": size}
        for path, size in removed
    ]
    moved = [{"appId": name, "version": version, "lastUpdated": now} for name, version in applications.items()]
    changes = [*({"remove": remove} for remove in gone), *({"add": add} for add in added)]
    return [{"commitInfo": info}, *changes, *({"txn": txn} for txn in moved)]


def require_protocol(protocol: Mapping[str, Any], folder: Place) -> None:
    """Refuse a table that asks its writers for more than `commit_actions` does."""
    features = protocol.get("writerFeatures") or ()
    if protocol["minWriterVersion"] > _WRITER_VERSION_MAX or features:
        asked = f"writer version {protocol['minWriterVersion']}" + (f" with {', '.join(features)}" if features else "")
        raise FormatError(
            f"the log at {folder} asks its writers for {asked}; this program knows {_WRITER_VERSION_MAX}",
            hint="another program has changed the table: put its protocol back, or begin a log in another folder",
        )
