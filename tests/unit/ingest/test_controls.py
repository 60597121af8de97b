"""No control event is lost: whatever effect is the last one before a crash, each was seen to before it was passed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, cast

import pytest

from evermark.checkpoints.base import Checkpoint
from evermark.cluster.base import Holder
from evermark.cluster.fence import source_lease
from evermark.ingest.batch_taker import BatchTaker, Fenced, WrittenBatch, controls_seen_to
from evermark.ingest.resume import Resume
from evermark.ingest.task_reports import gather
from evermark.log.base import Tail
from evermark.log.head import NO_VERSION, Head
from tests.unit.ingest.ingest_world import CrashError, World


@dataclass
class Desk:
    """Sees to every event as if it were a control event; doing so is an effect like any other."""

    world: World | None = None
    seen: set[str] = field(default_factory=set)

    def __call__(self, partition: int, after: int, to: int) -> None:
        world = self.world
        assert world is not None
        mine = world.effects
        world.effects += 1
        if mine == world.crash_at and not world.crash_after:
            raise CrashError
        for commit in world.log.commits:
            if commit.partition == partition and after < commit.batch <= to:
                self.seen |= {name for file in commit.files for name, _ in world.files[file.path]}
        if mine == world.crash_at:
            raise CrashError


def run(crash_at: int, after: bool, power_cut: bool, taker: type[BatchTaker] = BatchTaker) -> tuple[World, Desk]:
    desk = Desk()
    made = cast(Any, partial(taker, on_controls=desk))
    desk.world = World(crash_at, after, power_cut, taker=made)
    desk.world.run()
    return desk.world, desk


def lost(crash_at: int, after: bool, power_cut: bool, taker: type[BatchTaker] = BatchTaker) -> set[str]:
    world, desk = run(crash_at, after, power_cut, taker)
    return set(world.logged()) - desk.seen


@pytest.mark.parametrize(("after", "power_cut"), list(product([False, True], repeat=2)))
def test_a_crash_between_any_two_effects_loses_no_control_event(after: bool, power_cut: bool) -> None:
    """GIVEN each effect in turn as the last one WHEN started again THEN everything in the log was seen to."""
    effects = run(-1, False, False)[0].effects
    for crash_at in range(effects):
        assert lost(crash_at, after, power_cut) == set(), f"crash at effect {crash_at}"


class LooksOnlyWhenTaking(BatchTaker):
    def begin(self, partition: int, fenced: Fenced | None = None) -> Resume:
        kept, self.on_controls = self.on_controls, lambda _partition, _after, _to: None
        try:
            return super().begin(partition, fenced)
        finally:
            self.on_controls = kept


class CheckpointsBeforeLooking(BatchTaker):
    def take(self, written: WrittenBatch) -> None:
        kept, self.on_controls = self.on_controls, lambda _partition, _after, _to: None
        super().take(written)
        self.on_controls = kept
        self.on_controls(written.partition, written.batch - 1, written.batch)


@pytest.mark.parametrize("mutant", [LooksOnlyWhenTaking, CheckpointsBeforeLooking])
def test_any_other_order_is_found_out(mutant: type[BatchTaker]) -> None:
    """The test can fail: each of these loses one in some crash."""
    assert any(lost(n, after, False, mutant) for n in range(40) for after in (False, True))


def test_a_batch_without_control_events_is_not_looked_at() -> None:
    """GIVEN tasks that counted none WHEN the batch is taken THEN nobody reads the log for them."""
    file = {"path": "f", "rows": 2, "size": 1}
    row = {"partition": 0, "batch": 1, "start": "a", "end": "b", "files": [file]}
    (none,) = gather([{**row, "controls": 0}], 1).written
    (some,) = gather([{**row, "controls": 1}, {**row, "controls": 2}], 1).written
    assert (none.controls, some.controls) == (0, 3)
    looked: list[int] = []
    world = World(taker=cast(Any, partial(BatchTaker, on_controls=lambda _partition, _after, to: looked.append(to))))
    lease = world.leases.acquire(source_lease("shop"), Holder("i", "h", "b", 1, "1"), 10)
    assert lease is not None
    taker = world.taker("shop", lease.epoch, world.source, world.log, world, world.heads, world.checkpoints)
    taker.take(none)
    assert looked == []


def test_where_looking_begins() -> None:
    """GIVEN what is known at a start THEN looking begins at the checkpoint, else before the head's batch."""
    tail, head, checkpoint = Tail(9, 1, None), Head(8, 1, "p", 1), Checkpoint("p", 6, 1)
    assert controls_seen_to(tail, head, checkpoint) == 6
    assert controls_seen_to(tail, head, None) == 7
    assert controls_seen_to(tail, None, None) == 9
    begun = Head(0, 1, "p", NO_VERSION)
    assert controls_seen_to(Tail(1, 1, None), begun, None) == 0, "the first batch was committed, and no more"
    assert controls_seen_to(Tail(0, 1, None), begun, None) == 0
