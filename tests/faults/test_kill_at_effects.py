"""kill -9 of the real process at effect boundaries, one after the other, while orders go on being written."""

from __future__ import annotations

from evermark.testing.chaos import die_at_each
from tests.faults.conftest import SharedShop

# A sample of one per kind of effect; `make chaos` walks over all of them.
SAMPLE = ("log.committed", "settle.begun", "queue.posted")
# With which the test of replays begins: so it need not start an instance of its own.
NEXT = "replay.sent@1"


def test_killed_at_effect_boundaries_nothing_is_lost_or_doubled(shop: SharedShop) -> None:
    """GIVEN a steady writer WHEN the pipeline dies at one failpoint after another THEN log and receivers are exact.

    A process that is killed keeps the page cache, so this says nothing about fsync: see the tests of log/torn.py.
    """
    shop.end()
    shop.take(die_at_each(SAMPLE, shop, "flaky", NEXT), NEXT)
