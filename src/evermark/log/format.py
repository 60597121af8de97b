"""The log's durable format, version 1 (docs/formats.md).

One unpartitioned Delta table per source. The tail of each partition is kept as a Delta application transaction whose
version holds the lease epoch in its high bits and the batch number in the low ones, so that both survive the cleaning
of `_delta_log`. The end position of a batch stands in its commit's own metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from evermark.event import TIMESTAMP

FORMAT_VERSION = 1
METADATA_KEY = "evermark"

_BATCH_BITS = 40
BATCH_MAX = (1 << _BATCH_BITS) - 1
EPOCH_MAX = (1 << (63 - _BATCH_BITS)) - 1

STATS_COLUMNS = ("partition", "batch", "event_time", "ingested_at", "position")

TABLE_CONFIGURATION: dict[str, str | None] = {
    "delta.dataSkippingStatsColumns": ",".join(STATS_COLUMNS),
    # Versions are ours to clean: readers follow batches, never table versions.
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
    "delta.enableExpiredLogCleanup": "false",
    "delta.enableDeletionVectors": "false",
    "evermark.format": str(FORMAT_VERSION),
}


# Each removal of files, by compaction or retention, counts this up: of two at the same time the second is refused. It
# stands last in such a commit, which is whole where it is there (torn.py).
MAINTENANCE_APP_ID = "evermark:care"
# Each `log forget` that takes events out counts this up: what was made of the log before holds them, and is not used.
FORGOTTEN_APP_ID = "evermark:forgotten"


def app_id(partition: int) -> str:
    return f"evermark:{partition}"


def pack(epoch: int, batch: int) -> int:
    if not 0 <= batch <= BATCH_MAX or not 0 <= epoch <= EPOCH_MAX:
        raise ValueError(f"epoch {epoch}, batch {batch}: out of range")
    return epoch << _BATCH_BITS | batch


def unpack(version: int) -> tuple[int, int]:
    """(epoch, batch)"""
    return version >> _BATCH_BITS, version & BATCH_MAX


class Note:
    """What a commit says about itself."""

    def as_metadata(self) -> dict[str, str]:
        return {METADATA_KEY: json.dumps({**vars(self), "v": FORMAT_VERSION}, separators=(",", ":"))}


@dataclass(frozen=True)
class CommitNote(Note):
    """Of a batch."""

    partition: int
    batch: int
    epoch: int
    start: str
    end: str
    rows: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class MaintenanceNote(Note):
    """Of compaction, retention, `log forget` or `log missing --give-up`: how many files it added and removed."""

    care: str
    adds: int
    removes: int


@dataclass(frozen=True)
class FenceNote(Note):
    """The note of a fence: how many partitions it fences. Fences of older programs fence one, and have no such note."""

    fences: int


def note_of(commit_info: Mapping[str, Any]) -> CommitNote | MaintenanceNote | FenceNote | None:
    """The note in a commit's info; None for commits without (the table's creation)."""
    text = commit_info.get(METADATA_KEY)
    body: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
    body.pop("v", None)
    if "batch" in body:
        return CommitNote(**{**body, "files": tuple(body["files"])})
    if "fences" in body:
        return FenceNote(**body)
    return MaintenanceNote(**body) if "care" in body else None


def stats_json(rows: int, stats: Mapping[str, Sequence[Any]]) -> str:
    """Delta's per-file statistics from `{column: (min, max, nulls)}`."""
    return json.dumps(
        {
            "numRecords": rows,
            "minValues": {c: s[0] for c, s in stats.items() if s[0] is not None},
            "maxValues": {c: s[1] for c, s in stats.items() if s[1] is not None},
            "nullCount": {c: s[2] for c, s in stats.items()},
        }
    )


# One row for each (partition, row key): the newest event that speaks of it, and what later events must know of it.
KEPT = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("row_key", pa.string()),
        pa.field("key", pa.string()),
        pa.field("op", pa.string()),
        pa.field("payload", pa.string()),
        pa.field("event_time", TIMESTAMP),
        pa.field("schema_version", pa.int32()),
        pa.field("event_id", pa.string()),
        pa.field("position", pa.string()),
        pa.field("batch", pa.int64()),
        pa.field("tx", pa.string()),
        pa.field("history", pa.string()),
        pa.field("gone", pa.bool_()),
        # The last event that spoke of the key, if it is another one.
        pa.field("raw", pa.struct([("tx", pa.string()), ("gone", pa.bool_()), ("payload", pa.string())])),
        # The last event that had the key as its own, if it is another one; `known`: there was one.
        pa.field("keyed", pa.struct([("known", pa.bool_()), ("payload", pa.string())])),
    ]
)
