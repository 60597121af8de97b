"""Opening a file of the log to read it. Where it is gone or damaged, that is said, and what to do.

Whatever Evermark removes was out of the table for an hour: a file that is in the table and not in its folder was
removed by somebody else, as by a rule of the bucket's that deletes old objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evermark.errors import FormatError, UnreachableError
from evermark.storage import Place, readable

PLAYBOOK = "docs/playbook.md, `The log is lost or damaged`"
# Of rows that are held at a time. Values that are much alike are many times as large as their file.
_PIECE_ROWS = 4096
_PIECE_BYTES = 16 * 1024 * 1024
GONE_HINT = f"is its disk mounted? Else stop all instances, put it back from a copy and start again; {PLAYBOOK}"
_HINT = f"put it back from a copy, and it goes on by itself; if there is none: {PLAYBOOK}"


def opened(path: str, **options: Any) -> pq.ParquetFile:
    """A file of the log, to be read and closed by the caller."""
    with damage_is_said(path):
        return pq.ParquetFile(readable(path), **options)


def columns_of(path: str, columns: Sequence[str], **options: Any) -> pa.Table:
    """Some columns of a file of the log, whole."""
    with damage_is_said(path):
        return pq.read_table(readable(path), columns=list(columns), **options)


def rows_of(path: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a file of the log with those of these columns that it has, few at a time where they are large."""
    with damage_is_said(path), opened(path) as file:
        there = [name for name in file.schema_arrow.names if columns is None or name in columns]
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            about = [group.column(at) for at in range(group.num_columns)]
            size = sum(each.total_uncompressed_size for each in about if each.path_in_schema.split(".")[0] in there)
            rows_max = max(1, min(_PIECE_ROWS, _PIECE_BYTES * group.num_rows // max(size, 1)))
            # A piece never has rows of two row groups: another may have larger ones.
            yield from file.iter_batches(rows_max, row_groups=[number], columns=there, use_threads=False)


@contextmanager
def damage_is_said(path: str) -> Iterator[None]:
    """Raises `FormatError` for a file that is not there, or is no file of ours any more."""
    try:
        yield
    except FileNotFoundError as error:
        raise lost(path) from error
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # of the disk, and not of the file
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise FormatError(f"the file {path} of the log is damaged: {said}", hint=_HINT) from error


def lost(path: str) -> FormatError:
    return FormatError(f"the file {path} of the log is missing", hint=_HINT)


def gone(folder: Place, since: str = "it was there when it was opened") -> UnreachableError:
    """The folder of a log, though the log was there: its disk may be away. `since`: how that is known."""
    return UnreachableError(f"the log at {folder} is gone: {since}", hint=GONE_HINT)


def require_whole(logged: int, taken: int, where: str) -> None:
    """The log has what was taken: both are batches, the last of each."""
    if logged < taken:
        raise FormatError(
            f"the log of {where} ends at batch {logged}, but batch {taken} was taken",
            hint="the log's folder was replaced or restored from a backup: put the newer one back, or run"
            f" `evermark checkpoint reset` to take the missing part from the source again; {PLAYBOOK}",
        )


def require_there(paths: Iterable[str]) -> None:
    """Raises `FormatError` for the first of these files, on a disk, that is missing."""
    for path in paths:
        if not Path(path).exists():
            raise lost(path)


def require_readable(paths: Iterable[str]) -> None:
    """Raises `FormatError` for the first of these files that is missing or damaged."""
    for path in paths:
        opened(path).close()
