"""Data folder, State and installed schema of an older version are taken over as they are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from evermark.testing.chaos_upgrade import has_history, upgraded

# The last commits before the outbox and the log's columns changed, before the house was rebuilt, before lanes. A start
# of an older program costs twenty seconds of processor, so each run goes by one of those in the middle.
OLDEST, MIDDLE = "371d16d6", ("a0154ee9", "2a4b96d7")


@pytest.mark.skipif(
    not all(map(has_history, (OLDEST, *MIDDLE))), reason="the older programs come from the project's git history"
)
def test_what_older_versions_left_is_taken_over_and_brought_up_to_date(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN older instances killed under load WHEN this program starts on their folder THEN it warns of the older
    outbox, and nothing is lost or doubled, before and after the outbox is brought up to date under it."""
    ledger = upgraded(tmp_path, pg_dsn, (OLDEST, random.choice(MIDDLE)), warned="the outbox is of version 2")
    assert ledger.produced == ledger.taken == ledger.delivered > 200
