"""Kept tables after events have left the log: used no more, and gone from the disk when their readers are done."""

from __future__ import annotations

from pathlib import Path

from evermark.log.kept_table import FOLDER, UNUSED_AGE_S, forget_kept, remove_forgotten


def test_what_was_kept_of_events_that_are_gone_goes_too(tmp_path: Path) -> None:
    """GIVEN a kept table WHEN events left the log THEN it is not used from then on, and its files go an hour later."""
    folder = tmp_path / FOLDER / "ab"
    folder.mkdir(parents=True)
    known, rows = folder / "kept.json", folder / "x.parquet"
    known.write_text("{}")
    rows.write_bytes(b"rows")
    now = rows.stat().st_mtime
    remove_forgotten(tmp_path, now + 2 * UNUSED_AGE_S)
    assert known.exists() and rows.exists(), "in use"
    forget_kept(tmp_path)
    assert not known.exists()
    now = rows.stat().st_mtime
    remove_forgotten(tmp_path, now + UNUSED_AGE_S - 1)
    assert rows.exists(), "a reader may have been given it a moment ago"
    remove_forgotten(tmp_path, now + UNUSED_AGE_S)
    assert not rows.exists()
