"""The reports of one micro-batch's tasks, put together per partition. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evermark.errors import EvermarkError, of_kind
from evermark.ingest.take import Taken
from evermark.log.base import LogFile

WHOLE_SOURCE = -1


@dataclass
class Gathered:
    """Partitions with every slice written, and the first error of each other partition."""

    taken: list[Taken] = field(default_factory=list)
    failed: dict[int, EvermarkError] = field(default_factory=dict)


def gather(rows: Iterable[Mapping[str, Any]], epoch: int) -> Gathered:
    """A partition with one failed slice takes nothing of this batch: batches are whole or not at all."""
    by_partition: dict[int, list[Mapping[str, Any]]] = {}
    out = Gathered()
    for row in rows:
        partition = int(row.get("partition", WHOLE_SOURCE))
        error = row.get("error")
        if error is not None:
            failure = of_kind(error.get("kind", ""), error.get("message", ""), error.get("hint", ""))
            out.failed.setdefault(partition, failure)
        by_partition.setdefault(partition, []).append(row)
    out.taken += [_taken(p, mine, epoch) for p, mine in sorted(by_partition.items()) if p not in out.failed]
    return out


def _taken(partition: int, rows: list[Mapping[str, Any]], epoch: int) -> Taken:
    first = rows[0]
    files = tuple(LogFile(**row["file"]) for row in rows if row.get("file"))
    duplicates, controls = (sum(int(row.get(name, 0)) for row in rows) for name in ("duplicates", "controls"))
    return Taken(partition, first["batch"], epoch, first["start"], first["end"], files, duplicates, controls)
