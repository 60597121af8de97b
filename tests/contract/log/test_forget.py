"""What a person wants forgotten leaves the log, and nothing else does."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.errors import BusyError
from evermark.event import taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import LogFile
from evermark.log.compact import FAN_IN
from evermark.log.forget import Forgotten
from evermark.log.kept_table import FOLDER
from evermark.log.maintenance import REPLACED_AGE_S, Maintenance
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from tests.contract.log.log_scene import append, expected, fill, ids, position

STREAM = "public.orders"


@pytest.fixture
def log(tmp_path: Path) -> DeltaLog:
    return DeltaLog(tmp_path / "shop")


def rows(folder: Path) -> list[dict[str, object]]:
    tables = [pq.read_table(file.path) for file in LogReader(folder).files()]
    return sorted(pa.concat_tables(tables).to_pylist(), key=lambda row: str(row["position"])) if tables else []


def test_events_of_a_key_leave_and_all_others_stay_as_they_are(log: DeltaLog) -> None:
    """GIVEN batches, some of them merged WHEN a key is forgotten THEN its events are gone, and their files in an hour;
    every other event, batch number and position is as it was, and the log goes on."""
    merged = FAN_IN[0]
    fill(log, merged, rows=3)
    Maintenance(log.folder).run()
    fill(log, merged + 2, first=merged + 1, rows=3)
    before = rows(log.folder)
    old = {Path(file.path) for file in LogReader(log.folder).files()}
    what = Forgotten(STREAM, frozenset({"1", "no such key"}))

    assert Maintenance(log.folder).forget(what) == merged + 2
    assert rows(log.folder) == [row for row in before if row["key"] != "1"]
    assert Maintenance(log.folder).forget(what) == 0
    assert Maintenance(log.folder).forget(Forgotten("public.others", frozenset({"0"}))) == 0
    fill(log, merged + 3, first=merged + 3, rows=3)
    assert log.tail(0).batch == merged + 3
    assert all(path.exists() for path in old)
    later = Maintenance(log.folder, clock=lambda: time.time() + REPLACED_AGE_S + 1)
    later.run()
    assert not any(path.exists() for path in old)
    assert Maintenance(log.folder).forget(what) == 1
    kept = without_1(expected(merged + 3, rows=3))
    assert ids(log.folder) == kept


def without_1(wanted: dict[str, int]) -> dict[str, int]:
    return {each: count for each, count in wanted.items() if not each.endswith("-1")}


def test_a_file_without_anything_else_goes_whole(log: DeltaLog) -> None:
    """GIVEN batches of one key each WHEN it is forgotten THEN no empty file is left, and the next batch follows."""
    fill(log, 3)
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"0"}))) == 3
    assert LogReader(log.folder).files() == []
    fill(DeltaLog(log.folder), 4, first=4)
    assert ids(log.folder) == {"0-4-0": 1}


def _moved(folder: Path) -> LogFile:
    batch = taken_batch(
        {
            "event_id": ["moved"],
            "position": [position(1)],
            "stream": [STREAM],
            "key": ["new"],
            "previous_key": ["old"],
            "op": ["update"],
            "payload": ['{"id":"new"}'],
            "before": ['{"id":"old"}'],
            "flags": [[]],
        },
        1,
    )
    file = BatchWriter(folder, "shop", 0, 1).write_all([batch])
    assert file is not None
    return file


def test_a_record_that_has_another_key_now_stays_without_what_it_was(log: DeltaLog) -> None:
    """GIVEN an event that changed a key WHEN the old key is forgotten THEN nothing of it is left in the event; WHEN the
    new one is THEN the event goes."""
    log.commit(append([_moved(log.folder)], 1))
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"old"}))) == 1
    (row,) = rows(log.folder)
    assert (row["key"], row["previous_key"], row["before"], row["payload"]) == ("new", None, None, '{"id":"new"}')
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"new"}))) == 1
    assert rows(log.folder) == []


def test_a_record_does_not_come_back_under_the_key_it_had_before(log: DeltaLog) -> None:
    """GIVEN an event that changed a key WHEN the new key is forgotten THEN all that is left says that the old one is no
    more; WHEN both are THEN nothing is left."""
    log.commit(append([_moved(log.folder)], 1))
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"new"}))) == 1
    (row,) = rows(log.folder)
    assert (row["event_id"], row["op"], row["key"], row["previous_key"]) == ("moved", "delete", "old", None)
    assert (row["before"], row["payload"]) == (None, None)
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"new"}))) == 0
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"new", "old"}))) == 1
    assert rows(log.folder) == []


def test_it_runs_beside_the_owner_and_its_compaction(log: DeltaLog) -> None:
    """GIVEN an owner that appends and compacts WHEN a key is forgotten meanwhile THEN no other event is lost or twice,
    and none of the key that was there before is left."""
    fill(log, 40, rows=3)
    before, ended = 40, threading.Event()

    def own() -> None:
        care = Maintenance(log.folder)
        for batch in range(before + 1, before + 61):
            fill(log, batch, first=batch, rows=3)
            care.run()
        ended.set()

    owner = threading.Thread(target=own)
    owner.start()
    what = Forgotten(STREAM, frozenset({"1"}))
    forgotten = 0
    try:
        while forgotten == 0 or not ended.is_set():
            forgotten += Maintenance(log.folder).forget(what)
    finally:
        owner.join()
    forgotten += Maintenance(log.folder).forget(what)
    assert forgotten == before + 60
    assert ids(log.folder) == without_1(expected(before + 60, rows=3))


def test_a_commit_that_went_through_unseen_is_counted(log: DeltaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a commit whose success was not seen WHEN a key is forgotten THEN it is found, and nothing is done twice."""
    fill(log, 3, rows=3)
    put, seen = Maintenance._put, iter([False])
    monkeypatch.setattr(Maintenance, "_put", lambda *given: put(*given) and next(seen, True))
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"1"}))) == 3
    assert ids(log.folder) == without_1(expected(3, rows=3))
    version = log.tail(0)
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"1"}))) == 0 and log.tail(0) == version


def test_files_are_looked_at_once_though_compaction_is_quicker(log: DeltaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN another process that is quicker some times WHEN a key is forgotten THEN no file is looked at twice."""
    fill(log, 3, rows=3)
    put, seen, looked = Maintenance._put, iter([False, False]), list[str]()
    in_file = Forgotten.in_file
    monkeypatch.setattr(Maintenance, "_put", lambda *given: next(seen, True) and put(*given))
    monkeypatch.setattr(Forgotten, "in_file", lambda self, file: looked.append(file.path) or in_file(self, file))
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"1"}))) == 3
    assert len(looked) == len(set(looked)) == 3


def test_what_was_kept_of_forgotten_events_goes_though_a_run_before_died(log: DeltaLog) -> None:
    """GIVEN a kept table, and nothing left to forget WHEN a key is forgotten again THEN the kept table is used no more:
    the run that removed the events may have died before it came to that."""
    fill(log, 1)
    known = log.folder / FOLDER / "ab" / "kept.json"
    known.parent.mkdir(parents=True)
    known.write_text("{}")
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"no such key"}))) == 0
    assert not known.exists()


def test_one_that_is_always_overtaken_says_so(log: DeltaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN another process that is always quicker WHEN a key is to be forgotten THEN that is said; nothing is lost."""
    fill(log, 2, rows=3)
    monkeypatch.setattr(Maintenance, "_put", lambda *_: False)
    with pytest.raises(BusyError, match="compacted"):
        Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"1"})))
    assert ids(log.folder) == expected(2, rows=3)
