"""Checkpoints that wait: when they are saved, and what goes on while their store is away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from evermark.breaker import Breaker, BreakerLimits, BreakerState
from evermark.checkpoints.base import Checkpoint
from evermark.errors import ConflictError, EvermarkError, GapError, StaleError, UnreachableError
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch, take_each
from evermark.ingest.checkpoint_saver import MOVED_S, SavePolicy, SavingObserver
from evermark.log.base import LogFile
from evermark.log.head import Head, MemoryHeads
from tests.unit.ingest.ingest_world import World, position

FIVE_OR_THOUSAND = SavePolicy(5.0, 1000)


class Observer(SavingObserver):
    def __init__(self) -> None:
        self.saves = 0
        self.states: list[BreakerState] = []
        self.came_back = 0

    def saved(self, partition: int, took_s: float) -> None:
        self.saves += 1

    def away(self, partition: int, error: EvermarkError, breaker: BreakerState) -> None:
        self.states.append(breaker)

    def back(self) -> None:
        self.came_back += 1


class Outside:
    """The checkpoints of a world as a store of its own, which may be away."""

    def __init__(self, world: World) -> None:
        self._kept = world.checkpoints
        self.away = False
        self.away_for_saves = False
        self.calls = 0

    def beside(self, *_: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        if self.away or (self.away_for_saves and name == "save"):
            raise UnreachableError("the store does not answer")
        return getattr(self._kept, name)


class BothHeads(MemoryHeads):
    """Saves what comes with a head, too, as State does."""

    def move(self, source: str, partition: int, head: Head, *, also: Any = None, **how: Any) -> bool:
        super().move(source, partition, head, **how)
        if also is not None:
            also.rows.save(source, partition, also.row, also.require)
        return also is not None


class Scene:
    """One owner whose batches have as many rows as they are told to have, on a clock of its own."""

    def __init__(self, policy: SavePolicy, breaker: BreakerLimits | None = None) -> None:
        self.world = World(count=10_000_000)
        self.store, self.observer, self.now = Outside(self.world), Observer(), 0.0
        self.at, self.batch = 0, 0
        self.breaker = Breaker(breaker or BreakerLimits())
        self.policy = policy
        self.taker = self.owner()

    def owner(self) -> BatchTaker:
        from evermark.cluster.base import Holder
        from evermark.cluster.fence import source_lease

        holder = Holder("i", "h", "b", id(self), f"{self.batch}-{self.store.calls}")
        lease = self.world.leases.acquire(source_lease("shop"), holder, 10)
        assert lease is not None
        stores: Any = (self.world.source, self.world.log, self.world, self.world.heads, self.store)
        return BatchTaker(
            "shop", lease.epoch, *stores, policy=self.policy, breaker=self.breaker, saving=self.observer,
            clock=lambda: self.now,
        )  # fmt: skip

    def take(self, rows: int) -> Mapping[int, EvermarkError]:
        """A batch of so many rows; of none, only the position moves."""
        start, self.at = self.at, self.at + max(rows, 1)
        name = f"file-{self.batch}-{self.at}"
        self.world.files[name] = [(f"event-{n}", position(n)) for n in range(start, self.at)]
        files = (LogFile(name, rows, 1),) if rows else ()
        written = WrittenBatch(
            0, self.batch + 1, self.taker.epoch, position(start), position(self.at), files, controls=0
        )
        self.batch += bool(rows)
        failed = take_each(self.taker, [written], lambda _: None)
        self.taker.save_due([0])
        return failed

    @property
    def saved(self) -> int:
        return int(self.world.checkpoints.load("shop", 0).position)

    @property
    def confirmed(self) -> int:
        return self.world.source.forgotten


def test_s2_a_checkpoint_is_saved_after_so_many_events_and_the_count_begins_anew() -> None:
    """GIVEN 1000 events WHEN batches of 400 come without time passing THEN each third is saved, not each second."""
    scene = Scene(FIVE_OR_THOUSAND)
    scene.taker.begin(0)
    saved = [scene.take(400) or scene.saved for _ in range(7)]
    assert saved == [0, 0, 1200, 1200, 1200, 2400, 2400]


def test_s2_a_checkpoint_is_saved_after_so_long_and_the_time_begins_anew() -> None:
    """GIVEN 5 s WHEN a batch of one comes every two seconds THEN no checkpoint waits for longer than that."""
    scene = Scene(FIVE_OR_THOUSAND)
    scene.taker.begin(0)
    saved = []
    for _ in range(8):
        assert not scene.take(1)
        saved.append(scene.saved)
        scene.now += 2.0
    assert saved == [0, 0, 0, 4, 4, 4, 4, 8]


def test_s2_a_checkpoint_is_saved_in_its_time_though_no_batch_comes_any_more() -> None:
    """GIVEN one event WHEN nothing follows THEN its checkpoint is saved when its time has come, and confirmed then."""
    scene = Scene(FIVE_OR_THOUSAND)
    scene.taker.begin(0)
    scene.take(1)
    scene.now = 4.9
    scene.taker.save_due([0])
    assert (scene.saved, scene.confirmed) == (0, 0)
    scene.now = 5.0
    scene.taker.save_due([0])
    assert (scene.saved, scene.confirmed) == (1, 1)


def test_a_position_that_only_moved_is_saved_soon_however_long_the_interval_is() -> None:
    """GIVEN an interval of an hour WHEN an idle source moves on THEN that is saved within seconds: its lag is judged
    by it."""
    scene = Scene(SavePolicy(3600.0, 1000))
    scene.taker.begin(0)
    scene.take(0)
    scene.now += MOVED_S
    scene.taker.save_due([0])
    assert scene.saved == 1


def test_s2_the_source_is_never_confirmed_past_what_is_saved() -> None:
    """GIVEN checkpoints that wait, and a store that goes away and comes back THEN after each step the source is
    confirmed at most as far as the store knows."""
    scene = Scene(SavePolicy(5.0, 3))
    scene.taker.begin(0)
    for step in range(60):
        scene.store.away = 10 <= step < 30
        assert not scene.take(1)
        assert scene.confirmed <= scene.saved, f"after batch {step}"
        scene.now += 1.0
    assert scene.saved >= 57


def test_s1_while_the_store_is_away_batches_are_taken_and_the_breaker_opens() -> None:
    """GIVEN a store that goes away WHEN batches come THEN each is in the log, the breaker opens after five failures,
    the store is left alone while it is open, one try in 30 s finds it back, and the last checkpoint is saved."""
    scene = Scene(SavePolicy())
    scene.taker.begin(0)
    scene.take(1)
    scene.store.away = True
    for _ in range(20):
        assert not scene.take(1)
    assert (len(scene.world.log.commits), scene.saved) == (21, 1)
    assert scene.observer.states == [BreakerState.CLOSED] * 4 + [BreakerState.OPEN]
    scene.now += 31.0
    calls = scene.store.calls
    scene.take(1)
    assert scene.store.calls - calls <= 2  # `beside`, and one try
    assert scene.observer.states[5:] == [BreakerState.OPEN]
    scene.store.away = False
    scene.take(1)
    assert scene.saved == 1
    scene.now += 30.0
    scene.taker.save_due([0])
    assert (scene.saved, scene.confirmed, scene.observer.came_back) == (23, 23, 1)


def test_an_owner_that_begins_while_the_store_is_away_goes_on_where_the_log_ends() -> None:
    """GIVEN a store that is away WHEN another owner begins THEN it reads on at the log's end, and its checkpoint is
    saved when the store is back; without a log it cannot know, and says why."""
    scene = Scene(SavePolicy())
    scene.store.away = True
    with pytest.raises(UnreachableError):
        scene.taker.begin(0)
    scene.store.away = False
    scene.taker.begin(0)
    for _ in range(3):
        scene.take(2)
    scene.store.away = True
    scene.take(2)
    scene.taker = scene.owner()
    resumed = scene.taker.begin(0)
    assert (resumed.position, resumed.batch) == (position(8), 4)
    assert isinstance(resumed.without_checkpoint, UnreachableError)
    scene.store.away = False
    scene.take(1)
    assert scene.world.checkpoints.load("shop", 0) == Checkpoint(position(9), 5, scene.taker.epoch)


def test_s8_the_store_is_asked_once_for_partitions_that_are_begun_together_and_not_while_the_breaker_is_open() -> None:
    """GIVEN a store of checkpoints WHEN three partitions are begun together THEN it is listed once; WHEN it is away
    THEN it is not asked again for each of them, and after some failures in a row not at all until the breaker lets a
    try through."""
    scene = Scene(SavePolicy(), BreakerLimits(threshold=2, timeout_s=30.0))
    calls = scene.store.calls
    fenced = scene.taker.fence([0, 1, 2])
    assert scene.store.calls - calls == 1
    scene.taker.begin(0, fenced[0])
    assert scene.store.calls - calls == 2, "it saved where reading begins"
    scene.take(2)
    scene.store.away = True
    calls = scene.store.calls
    for states in (BreakerState.CLOSED, BreakerState.OPEN):
        scene.taker = scene.owner()
        fenced = scene.taker.fence([0])
        assert isinstance(fenced[0].away, UnreachableError)
        assert scene.taker.begin(0, fenced[0]).position == position(2)
        assert scene.observer.states[-1] is states
    assert scene.store.calls - calls == 2
    scene.store.away = False
    assert scene.taker.fence([0])[0].away is not None, "the breaker is open"
    assert scene.store.calls - calls == 2
    scene.now += 31.0
    assert scene.taker.fence([0])[0].away is None
    scene.taker.begin(0)
    assert scene.breaker.state(scene.now) is BreakerState.CLOSED


def passed_beyond_the_log() -> Scene:
    """The log ends at 2; the source was passed, saved and confirmed up to 3."""
    scene = Scene(SavePolicy())
    scene.taker.begin(0)
    scene.take(2)
    scene.take(0)  # no events, up to 3
    scene.now += 10.0
    scene.taker.save_due([0])
    assert (scene.saved, scene.confirmed) == (3, 3)
    return scene


def test_an_owner_that_began_without_its_checkpoint_saves_nothing_over_one_that_passed_more() -> None:
    """GIVEN a source that was passed and confirmed beyond the log's end WHEN an owner begins while the store is away
    THEN it saves nothing older than what is stored, and says so when the store is back; who begins then goes on there.
    """
    scene = passed_beyond_the_log()
    scene.store.away = True
    scene.taker = scene.owner()
    noted = scene.world.heads.load("shop")[0]
    # As a program of before left it, which noted nothing.
    scene.world.heads.move("shop", 0, replace(noted, epoch=scene.taker.epoch, passed=""))
    assert scene.taker.begin(0).position == position(2)
    scene.store.away = False
    scene.now += 10.0
    assert isinstance(scene.taker.save_due([0])[0], ConflictError)
    assert scene.saved == 3
    scene.taker = scene.owner()
    assert scene.taker.begin(0).position == position(3)


@pytest.mark.parametrize("lost", [True, False])
def test_s10_what_was_passed_without_events_outlives_the_checkpoint(lost: bool) -> None:
    """GIVEN a source that was passed and confirmed beyond the log's end WHEN its checkpoint is lost, or its store away
    THEN the next owner goes on where it was passed, not where the log ends: that would look like a gap."""
    scene = passed_beyond_the_log()
    if lost:
        scene.world.checkpoints.delete("shop", 0)
    else:
        scene.store.away = True
    scene.taker = scene.owner()
    assert scene.taker.begin(0).position == position(3)


@pytest.mark.parametrize("passed", [0, 3])
@pytest.mark.parametrize("lost", [True, False])
def test_s10_a_partition_without_an_event_goes_on_where_it_began(lost: bool, passed: int) -> None:
    """GIVEN a source that begins with what is new, and had no event since WHEN its checkpoint is lost, or its store
    away THEN the next owner goes on where it began, or where it was passed since: what was written meanwhile comes."""
    scene = Scene(SavePolicy())
    scene.world.source.earliest = lambda _: position(0)  # type: ignore[method-assign]
    scene.taker.begin(0)
    for _ in range(passed):
        scene.take(0)
        scene.now += 10.0
        scene.taker.save_due([0])
    assert (scene.saved, scene.world.log.commits) == (passed, [])
    if lost:
        scene.world.checkpoints.delete("shop", 0)
    else:
        scene.store.away = True
    scene.world.source.earliest = lambda _: position(9)  # type: ignore[method-assign]
    for _ in range(2):  # an owner that ends at once leaves it as it was
        scene.taker = scene.owner()
        assert scene.taker.begin(0).position == position(passed)
    scene.store.away = False
    scene.now += 31.0
    scene.take(2)
    assert scene.world.heads.load("shop")[0].batch == 1


def test_a_partition_that_a_program_of_before_began_is_noted_where_its_checkpoint_stands() -> None:
    """GIVEN a checkpoint of before the first event, and no head WHEN an owner begins THEN the head notes it."""
    scene = Scene(SavePolicy())
    scene.world.checkpoints.save("shop", 0, Checkpoint(position(4), 0, scene.taker.epoch))
    scene.taker.begin(0)
    scene.world.checkpoints.delete("shop", 0)
    scene.taker = scene.owner()
    assert scene.taker.begin(0).position == position(4)


def test_an_owner_that_began_without_its_checkpoint_is_sure_once_one_was_saved_with_the_head() -> None:
    """GIVEN an owner that began while the store was away WHEN it saves a checkpoint together with the log's head, and
    then passes something without events THEN that is saved as well.
    """
    scene = Scene(SavePolicy())
    scene.world.heads = BothHeads(scene.world.leases)
    scene.taker = scene.owner()
    scene.taker.begin(0)
    scene.take(2)
    scene.store.away = True
    scene.taker = scene.owner()
    scene.taker.begin(0)
    scene.store.beside = scene.world.checkpoints.beside
    scene.store.away = False
    assert not scene.take(2)
    scene.take(0)
    scene.now += 10.0
    assert not scene.taker.save_due([0])
    assert scene.saved == scene.at == 5


def test_s9_what_waits_is_saved_when_reading_ends_within_its_time() -> None:
    """GIVEN checkpoints that wait WHEN reading ends THEN they are saved; a store that is away is tried, and no longer
    than there is time."""
    scene = Scene(FIVE_OR_THOUSAND)
    scene.taker.begin(0)
    scene.take(1)
    scene.store.away = True
    calls = scene.store.calls
    scene.taker.save_rest([0, 0, 0])
    assert scene.saved == 0
    assert scene.store.calls - calls == 1, "each try may take seconds to fail"
    scene.store.away = False
    scene.taker.save_rest([0])
    assert scene.saved == 1

    scene = Scene(SavePolicy(5.0, 1000, last_s=0.0))
    scene.taker.begin(0)
    scene.take(1)
    scene.taker.save_rest([0])
    assert scene.saved == 0


def test_a_stale_owner_hears_it_when_a_checkpoint_that_waited_is_saved() -> None:
    """GIVEN a checkpoint that waits WHEN another owner has saved meanwhile THEN the old one is refused, and changes
    nothing."""
    scene = Scene(FIVE_OR_THOUSAND)
    scene.taker.begin(0)
    scene.take(1)
    old, scene.taker = scene.taker, scene.owner()
    scene.taker.begin(0)
    scene.now += 10.0
    assert isinstance(old.save_due([0])[0], StaleError)
    assert scene.world.checkpoints.load("shop", 0).epoch == scene.taker.epoch


def test_a_store_that_can_only_be_read_keeps_no_partition_from_being_read() -> None:
    """GIVEN a store that refuses writes WHEN reading begins THEN it begins, and the checkpoint is saved later."""
    scene = Scene(FIVE_OR_THOUSAND)
    scene.taker.begin(0)
    scene.take(1000)
    scene.store.away_for_saves = True
    scene.taker = scene.owner()
    resumed = scene.taker.begin(0)
    assert (resumed.position, resumed.without_checkpoint) == (position(1000), None)
    scene.store.away_for_saves = False
    scene.take(1000)
    assert scene.saved == 2000


def test_checkpoint_saver_is_about_the_partitions_that_are_read_and_a_failure_is_its_partitions_own() -> None:
    """GIVEN a saved checkpoint WHEN its source cannot be told THEN just that partition fails; and one that is not read
    any more is neither saved nor told."""
    scene = Scene(FIVE_OR_THOUSAND)
    scene.taker.begin(0)
    scene.take(1)
    scene.now += 10.0
    told: list[int] = []

    def confirm(partition: int, _end: str) -> None:
        told.append(partition)
        raise GapError("the slot is gone")

    scene.world.source.confirm = confirm  # type: ignore[method-assign]
    assert scene.taker.save_due([1]) == {} and not told
    failed = scene.taker.save_due([0, 1])
    assert list(failed) == [0] and isinstance(failed[0], GapError) and told == [0]
    assert scene.taker.save_due([0]) == {}
