"""Which files are merged, and the merging. Small files make every reader slow; rewriting makes the disk slow.

Files have levels. A batch's own file is level 0; when a partition has enough files of a level, all of them become one
file of the next. A row is therefore rewritten at most once a level, whatever its size, and files of different
partitions are never mixed: a reader of one partition reads nothing of the others, and retention can tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from evermark.errors import FormatError
from evermark.event import EVENT, with_all_columns
from evermark.log.base import LogFile
from evermark.log.opened import rows_of
from evermark.log.read import FileRange
from evermark.log.write import FileWriter
from evermark.storage import Place, trouble_is_said

# This many files of level 0, 1, 2, 3 are merged into one of the next level.
FAN_IN = (32, 16, 16, 16)
# A batch's own file of so many rows takes much longer to be read than to be opened, and to be rewritten: it waits for
# more of its like. A copy of a table, or a backlog, is many of them at once.
LARGE_ROWS, LARGE_FAN_IN = 50_000, 128
# A file of the first size is read well enough as it is; no merged file grows far beyond the second.
SIZE_ENOUGH = 32 * 1024 * 1024
SIZE_MAX = 128 * 1024 * 1024
_FILES_MAX = 512

_LEVEL = re.compile(r"-c(\d)-")


def level_of(path: str) -> int:
    """A merged file says its level in its name; any other is a batch's own."""
    found = _LEVEL.search(Path(path).name)
    return int(found[1]) if found else 0


def groups_to_merge(files: Iterable[FileRange]) -> list[list[FileRange]]:
    """Files to be merged into one each, in log order. Lower levels first, so that a round may end early."""
    by_place: dict[tuple[int, bool, int], list[FileRange]] = {}
    for file in files:
        level = level_of(file.path)
        if level < len(FAN_IN) and file.size < SIZE_ENOUGH and file.partition_min == file.partition_max:
            is_large = level == 0 and file.rows >= LARGE_ROWS
            by_place.setdefault((level, is_large, file.partition_min), []).append(file)
    groups: list[list[FileRange]] = []
    for (level, is_large, _), mine in sorted(by_place.items()):
        if len(mine) >= (LARGE_FAN_IN if is_large else FAN_IN[level]):
            groups += _cut(sorted(mine, key=lambda f: (f.batch_min, f.position_min or "")))
    return groups


def _cut(files: Sequence[FileRange]) -> list[list[FileRange]]:
    groups: list[list[FileRange]] = [[]]
    size = 0
    for file in files:
        if groups[-1] and (size + file.size > SIZE_MAX or len(groups[-1]) >= _FILES_MAX):
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [group for group in groups if len(group) > 1]


def merge(folder: Place, group: Sequence[FileRange]) -> LogFile:
    """One file with the rows of all, in order, durable and not yet committed."""
    level = 1 + level_of(group[0].path)
    with trouble_is_said(folder):
        writer = FileWriter(folder, f"p{group[0].partition_min}-c{level}-b{group[0].batch_min}")
        try:
            for file in group:
                for batch in rows_of(file.path):
                    whole = batch.schema.equals(EVENT)
                    writer.write(batch if whole else with_all_columns(batch, EVENT).cast(EVENT))
            merged = writer.finish()
            if merged.rows != sum(f.rows for f in group):
                raise FormatError(
                    f"merging {len(group)} files of {folder} gave {merged.rows} rows, not {sum(f.rows for f in group)}",
                    hint="nothing was changed: a file and its description disagree; report this, with the log",
                )
        except BaseException:
            writer.discard()
            raise
    return merged


def unreadable(group: Iterable[FileRange]) -> list[str]:
    """The names of files whose rows cannot all be read."""
    found = []
    for file in group:
        try:
            for _ in rows_of(file.path):
                pass
        except FormatError:
            found.append(Path(file.path).name)
    return found
