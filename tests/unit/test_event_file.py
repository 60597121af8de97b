"""Files of events that are written before their batch is known: filled in without a look at any row (X6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark import event_file
from evermark.errors import DiskFullError, FormatError
from evermark.event import TAKEN, taken_batch
from evermark.event_file import Fill, Rows, filled
from evermark.ingest.pieces import Piece, ReadFrom
from evermark.log.base import LogFile
from evermark.log.write import BatchWriter
from evermark.sources.base import Slice
from evermark.sources.postgres.tables.chunk_file import read_rows
from evermark.testing.number_files import NumberFiles
from tests.unit.event_files import ABOUT, AT, TIME_US, written_events


def rows_of(count: int, name: str = "row") -> pa.RecordBatch:
    keys = [f"{name} {n}" for n in range(count)]
    same = {"position": [""] * count, "stream": ["public.t"] * count, "op": ["read"] * count, "flags": [[]] * count}
    return taken_batch({"event_id": keys, "key": keys, "payload": [f'{{"k":"{key}"}}' for key in keys], **same}, count)


@pytest.mark.parametrize(("group", "piece"), [(131_072, 1 << 20), (1_000, 977), (1_000, 64)])
def test_a_file_that_is_filled_in_is_a_file_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, piece: int
) -> None:
    """GIVEN rows in a file with blanks, of one group or several, WHEN it is taken over in pieces of any size THEN it
    says what the log says of a file, in every row and in its statistics; and the file that it is made of is as it was.
    """
    monkeypatch.setattr(event_file, "_GROUP_ROWS_MAX", group)
    monkeypatch.setattr(event_file, "_COPIED_BYTES", piece)
    batches = [rows_of(1_500, "one"), rows_of(1_500, "other"), rows_of(7, "last")]
    events = written_events(tmp_path, *batches)
    before = (tmp_path / "chunk").read_bytes()
    file = BatchWriter(tmp_path, "shop", 0, 77).take_over(events)
    assert (tmp_path / "chunk").read_bytes() == before
    assert file.path.startswith("p0-b77-") and file.size == (tmp_path / file.path).stat().st_size == len(before)
    found = pq.read_table(tmp_path / file.path)
    columns = ["event_id", "stream", "key", "op", "payload", "flags"]
    assert found.select(columns).equals(pa.Table.from_batches(batches).select(columns))
    assert found["position"].to_pylist() == [f"{str(AT)[:-8]}{n + 1:08x}" for n in range(3_007)]
    same = {name: found[name].unique().to_pylist() for name in ("source", "partition", "batch", "schema_version")}
    assert same == {"source": ["shop"], "partition": [0], "batch": [77], "schema_version": [3]}
    assert found["event_time"].unique().cast(pa.int64()).to_pylist() == [TIME_US]
    (taken_at,) = found["ingested_at"].unique().to_pylist()
    assert abs((datetime.now(UTC) - taken_at).total_seconds()) < 60
    about = pq.read_metadata(tmp_path / file.path)
    assert about.num_row_groups == (1 if group > 3_007 else 3)
    for number in range(about.num_row_groups):
        group_of = about.row_group(number)
        stats = {group_of.column(n).path_in_schema: group_of.column(n).statistics for n in range(group_of.num_columns)}
        assert (stats["batch"].min, stats["batch"].max, stats["partition"].max) == (77, 77, 0)
        assert stats["event_time"].min == stats["event_time"].max == found["event_time"][0].as_py()


def test_the_description_of_a_file_is_that_of_one_written_row_by_row(tmp_path: Path) -> None:
    """GIVEN the same rows WHEN taken over, and written anew, THEN rows and statistics are told alike."""
    events = written_events(tmp_path, rows_of(20))
    over = BatchWriter(tmp_path, "shop", 0, 5).take_over(events)
    anew = BatchWriter(tmp_path, "shop", 0, 5).write_all([events])
    assert anew is not None and (over.rows, set(over.stats)) == (anew.rows, set(anew.stats))
    for column in ("partition", "batch", "position"):
        assert over.stats[column] == anew.stats[column]


def test_a_file_without_blanks_is_refused(tmp_path: Path) -> None:
    """GIVEN a file that was filled in already WHEN it is to be filled in THEN that is refused, not passed over."""
    events = written_events(tmp_path, rows_of(20))
    file = BatchWriter(tmp_path, "shop", 0, 5).take_over(events)
    fill = Fill({"batch": 6}, events.fill.position)
    with pa.memory_map(str(tmp_path / file.path)) as source, pytest.raises(FormatError, match="lacks its batch"):
        list(filled(source, fill))


def piece(looked_up_from: str | None = None) -> Piece:
    return Piece(Slice(0, "a", "b"), 1, "a", "b", looked_up_from)


class Source(NumberFiles):
    def __init__(self, *rows: Rows | Exception) -> None:
        self.rows = rows

    def read(self, piece: Slice) -> Iterator[Rows]:
        for some in self.rows:
            if isinstance(some, Exception):
                raise some
            yield some


def report(folder: Path, *rows: Rows | Exception, name: str = "shop", of: Piece | None = None) -> dict[str, object]:
    return ReadFrom(name, Source(*rows), str(folder)).written(of or piece())


def ids(folder: Path, files: Sequence[LogFile]) -> list[list[str]]:
    return [pq.read_table(folder / file.path)["event_id"].to_pylist() for file in files]


def files_of(said: dict[str, object]) -> list[LogFile]:
    found = said["files"]
    assert isinstance(found, list)
    return [LogFile(**each) for each in found]


def test_a_batch_has_a_file_of_its_rows_and_each_file_that_was_ready(tmp_path: Path) -> None:
    """GIVEN events, a file that is ready, and events WHEN read as one batch THEN it has both, every row once."""
    made = tmp_path / "_copies"
    made.mkdir()
    said = report(tmp_path, rows_of(2, "a"), written_events(made, rows_of(3, "copied")), rows_of(1, "b"))
    assert said["controls"] == 0 and said["duplicates"] == 0
    assert ids(tmp_path, files_of(said)) == [["copied 0", "copied 1", "copied 2"], ["a 0", "a 1", "b 0"]]
    assert len(list(tmp_path.glob("*.parquet"))) == 2


def test_a_file_of_another_source_is_written_row_by_row(tmp_path: Path) -> None:
    """GIVEN a file that names another source WHEN it is read THEN its rows are the reader's source's."""
    made = tmp_path / "_copies"
    made.mkdir()
    (file,) = files_of(report(tmp_path, written_events(made, rows_of(3)), name="market"))
    assert pq.read_table(tmp_path / file.path)["source"].unique().to_pylist() == ["market"]


def test_a_failure_behind_a_file_leaves_none(tmp_path: Path) -> None:
    """GIVEN a file that was taken over WHEN what follows cannot be read THEN nothing is left of the batch."""
    made = tmp_path / "_copies"
    made.mkdir()
    said = report(tmp_path, written_events(made, rows_of(3)), DiskFullError("full", hint="make room"))
    assert said["error"] and not list(tmp_path.glob("*.parquet"))
    assert [path.name for path in made.iterdir()] == ["chunk"]


def test_rows_that_the_log_may_hold_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a crash after a commit WHEN its batch is read again THEN a ready file's rows are compared by id."""
    made = tmp_path / "_copies"
    made.mkdir()
    monkeypatch.setattr("evermark.log.read.LogReader.ids_from", lambda *_: pa.array(["row 0", "row 2"]))
    said = report(tmp_path, written_events(made, rows_of(4)), of=piece("a"))
    assert said["duplicates"] == 2 and ids(tmp_path, files_of(said)) == [["row 1", "row 3"]]


def test_rows_of_a_program_from_before_are_read(tmp_path: Path) -> None:
    """GIVEN a chunk that an older program has left, an Arrow IPC file, WHEN its mark comes THEN its rows are there."""
    columns = ("event_id", "stream", "key", "op", "payload", "flags")
    about = {b"evermark.relation": b"R\x00\x01", b"evermark.hashed": b'["mail"]'}
    schema = pa.schema([TAKEN.field(name) for name in columns]).with_metadata(about)
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), schema) as to:
        to.write_batch(pa.RecordBatch.from_arrays([rows_of(3).column(name) for name in columns], schema=schema))
    found = read_rows(tmp_path / "x.arrow", 3)
    assert (found.relation, found.hashed, found.ready) == (ABOUT.relation, ABOUT.hashed, None)
    assert sum(batch.num_rows for batch in found.batches()) == 3
