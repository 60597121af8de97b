"""kill -9 of the real process at effect boundaries, one after the other, while orders go on being written."""

from __future__ import annotations

from pathlib import Path

from evermark.testing.chaos import killed_at_each

# A sample of one per kind of effect; `make chaos` walks over all of them.
SAMPLE = ("log.committed", "settle.begun", "queue.posted")


def test_killed_at_effect_boundaries_nothing_is_lost_or_doubled(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a steady writer WHEN the pipeline dies at one failpoint after another THEN log and receivers are exact.

    A process that is killed keeps the page cache, so this says nothing about fsync: see the tests of log/mend.py.
    """
    killed_at_each(SAMPLE, tmp_path, pg_dsn)
