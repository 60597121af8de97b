"""A log from before an event had all its columns: opened, read, written to and merged, with nulls where it has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark import event_file
from evermark.event import ADDED_SINCE, EVENT
from evermark.log import compact
from evermark.log import write as log_write
from evermark.log.append import DeltaLog
from evermark.log.format import TABLE_CONFIGURATION
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader
from evermark.log.row_reader import RowReader, code_of
from evermark.log.table import commit_file, open_table
from evermark.log.torn import set_aside_torn
from tests.contract.log.log_scene import append, events, expected, fill, ids, write

AT_FIRST = pa.schema([field for field in EVENT if field.name not in ADDED_SINCE])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table of 40 batches as the first program made it."""
    path = tmp_path / "shop"
    deltalake.DeltaTable.create(
        str(path), schema=AT_FIRST, configuration=TABLE_CONFIGURATION, raise_if_key_not_exists=False
    )
    with pytest.MonkeyPatch.context() as past:
        for module in (log_write, event_file):
            past.setattr(module, "EVENT", AT_FIRST)
        fill(DeltaLog(path), 40)
    return path


def columns(folder: Path) -> list[str]:
    return [field.name for field in open_table(folder).schema().fields]


def test_an_older_log_opens_and_goes_on(folder: Path) -> None:
    """GIVEN a table without the column WHEN its next owner begins THEN the table has it, and nothing else changed."""
    before = ids(folder)
    assert columns(folder) == AT_FIRST.names
    log = DeltaLog(folder)
    tail = log.fence(0, 2)
    assert (tail.batch, tail.epoch) == (40, 2)
    assert columns(folder) == EVENT.names
    assert open_table(folder).metadata().configuration == {k: v for k, v in TABLE_CONFIGURATION.items() if v}
    version = log.sync()
    assert DeltaLog(folder).fence(0, 3).batch == 40
    assert open_table(folder).version() == version + 1  # the fence alone: a column is added once
    log = DeltaLog(folder)
    log.commit(append([write(folder, 41)], 41, epoch=3))
    assert ids(folder) == before + expected(41) - expected(40)


def test_files_with_and_without_the_column_are_read_and_merged_together(folder: Path) -> None:
    """GIVEN old files and new ones WHEN rows are picked, and files merged THEN the old rows have nulls."""
    log = DeltaLog(folder)
    log.fence(0, 2)
    wanderer = events(0, 41).set_column(
        events(0, 41).schema.get_field_index("previous_key"), "previous_key", pa.array(["before"])
    )
    file = log_write.BatchWriter(folder, "shop", 0, 41).write_all([wanderer])
    assert file is not None
    log.commit(append([file], 41, epoch=2))

    def previous_keys() -> list[str | None]:
        files = sorted(LogReader(folder).files(), key=lambda f: f.batch_min)
        picker = RowReader([f.path for f in files])
        return [key for f in files for key in picked(picker, f.path, f.rows)]

    assert previous_keys() == [None] * 40 + ["before"]
    assert Maintenance(folder).run().compacted == 41
    assert previous_keys() == [None] * 40 + ["before"]
    assert ids(folder) == expected(41)


def picked(picker: RowReader, path: str, rows: int) -> list[str | None]:
    numbers = pa.array(range(rows)).to_numpy()
    found: list[str | None] = picker.pick(numbers * 0 + code_of(path), numbers)["previous_key"].to_pylist()
    return found


def test_a_column_of_a_newer_program_is_ignored(folder: Path) -> None:
    """A file with a column that this program does not know is read and merged without it."""
    newer = Path(LogReader(folder).files()[0].path)
    table = pq.read_table(newer)
    group = [f for f in LogReader(folder).files() if f.batch_min <= 2]
    pq.write_table(table.append_column("from_the_future", pa.array([1] * table.num_rows)), newer)
    merged = compact.merge(folder, group)
    assert pq.read_schema(folder / merged.path).names == EVENT.names
    assert merged.rows == 2


def test_a_commit_that_meets_the_new_column_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN an owner of another partition about to commit WHEN the column is added THEN its batch is in, once."""
    one, other = DeltaLog(folder), DeltaLog(folder)
    fill(one, 1, partition=1)
    do_before_commit(one, monkeypatch, lambda: other.fence(0, 2))
    one.commit(append([write(folder, 2, partition=1)], 2, partition=1))
    assert columns(folder) == EVENT.names
    assert ids(folder) == expected(40) + expected(2, partition=1)


def do_before_commit(log: DeltaLog, monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    real = log._try_commit

    def raced(*args: object) -> bool:
        monkeypatch.setattr(log, "_try_commit", real)
        do()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(log, "_try_commit", raced)


def test_two_owners_that_add_the_column_at_once_add_it_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a second owner between a look and its change WHEN both are done THEN both go on with one column."""
    one, other = DeltaLog(folder, pause=lambda _: None), DeltaLog(folder)
    from evermark.log import append as log_append

    real = log_append.missing_columns

    def raced(table: deltalake.DeltaTable) -> list[deltalake.Field]:
        monkeypatch.setattr(log_append, "missing_columns", real)
        missing = real(table)
        other.fence(1, 5)
        return missing

    monkeypatch.setattr(log_append, "missing_columns", raced)
    assert one.fence(0, 2).batch == 40
    assert columns(folder) == EVENT.names


def test_a_power_cut_right_after_the_new_column_keeps_or_loses_it_whole(folder: Path) -> None:
    """GIVEN the change of the table as the last commit WHEN it is whole, or cut off THEN it stays, or is made again."""
    log = DeltaLog(folder)
    durable = log.sync()
    log.fence(0, 2)
    last = open_table(folder).version()
    assert set_aside_torn(folder, durable) == []
    assert columns(folder) == EVENT.names
    commit = commit_file(folder, last)
    commit.write_text(commit.read_text().splitlines()[0] + "\n")
    assert set_aside_torn(folder, durable) == [last]
    assert columns(folder) == AT_FIRST.names
    assert DeltaLog(folder).fence(0, 3).batch == 40
    assert columns(folder) == EVENT.names
