"""What every `LeaseStore` promises."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from evermark.cluster.base import Holder, Lease, LeaseStore, owner_epoch
from evermark.errors import StaleError

TTL_S = 60.0


def holder(instance: str) -> Holder:
    return Holder(instance=instance, host="host", boot="boot", pid=1, started="1")


class LeaseContract:
    @pytest.fixture
    def gone(self) -> set[Holder]:
        """Holders whose process ended; the store under test asks this set."""
        return set()

    @pytest.fixture
    def leases(self, gone: set[Holder]) -> LeaseStore:
        raise NotImplementedError("override this fixture; pass `is_gone=gone.__contains__`")

    @pytest.fixture
    def let_expire(self, leases: LeaseStore) -> Callable[[str], None]:
        raise NotImplementedError("override this fixture with a way to let a lease run out without waiting")

    def test_only_one_holds_a_lease(self, leases: LeaseStore) -> None:
        """While one holds it nobody else gets it, and names do not mix."""
        first = leases.acquire("deliver", holder("a"), TTL_S)
        assert first is not None
        assert leases.acquire("deliver", holder("b"), TTL_S) is None
        assert leases.acquire("other", holder("b"), TTL_S) is not None

    def test_acquiring_what_one_holds_renews_it(self, leases: LeaseStore) -> None:
        """The same process gets the same epoch again."""
        first = leases.acquire("deliver", holder("a"), TTL_S)
        assert leases.acquire("deliver", holder("a"), TTL_S) == first

    def test_another_run_of_the_same_instance_is_another_holder(self, leases: LeaseStore) -> None:
        """A restarted instance must not take itself for its former process."""
        leases.acquire("deliver", holder("a"), TTL_S)
        again = Holder(instance="a", host="host", boot="boot", pid=2, started="9")
        assert leases.acquire("deliver", again, TTL_S) is None

    def test_every_change_of_holder_raises_the_epoch(
        self, leases: LeaseStore, let_expire: Callable[[str], None], gone: set[Holder]
    ) -> None:
        """Expiry, release and death all give the next holder a higher epoch, never one used before."""
        epochs = []
        for turn, instance in enumerate("abcdef"):
            lease = leases.acquire("deliver", holder(instance), TTL_S)
            assert lease is not None
            epochs.append(lease.epoch)
            if turn % 3 == 0:
                let_expire("deliver")
            elif turn % 3 == 1:
                leases.release(lease)
            else:
                gone.add(holder(instance))
        assert epochs == sorted(set(epochs))

    def test_released_and_taken_again_by_the_same_holder_raises_the_epoch(self, leases: LeaseStore) -> None:
        """Letting go ends the tenure: even its last holder comes back with a new epoch."""
        first = leases.acquire("deliver", holder("a"), TTL_S)
        assert first is not None
        leases.release(first)
        second = leases.acquire("deliver", holder("a"), TTL_S)
        assert second is not None
        assert second.epoch > first.epoch

    def test_a_holder_whose_process_is_gone_loses_at_once(self, leases: LeaseStore, gone: set[Holder]) -> None:
        """Nobody waits for the lease of a dead process, nor gets that of a living one."""
        leases.acquire("deliver", holder("a"), TTL_S)
        gone.add(holder("c"))
        assert leases.acquire("deliver", holder("b"), TTL_S) is None
        gone.add(holder("a"))
        assert leases.acquire("deliver", holder("b"), TTL_S) is not None

    def test_a_lease_that_ran_out_and_was_taken_is_stale(
        self, leases: LeaseStore, let_expire: Callable[[str], None]
    ) -> None:
        """The former holder can neither renew nor pass `require`, and its release harms nobody."""
        old = leases.acquire("deliver", holder("a"), TTL_S)
        assert old is not None
        let_expire("deliver")
        new = leases.acquire("deliver", holder("b"), TTL_S)
        assert new is not None
        with pytest.raises(StaleError):
            leases.renew([old], TTL_S)
        with pytest.raises(StaleError):
            leases.require(old)
        leases.release(old)
        leases.require(new)
        assert leases.acquire("deliver", holder("c"), TTL_S) is None

    def test_a_late_holder_may_renew_while_nobody_took_over(
        self, leases: LeaseStore, let_expire: Callable[[str], None]
    ) -> None:
        """Running out is no loss by itself."""
        lease = leases.acquire("deliver", holder("a"), TTL_S)
        assert lease is not None
        let_expire("deliver")
        leases.renew([lease], TTL_S)
        assert leases.acquire("deliver", holder("b"), TTL_S) is None

    def test_a_released_lease_writes_no_more(self, leases: LeaseStore) -> None:
        """After a release neither renew nor require succeed, though nobody else has it yet."""
        lease = leases.acquire("deliver", holder("a"), TTL_S)
        assert lease is not None
        leases.release(lease)
        with pytest.raises(StaleError):
            leases.renew([lease], TTL_S)
        with pytest.raises(StaleError):
            leases.require(lease)

    def test_a_lease_nobody_ever_had_is_stale(self, leases: LeaseStore) -> None:
        """An invented epoch is refused."""
        for epoch in (0, 1):
            with pytest.raises(StaleError):
                leases.require(Lease("never", epoch))

    def test_several_are_taken_under_one_new_epoch(self, leases: LeaseStore) -> None:
        """What others have is left to them; what is held already gets the new epoch, and the old one is stale."""
        leases.acquire("source:a:2", holder("b"), TTL_S)
        old = leases.acquire("source:a", holder("a"), TTL_S)
        names = ["source:a", "source:a:1", "source:a:2"]
        assert old is not None
        assert leases.free(names, holder("a")) == names[:2]
        found = leases.acquire_all(names, holder("a"), TTL_S)
        assert found == [Lease("source:a", old.epoch + 1), Lease("source:a:1", old.epoch + 1)]
        assert leases.free(names, holder("c")) == []
        for lease in found:
            leases.require(lease)
        with pytest.raises(StaleError):
            leases.require(old)

    def test_taking_several_never_gives_an_epoch_twice(
        self, leases: LeaseStore, let_expire: Callable[[str], None]
    ) -> None:
        """However the sets of those who follow each other overlap."""
        given: list[Lease] = []
        for instance, names in enumerate((["x"], ["x", "y"], ["y"], ["x", "y", "z"], ["z"])):
            for name in names:
                let_expire(name)
            given += leases.acquire_all(names, holder(str(instance)), TTL_S)
        assert len(given) == len(set(given)) == 8
        for name in "xyz":
            epochs = [lease.epoch for lease in given if lease.name == name]
            assert epochs == sorted(epochs)

    def test_a_lease_is_divided_once_and_not_under_its_holder(self, leases: LeaseStore) -> None:
        """Who had it for all of them can write to none of them afterwards, and nobody begins below its epoch."""
        whole = leases.acquire("source:a", holder("a"), TTL_S)
        assert whole is not None
        assert not leases.divide("source:a", ["source:a:1"], holder("b"))
        assert leases.divide("source:a", ["source:a:1"], holder("a"))
        with pytest.raises(StaleError):
            leases.require(whole)
        (part,) = leases.acquire_all(["source:a:1"], holder("b"), TTL_S)
        assert part.epoch > whole.epoch
        assert leases.divide("source:a", ["source:a:1"], holder("c"))  # a look, though another has one of them
        leases.require(part)

    def test_a_part_that_comes_later_gets_a_lease_though_others_hold_theirs(self, leases: LeaseStore) -> None:
        """An instance with a newer file does not wait for those with the older one, and takes nothing from them."""
        assert leases.divide("source:a", ["source:a:1"], holder("a"))
        held = leases.acquire_all(["source:a", "source:a:1"], holder("a"), TTL_S)
        assert leases.divide("source:a", ["source:a:1", "source:a:2"], holder("b"))
        (later,) = leases.acquire_all(["source:a", "source:a:1", "source:a:2"], holder("b"), TTL_S)
        assert later.name == "source:a:2" and later.epoch > held[0].epoch
        for lease in held:
            leases.require(lease)

    def test_of_several_that_are_renewed_one_that_is_lost_is_told(
        self, leases: LeaseStore, let_expire: Callable[[str], None]
    ) -> None:
        """All are renewed in one call; when another has one of them, the holder hears it."""
        mine = leases.acquire_all(["x", "y", "z"], holder("a"), TTL_S)
        leases.renew(mine, TTL_S)
        let_expire("y")
        assert leases.acquire("y", holder("b"), TTL_S) is not None
        with pytest.raises(StaleError, match="'y'"):
            leases.renew(mine, TTL_S)

    def test_people_see_who_has_a_lease_and_who_had_it_last(
        self, leases: LeaseStore, let_expire: Callable[[str], None], gone: set[Holder]
    ) -> None:
        """A lease that was let go of, has run out, or whose holder is gone, is held by nobody; who had it stays."""
        old = leases.acquire("out", holder("a"), TTL_S)
        let_expire("out")
        mine = leases.acquire_all(["kept", "let go"], holder("a"), TTL_S)
        leases.release(mine[1])
        leases.acquire("of the gone", holder("c"), TTL_S)
        gone.add(holder("c"))
        rows = leases.rows()
        assert old is not None and {name for name, row in rows.items() if row.held} == {"kept"}
        assert (rows["kept"].holder, rows["let go"].holder) == (holder("a"), None)
        assert {name: row.last for name, row in rows.items()} == dict.fromkeys(rows, "a") | {"of the gone": "c"}
        assert [owner_epoch(leases, name) for name in ("kept", "out", "never")] == [mine[0].epoch, None, None]

    def test_what_was_checked_is_so_until_the_lease_changes_hands(self, leases: LeaseStore) -> None:
        """Of leases under one epoch, each is told apart; a late note of a former owner says nothing."""
        mine = leases.acquire_all(["x", "y"], holder("a"), TTL_S)
        leases.note_checked(mine[:1])
        assert {name: row.checked for name, row in leases.rows().items()} == {"x": True, "y": False}
        leases.release(*mine)
        leases.acquire_all(["x", "y"], holder("b"), TTL_S)
        leases.note_checked(mine)
        assert not any(row.checked for row in leases.rows().values())

    def test_of_many_at_once_one_wins(self, leases: LeaseStore) -> None:
        """A race for a free lease has exactly one winner."""
        won: list[Lease] = []
        barrier = threading.Barrier(6)

        def race(instance: str) -> None:
            barrier.wait()
            lease = leases.acquire("deliver", holder(instance), TTL_S)
            if lease is not None:
                won.append(lease)

        threads = [threading.Thread(target=race, args=(name,)) for name in "abcdef"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
