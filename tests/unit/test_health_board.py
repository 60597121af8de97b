"""The board behind /health: how a partition is may change; what was taken stays."""

from __future__ import annotations

from datetime import UTC, datetime

from evermark.observe.health import Board, PartitionHealth

NOON = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


def test_a_failure_and_a_new_try_do_not_forget_what_was_taken() -> None:
    """GIVEN ten events taken WHEN the partition fails and is read again THEN the count and the time stay."""
    board = Board()
    board.put("shop", 0, PartitionHealth.HEALTHY)
    board.seen("shop", 0, 10, NOON, 0.5)
    board.put("shop", 0, PartitionHealth.STALE, "no space left", "free some")
    failed = board.partitions()["shop/0"]
    assert (failed.state, failed.reason, failed.hint) == (PartitionHealth.STALE, "no space left", "free some")
    board.put("shop", 0, PartitionHealth.HEALTHY)
    again = board.partitions()["shop/0"]
    assert (again.events, again.last_event_at, again.reason, again.hint) == (10, NOON, "", "")


def test_a_batch_clears_reason_and_hint() -> None:
    """GIVEN a partition that failed WHEN a batch is taken THEN neither the reason nor the hint is left."""
    board = Board()
    board.put("shop", 0, PartitionHealth.STALE, "no space left", "free some")
    board.seen("shop", 0, 1, NOON, 0.0)
    found = board.partitions()["shop/0"]
    assert (found.state, found.reason, found.hint) == (PartitionHealth.HEALTHY, "", "")
