"""Whatever effect is the last one before a crash: after the restart the log holds every event once."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from evermark.checkpoints.base import Checkpoint
from evermark.errors import BusyError, EvermarkError, StaleError
from evermark.ingest.batch_taker import BatchTaker, Fenced, WrittenBatch
from evermark.ingest.resume import Resume
from evermark.log.base import LogFile
from evermark.log.head import Head
from tests.unit.ingest.ingest_world import World, position

EVERY = Counter(f"event-{n}" for n in range(World.count))
KINDS = list(product([False, True], repeat=4))  # crash after, power cut, forgets ends, repeats


def effects_of(**given: bool) -> int:
    world = World(**given)  # type: ignore[arg-type]
    world.run()
    return world.effects


def outcome(world: World) -> str:
    """Empty when all is well."""
    try:
        world.run()
    except EvermarkError as error:
        return f"{type(error).__name__}: {error.message}"
    lost, doubled = EVERY - world.logged(), world.logged() - EVERY
    if lost or doubled:
        return f"lost {sorted(lost)}, doubled {sorted(doubled)}"
    head = world.heads.load("shop")[0]
    if head.batch != len(world.log.commits):
        return f"head {head} of {len(world.log.commits)} batches"
    return ""


@pytest.mark.parametrize(("after", "power_cut", "forgets_ends", "repeats"), KINDS)
def test_a_crash_between_any_two_effects_loses_and_doubles_nothing(
    after: bool, power_cut: bool, forgets_ends: bool, repeats: bool
) -> None:
    """GIVEN each effect in turn as the last one WHEN started again THEN the log is the source, once."""
    for crash_at in range(effects_of(forgets_ends=forgets_ends, repeats=repeats)):
        world = World(crash_at, after, power_cut, forgets_ends, repeats)
        assert outcome(world) == "", f"crash at effect {crash_at}"


@pytest.mark.parametrize(("power_cut", "forgets_ends", "repeats"), list(product([False, True], repeat=3)))
def test_two_crashes_are_no_worse_than_one(power_cut: bool, forgets_ends: bool, repeats: bool) -> None:
    """The restart itself may be cut short, too, at each of its effects."""
    for first, again in product(range(8, 16), range(8)):
        world = World(first, True, power_cut, forgets_ends, repeats, crash_again=again)
        assert outcome(world) == "", f"crashes at effect {first} and {again} effects into the restart"


class ConfirmsFirst(BatchTaker):
    def take(self, written: WrittenBatch) -> None:
        self.confirm(written.partition, written.end)
        super().take(written)


class CheckpointsFirst(BatchTaker):
    def take(self, written: WrittenBatch) -> None:
        self._save(written.partition, written.end, written.batch)
        super().take(written)


class NeverSyncs(BatchTaker):
    def take(self, written: WrittenBatch) -> None:
        self.log.commit(written)
        self.heads.move(self.name, written.partition, Head(written.batch, self.epoch, written.end, 1))
        self._save(written.partition, written.end, written.batch)


class HeadBeforeSync(BatchTaker):
    def take(self, written: WrittenBatch) -> None:
        self.log.commit(written)
        self.heads.move(self.name, written.partition, Head(written.batch, self.epoch, written.end, written.batch))
        self.log.sync()
        self._save(written.partition, written.end, written.batch)


class ForgetsRepeats(BatchTaker):
    """Forgets that reading may begin before what is logged."""

    def begin(self, partition: int, fenced: Fenced | None = None) -> Resume:
        found = super().begin(partition, fenced)
        return Resume(found.position, found.batch)


@pytest.mark.parametrize("mutant", [ConfirmsFirst, CheckpointsFirst, NeverSyncs, HeadBeforeSync, ForgetsRepeats])
def test_any_other_order_of_effects_is_found_out(mutant: type[BatchTaker]) -> None:
    """The simulation can fail: each of these orders loses or doubles something in some crash."""
    assert any(
        outcome(World(crash_at, after, power_cut, forgets_ends, repeats, taker=mutant))
        for after, power_cut, forgets_ends, repeats in KINDS
        for crash_at in range(effects_of())
    )


def test_a_batch_without_rows_moves_only_the_checkpoint() -> None:
    """Positions that hold nothing for us are passed without a commit."""
    world = World(repeats=False)
    epoch = _epoch(world)
    taker = BatchTaker("shop", epoch, world.source, world.log, world, world.heads, world.checkpoints)
    assert taker.stands() == {}
    assert taker.begin(0).batch == 0
    assert taker.stands() == {0: position(0)}
    taker.take(WrittenBatch(0, 1, epoch, position(0), position(3), ()))
    assert taker.stands() == {0: position(3)}
    assert world.checkpoints.load("shop", 0) == Checkpoint(position(3), 0, epoch)
    assert (world.log.commits, world.heads.load("shop")[0].batch) == ([], 0)
    assert taker.begin(0).position == position(3)


def test_a_stale_owner_takes_nothing() -> None:
    """From the new owner's beginning on, the old one's batch is refused before anything is written."""
    world = World()
    old = BatchTaker("shop", _epoch(world), world.source, world.log, world, world.heads, world.checkpoints)
    old.begin(0)
    new = BatchTaker("shop", _epoch(world), world.source, world.log, world, world.heads, world.checkpoints)
    new.begin(0)
    batch = WrittenBatch(0, 1, old.epoch, position(0), position(1), (LogFile("f", 1, 1),))
    with pytest.raises(StaleError):
        old.take(batch)
    with pytest.raises(StaleError):
        old.begin(0)
    assert world.log.commits == []


def test_a_stale_owner_does_not_say_where_a_partition_began() -> None:
    """GIVEN a partition that nobody has begun WHEN the lease goes to another owner while the first one begins THEN the
    first one notes nothing: what it passed in between would be lost to the other."""
    world = World()
    old = BatchTaker("shop", _epoch(world), world.source, world.log, world, world.heads, world.checkpoints)
    fenced = old.fence([0])[0]
    epoch = _epoch(world)
    with pytest.raises(StaleError):
        old.begin(0, fenced)
    assert world.heads.load("shop") == {} and world.checkpoints.list("shop") == {}
    world.source.earliest = lambda _: position(2)  # type: ignore[method-assign]
    new = BatchTaker("shop", epoch, world.source, world.log, world, world.heads, world.checkpoints)
    assert new.begin(0).position == position(2)
    assert world.heads.load("shop")[0].position == position(2)


def test_a_source_that_is_busy_is_confirmed_later() -> None:
    """Not being able to confirm is told, and stops nothing."""
    world = World()
    told: list[Exception] = []
    taker = BatchTaker(
        "shop", 1, world.source, world.log, world, world.heads, world.checkpoints, on_unconfirmed=told.append
    )

    def busy(partition: int, end: str) -> None:
        raise BusyError("slot in use")

    world.source.confirm = busy  # type: ignore[method-assign]
    taker.confirm(0, position(1))
    assert [str(error) for error in told] == ["slot in use"]


def _epoch(world: World) -> int:
    from evermark.cluster.base import Holder
    from evermark.cluster.fence import source_lease

    world.effects += 1
    lease = world.leases.acquire(source_lease("shop"), Holder("i", "h", "b", world.effects, str(world.effects)), 10)
    assert lease is not None
    return lease.epoch
