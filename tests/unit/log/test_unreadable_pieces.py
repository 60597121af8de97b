"""The log read on piece by piece up to a file that cannot be read."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evermark.errors import FormatError
from evermark.event import EVENT
from evermark.log.pieces import PieceReader
from evermark.log.read import LogReader
from tests.unit.log.test_pieces import Files


@pytest.mark.parametrize("damaged", [None, "batch", "payload"])
def test_a_reader_stops_right_before_a_file_that_cannot_be_read(tmp_path: Path, damaged: str | None) -> None:
    """GIVEN files of a batch each, one of them missing, or damaged in a column WHEN read THEN every row before it
    comes, and then an error that names it; WHEN it is put back THEN reading goes on there at once.
    """
    log = Files(tmp_path, [[(batch, f"{n:04}") for n in range(10)] for batch in range(1, 21)])
    path = Path(log.files()[12].path)
    content, reader = path.read_bytes(), PieceReader(log)

    def read(at: tuple[int, str]) -> tuple[list[int], tuple[int, str], str]:
        """The batches of the rows, where reading ends, and why."""
        found: list[int] = []
        try:
            while at[0] < 20:
                piece = reader.next(0, *at, 20, 60, 1 << 20)
                found += piece.rows.column("batch").to_pylist()
                at = (piece.batch, piece.through)
        except FormatError as error:
            return found, at, error.message
        return found, at, ""

    path.unlink()
    if damaged is not None:
        column = pq.read_metadata(io.BytesIO(content)).row_group(0).column(EVENT.names.index(damaged))
        start, size = column.dictionary_page_offset or column.data_page_offset, column.total_compressed_size
        path.write_bytes(content[:start] + b"\xff" * size + content[start + size :])
    found, at, said = read((0, ""))
    assert found == [batch for batch in range(1, 13) for _ in range(10)] and path.name in said
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    assert read(at) == ([batch for batch in range(13, 21) for _ in range(10)], (20, ""), "")


def test_a_log_that_is_not_there_was_lost_and_is_not_empty(tmp_path: Path) -> None:
    """GIVEN the folder of a log whose disk is not mounted WHEN a reader begins THEN that is said, as of a lost file:
    retention has not removed what was taken."""
    reader = PieceReader(LogReader(tmp_path))
    with pytest.raises(FormatError, match="is gone") as found:
        reader.first_batch(0)
    assert "mounted" in found.value.hint
    with pytest.raises(FormatError, match="is gone"):
        reader.next(0, 0, "", 9, 100, 1 << 20)
