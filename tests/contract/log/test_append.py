"""The compare-and-set of the log commit, and what is on the disk when it is called durable."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from deltalake.exceptions import CommitFailedError

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.error_policy import Action, action_for
from evermark.errors import ConflictError, DiskFullError, EngineError, FormatError, StaleError
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.log import maintenance
from evermark.log.append import DeltaLog
from evermark.log.base import Tail
from evermark.log.format import MaintenanceNote
from evermark.log.head import MemoryHeads
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader
from evermark.log.table import DELTA_CHECKPOINT_EVERY, commit_file
from evermark.storage import local
from tests.contract.log.log_scene import append, expected, fill, ids, position, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log" / "shop"


def no_pause(_: float) -> None:
    return


def between_read_and_commit(log: DeltaLog, monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Let `do` happen once, after this owner looked at the tail and before it commits."""
    original = log._try_commit
    left = [do]

    def interrupted(*args: Any) -> bool:
        if left:
            left.pop()()
        return original(*args)

    monkeypatch.setattr(log, "_try_commit", interrupted)


def test_an_owner_that_read_the_tail_before_the_fence_cannot_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a stale owner between its look and its commit WHEN another fences THEN the commit is refused."""
    old, new = DeltaLog(folder, pause=no_pause), DeltaLog(folder, pause=no_pause)
    fill(old, 1)
    between_read_and_commit(old, monkeypatch, lambda: new.fence(0, 2))
    with pytest.raises(StaleError):
        old.commit(append([write(folder, 2)], 2))
    assert new.tail(0) == Tail(1, 2, position(2))
    assert ids(folder) == expected(1)


@pytest.fixture
def few_commits_kept(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many commits it takes until the first is cleaned: far fewer than in production."""
    monkeypatch.setattr(maintenance, "KEPT_COMMITS", 2)
    return DELTA_CHECKPOINT_EVERY + maintenance.KEPT_COMMITS + 2


def test_a_stale_owner_that_slept_through_cleaning_commits_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, few_commits_kept: int
) -> None:
    """The gap its commit fills in a cleaned `_delta_log` is not taken for a success."""
    old, new = DeltaLog(folder, pause=no_pause), DeltaLog(folder, pause=no_pause)
    fill(old, 1)

    def meanwhile() -> None:
        new.fence(0, 2)
        for batch in range(2, few_commits_kept + 2):
            new.commit(append([write(folder, batch)], batch, epoch=2))
        Maintenance(folder).run()
        assert not commit_file(folder, 2).exists()

    between_read_and_commit(old, monkeypatch, meanwhile)
    with pytest.raises(StaleError):
        old.commit(append([write(folder, 2)], 2))
    assert ids(folder) == expected(few_commits_kept + 1)


def test_a_partition_that_was_idle_is_taken_over_by_a_log_that_was_opened_long_ago(
    folder: Path, few_commits_kept: int
) -> None:
    """GIVEN a log that was opened before commits that are cleaned by now WHEN its owner takes over a partition that it
    never asked for THEN it is told where that stands."""
    other, last = DeltaLog(folder, pause=no_pause), few_commits_kept
    fill(other, 2, partition=1)
    fill(other, last)
    Maintenance(folder).run()
    log = DeltaLog(folder, pause=no_pause)
    for _ in range(2):
        fill(other, last + few_commits_kept, first=last + 1)
        last += few_commits_kept
        assert log.tail(0).batch == last
        Maintenance(folder).run()
    assert {p: tail.batch for p, tail in log.fence_all([0, 1], 2).items()} == {0: last, 1: 2}


def test_a_batch_of_another_owner_in_between_is_a_conflict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two owners of one epoch, one batch: exactly one wins, even when both looked first."""
    one, other = DeltaLog(folder, pause=no_pause), DeltaLog(folder, pause=no_pause)
    between_read_and_commit(one, monkeypatch, lambda: other.commit(append([write(folder, 1)], 1)))
    with pytest.raises(ConflictError):
        one.commit(append([write(folder, 1)], 1))
    assert ids(folder) == expected(1)


def test_compaction_in_between_does_not_hurt_a_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance may replace files between an owner's look and its commit."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 40)
    compacted: list[int] = []
    between_read_and_commit(log, monkeypatch, lambda: compacted.append(Maintenance(folder).run().compacted))
    fill(log, 41, first=41)
    assert compacted == [40]
    assert ids(folder) == expected(41)


@pytest.mark.parametrize("error", [CommitFailedError("answer lost"), KeyboardInterrupt("answer lost")])
def test_a_commit_whose_answer_was_lost_is_recognised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The commit landed and raised: whether it is tried again at once or by the caller, the batch is there once."""
    log = DeltaLog(folder, pause=no_pause)
    mine = append([write(folder, 1)], 1)
    original = log._try_commit
    lost = [error]

    def landed_and_raised(*args: Any) -> bool:
        done = original(*args)
        if lost:
            failure = lost.pop()
            if isinstance(failure, CommitFailedError):
                return False
            raise failure
        return done

    monkeypatch.setattr(log, "_try_commit", landed_and_raised)
    try:
        log.commit(mine)
    except KeyboardInterrupt:
        log.commit(mine)
    assert log.tail(0) == Tail(1, 1, position(2))
    assert ids(folder) == expected(1)


def test_racing_owners_leave_each_batch_once(folder: Path) -> None:
    """Four threads of rising epochs take over from each other at any moment; no batch is lost, none is there twice."""
    taken: list[tuple[int, int, str]] = []
    lock = threading.Lock()
    DeltaLog(folder)

    def own(epoch: int) -> None:
        log = DeltaLog(folder, pause=no_pause)
        try:
            tail = log.fence(0, epoch)
            for batch in range(tail.batch + 1, tail.batch + 9):
                file = write(folder, batch)
                log.commit(append([file], batch, epoch=epoch))
                with lock:
                    taken.append((batch, epoch, file.path))
        except (StaleError, ConflictError):
            return

    threads = [threading.Thread(target=own, args=(epoch,)) for epoch in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batches = sorted(batch for batch, _, _ in taken)
    last = DeltaLog(folder).tail(0)
    assert batches == list(range(1, last.batch + 1))
    assert ids(folder) == Counter(f"0-{batch}-0" for batch in batches)
    epochs = [epoch for _, epoch, _ in sorted(taken)]
    assert epochs == sorted(epochs)


_RIVAL = """
import sys
from pathlib import Path
from evermark.errors import ConflictError, StaleError
from evermark.log.append import DeltaLog
from tests.contract.log.log_scene import append, write
folder, epoch, wanted = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
log = DeltaLog(folder)
done = 0
while done < wanted:
    try:
        batch = log.fence(0, epoch).batch + 1
        log.commit(append([write(folder, batch)], batch, epoch=epoch))
        done += 1
    except ConflictError:
        pass
    except StaleError:
        break
print(done)
"""


def test_racing_processes_leave_each_batch_once(folder: Path) -> None:
    """Two processes of one epoch: what each was told it committed is what the log holds."""
    DeltaLog(folder)
    rivals = [
        subprocess.Popen([sys.executable, "-c", _RIVAL, str(folder), "1", "12"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    done = [int(rival.communicate(timeout=120)[0]) for rival in rivals]
    assert done == [12, 12]
    assert DeltaLog(folder).tail(0).batch == 24
    assert ids(folder) == expected(24)


def test_sync_makes_file_commit_and_folders_durable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents and names: the file, its folder, the commit, `_delta_log`, and at first the folder above."""
    log = DeltaLog(folder, pause=no_pause)
    synced: list[Path] = []
    real = os.fsync

    def recording(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr("evermark.log.disk.os.fsync", recording)
    file = write(folder, 1)
    assert synced == [folder / file.path]
    log.commit(append([file], 1))
    (commit,) = synced[1:]  # its contents, before it has its name
    assert commit.match("_delta_log/_commit_*.json.tmp")
    version = log.sync()
    names = [folder, folder / "_delta_log", folder.parent]
    assert set(synced[2:]) == {commit_file(folder, 0), commit_file(folder, version), *names}
    assert synced.index(folder) < synced.index(folder / "_delta_log")
    assert synced.index(commit_file(folder, 0)) < synced.index(folder / "_delta_log")
    del synced[:]
    fill(log, 2, first=2)
    log.sync()
    assert synced[1].match("_delta_log/_commit_*.json.tmp")
    assert synced[2:] == [folder, folder / "_delta_log"]
    care = Maintenance(folder)
    care._commit(
        care._handle.refresh(), MaintenanceNote("retain", 0, 1), [], LogReader(folder).files()[:1], data_change=True
    )
    del synced[:]
    version = log.sync()
    assert synced == [folder, commit_file(folder, version), folder / "_delta_log"], "delta-rs syncs nothing"


def test_a_new_folder_is_durable_in_all_folders_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder that had to be made is named durably in the one above."""
    synced: list[Path] = []
    monkeypatch.setattr("evermark.log.disk.os.fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    DeltaLog(tmp_path / "a" / "b" / "shop")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)


def test_a_sync_covers_commits_of_others(folder: Path) -> None:
    """What an owner finds in the log, its predecessor may never have synced: the version covers it."""
    fill(DeltaLog(folder), 3)
    log = DeltaLog(folder)
    log.fence(0, 2)
    assert log.sync() == 4


def test_files_that_a_durable_commit_names_are_durable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN an owner that has synced the folder WHEN another one commits a file before the owner syncs the commits THEN
    the version that is said to be durable is from before."""
    mine, other = DeltaLog(folder), DeltaLog(folder)
    fill(mine, 2)
    mine.sync()
    fill(mine, 3, first=3)
    sync, late = local.LocalDisk.sync, [1]

    def watched(self: local.LocalDisk, *places: Path) -> None:
        sync(self, *places)
        if late and folder in places:
            late.clear()
            fill(other, 1, partition=1)

    monkeypatch.setattr(local.LocalDisk, "sync", watched)
    assert (mine.sync(), late, mine.sync()) == (3, [], 4)


def test_a_log_that_was_put_in_place_of_another_is_synced_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a log that was synced, and a shorter one in its place WHEN its owner syncs again THEN the new one's commits
    are synced, though the old one had as many."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 5)
    log.sync()
    folder.rename(tmp_path / "old")
    fill(DeltaLog(folder), 3)
    synced: list[Path] = []
    monkeypatch.setattr("evermark.log.disk.os.fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    log.sync()
    assert {commit_file(folder, version) for version in range(4)} <= set(synced)


def test_the_end_of_a_batch_is_known_until_its_commit_is_cleaned(folder: Path, few_commits_kept: int) -> None:
    """An idle partition's tail keeps its number when only others commit; its end is honestly unknown."""
    log, last = DeltaLog(folder, pause=no_pause), few_commits_kept + 2
    fill(log, 1, partition=7)
    fill(log, last)
    Maintenance(folder).run()
    assert log.tail(7) == Tail(1, 1, position(2)), "its writer knows it"
    assert DeltaLog(folder).tail(7) == Tail(1, 1, None)
    assert DeltaLog(folder).tail(0) == Tail(last, 1, position(last + 1))


def test_a_log_of_another_format_is_refused(tmp_path: Path) -> None:
    """A table somebody else made is neither read nor written."""
    import deltalake
    import pyarrow as pa

    deltalake.write_deltalake(str(tmp_path / "shop"), pa.table({"a": [1]}))
    with pytest.raises(FormatError, match="has format None"):
        DeltaLog(tmp_path / "shop")


def vanish(path: Path) -> None:
    path.unlink()


def lose_its_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [vanish, lose_its_end, be_a_folder])
@pytest.mark.parametrize("repaired", [False, True])
def test_a_file_that_only_its_task_could_see_is_never_committed(
    folder: Path, damage: Callable[[Path], None], repaired: bool
) -> None:
    """GIVEN a batch, read or repaired, with a file that is not here as its task described it WHEN it is taken THEN the
    error names the file and is retried, and neither log, head nor checkpoint moved; read again, the batch is taken.
    """
    log, heads, checkpoints = DeltaLog(folder, pause=no_pause), MemoryHeads(), MemoryCheckpoints()
    nothing: Any = None
    taker = BatchTaker("shop", 1, nothing, log, LogReader(folder), heads, checkpoints)

    def take(batch: int, do: Callable[[Path], None] = lambda _: None) -> str:
        whole, last = write(folder, batch), write(folder, batch)
        do(folder / last.path)
        named = append([whole, last], batch)
        taker.take(WrittenBatch(**vars(named)), repaired=repaired)
        return last.path

    take(1)
    before = (log.tail(0), heads.load("shop"), checkpoints.load("shop", 0), ids(folder))
    with pytest.raises(
        EngineError, match=r"a task wrote the log file .*/p0-b2-.*\.parquet of \d+ bytes, and it "
    ) as caught:
        take(2, damage)
    assert action_for(caught.value) is Action.RETRY
    assert (log.tail(0), heads.load("shop"), checkpoints.load("shop", 0), ids(folder)) == before
    take(2)
    assert (log.tail(0).batch, heads.load("shop")[0].batch) == (2, 2)
    assert checkpoints.load("shop", 0) == Checkpoint(position(3), 2, 1)


def test_a_batch_whose_answer_was_lost_is_recognised_after_its_file_was_merged(folder: Path) -> None:
    """What is committed already is not asked for its file again: compaction may have replaced it."""
    log = DeltaLog(folder, pause=no_pause)
    mine = append([write(folder, 1)], 1)
    log.commit(mine)
    (folder / mine.files[0].path).unlink()
    log.commit(mine)
    assert log.tail(0) == Tail(1, 1, position(2))


def test_a_merged_file_that_is_not_there_replaces_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a merged file that vanishes before its commit WHEN care compacts THEN the files it would replace stay."""
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 40)
    real = maintenance.merge

    def merged_and_lost(where: Path, group: Any) -> Any:
        made = real(where, group)
        (where / made.path).unlink()
        return made

    monkeypatch.setattr(maintenance, "merge", merged_and_lost)
    with pytest.raises(EngineError, match=r"-c1-"):
        Maintenance(folder).run()
    assert ids(folder) == expected(40)


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("needs to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_full_disk_is_said_and_loses_nothing(small_disk: Path) -> None:
    """Writing and committing fail with one error that says what to do; with room again, work goes on."""
    folder = small_disk / "shop"
    log = DeltaLog(folder, pause=no_pause)
    fill(log, 3)
    held = append([write(folder, 4)], 4)
    ballast = small_disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as out:
        while out.write(b"x" * 4096):
            pass
    with pytest.raises(DiskFullError, match="no space left"):
        write(folder, 5, rows=5_000)
    with pytest.raises(DiskFullError):
        log.commit(held)
    assert len(list(folder.glob("*.parquet"))) == 4
    ballast.unlink()
    log.commit(held)
    log.sync()
    assert ids(folder) == expected(4)


def test_a_quota_is_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the system calls it, no room is no room; anything else is left as it is."""
    log = DeltaLog(folder, pause=no_pause)

    def refuse(code: int) -> Callable[[Path], None]:
        def fail(_: Path) -> None:
            raise OSError(code, os.strerror(code))

        return fail

    monkeypatch.setattr(local, "sync_file", refuse(errno.EDQUOT))
    with pytest.raises(DiskFullError):
        log.sync()
    monkeypatch.setattr(local, "sync_file", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        log.sync()
