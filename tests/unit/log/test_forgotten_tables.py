"""Kept tables after events have left the log: used no more, and gone from the disk when their readers are done."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evermark.log.format import KEPT
from evermark.log.kept_shelf import (
    FOLDER,
    FORMAT,
    UNUSED_AGE_S,
    Layer,
    Mark,
    Shelf,
    described,
    forget_kept,
    remove_forgotten,
    write_kept,
)


def test_what_was_kept_of_events_that_are_gone_goes_too(tmp_path: Path) -> None:
    """GIVEN a kept table WHEN events left the log THEN it is not used from then on, and its files go an hour later."""
    folder = tmp_path / FOLDER / "ab"
    folder.mkdir(parents=True)
    known, rows = folder / "kept.json", folder / "x.parquet"
    known.write_text(json.dumps({"format": FORMAT, "layers": [{"files": [{"name": "x.parquet"}]}]}))
    rows.write_bytes(b"rows")
    now = rows.stat().st_mtime
    remove_forgotten(tmp_path, now + 2 * UNUSED_AGE_S, lambda: 0)
    assert known.exists() and rows.exists(), "in use"
    forget_kept(tmp_path)
    assert not known.exists()
    now = rows.stat().st_mtime
    remove_forgotten(tmp_path, now + UNUSED_AGE_S - 1, lambda: 1)
    assert rows.exists(), "a reader may have been given it a moment ago"
    remove_forgotten(tmp_path, now + UNUSED_AGE_S, lambda: 1)
    assert not rows.exists()


def test_a_file_that_cannot_be_touched_keeps_no_table_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN kept tables, a file of which is another user's, or goes just now WHEN events left the log THEN none of the
    tables is used from then on, and none is said to be left."""
    known = [tmp_path / FOLDER / name / "kept.json" for name in ("ab", "cd")]
    for each in known:
        each.parent.mkdir(parents=True)
        each.write_text("{}")
        (each.parent / "x.parquet").write_bytes(b"rows")

    def refused(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refused)
    assert forget_kept(tmp_path) == []
    assert not any(each.exists() for each in known)


def test_a_kept_table_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    """GIVEN a kept table that cannot be removed, and another WHEN events left the log THEN the first is named, and the
    other goes."""
    stuck, known = (tmp_path / FOLDER / name / "kept.json" for name in ("ab", "cd"))
    stuck.mkdir(parents=True)
    known.parent.mkdir()
    known.write_text("{}")
    assert forget_kept(tmp_path) == [stuck.parent]
    assert not known.exists()


def layer_of(shelf: Shelf) -> Layer:
    assert shelf.open()
    path = shelf.folder / "rows.parquet"
    write_kept(path, [KEPT.empty_table()])
    return Layer((described(path),), {0: Mark(1, 1, 1)}, (0,), (), 0)


def test_a_table_kept_before_events_were_forgotten_is_not_used(tmp_path: Path) -> None:
    """GIVEN a kept table that says how often events were forgotten by then, or is of a program that did not count WHEN
    the log says another number THEN it is not used; with the same one it is."""
    shelf = Shelf(tmp_path, "t", forgotten=1)
    kept = layer_of(shelf)
    shelf.keep([kept])
    assert shelf.layers() == Shelf(tmp_path, "t", forgotten=1).layers() == [kept]
    assert Shelf(tmp_path, "t", forgotten=2).layers() == Shelf(tmp_path, "t").layers() == []
    known = shelf.folder / "kept.json"
    body = json.loads(known.read_text())
    del body["forgotten"]
    known.write_text(json.dumps(body))
    assert shelf.layers() == [] and Shelf(tmp_path, "t").layers() == [kept]


@pytest.mark.parametrize("looks", [[False], [True, False]])
def test_what_was_begun_before_events_were_forgotten_is_not_kept(tmp_path: Path, looks: list[bool]) -> None:
    """GIVEN a table that was begun before events were forgotten WHEN it is to be kept, and that is seen before it is
    written, or only after THEN it is not."""
    shelf = Shelf(tmp_path, "t")
    seen = iter(looks)
    shelf.keep([layer_of(shelf)], lambda: next(seen))
    assert not (shelf.folder / "kept.json").exists()
    assert list(seen) == []


def test_a_table_kept_by_one_who_did_not_live_to_see_it_goes(tmp_path: Path) -> None:
    """GIVEN a table of which its writer did not learn that events had been forgotten meanwhile WHEN the log is tidied
    THEN it is out of use, and gone in an hour; one that was made since stays."""
    old, new = Shelf(tmp_path, "old"), Shelf(tmp_path, "new", forgotten=1)
    for shelf in (old, new):
        shelf.keep([layer_of(shelf)])
    rows = old.folder / "rows.parquet"
    os.utime(rows, (0, 0))
    now = (new.folder / "rows.parquet").stat().st_mtime
    remove_forgotten(tmp_path, now, lambda: 1)
    assert not (old.folder / "kept.json").exists() and rows.exists()
    remove_forgotten(tmp_path, now + 2 * UNUSED_AGE_S, lambda: 1)
    assert not rows.exists() and len(new.layers()) == 1


def test_drafts_and_files_that_no_table_names_go(tmp_path: Path) -> None:
    """GIVEN a kept table, and beside it what a writer left that died WHEN an hour is over THEN the table alone is left;
    a draft in which Spark still writes stays."""
    shelf = Shelf(tmp_path, "t")
    shelf.keep([layer_of(shelf)])
    stays = {path.name for path in shelf.folder.iterdir()}
    (shelf.folder / "f00d.parquet").write_bytes(b"rows")
    (shelf.folder / ".kept.json.7.ab").write_text("{}")
    part = shelf.folder / "draft-ab" / "_temporary" / "0" / "part-0.parquet"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"rows")
    now = part.stat().st_mtime
    remove_forgotten(tmp_path, now + UNUSED_AGE_S - 1, lambda: 0)
    assert len(list(shelf.folder.iterdir())) == len(stays) + 3
    os.utime(part, (now + 10, now + 10))
    remove_forgotten(tmp_path, now + UNUSED_AGE_S + 5, lambda: 0)
    assert {path.name for path in shelf.folder.iterdir()} == stays | {"draft-ab"}
    remove_forgotten(tmp_path, now + UNUSED_AGE_S + 10, lambda: 0)
    assert {path.name for path in shelf.folder.iterdir()} == stays


def test_a_table_kept_by_another_program_is_left_alone(tmp_path: Path) -> None:
    """GIVEN a kept table in a format that is not known WHEN the log is tidied THEN nothing beside it goes."""
    shelf = Shelf(tmp_path, "t")
    shelf.keep([layer_of(shelf)])
    known = shelf.folder / "kept.json"
    known.write_text(json.dumps({**json.loads(known.read_text()), "format": 99}))
    remove_forgotten(tmp_path, known.stat().st_mtime + 2 * UNUSED_AGE_S, lambda: 1)
    assert (shelf.folder / "rows.parquet").exists() and known.exists()
