"""Rows of a copy that wait for their place: in a folder and in a bucket alike."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest

from evermark.errors import EvermarkError
from evermark.sources.chunk_file import keep_draft, read_batches, write_batches, written_attempt
from evermark.sources.copies import ChunkWork, CopyStore, Mark
from evermark.storage import Place, storage_of

ROWS = pa.record_batch({"key": ["a", "b", "c"]})
WORK = ChunkWork("c1", 4, "shop.orders", (None, None), "")


class Copies:
    """A `CopyStore` that takes a chunk, or has given it up."""

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes

    def begin(self, copy: str, number: int, epoch: int) -> int:
        return 2

    def ready(self, mark: Mark, position: str, rows: int, epoch: int) -> bool:
        return self.takes


def write(mark: Mark, draft: Path, path: Path) -> tuple[str, int]:
    """As sources do: a draft, which becomes the file."""
    rows = write_batches(draft, ROWS.schema, [ROWS])
    keep_draft(draft, path)
    return "0042", rows


@pytest.fixture(params=["folder", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    place: Place = tmp_path / "copies" if request.param == "folder" else request.getfixturevalue("s3_place") / "_copies"
    storage_of(place).make_folder(place)
    return place


def attempt(folder: Place, *, takes: bool) -> bool:
    return written_attempt(cast("CopyStore", Copies(takes=takes)), WORK, folder, 7, write)


def test_the_rows_of_a_chunk_are_read_where_they_were_put(folder: Place) -> None:
    """GIVEN a chunk that was written WHEN its place is reached THEN its rows are there, and no draft is."""
    assert attempt(folder, takes=True)
    (file,) = storage_of(folder).listed(folder)
    assert pa.Table.from_batches(read_batches(folder / file.name, 3)[1]) == pa.Table.from_batches([ROWS])
    with pytest.raises(EvermarkError, match="it has 3 rows instead of 4"):
        list(read_batches(folder / file.name, 4)[1])
    storage_of(folder).delete(folder / file.name)
    with pytest.raises(EvermarkError, match="cannot be read: FileNotFoundError"):
        read_batches(folder / file.name, 3)


def test_a_chunk_that_was_given_up_leaves_nothing(folder: Place) -> None:
    """GIVEN a chunk that its reader has given up meanwhile WHEN it is written THEN its file is gone."""
    assert not attempt(folder, takes=False)
    assert storage_of(folder).listed(folder) == []
