"""The reports of one micro-batch's tasks, put together per partition. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evermark.errors import EvermarkError, of_kind
from evermark.ingest.batch_taker import WrittenBatch
from evermark.log.base import LogFile

WHOLE_SOURCE = -1


@dataclass
class Gathered:
    """Partitions with every slice written, and the first error of each other partition."""

    written: list[WrittenBatch] = field(default_factory=list)
    failed: dict[int, EvermarkError] = field(default_factory=dict)


def gather(rows: Iterable[Mapping[str, Any]], epoch: int) -> Gathered:
    """A partition with one failed slice takes nothing of this batch: batches are whole or not at all."""
    by_partition: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_partition[int(row.get("partition", WHOLE_SOURCE))].append(row)
    out = Gathered()
    for partition, mine in sorted(by_partition.items()):
        error = next((row["error"] for row in mine if row.get("error") is not None), None)
        if error is not None:
            out.failed[partition] = of_kind(error.get("kind", ""), error.get("message", ""), error.get("hint", ""))
        else:
            out.written.append(_written(partition, mine, epoch))
    return out


def _written(partition: int, rows: list[Mapping[str, Any]], epoch: int) -> WrittenBatch:
    first = rows[0]
    files = tuple(LogFile(**file) for row in rows for file in row.get("files", ()))
    duplicates, ready, controls = (
        sum(int(row.get(name, 0)) for row in rows) for name in ("duplicates", "ready", "controls")
    )
    fresh = first.get("fresh") if len(rows) == 1 else None
    return WrittenBatch(
        partition, first["batch"], epoch, first["start"], first["end"], files, duplicates, ready, controls, fresh
    )
