"""The log in an object store: read, searched, maintained, forgotten from and asked as on a disk."""

from __future__ import annotations

from typing import Any

import deltalake
import pyarrow as pa
import pytest

from evermark.errors import ConflictError, EngineError, EvermarkError, FormatError, NotFoundError, UnreachableError
from evermark.log import append as append_module
from evermark.log import compact, maintenance
from evermark.log.append import DeltaLog
from evermark.log.commits import read_commit
from evermark.log.forget import Forgotten
from evermark.log.maintenance import Maintenance
from evermark.log.query import query
from evermark.log.read import LogReader, sources_at
from evermark.log.row_reader import RowReader
from evermark.log.span import row_addresses
from evermark.log.streams import streams_at
from evermark.log.table import commit_file, last_delta_checkpoint, open_table
from evermark.log.torn import set_aside_torn
from evermark.log.window_search import Stretch, find
from evermark.storage import Place, storage_of
from tests.contract.log.log_scene import TIME, append, expected, fill, ids, position, write


@pytest.fixture
def folder(s3_place: Place) -> Place:
    return s3_place / "shop"


def no_pause(_: float) -> None: ...


def test_a_log_in_a_store_is_read_as_one_on_a_disk(s3_place: Place, folder: Place) -> None:
    """GIVEN batches of two partitions WHEN a reader asks THEN it is told the same as from a disk."""
    with pytest.raises(NotFoundError):
        LogReader(folder).files()
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 3, rows=2)
    fill(log, 2, rows=1, partition=1)
    assert log.sync() == 5
    reader = LogReader(folder)
    assert ids(folder) == expected(3, rows=2) + expected(2, partition=1)
    assert reader.tail_batch(0) == 3
    assert reader.position_max(0) == position(3, 1)
    assert reader.holds(1, position(2))
    assert not reader.holds(1, position(3))
    assert sorted(reader.ids_from(0, position(3)).to_pylist()) == ["0-3-0", "0-3-1"]
    assert reader.batch_at(0, "2026-11-01T00:00Z") == 0
    fill(log, 4, first=4)
    assert [file.batch_max for file in reader.files_of(0, 3, 4)] == [4], "by the commit alone"
    assert sources_at(s3_place) == ["shop"]
    assert streams_at(s3_place) == {"public.orders"}
    assert set_aside_torn(folder, 2) == []


def test_rows_are_found_and_picked_where_they_are(folder: Place) -> None:
    """GIVEN files in a store WHEN a task looks for rows THEN it finds their places and reads them."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 3, rows=3)
    paths = [file.path for file in sorted(LogReader(folder).files(), key=lambda file: file.batch_min)]
    assert all(path.startswith("s3://") for path in paths)
    found = row_addresses(paths, 0, 1, 3, exact=False)
    rows = RowReader(paths).pick(found.codes, found.numbers)
    assert rows.column("event_id").to_pylist() == ["0-2-0", "0-2-1", "0-2-2", "0-3-0", "0-3-1", "0-3-2"]
    us = int(TIME.timestamp()) * 1_000_000
    codes, _ = find(paths, Stretch(us, None, us + 1_000_000, frozenset({"insert"})))
    assert len(codes) == 9


def test_a_log_that_is_taken_away_under_its_owner_gets_no_more_batches(folder: Place) -> None:
    """GIVEN an owner with an open log WHEN its newest commits, or all of it, are deleted THEN the next batch is refused
    and nothing is put: no reader would find a batch after a gap, and the source would be told that it is safe."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 3)
    storage = storage_of(folder)
    newest = sorted(found.name for found in storage.listed(folder / "_delta_log", ".json"))[-2:]
    for name in newest:
        storage.delete(folder / "_delta_log" / name)
    with pytest.raises(ConflictError, match="4 cannot follow"):
        log.commit(append([write(folder, 4)], 4))
    for found in storage.listed(folder / "_delta_log"):
        storage.delete(folder / "_delta_log" / found.name)
    with pytest.raises(FormatError, match="is gone"):
        log.commit(append([write(folder, 4)], 4))
    assert storage.listed(folder / "_delta_log") == []


def test_who_was_asleep_goes_on_where_the_log_is(folder: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN an owner whose put of a commit hangs while owners of other partitions go on and commits are cleaned WHEN it
    lands THEN it is no success: the batch, and the next, are put where others read."""
    monkeypatch.setattr(maintenance, "KEPT_COMMITS", 2)
    monkeypatch.setattr(maintenance, "DELTA_CHECKPOINT_EVERY", 10)
    old, others = DeltaLog(folder, pause=no_pause), DeltaLog(folder, pause=no_pause)
    fill(old, 1)
    try_commit = old._try_commit

    def late(*args: Any) -> bool:
        monkeypatch.setattr(old, "_try_commit", try_commit)
        fill(others, 15, partition=1)
        Maintenance(folder).run()
        assert not storage_of(folder).exists(commit_file(folder, 2))
        return try_commit(*args)

    monkeypatch.setattr(old, "_try_commit", late)
    fill(old, 3, first=2)
    assert DeltaLog(folder).tail(0).batch == 3
    assert ids(folder) == expected(3) + expected(15, partition=1)


def test_the_takeover_of_an_idle_partition_reads_no_commits_from_before_the_last_checkpoint(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a partition whose last commit is in a Delta checkpoint WHEN another owner fences it THEN it reads the
    commits that have come since, and no more: each is a request."""
    monkeypatch.setattr(maintenance, "DELTA_CHECKPOINT_EVERY", 20)
    fill(log := DeltaLog(folder, pause=no_pause), 1, partition=1)
    fill(log, 30)
    Maintenance(folder).run()
    fill(log, 33, first=31)
    read: list[int] = []
    monkeypatch.setattr(append_module, "read_commit", lambda place, v: read.append(v) or read_commit(place, v))
    assert DeltaLog(folder, pause=no_pause).fence(1, 2).batch == 1
    assert min(read) >= last_delta_checkpoint(folder)


def test_a_log_that_is_away_when_it_is_opened_is_not_begun_anew(folder: Place) -> None:
    """GIVEN no table where a batch is known to have been WHEN an owner opens it THEN that is said, with the folder and
    what to do, and nothing is made; where none is known one is made."""
    with pytest.raises(UnreachableError, match="is gone: batch 3 was in it") as raised:
        DeltaLog(folder, taken=3)
    assert str(folder) in raised.value.message and "is its disk mounted?" in raised.value.hint
    assert storage_of(folder).listed(folder / "_delta_log") == []
    fill(DeltaLog(folder), 3)
    assert DeltaLog(folder, taken=3).tail(0).batch == 3


def test_a_hole_between_commits_is_said(folder: Place) -> None:
    """GIVEN a log in the middle of which a commit is missing WHEN it is opened THEN the error says where and what to
    do, in one line."""
    fill(DeltaLog(folder, pause=no_pause), 3)
    storage_of(folder).delete(commit_file(folder, 2))
    with pytest.raises(EvermarkError, match="cannot be read") as raised:
        LogReader(folder).files()
    assert raised.value.hint and "gap" in raised.value.message and "\n" not in raised.value.message


def test_a_batch_with_a_file_that_is_not_in_the_store_is_refused(folder: Place) -> None:
    """GIVEN a file that was removed, or that has another size WHEN its batch is committed THEN nothing is."""
    log = DeltaLog(folder, pause=no_pause)
    lost, cut = write(folder, 1), write(folder, 1)
    storage_of(folder).delete(folder / lost.path)
    storage_of(folder).put(folder / cut.path, b"PAR1")
    for file in (lost, cut):
        with pytest.raises(EngineError, match="a task wrote the log file s3://"):
            log.commit(append([file], 1))
    assert log.tail(0).batch == 0


def test_maintenance_merges_cleans_and_removes_by_the_clock_of_the_store(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN many small files and an orphan WHEN maintenance runs THEN there are few, and every event once."""
    monkeypatch.setattr(compact, "FAN_IN", (6, 3))
    monkeypatch.setattr(maintenance, "DELTA_CHECKPOINT_EVERY", 6)
    monkeypatch.setattr(maintenance, "KEPT_COMMITS", 4)
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 14)
    orphan = write(folder, 99)
    now = [maintenance.time.time()]
    care = Maintenance(folder, clock=lambda: now[0])
    report = care.run()
    assert report.compacted == 14
    assert report.commits_cleaned > 0
    assert last_delta_checkpoint(folder) > 0
    assert ids(folder) == expected(14)
    assert storage_of(folder).exists(folder / orphan.path), "it may be committed in a moment"
    monkeypatch.setattr(maintenance, "ORPHAN_AGE_S", 0.0)
    now[0] += maintenance.SCAN_EVERY_S
    care.run()  # noted
    now[0] += maintenance.REPLACED_AGE_S
    report = care.run()
    assert (report.replaced_removed, report.orphans_removed) == (14, 1)
    assert not storage_of(folder).exists(folder / orphan.path)
    assert ids(folder) == expected(14)
    log.commit(append([write(folder, 15)], 15))
    assert ids(folder) == expected(15)
    assert ids(folder) == expected(15)
    assert deltalake.DeltaTable(str(folder), storage_options=storage_of(folder).options()).version() == log.sync()


def test_events_are_forgotten_in_a_store_too(folder: Place) -> None:
    """GIVEN events of two keys WHEN one is forgotten THEN only the other is left."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 2, rows=2)
    assert Maintenance(folder).forget(Forgotten("public.orders", frozenset({"0"}))) == 2
    assert sorted(ids(folder)) == ["0-1-1", "0-2-1"]


def test_a_log_in_a_store_is_asked_in_sql(s3_place: Place, folder: Place) -> None:
    """GIVEN a log in a store WHEN it is queried without Spark THEN the rows come from there."""
    fill(DeltaLog(folder, pause=no_pause), 3, rows=2)
    columns, rows = query(s3_place, "select batch, count(*) as events from shop group by batch order by batch", 10)
    assert (columns, list(rows)) == (["batch", "events"], [(1, 2), (2, 2), (3, 2)])


def test_columns_that_an_older_table_lacks_are_added(folder: Place) -> None:
    """GIVEN a table of an older program WHEN a new owner fences it THEN it has every column."""
    from evermark.event import ADDED_SINCE, EVENT
    from evermark.log.format import TABLE_CONFIGURATION

    older = pa.schema([field for field in EVENT if field.name not in ADDED_SINCE])
    options = storage_of(folder).options()
    deltalake.DeltaTable.create(
        str(folder), older, configuration=TABLE_CONFIGURATION, raise_if_key_not_exists=False, storage_options=options
    )
    DeltaLog(folder, pause=no_pause).fence(0, 1)
    assert [field.name for field in open_table(folder).schema().fields] == EVENT.names
