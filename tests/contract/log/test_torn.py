"""Commits that did not reach the disk whole are set aside.

A real power cut cannot be made here (a kill leaves the page cache as it is), so what one may leave is made by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from evermark.log.append import DeltaLog
from evermark.log.base import Tail
from evermark.log.forget import Forgotten
from evermark.log.maintenance import ORPHAN_AGE_S, REPLACED_AGE_S, Maintenance
from evermark.log.read import LogReader
from evermark.log.table import commit_file
from evermark.log.torn import set_aside_torn
from tests.contract.log.log_scene import append, expected, fill, ids, position, write

Damage = Callable[[Path, int], None]


@pytest.fixture(autouse=True)
def checkpoints_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of maintenance after thirty commits makes a checkpoint."""
    monkeypatch.setattr("evermark.log.maintenance.DELTA_CHECKPOINT_EVERY", 30)


def truncated(folder: Path, version: int) -> None:
    path = commit_file(folder, version)
    path.write_bytes(path.read_bytes()[:-20])


def zero_length(folder: Path, version: int) -> None:
    commit_file(folder, version).write_bytes(b"")


def zeros(folder: Path, version: int) -> None:
    path = commit_file(folder, version)
    path.write_bytes(b"\0" * path.stat().st_size)


def cut_between_lines(folder: Path, version: int) -> None:
    path = commit_file(folder, version)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")


def only_its_info(folder: Path, version: int) -> None:
    path = commit_file(folder, version)
    path.write_text(path.read_text().splitlines()[0] + "\n")


def missing(folder: Path, version: int) -> None:
    commit_file(folder, version).unlink()


def file_of(folder: Path, version: int) -> Path:
    return next(folder.glob(f"p0-b{version}-*.parquet"))


def missing_file(folder: Path, version: int) -> None:
    file_of(folder, version).unlink()


def short_file(folder: Path, version: int) -> None:
    path = file_of(folder, version)
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[Damage] = [
    truncated,
    zero_length,
    zeros,
    cut_between_lines,
    only_its_info,
    missing,
    missing_file,
    short_file,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    fill(DeltaLog(folder), 5)  # batch n is version n
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("version", [4, 5])
def test_a_torn_commit_and_those_after_it_are_set_aside(folder: Path, damage: Damage, version: int) -> None:
    """GIVEN version 3 durable and a later one torn WHEN repaired THEN the log reads, ends before it, and goes on."""
    damage(folder, version)
    present = [v for v in (4, 5) if v >= version and commit_file(folder, v).exists()]
    assert set_aside_torn(folder, 3) == present
    log = DeltaLog(folder)
    assert log.tail(0) == Tail(version - 1, 1, position(version))
    assert ids(folder) == expected(version - 1)
    for batch in range(version, 8):
        log.commit(append([write(folder, batch)], batch))
    assert ids(folder) == expected(7)


@pytest.mark.parametrize("damage", [truncated, missing])
def test_who_slept_before_setting_aside_leaves_what_another_has_committed_since(
    folder: Path, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a process that has found a torn commit WHEN it sleeps until another has set that aside and gone on THEN it
    touches nothing."""
    damage(folder, 4)

    def another_meanwhile(_: Path, first: int | None = None) -> list[Path]:
        monkeypatch.undo()
        assert set_aside_torn(folder, 3)
        log = DeltaLog(folder)
        for batch in (4, 5, 6):
            log.commit(append([write(folder, batch)], batch))
        return []

    monkeypatch.setattr("evermark.log.torn.torn_delta_checkpoints", another_meanwhile)
    assert set_aside_torn(folder, 3) == []
    assert ids(folder) == expected(6)


def test_whole_commits_are_left_alone(folder: Path) -> None:
    """Fences, compaction, retention and creation are all recognised as whole, durable or not."""
    log = DeltaLog(folder)
    log.fence(0, 2)
    for batch in range(6, 40):
        log.commit(append([write(folder, batch)], batch, epoch=2))
    assert Maintenance(folder).run().compacted == 39
    before = sorted((folder / "_delta_log").iterdir())
    for durable in (-1, 0, 5, 41):
        assert set_aside_torn(folder, durable) == []
    assert sorted((folder / "_delta_log").iterdir()) == before
    assert ids(folder) == expected(39)


def test_what_was_forgotten_and_given_up_stays_so(folder: Path) -> None:
    """GIVEN a source that is idle since its last batch WHEN keys are forgotten, a lost file is given up, and the owner
    is another one THEN both commits are whole: nothing is undone."""
    durable, care = DeltaLog(folder).sync(), Maintenance(folder)
    fill(DeltaLog(folder), 7, rows=2, first=6)
    assert care.forget(Forgotten("public.orders", frozenset({"1"}))) == 2
    missing_file(folder, 3)
    care.give_up(care.missing())
    left = ids(folder) if not care.missing() else None
    assert set_aside_torn(folder, durable) == []
    assert ids(folder) == left == expected(7) - Counter({"0-3-0": 1})


def test_a_merged_file_that_was_lost_takes_no_other_with_it(folder: Path) -> None:
    """GIVEN files that were merged after the last batch, and an hour WHEN a merged file is moved away, owners change,
    and the file is put back a day later THEN the log has every event."""
    log, now = DeltaLog(folder), [0.0]
    fill(log, 40, first=6)
    fill(log, 40, partition=1)
    durable, care = log.sync(), Maintenance(folder, clock=lambda: now[0])
    assert care.run().compacted == 80
    now[0] += REPLACED_AGE_S
    assert care.run().replaced_removed == 80
    lost = next(folder.glob("p0-c1-*"))
    lost.rename(folder.parent / lost.name)
    assert set_aside_torn(folder, durable) == []
    (folder.parent / lost.name).rename(lost)
    for _ in range(3):
        now[0] += ORPHAN_AGE_S
        assert care.run().orphans_removed == 0
    assert ids(folder) == expected(40) + expected(40, partition=1)


@pytest.mark.parametrize("damage", [truncated, cut_between_lines, only_its_info])
def test_a_torn_fence_of_several_partitions_is_set_aside(folder: Path, damage: Damage) -> None:
    """GIVEN a fence of two partitions WHEN a power cut left one of them in it, or none THEN it counts for neither."""
    DeltaLog(folder).fence_all([0, 1], 7)
    assert set_aside_torn(folder, 5) == []
    damage(folder, 6)
    assert set_aside_torn(folder, 5) == [6]
    log = DeltaLog(folder)
    assert (log.tail(0).epoch, log.tail(1).epoch) == (1, 0)


@pytest.mark.parametrize("damage", [truncated, cut_between_lines, only_its_info])
def test_a_torn_compaction_brings_the_replaced_files_back(folder: Path, damage: Damage) -> None:
    """Without some of its lines a compaction would lose rows or double them."""
    log = DeltaLog(folder)
    fill(log, 31, first=6)
    fill(log, 40, first=32)
    version = log.sync()
    assert Maintenance(folder).run().compacted == 40
    damage(folder, version + 1)
    assert set_aside_torn(folder, version) == [version + 1]
    assert ids(folder) == expected(40)


def test_durable_commits_are_never_touched(folder: Path) -> None:
    """Damage at or before the durable version is not a power cut's: it is left for a person to see."""
    truncated(folder, 3)
    assert set_aside_torn(folder, 3) == []
    assert set_aside_torn(folder, 5) == []
    assert commit_file(folder, 3).exists()


@pytest.mark.parametrize("contents", [b"", b"\0" * 1000, b"PAR1"])
def test_a_torn_checkpoint_is_set_aside(folder: Path, contents: bytes) -> None:
    """All commits are whole and durable, only the checkpoint is not: the commits it stands for are still there."""
    log = DeltaLog(folder)
    fill(log, 31, first=6)
    Maintenance(folder).run()
    assert ids(folder) == expected(31)
    for checkpoint in (folder / "_delta_log").glob("*.checkpoint*.parquet"):
        checkpoint.write_bytes(contents)
    assert set_aside_torn(folder, log.sync()) == []
    assert ids(folder) == expected(31)
    assert DeltaLog(folder).tail(0).batch == 31


def test_a_checkpoint_of_a_torn_version_goes_with_it(folder: Path) -> None:
    """A checkpoint that holds a torn commit would keep it alive, also when that commit's own name is gone."""
    fill(DeltaLog(folder), 31, first=6)
    Maintenance(folder).run()
    made = next((folder / "_delta_log").glob("*.checkpoint*.parquet"))
    missing(folder, int(made.name[:20]))
    missing_file(folder, 20)
    set_aside_torn(folder, 10)
    assert ids(folder) == expected(19)


@pytest.mark.parametrize("contents", ["", "{", '{"version": 77, "size": 1}'])
def test_a_torn_pointer_to_the_checkpoint_is_dropped(folder: Path, contents: str) -> None:
    """`_last_checkpoint` is a hint; a wrong one is worse than none."""
    fill(DeltaLog(folder), 31, first=6)
    Maintenance(folder).run()
    (folder / "_delta_log" / "_last_checkpoint").write_text(contents)
    assert set_aside_torn(folder, 10_000) == []
    assert ids(folder) == expected(31)


def test_no_log_is_nothing_to_repair(tmp_path: Path) -> None:
    """Before the first start there is no folder."""
    assert set_aside_torn(tmp_path / "shop", -1) == []


def test_a_table_whose_creation_is_torn_is_made_again(tmp_path: Path) -> None:
    """The very first commit may be the torn one."""
    folder = tmp_path / "shop"
    DeltaLog(folder)
    cut_between_lines(folder, 0)
    assert set_aside_torn(folder, -1) == [0]
    fill(DeltaLog(folder), 2)
    assert ids(folder) == expected(2)


def test_files_that_a_later_commit_replaced_may_be_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a log that was compacted twice since its durable version WHEN it is opened later THEN nothing is torn."""
    monkeypatch.setattr("evermark.log.compact.FAN_IN", (3, 2))
    log, now = DeltaLog(folder), [0.0]
    fill(log, 8, first=6)
    durable = log.sync()
    care = Maintenance(folder, clock=lambda: now[0])
    assert care.run().compacted
    care.run()
    fill(log, 11, first=9)
    care.run()
    care.run()
    now[0] += 3600
    assert care.run().replaced_removed > 3
    assert set_aside_torn(folder, durable) == []
    assert ids(folder) == expected(11)


@pytest.mark.parametrize("last", [4, 5])
def test_who_has_the_log_open_notices_that_versions_were_used_again(folder: Path, last: int) -> None:
    """GIVEN commits that were read WHEN they are set aside and others take their place THEN those are read."""
    reader, handle, owner = LogReader(folder), LogReader(folder), DeltaLog(folder)
    assert len(reader.files()) == handle.tail_batch(0) == owner.tail(0).batch == 5
    damaged = DeltaLog(folder).sync() - 1
    missing_file(folder, 4)
    assert set_aside_torn(folder, damaged - 1) == [damaged, damaged + 1]
    fill(DeltaLog(folder), last, first=4)
    assert set(reader.files()) == set(LogReader(folder).files())
    assert handle.tail_batch(0) == owner.tail(0).batch == last
