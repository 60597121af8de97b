"""What a person wants forgotten leaves the log, and nothing else does."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.errors import BusyError, FormatError
from evermark.event import taken_batch
from evermark.log import maintenance
from evermark.log.append import DeltaLog
from evermark.log.base import LogFile
from evermark.log.compact import FAN_IN
from evermark.log.forget import Forgotten
from evermark.log.kept_shelf import FOLDER
from evermark.log.maintenance import REPLACED_AGE_S, Maintenance
from evermark.log.read import LogReader
from evermark.log.small_table import small_tables
from evermark.log.write import BatchWriter, FileWriter
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


def told(log: DeltaLog, batch: int, *events: dict[str, str | None]) -> None:
    """One batch: what each event says beside its place."""
    names = ("key", "previous_key", "op", "payload", "before", "tx")
    columns = {name: [event.get(name) for event in events] for name in names}
    place = {
        "event_id": [f"{batch}-{row}" for row in range(len(events))],
        "position": [position(batch, row) for row in range(len(events))],
        "stream": [STREAM] * len(events),
        "flags": [[] for _ in events],
    }
    file = BatchWriter(log.folder, "shop", 0, batch).write_all([taken_batch({**place, **columns}, len(events))])
    assert file is not None
    log.commit(append([file], batch))


def inserted(key: str, name: str, tx: str = "1") -> dict[str, str | None]:
    return {"key": key, "op": "insert", "payload": f'{{"id":{key},"name":"{name}"}}', "tx": tx}


def left(old: str, new: str, name: str, tx: str) -> dict[str, str | None]:
    """The change of a record's key, with whole images."""
    image = f'{{"id":{new},"name":"{name}"}}'
    return {
        "key": new,
        "previous_key": old,
        "op": "update",
        "payload": image,
        "before": f'{{"id":{old},"name":"{name}"}}',
        "tx": tx,
    }


def implied(log: DeltaLog) -> dict[str, str]:
    tables = small_tables([file.path for file in LogReader(log.folder).files()])
    return {row["key"]: row["payload"] for table in tables.values() for row in table.to_pylist()}


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_record_that_took_a_key_before_another_left_it_stays(log: DeltaLog, batches: int) -> None:
    """GIVEN a transaction in which a record takes key 1 before another leaves it for key 3 WHEN key 3 is forgotten THEN
    key 1 is not said to be gone: it is that of the record that took it; in whichever files the events are."""
    told(log, 1, inserted("1", "ann"), inserted("2", "bob"))
    moves = [left("2", "1", "bob", "7"), left("1", "3", "ann", "7")]
    if batches == 1:
        told(log, 2, *moves)
    else:
        told(log, 2, moves[0])
        if batches == 3:  # events of another key in between, which are forgotten, too
            told(log, 3, {**inserted("3", "cid"), "op": "delete"})
        told(log, batches + 1, moves[1])
    assert implied(log) == {"1": '{"id":1,"name":"bob"}', "3": '{"id":3,"name":"ann"}'}
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"3"}))) == max(1, batches - 1)
    assert implied(log) == {"1": '{"id":1,"name":"bob"}'}
    assert "3" not in {row[name] for row in rows(log.folder) for name in ("key", "previous_key")}


def test_a_key_that_nobody_has_when_its_record_leaves_it_is_gone(log: DeltaLog) -> None:
    """GIVEN records that changed before they left a key, one in the same transaction WHEN the new key is forgotten THEN
    the old one is gone: what had it in that transaction was the record itself, or has left it, too."""
    told(log, 1, inserted("1", "ann", "7"), {**left("1", "3", "ann", "7"), "before": '{"id":1}'})
    told(log, 2, inserted("2", "bob"), inserted("4", "dan"))
    told(log, 3, left("4", "2", "dan", "8"), left("2", "5", "bob", "8"), left("2", "3", "dan", "8"))
    Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"3"})))
    assert implied(log) == {"5": '{"id":5,"name":"bob"}'}


@pytest.mark.parametrize(
    ("named", "stays", "names"),
    [
        ("a", {"c": "c"}, {"b", "c"}),
        ("b", {"c": "c"}, {"a", "c"}),
        ("c", {}, {"a", "b"}),
        ("ab", {"c": "c"}, {"c"}),
        ("bc", {}, {"a"}),
        ("ac", {}, {"b"}),
        ("abc", {}, set()),
    ],
)
def test_of_a_record_that_had_several_keys_each_has_to_be_named(
    log: DeltaLog, named: str, stays: dict[str, str], names: set[str]
) -> None:
    """GIVEN a record whose key went from a to b to c WHEN some of its keys are forgotten THEN it is still there exactly
    if its last one is not among them, it comes back under no other, and events of the others stay."""
    told(log, 1, {"key": "a", "op": "insert", "payload": "a"})
    told(log, 2, {"key": "b", "previous_key": "a", "op": "update", "payload": "b", "before": "a", "tx": "2"})
    told(log, 3, {"key": "c", "previous_key": "b", "op": "update", "payload": "c", "before": "b", "tx": "3"})
    Maintenance(log.folder).forget(Forgotten(STREAM, frozenset(named)))
    assert implied(log) == stays
    assert {row[name] for row in rows(log.folder) for name in ("key", "previous_key")} - {None} == names


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


def test_the_log_counts_how_often_events_were_forgotten(log: DeltaLog) -> None:
    """GIVEN readers of a log, old and new WHEN keys are forgotten THEN each learns how often; not where there was none,
    and not by other maintenance."""
    fill(log, FAN_IN[0], rows=3)
    reader = LogReader(log.folder)
    assert reader.forgotten() == 0
    Maintenance(log.folder).run()
    for count, key in enumerate("12", start=1):
        Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({key})))
        Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"no such key"})))
        assert reader.forgotten() == LogReader(log.folder).forgotten() == count


def test_how_often_events_were_forgotten_is_known_though_commits_are_cleaned_away(
    log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a reader that has a log open WHEN its commits are cleaned away THEN it still learns the number."""
    fill(log, 3, rows=3)
    reader = LogReader(log.folder)
    assert reader.forgotten() == 0
    Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"1"})))
    fill(log, 9, first=4)
    monkeypatch.setattr(maintenance, "DELTA_CHECKPOINT_EVERY", 5)
    monkeypatch.setattr(maintenance, "KEPT_COMMITS", 2)
    assert Maintenance(log.folder).run().commits_cleaned
    assert reader.forgotten() == LogReader(log.folder).forgotten() == 1


def test_files_are_written_anew_a_few_large_events_at_a_time(log: DeltaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a row group of many large events WHEN a key is forgotten THEN few of them are held at a time; and of one
    with small ones many."""
    pieces: list[tuple[int, int]] = []
    write = FileWriter.write

    def seen(self: FileWriter, piece: pa.RecordBatch) -> None:
        pieces.append((piece.num_rows, piece.nbytes))
        write(self, piece)

    told(log, 1, *({"key": str(row), "op": "insert", "payload": f'"{"x" * 1_000_000}"'} for row in range(50)))
    told(log, 2, *({"key": str(row), "op": "insert", "payload": "{}"} for row in range(2_000)))
    assert pq.ParquetFile(LogReader(log.folder).files()[0].path).num_row_groups == 1
    monkeypatch.setattr(FileWriter, "write", seen)
    assert Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"1"}))) == 2
    assert sum(rows for rows, _ in pieces) == 49 + 1_999
    assert max(size for _, size in pieces) < 20_000_000 and max(rows for rows, _ in pieces) == 1_999


def test_a_damaged_file_is_named_and_nothing_is_forgotten_by_halves(log: DeltaLog) -> None:
    """GIVEN a file whose pages are damaged WHEN a key is forgotten THEN the file is named, and what to do."""
    fill(log, 2, rows=3)
    file = Path(LogReader(log.folder).files()[-1].path)
    body = bytearray(file.read_bytes())
    body[4:-2000] = b"\xff" * len(body[4:-2000])
    file.write_bytes(bytes(body))
    with pytest.raises(FormatError, match=f"{file.name} of the log is damaged") as error:
        Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"1"})))
    assert "put it back" in error.value.hint


def test_one_that_is_always_overtaken_says_so(log: DeltaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN another process that is always quicker WHEN a key is to be forgotten THEN that is said; nothing is lost."""
    fill(log, 2, rows=3)
    monkeypatch.setattr(Maintenance, "_put", lambda *_: False)
    with pytest.raises(BusyError, match="compacted"):
        Maintenance(log.folder).forget(Forgotten(STREAM, frozenset({"1"})))
    assert ids(log.folder) == expected(2, rows=3)
