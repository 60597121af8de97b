"""All checkpoints are lost: reading goes on where the log ends, or where a person says."""

from __future__ import annotations

from collections import Counter

import pytest

from evermark.checkpoints.base import Checkpoint
from evermark.cluster.base import Holder
from evermark.cluster.fence import source_lease
from tests.unit.ingest.ingest_world import CrashError, World, position


def half_read(*, forgets_ends: bool, repeats: bool) -> World:
    """A world whose owner ended in the middle, after its fourth batch or so; then all checkpoints were deleted."""
    world = World(crash_at=20, crash_after=True, forgets_ends=forgets_ends, repeats=repeats, count=17)
    with pytest.raises(CrashError):
        world._own(0)
    assert 2 < sum(world.logged().values()) < world.count
    world.checkpoints.delete("shop", 0)
    assert world.checkpoints.list("shop") == {}
    world.crash_at = -1
    return world


@pytest.mark.parametrize("forgets_ends", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
def test_s10_without_any_checkpoint_the_log_says_where_to_go_on(forgets_ends: bool, repeats: bool) -> None:
    """GIVEN a log, and no checkpoint WHEN read on to the end THEN nothing is lost, and nothing is there twice."""
    world = half_read(forgets_ends=forgets_ends, repeats=repeats)
    if forgets_ends:
        world.source.forgotten = 0  # the last event's own position is read again
    world._own(1)
    assert world.logged() == Counter(f"event-{n}" for n in range(world.count))


@pytest.mark.parametrize("repeats", [False, True])
def test_s10_from_the_oldest_what_the_log_has_is_left_out(repeats: bool) -> None:
    """GIVEN a source that still has everything WHEN reading goes on at its oldest THEN each event is there once."""
    world = half_read(forgets_ends=False, repeats=repeats)
    world.source.forgotten = 0
    lease = world.leases.acquire(source_lease("shop"), Holder("person", "h", "b", 9, "9"), 10)
    assert lease is not None
    oldest = Checkpoint(position(0), len(world.log.commits), lease.epoch)
    world.checkpoints.save("shop", 0, oldest)
    world.leases.release(lease)
    world._own(1)
    assert world.logged() == Counter(f"event-{n}" for n in range(world.count))
