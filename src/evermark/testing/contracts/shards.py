"""What every `DeliveryStore` promises about shards: where subscriptions are, and how they get to another shard."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evermark.cluster.fence import deliver_lease
from evermark.delivery.decide.shards import shard_of
from evermark.delivery.model import Cursor, GroupWork, MadeBy, SourcePartition, SubscriptionState
from evermark.delivery.ports import DeliveryStore
from evermark.errors import NotFoundError, StaleError
from evermark.testing.contracts.scene import P0, P1, T0, begin, done, spec

NAMES = tuple(f"s{number}" for number in range(12))
FIRST, SECOND = (frozenset(name for name in NAMES if shard_of(name, 2) == shard) for shard in (0, 1))

TakeLease = Callable[[str], int]


class ShardContract:
    """A subclass has the fixtures `store`, and `take`, which takes over the lease of a name."""

    @pytest.fixture
    def store(self) -> DeliveryStore:
        raise NotImplementedError

    @pytest.fixture
    def take(self) -> TakeLease:
        raise NotImplementedError

    def two_shards(self, store: DeliveryStore, take: TakeLease) -> tuple[int, DeliveryStore, int]:
        """The epoch of the first shard; the store of the second, and its epoch."""
        epoch = take(deliver_lease(0))
        begin(store, epoch, *NAMES)
        store.spread(2, epoch)
        return epoch, store.of_shard(1), take(deliver_lease(1))

    def test_members_are_spread_and_stay_live(self, store: DeliveryStore, take: TakeLease) -> None:
        """GIVEN one group WHEN there are to be two THEN each member is in one of them, and none has fallen behind."""
        _, second, _ = self.two_shards(store, take)
        assert (store.group().members, second.group().members) == (FIRST, SECOND)
        assert len(FIRST) > 2 < len(SECOND)
        assert store.groups() == {0: store.group(), 1: second.group()}
        assert second.group().cursors == store.group().cursors == {P0: Cursor(0), P1: Cursor(0)}
        assert store.cursors_outside() == {}

    def test_spreading_again_changes_nothing(self, store: DeliveryStore, take: TakeLease) -> None:
        """Every start of an owner does it: a version that moved would throw members out of work under way."""
        epoch, _, _ = self.two_shards(store, take)
        before = store.groups()
        store.spread(2, epoch)
        assert store.groups() == before

    def test_groups_move_on_by_themselves(self, store: DeliveryStore, take: TakeLease) -> None:
        """GIVEN two shards WHEN one settles work THEN the other stands where it stood."""
        _, second, epoch = self.two_shards(store, take)
        group = second.group()
        second.settle_group(
            GroupWork(P0, Cursor(0), Cursor(3), SECOND, group.version), list(map(done, sorted(SECOND))), T0, epoch
        )
        assert (second.group().cursors[P0], store.group().cursors[P0]) == (Cursor(3), Cursor(0))
        assert second.group().members == SECOND

    def test_each_shard_is_fenced_by_its_own_lease(self, store: DeliveryStore, take: TakeLease) -> None:
        """GIVEN an owner that lost its shard WHEN it writes THEN it is refused; the other shard's owner is not."""
        first, second, old = self.two_shards(store, take)
        take(deliver_lease(1))
        with pytest.raises(StaleError):
            second.settle_group(GroupWork(P0, Cursor(0), Cursor(1), SECOND), list(map(done, SECOND)), T0, old)
        with pytest.raises(StaleError):
            second.open_partition(SourcePartition("new", 0), 0, old)
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), FIRST), list(map(done, FIRST)), T0, first)

    def test_members_of_a_shard_that_goes_leave_where_it_stands(self, store: DeliveryStore, take: TakeLease) -> None:
        """GIVEN a shard that is ahead WHEN there is to be one THEN its members are behind at its cursors, and can join
        the other group when they are level with it, not before.
        """
        epoch, second, other = self.two_shards(store, take)
        second.settle_group(GroupWork(P0, Cursor(0), Cursor(3), SECOND), list(map(done, SECOND)), T0, other)
        store.spread(1, epoch)
        with pytest.raises(NotFoundError):
            second.group()
        assert store.group().members == FIRST
        assert store.cursors_outside() == {name: {P0: Cursor(3), P1: Cursor(0)} for name in SECOND}
        assert store.outside().keys() == SECOND
        name = min(SECOND)
        assert not store.join(name, epoch)
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(3), FIRST), list(map(done, FIRST)), T0, epoch)
        assert store.join(name, epoch)
        assert store.group().members == FIRST | {name}

    def test_the_version_of_a_shard_never_comes_back(self, store: DeliveryStore, take: TakeLease) -> None:
        """GIVEN work of a shard that is closed and made anew WHEN it is settled THEN it counts for no new member."""
        epoch, second, other = self.two_shards(store, take)
        work = second.group()
        store.spread(1, epoch)
        closed = store.group()
        store.spread(2, epoch)
        assert second.group().version > work.version
        assert store.group().version >= closed.version > work.version
        second.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), work.members, work.version), list(map(done, SECOND)), T0, other
        )
        assert second.group().members == frozenset()
        assert set(store.cursors_outside()) == SECOND

    def test_work_that_began_before_a_move_does_not_count_for_who_moved(
        self, store: DeliveryStore, take: TakeLease
    ) -> None:
        """GIVEN a batch under way for all WHEN some move meanwhile THEN it is settled for those that stayed."""
        epoch = take(deliver_lease(0))
        begin(store, epoch, *NAMES)
        group = store.group()
        store.spread(2, epoch)
        work = GroupWork(P0, Cursor(0), Cursor(1), group.members, group.version)
        store.settle_group(work, list(map(done, NAMES)), T0, epoch)
        assert (store.group().cursors[P0], store.of_shard(1).group().cursors[P0]) == (Cursor(1), Cursor(0))
        assert store.group().members == FIRST
        assert store.of_shard(1).group().members == SECOND

    def test_who_is_outside_moves_with_its_cursors(self, store: DeliveryStore, take: TakeLease) -> None:
        """GIVEN subscriptions that are behind WHEN they move THEN only their shard's owner serves them, from there."""
        epoch = take(deliver_lease(0))
        begin(store, epoch)
        begun = {name: {P0: Cursor(0), P1: Cursor(2)} for name in NAMES}
        store.register([spec(name) for name in NAMES], MadeBy.FILE, begun, epoch)
        store.spread(2, epoch)
        second = store.of_shard(1)
        assert store.outside().keys() == FIRST and second.outside().keys() == SECOND
        assert store.cursors_outside() == begun
        name, other = min(SECOND), take(deliver_lease(1))
        assert not store.join(name, epoch)
        assert second.settle_subscription(name, P0, Cursor(0), Cursor(1), done(name), T0, other)

    def test_a_partition_is_opened_for_one_shard(self, store: DeliveryStore, take: TakeLease) -> None:
        """And a subscription that comes from a shard that has not seen it has all of it before it."""
        epoch, second, other = self.two_shards(store, take)
        store.suspend(min(FIRST), "", epoch)
        store.suspend(min(SECOND), "", epoch)
        new = SourcePartition("new", 0)
        store.open_partition(new, 4, epoch)
        second.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), SECOND - {min(SECOND)}), list(map(done, SECOND)), T0, other
        )
        assert store.group().cursors[new] == Cursor(4)
        assert new not in second.group().cursors
        assert (store.cursors(min(FIRST)).get(new), store.cursors(min(SECOND)).get(new)) == (Cursor(0), None)
        store.spread(1, epoch)
        assert store.cursors(min(SECOND))[new] == Cursor(0)
        assert store.cursors(max(SECOND)) == {P0: Cursor(1), P1: Cursor(0), new: Cursor(0)}

    def test_new_subscriptions_begin_in_their_shard(self, store: DeliveryStore, take: TakeLease) -> None:
        """Of the file, and of the API; and no other is touched by it."""
        epoch, second, _ = self.two_shards(store, take)
        later = [f"later{number}" for number in range(8)]
        store.register([spec(name) for name in (*NAMES, *later)], MadeBy.FILE, {}, epoch)
        store.add(spec("by hand"), None, epoch)
        for name in (*later, "by hand"):
            shard = shard_of(name, 2)
            assert name in store.of_shard(shard).group().members
            assert name not in store.of_shard(1 - shard).group().members
        store.register([], MadeBy.FILE, {}, epoch)
        assert store.group().members | second.group().members == {"by hand"}

    def test_a_person_reaches_every_shard(self, store: DeliveryStore, take: TakeLease) -> None:
        """GIVEN a member of another shard WHEN it is paused, or removed, THEN it leaves that shard's group."""
        epoch, second, other = self.two_shards(store, take)
        second.settle_group(GroupWork(P0, Cursor(0), Cursor(3), SECOND), list(map(done, SECOND)), T0, other)
        before = second.group()
        name = min(SECOND)
        store.suspend(name, "for now", epoch)
        assert second.group().version == before.version + 1
        assert second.group().members == SECOND - {name}
        assert store.cursors(name) == {P0: Cursor(3), P1: Cursor(0)}
        store.add(spec("by hand"), None, epoch)
        store.remove("by hand", epoch)
        assert store.groups()[shard_of("by hand", 2)].members == (SECOND - {name}, FIRST)[shard_of("by hand", 2) == 0]
        store.disable(max(SECOND), "gone", epoch)
        assert store.subscription(max(SECOND)).state is SubscriptionState.DISABLED
        assert second.group().members == SECOND - {name, max(SECOND)}
