"""Log care: quick for ever, and never at the price of a row."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.errors import DiskFullError, FormatError
from evermark.log import compact
from evermark.log import maintenance as care_module
from evermark.log.append import DeltaLog
from evermark.log.compact import FAN_IN, groups_to_merge, level_of
from evermark.log.maintenance import (
    ORPHAN_AGE_S,
    REPLACED_AGE_S,
    SCAN_EVERY_S,
    Maintenance,
    collected,
    may_be_collected,
)
from evermark.log.opened import rows_of
from evermark.log.read import FileRange, LogReader, files_at
from evermark.log.table import DELTA_CHECKPOINT_EVERY
from evermark.log.write import BatchWriter
from tests.contract.log.log_scene import append, events, expected, fill, ids, write


class Clock:
    def __init__(self) -> None:
        self.now = datetime.now(UTC).timestamp()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    DeltaLog(tmp_path / "shop")
    return tmp_path / "shop"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests are about does not depend on the disk having it."""
    monkeypatch.setattr("evermark.log.disk.os.fsync", lambda _: None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_row_is_rewritten_once_a_level(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 000 one-row files: every row was merged at most twice, and few files are left."""
    rewritten = {"rows": 0, "bytes": 0}
    written = 0
    real = compact.merge

    def counting(where: Path, group: Any) -> Any:
        rewritten["rows"] += sum(file.rows for file in group)
        rewritten["bytes"] += sum(file.size for file in group)
        return real(where, group)

    monkeypatch.setattr(care_module, "merge", counting)
    log, care = DeltaLog(folder), Maintenance(folder)
    for batch in range(1, 126):
        slices = [BatchWriter(folder, "shop", 0, batch).write_all([row]) for row in _one_by_one(events(0, batch, 16))]
        files = [file for file in slices if file]
        written += sum(file.size for file in files)
        log.commit(append(files, batch))
        if batch % 4 == 0:
            care.run()
    assert ids(folder) == expected(125, rows=16)
    assert max(level_of(f.path) for f in LogReader(folder).files()) == 2
    assert rewritten["rows"] < 2 * 2_000
    assert rewritten["bytes"] < 1.5 * written
    assert len(LogReader(folder).files()) < sum(FAN_IN)


def _one_by_one(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [batch.slice(row, 1) for row in range(batch.num_rows)]


def file_range(partition: int, batch: int, size: int = 5_000, level: int = 0) -> FileRange:
    name = f"p{partition}-c{level}-b{batch}-x.parquet" if level else f"p{partition}-b{batch}-x.parquet"
    return FileRange(name, partition, partition, batch, batch, 1, size)


def test_partitions_and_levels_are_never_mixed() -> None:
    """A group is of one partition and one level, in log order, and a large file is left alone."""
    files = [file_range(p, b) for b in range(40, 0, -1) for p in (0, 1)]
    files += [file_range(0, b, level=1) for b in range(16)] + [file_range(0, 99, size=compact.SIZE_ENOUGH)]
    groups = groups_to_merge(files)
    assert [({f.partition_min for f in g}, {level_of(f.path) for f in g}, len(g)) for g in groups] == [
        ({0}, {0}, 40),
        ({1}, {0}, 40),
        ({0}, {1}, 16),
    ]
    assert all([f.batch_min for f in g] == sorted(f.batch_min for f in g) for g in groups)
    assert groups_to_merge(files[:10]) == []


def test_files_with_many_rows_wait_for_more_of_their_like() -> None:
    """GIVEN batches with many rows, as of a copy, between others WHEN there are some dozens THEN only the others are
    merged; WHEN there are many THEN these are, too, apart."""
    large = [replace(file_range(0, 3 * n), rows=compact.LARGE_ROWS) for n in range(compact.LARGE_FAN_IN)]
    small = [replace(file_range(0, 3 * n + 1), rows=compact.LARGE_ROWS - 1) for n in range(FAN_IN[0])]
    assert groups_to_merge(large[:-1]) == []
    assert groups_to_merge([*large[:-1], *small]) == [small]
    assert groups_to_merge([*small[:-1], *large]) == [large]
    assert groups_to_merge([*small, *large]) == [small, large]
    merged = [file_range(0, n, level=1) for n in range(FAN_IN[1])]
    assert groups_to_merge([replace(file, rows=compact.LARGE_ROWS) for file in merged]) != []


def test_merged_files_stay_within_bounds() -> None:
    """Many middling files become several of a good size, not one of any size."""
    files = [file_range(0, b, size=compact.SIZE_ENOUGH - 1) for b in range(32)]
    groups = groups_to_merge(files)
    assert sorted(f.batch_min for g in groups for f in g) == list(range(32))
    assert max(sum(f.size for f in g) for g in groups) <= compact.SIZE_MAX


def test_appends_and_care_side_by_side_lose_and_double_nothing(folder: Path) -> None:
    """A writer of two partitions and two carers of one table, as fast as they can; readers always see a whole log."""
    done = threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - told by the test
                failures.append(error)

        return run

    def writer() -> None:
        log = DeltaLog(folder)
        try:
            for batch in range(1, 101):
                fill(log, batch, first=batch, partition=0)
                fill(log, batch, first=batch, partition=1)
        finally:
            done.set()

    def carer() -> None:
        care = Maintenance(folder)
        while not done.is_set():
            care.run()
        care.run()

    def reader() -> None:
        seen = 0
        while not done.is_set():
            now = ids(folder)
            assert set(now.values()) <= {1}
            assert len(now) >= seen
            seen = len(now)

    threads = [threading.Thread(target=guarded(work)) for work in (writer, carer, carer, reader)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert ids(folder) == expected(100) + expected(100, partition=1)
    assert len(LogReader(folder).files()) < 2 * (FAN_IN[0] + FAN_IN[1])


def test_of_two_carers_with_one_plan_only_one_commits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both merged the same files: the second commit would double every row, and is refused."""
    fill(DeltaLog(folder), 40)
    one, other = Maintenance(folder), Maintenance(folder)
    real = compact.merge
    rival = [other]

    def slow(where: Path, group: Any) -> Any:
        if rival:
            assert rival.pop().run().compacted == 40
        return real(where, group)

    monkeypatch.setattr(care_module, "merge", slow)
    assert one.run().compacted == 0
    assert ids(folder) == expected(40)


def test_a_merge_that_lost_a_row_is_not_committed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance counts before it replaces."""
    fill(DeltaLog(folder), 40)
    real = groups_to_merge

    def wrong(files: Any) -> Any:
        return [[FileRange(**{**vars(f), "rows": 2}) for f in group] for group in real(files)]

    monkeypatch.setattr(care_module, "groups_to_merge", wrong)
    with pytest.raises(FormatError, match="gave 40 rows, not 80"):
        Maintenance(folder).run()
    assert ids(folder) == expected(40)
    assert len(list(folder.glob("*.parquet"))) == 40


def test_a_crash_at_any_step_leaves_a_log_that_opens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance ends before each of its file operations in turn; every reader, fresh or kept, sees every row once."""
    monkeypatch.setattr(compact, "FAN_IN", (6, 3))
    monkeypatch.setattr(care_module, "DELTA_CHECKPOINT_EVERY", 6)
    monkeypatch.setattr(care_module, "KEPT_COMMITS", 8)
    log, reader, tails = DeltaLog(folder), LogReader(folder), LogReader(folder)
    batch = 0
    step = 0
    while True:
        fill(log, batch + 6, first=batch + 1)
        batch += 6
        with monkeypatch.context() as patch:
            steps = _crash_at(patch, step)
            with suppress(_PowerGoneError):
                Maintenance(folder).run()
        assert ids(folder) == expected(batch), f"after a crash before operation {step}"
        assert set(reader.files()) == set(LogReader(folder).files())
        assert tails.tail_batch(0) == batch
        if steps[0] < step:
            break
        Maintenance(folder).run()
        assert ids(folder) == expected(batch), f"after care that followed a crash before operation {step}"
        step += 1
    assert step > 12


class _PowerGoneError(BaseException):
    pass


def _crash_at(patch: pytest.MonkeyPatch, step: int) -> list[int]:
    """Raise before the `step`-th fsync, removal, commit or checkpoint; returns a counter of those that happened."""
    count = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if count[0] == step:
                raise _PowerGoneError
            count[0] += 1
            return real(*args, **kwargs)

        return run

    import deltalake

    patch.setattr("evermark.log.disk.os.fsync", counted(lambda _: None))
    patch.setattr(Path, "unlink", counted(Path.unlink))
    patch.setattr(deltalake.DeltaTable, "create_checkpoint", counted(deltalake.DeltaTable.create_checkpoint))
    patch.setattr("evermark.storage.local.os.link", counted(os.link))
    return count


def test_what_compaction_writes_is_durable_before_it_is_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an append right after it would call a file durable that is not."""
    fill(DeltaLog(folder), 40)
    care = Maintenance(folder)
    happened: list[str] = []

    def syncing(fd: int) -> None:
        happened.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr("evermark.log.disk.os.fsync", syncing)
    real = care._commit

    def committing(*args: Any, **kwargs: Any) -> bool:
        happened.append("commit")
        return real(*args, **kwargs)

    monkeypatch.setattr(care, "_commit", committing)
    care.run()
    (merged,) = LogReader(folder).files()
    commit = happened.index("commit")
    assert Path(merged.path).name in happened[:commit]
    assert "shop" in happened[:commit]


def test_cleaning_keeps_the_recent_commits_and_the_newest_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_delta_log` stays small, and handles of any age find their way to the newest version."""
    monkeypatch.setattr(care_module, "KEPT_COMMITS", 100)
    monkeypatch.setattr(care_module, "DELTA_CHECKPOINT_EVERY", 32)
    log, care = DeltaLog(folder), Maintenance(folder)
    old_reader, old_tails, old_log = LogReader(folder), LogReader(folder), DeltaLog(folder)
    assert old_reader.files() == []
    for batch in range(1, 200):
        fill(log, batch, first=batch)
        if batch % 50 == 0:
            care.run()
    left = list((folder / "_delta_log").iterdir())
    assert len(left) < 100 + 50 + 10
    assert len(old_reader.files()) == len(LogReader(folder).files())
    assert old_tails.tail_batch(0) == 199
    old_log.commit(append([write(folder, 200)], 200))
    assert ids(folder) == expected(200)


def test_a_list_of_files_stays_readable_for_an_hour(folder: Path, clock: Clock) -> None:
    """GIVEN a reader's list WHEN its files are replaced THEN they go only after an hour, and are counted."""
    fill(DeltaLog(folder), 40)
    held = LogReader(folder).files()
    care = Maintenance(folder, clock=clock)
    assert care.run().compacted == 40
    clock.now += REPLACED_AGE_S - 1
    assert care.run().replaced_removed == 0
    assert sum(pq.read_table(f.path).num_rows for f in held) == 40
    clock.now += 1
    assert care.run().replaced_removed == 40
    assert not any(Path(f.path).exists() for f in held)
    assert ids(folder) == expected(40)


@pytest.mark.parametrize("noted", [True, False])
def test_replaced_files_go_after_an_hour_whoever_maintains_the_log_then(
    folder: Path, clock: Clock, noted: bool
) -> None:
    """Owners live for minutes. Without its note (a crash came first) a file has its hour from when it is found."""
    fill(DeltaLog(folder), 40)
    held = LogReader(folder).files()
    clock.now += 3 * ORPHAN_AGE_S
    assert Maintenance(folder, clock=clock).run().compacted == 40
    if not noted:
        next((folder / "_unused").glob("*.json")).unlink()
    for _ in range(4):
        assert Maintenance(folder, clock=clock).run().replaced_removed == 0
        assert all(Path(f.path).exists() for f in held)
        clock.now += REPLACED_AGE_S / 4
    last = Maintenance(folder, clock=clock).run()
    assert (last.replaced_removed, last.orphans_removed) == ((40, 0) if noted else (0, 40))
    assert not any(Path(f.path).exists() for f in held)
    assert ids(folder) == expected(40)
    assert list((folder / "_unused").iterdir()) == []


def test_files_nobody_committed_wait_a_day(folder: Path, clock: Clock) -> None:
    """A task may be slow: its file is an orphan only when it is a day old."""
    file = write(folder, 1)
    care = Maintenance(folder, clock=clock)
    for _ in range(20):
        care.run()
        clock.now += REPLACED_AGE_S
    assert (folder / file.path).exists()
    DeltaLog(folder).commit(append([file], 1))
    orphan = write(folder, 2)
    clock.now += ORPHAN_AGE_S
    assert care.run().orphans_removed == 0
    clock.now += max(REPLACED_AGE_S, SCAN_EVERY_S)
    assert care.run().orphans_removed == 1
    assert not (folder / orphan.path).exists()
    assert ids(folder) == expected(1)


def test_a_commit_that_a_kill_left_half_written_goes_after_a_day(folder: Path, clock: Clock) -> None:
    """GIVEN the file of a commit that never got its name WHEN a day has passed THEN it is removed, and no commit is."""
    fill(DeltaLog(folder), 3)
    left = folder / "_delta_log" / "_commit_1f.json.tmp"
    left.write_text("{")
    care = Maintenance(folder, clock=clock)
    care.run()
    assert left.exists(), "its writer may be about to name it"
    clock.now += ORPHAN_AGE_S + 60
    care.run()
    assert not left.exists()
    assert DeltaLog(folder).tail(0).batch == 3


def test_retention_takes_whole_files_that_are_old_and_passed_by_all(folder: Path, clock: Clock) -> None:
    """Younger than the horizon, or not yet passed by a cursor: it stays. What goes is counted."""
    log = DeltaLog(folder)
    fill(log, 6, rows=2)
    care = Maintenance(folder, timedelta(days=30), clock)
    assert care.run(lambda: {0: 6}).retained_out_rows == 0
    clock.now += 31 * 86_400
    assert care.run(dict).retained_out_rows == 0
    assert care.run(lambda: {0: 4}).retained_out_rows == 8
    assert ids(folder) == expected(6, rows=2) - expected(4, rows=2)
    assert log.tail(0).batch == 6
    assert care.run(lambda: {0: 6}).retained_out_rows == 4
    fill(log, 7, first=7)
    assert LogReader(folder).tail_batch(0) == 7


def test_a_log_that_nobody_wrote_to_costs_a_round_next_to_nothing(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are listed once, then commits are read; cursors are asked for only when a file is old enough to go."""
    log = DeltaLog(folder)
    fill(log, 2)
    listed: list[Path] = []
    asked: list[float] = []
    monkeypatch.setattr(care_module, "files_at", lambda at, table: listed.append(at) or files_at(at, table))

    def cursors() -> dict[int, int]:
        asked.append(clock.now)
        return {}

    care = Maintenance(folder, timedelta(days=30), clock)
    care.run(cursors)
    listed.clear()  # the first round looks for orphans, too
    for _ in range(3):
        care.run(cursors)
    assert (listed, asked) == ([], [])
    fill(log, 3, first=3)
    care.run(cursors)
    assert (listed, asked) == ([], [])
    clock.now += 31 * 86_400
    care.run(cursors)
    assert asked == [clock.now]


def test_retention_yields_to_a_compaction_in_between(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files merged since they were looked at are not removed under the merged one: it would bring them back."""
    fill(DeltaLog(folder), 40)
    clock.now += 31 * 86_400
    care = Maintenance(folder, timedelta(days=30), clock)
    rival = [Maintenance(folder)]
    real = care._commit

    def late(*args: Any, **kwargs: Any) -> bool:
        if rival:
            assert rival.pop().run().compacted == 40
        return real(*args, **kwargs)

    monkeypatch.setattr(care_module, "groups_to_merge", lambda files: groups_to_merge(files) if not rival else [])
    monkeypatch.setattr(care, "_commit", late)
    assert care.run(lambda: {0: 40}).retained_out_rows == 0
    assert ids(folder) == expected(40)
    assert care.run(lambda: {0: 40}).retained_out_rows == 40


@pytest.mark.parametrize(
    ("age_days", "cursors", "collected"),
    [(31, {0: 9}, True), (31, {0: 10}, True), (31, {0: 8}, False), (29, {0: 9}, False), (31, {}, False)],
)
def test_may_be_collected(age_days: int, cursors: dict[int, int], collected: bool) -> None:
    """Older than the horizon and passed by every cursor; a partition nobody speaks of is not passed."""
    now = datetime(2026, 11, 1, tzinfo=UTC)
    file = FileRange("f", 0, 0, 5, 9, 1, 1, ingested_at_max=now - timedelta(days=age_days))
    assert may_be_collected(file, now - timedelta(days=30), cursors) is collected
    unknown = FileRange("f", 0, 0, 5, 9, 1, 1)
    assert not may_be_collected(unknown, now, cursors)


def _aged(path: str, first: int, last: int, age_days: int, partitions: tuple[int, int] = (0, 0)) -> FileRange:
    taken = datetime(2026, 11, 1, tzinfo=UTC) - timedelta(days=age_days)
    return FileRange(path, *partitions, first, last, 1, 1, ingested_at_max=taken)


@pytest.mark.parametrize(
    ("files", "gone"),
    [
        ([_aged("a", 1, 1, 40), _aged("b", 2, 2, 40), _aged("c", 3, 3, 1)], "ab"),
        # Merged of many small ones around a large one, which was not merged.
        ([_aged("merged", 1, 40, 1), _aged("large", 2, 2, 40)], ""),
        ([_aged("merged", 1, 40, 40), _aged("large", 2, 2, 40), _aged("new", 41, 41, 1)], "largemerged"),
        # Two files of one batch.
        ([_aged("a", 1, 1, 40), _aged("b", 1, 1, 1)], ""),
        # One that stays holds the next, and that one the one after it.
        ([_aged("a", 1, 9, 1), _aged("b", 5, 20, 40), _aged("c", 15, 30, 40), _aged("d", 31, 31, 40)], ""),
        # Of several partitions, by an older program.
        ([_aged("a", 1, 3, 40, (0, 1)), _aged("b", 2, 2, 1, (1, 1)), _aged("c", 4, 4, 40, (0, 0))], ""),
        ([_aged("a", 1, 3, 1, (0, 0)), _aged("b", 2, 2, 40, (1, 1))], "b"),
    ],
)
def test_retention_takes_the_oldest_batches_and_leaves_no_hole(files: list[FileRange], gone: str) -> None:
    """GIVEN files of which some are old WHEN a file with an earlier batch stays THEN those behind it stay as well."""
    horizon = datetime(2026, 11, 1, tzinfo=UTC) - timedelta(days=30)
    found = collected(files, horizon, {0: 100, 1: 100})
    assert "".join(sorted(file.path for file in found)) == gone


def test_what_makes_room_is_done_on_a_full_disk(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a disk on which no file can be merged any more WHEN replaced files are due and others are old THEN they go,
    and the round says what it could not do."""
    care = Maintenance(folder, timedelta(days=30), clock)
    fill(DeltaLog(folder), 40)
    assert care.run().compacted == 40
    clock.now += 31 * 86_400
    fill(DeltaLog(folder), 80, first=41)

    def full(*_: object) -> None:
        raise DiskFullError("no space left", hint="make room")

    monkeypatch.setattr(care_module, "merge", full)
    with pytest.raises(DiskFullError):
        care.run(lambda: {0: 40})
    assert len(list(folder.glob("*.parquet"))) == 41, "the forty that were merged are gone"
    assert ids(folder) == expected(80) - expected(40)


def test_the_number_of_commits_costs_nothing(folder: Path) -> None:
    """What a batch has to read of the table's history is bounded: few commits after the checkpoint, few files."""
    log, care = DeltaLog(folder), Maintenance(folder)
    for batch in range(1, 321):
        fill(log, batch, first=batch)
        if batch % DELTA_CHECKPOINT_EVERY == 0:
            care.run()
            since = log._handle.table.version() - log._handle._base
            assert since <= 3 * DELTA_CHECKPOINT_EVERY
            newest = max((folder / "_delta_log").glob("*.checkpoint*.parquet"))
            assert pq.read_metadata(newest).num_rows < 2 * sum(FAN_IN)


def test_files_that_somebody_removed_are_named_and_the_rest_is_cared_for(folder: Path, clock: Clock) -> None:
    """GIVEN a log two files of which were deleted WHEN it is maintained THEN they are named at the next look through
    the folder, or when they would have been merged; others are merged and leave no file behind; a file that is put back
    is missing no more."""
    log, care = DeltaLog(folder), Maintenance(folder, None, clock)
    fill(log, 3)
    assert care.run().lost == ()
    first, second = (Path(file.path) for file in sorted(LogReader(folder).files(), key=lambda f: f.batch_min)[:2])
    kept = {path: path.read_bytes() for path in (first, second)}
    first.unlink()
    assert care.run().lost == (), "it is not looked for all the time"
    clock.now += SCAN_EVERY_S
    assert care.run().lost == (first.name,)
    second.unlink()
    fill(log, 40, first=4)
    reports = [care.run() for _ in range(3)]
    assert [report.compacted for report in reports] == [0, 38, 0]
    assert {report.lost for report in reports} == {tuple(sorted((first.name, second.name)))}
    named = {Path(file.path).name for file in LogReader(folder).files()}
    there = {path.name for path in folder.glob("*.parquet")}
    assert len(there - named) == 38, "the files that were replaced, and none that nobody uses"
    first.write_bytes(kept[first])
    assert care.run().lost == (second.name,)
    second.write_bytes(kept[second])
    assert care.run().lost == ()
    assert ids(folder) == expected(40)


def test_missing_files_are_given_up_by_a_person_and_nothing_else(folder: Path) -> None:
    """GIVEN a log two files of which were deleted WHEN a person gives them up THEN they are out of the table, in log
    order, though batches come meanwhile; what is there stays, and nothing is missing any more."""
    log, care = DeltaLog(folder), Maintenance(folder)
    fill(log, 5)
    reader = LogReader(folder)
    for batch in (4, 2):
        Path(reader.files_of(0, batch - 1, batch)[0].path).unlink()
    missing = care.missing()
    assert [file.batch_min for file in missing] == [2, 4]
    fill(log, 6, first=6)
    care.give_up(missing)
    assert ids(folder) == expected(6) - Counter({"0-2-0": 1, "0-4-0": 1})
    assert {file.batch_min for file in reader.files()} == {1, 3, 5, 6}, "a reader that was there sees it, too"
    assert care.missing() == []
    care.give_up(missing)  # again
    fill(log, 7, first=7)
    assert log.sync() == LogReader(folder).refresh().version()


def test_a_file_that_is_damaged_is_said_and_the_rest_is_cared_for(folder: Path, clock: Clock) -> None:
    """GIVEN a damaged file among those to be merged WHEN the log is maintained THEN each round fails and names it, does
    all the rest, and leaves no file behind that nobody uses."""
    log, care = DeltaLog(folder), Maintenance(folder, timedelta(days=30), clock)
    fill(log, FAN_IN[0], partition=0)
    fill(log, FAN_IN[0], partition=1)
    ill = Path(next(file.path for file in LogReader(folder).files_of(1, 3, 4)))
    ill.write_bytes(ill.read_bytes()[:100])
    for _ in range(3):
        with pytest.raises(FormatError, match=f"{ill.name} of the log is damaged"):
            care.run()
    files = {Path(file.path).name: file for file in LogReader(folder).files()}
    assert [level_of(name) for name, file in files.items() if file.partition_min == 0] == [1]
    assert len({path.name for path in folder.glob("*.parquet")} - files.keys()) == FAN_IN[0]


def test_a_damaged_file_is_read_once_and_those_around_it_are_merged(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a damaged file among very many to be merged WHEN rounds follow THEN the others are merged without it, it is
    not read again until the next look through the folder, and it is merged when it was put back."""
    log, care = DeltaLog(folder), Maintenance(folder, None, clock)
    fill(log, 3 * FAN_IN[0])
    ill = Path(next(file.path for file in LogReader(folder).files_of(0, 9, 10)))
    whole, read = ill.read_bytes(), list[str]()
    ill.write_bytes(whole[:100])
    monkeypatch.setattr(compact, "rows_of", lambda path: read.append(path) or rows_of(path))
    for _ in range(3):
        with pytest.raises(FormatError, match=ill.name):
            care.run()
    assert sorted(level_of(file.path) for file in LogReader(folder).files()) == [0, 1]
    assert read.count(str(ill)) == 2, "by the merge that met it, and to find out which one it was"
    ill.write_bytes(whole)
    clock.now += SCAN_EVERY_S
    assert care.run().compacted == 0
    fill(log, 4 * FAN_IN[0], first=3 * FAN_IN[0] + 1)
    assert care.run().compacted == FAN_IN[0] + 1
    assert ids(folder) == expected(4 * FAN_IN[0])


def test_a_damaged_file_that_was_given_up_is_said_no_more(folder: Path, clock: Clock) -> None:
    """GIVEN a damaged file that maintenance has met WHEN it is moved away and given up THEN rounds are well at once."""
    log, care = DeltaLog(folder), Maintenance(folder, None, clock)
    fill(log, FAN_IN[0])
    ill = Path(next(file.path for file in LogReader(folder).files_of(0, 3, 4)))
    ill.write_bytes(ill.read_bytes()[:100])
    with pytest.raises(FormatError, match=ill.name):
        care.run()
    ill.unlink()
    another = Maintenance(folder)
    another.give_up(another.missing())
    assert care.run().lost == ()


def test_a_file_that_came_while_the_folder_was_listed_is_not_missing(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a batch that is committed just after the folder was listed WHEN the list is compared with the table THEN
    nothing is said to be missing."""
    log, care = DeltaLog(folder), Maintenance(folder, None, clock)
    fill(log, 2)
    used = care._used

    def late() -> set[str]:
        monkeypatch.setattr(care, "_used", used)
        fill(log, 3, first=3)
        return used()

    monkeypatch.setattr(care, "_used", late)
    assert care.run().lost == ()
