"""The file of a chunk: whole, or not there (X6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from evermark.errors import EvermarkError
from evermark.sources.chunk_file import read_batches, write_batches

SCHEMA = pa.schema([("key", pa.string())])


def _rows(error: Exception | None = None) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"key": ["a", "b"]})
    if error is not None:
        raise error


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """GIVEN rows WHEN they are written THEN as many are read."""
    assert write_batches(tmp_path / "x", SCHEMA, _rows()) == 2
    assert sum(batch.num_rows for batch in read_batches(tmp_path / "x", 2)[1]) == 2


def test_rows_that_break_off_leave_no_file_and_are_not_blamed_on_the_disk(tmp_path: Path) -> None:
    """GIVEN rows from a connection that breaks WHEN they are written THEN that error is raised, and no half is left."""
    with pytest.raises(ConnectionResetError):
        write_batches(tmp_path / "x", SCHEMA, _rows(ConnectionResetError("gone")))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """GIVEN a folder that is not there WHEN rows are written THEN the error says which file."""
    with pytest.raises(EvermarkError, match="cannot be written"):
        write_batches(tmp_path / "none" / "x", SCHEMA, _rows())
