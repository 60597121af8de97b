"""Commits that we write ourselves: whole or not there, refused when another is quicker, and read by others."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import deltalake
import pytest

from evermark.errors import FormatError
from evermark.log.append import DeltaLog
from evermark.log.commits import put_commit, read_commit
from evermark.log.format import CommitNote, app_id, pack
from evermark.log.read import LogReader
from evermark.log.table import commit_file
from tests.contract.log.log_scene import append, expected, fill, ids, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log" / "shop"


def test_of_many_writers_of_one_version_one_wins(tmp_path: Path) -> None:
    """And what stands there is all of what the winner wrote."""
    (tmp_path / "_delta_log").mkdir()
    won: list[int] = []

    def write_one(number: int) -> None:
        if put_commit(tmp_path, 7, [{"by": number}] * 500):
            won.append(number)

    threads = [threading.Thread(target=write_one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_commit(tmp_path, 7) == [{"by": won[0]}] * 500 and len(won) == 1
    assert [path.name for path in (tmp_path / "_delta_log").iterdir()] == [commit_file(tmp_path, 7).name]


def test_a_commit_is_durable_before_it_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that sees the name sees the contents, also after a power cut."""
    (tmp_path / "_delta_log").mkdir()
    order: list[str] = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("synced"), fsync(fd))[1])
    monkeypatch.setattr(os, "link", lambda a, b: (order.append("linked"), link(a, b))[1])
    assert put_commit(tmp_path, 0, [{"x": 1}])
    assert order == ["synced", "linked"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a full disk WHEN a commit is written THEN there is neither a commit nor a rest of it."""
    (tmp_path / "_delta_log").mkdir()

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        put_commit(tmp_path, 0, [{"x": 1}])
    assert list((tmp_path / "_delta_log").iterdir()) == []


def test_delta_rs_reads_what_we_wrote_and_its_application_transaction(folder: Path) -> None:
    """Its files, their statistics, and the versions that fence."""
    log = DeltaLog(folder)
    fill(log, 3)
    table = deltalake.DeltaTable(str(folder))
    assert table.transaction_version("evermark:0") == (1 << 40) | 3
    assert table.to_pyarrow_table().num_rows == 3
    assert [f.batch_max for f in LogReader(folder).files()] == [1, 2, 3] or len(LogReader(folder).files()) == 3
    table.create_checkpoint()
    assert ids(folder) == expected(3)


def test_a_writer_that_slept_through_a_cleaning_knows_that_nobody_reads_its_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN versions cleaned away WHEN a writer puts its commit there THEN it does not count as one."""
    slept, log = DeltaLog(folder), DeltaLog(folder)
    fill(log, 4)
    file = write(folder, 5)
    deltalake.DeltaTable(str(folder)).create_checkpoint()
    for version in range(1, 4):
        commit_file(folder, version).unlink()
    monkeypatch.setattr(slept, "_catch_up", lambda: None)
    note = CommitNote(0, 5, 1, "", "", file.rows, (file.path,))
    assert not slept._try_commit({app_id(0): pack(1, 5)}, [file], note)
    monkeypatch.undo()
    slept.commit(append([file], 5))
    assert ids(folder) == expected(5)


@pytest.mark.parametrize(
    "protocol",
    [
        {"minReaderVersion": 1, "minWriterVersion": 4},
        {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [], "writerFeatures": ["rowTracking"]},
    ],
)
def test_a_table_that_asks_its_writers_for_more_is_refused(folder: Path, protocol: dict[str, Any]) -> None:
    """GIVEN a protocol that another program raised WHEN we would write THEN we do not."""
    log = DeltaLog(folder)
    fill(log, 1)
    commit_file(folder, 2).write_text(json.dumps({"protocol": protocol}) + "\n")
    with pytest.raises(FormatError, match="asks its writers for writer version"):
        log.commit(append([write(folder, 2)], 2))
    with pytest.raises(FormatError, match="asks its writers for"):
        DeltaLog(folder).tail(0)
