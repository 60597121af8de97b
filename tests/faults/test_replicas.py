"""Three real replicas, two on SQLite and one on Postgres, killed and cut off while all of them are written to."""

from __future__ import annotations

from pathlib import Path

from evermark.testing.chaos_replicas import replicas_killed

WRITES, FAULTS = 150, 3


def test_three_replicas_are_equal_after_kills_and_cuts(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a ring of three nodes with a writer each WHEN nodes are killed and links are cut meanwhile THEN in the end
    all rows are the same everywhere, and every acknowledged write is there."""
    ledger = replicas_killed(tmp_path, pg_dsn, WRITES, FAULTS)
    assert ledger.lost == 0 and ledger.produced == 3 * WRITES
