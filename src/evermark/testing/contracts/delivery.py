"""What every `DeliveryStore` promises about subscriptions, the live group and cursors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, Parked, SourcePartition, SubscriptionState
from evermark.delivery.ports import DeliveryStore, ParkedStore
from evermark.errors import ConfigError, ConflictError, NotFoundError, StaleError
from evermark.testing.contracts.owned import OwnedStore
from evermark.testing.contracts.scene import P0, P1, T0, TakeOver, begin, done, event, failed, snapshot, spec

# Everything else in the port must take an epoch and be listed in `_writes`.
READERS = {
    *("outside", "subscriptions", "subscription", "group", "groups", "of_shard"),
    *("cursors", "cursors_outside", "counted"),
    *("counts", "oldest", "rows", "room", "held_keys"),
}


class DeliveryContract(OwnedStore):
    # subscriptions

    def test_new_subscriptions_join_or_begin_behind(self, store: DeliveryStore, epoch: int) -> None:
        """Without a start they are live from now; with one they are behind, and places left out are all backlog."""
        begin(store, epoch)
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(5), frozenset()), [], T0, epoch)
        store.register([spec("now"), spec("old")], MadeBy.FILE, {"old": {P0: Cursor(2)}}, epoch)
        assert {n: s.state for n, s in store.subscriptions().items()} == {"now": "live", "old": "behind"}
        assert store.group().members == {"now"}
        assert store.cursors("now") == {}
        assert store.cursors("old") == {P0: Cursor(2), P1: Cursor(0)}
        assert store.cursors_outside() == {"old": {P0: Cursor(2), P1: Cursor(0)}}

    def test_a_specification_comes_back_whole(self, store: DeliveryStore, epoch: int) -> None:
        """Every setting survives the store."""
        full = spec(
            "a",
            secrets=("sealed:1", "sealed:2"),
            streams=("public.orders",),
            ops=("insert",),
            where="data.total > 100 and data.n = 'ü\\u0000'",
            start="beginning",
            ordered=True,
            bundle=10,
            rate_per_s=2.5,
            headers={"x-a": "1"},
            allow_networks=("127.0.0.0/8",),
        )
        store.register([full], MadeBy.API, {}, epoch)
        assert store.subscriptions()["a"].spec == replace(full, made_by=MadeBy.API)

    def test_registering_again_keeps_state_and_cursor(self, store: DeliveryStore, epoch: int) -> None:
        """Known ones take the new settings and stay where they are; membership did not change, nor the version."""
        begin(store, epoch, "a", "b")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), [done("a"), failed("b")], T0, epoch)
        before, group = store.subscriptions(), store.group()
        store.register([spec("a", bundle=5), spec("b", bundle=5)], MadeBy.FILE, {"a": {P0: Cursor(0)}}, epoch)
        after = store.subscriptions()
        assert after["b"].spec.bundle == 5
        assert {n: replace(s, spec=before[n].spec) for n, s in after.items()} == before
        assert store.group() == group

    def test_a_receiver_that_is_gone_leaves_the_group_where_it_stands(self, store: DeliveryStore, epoch: int) -> None:
        """It is disabled until a person or a new url says otherwise; one made anew is not meant."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(3), frozenset("a")), [done("a")], T0, epoch)
        generation = store.subscriptions()["a"].generation
        store.disable("a", "410", epoch, generation=generation + 1)
        assert store.group().members == {"a"}
        store.disable("a", "410", epoch, generation=generation)
        assert (store.subscriptions()["a"].state, store.subscriptions()["a"].reason) == ("disabled", "410")
        assert (store.group().members, store.cursors("a")) == (frozenset(), {P0: Cursor(3), P1: Cursor(0)})
        store.disable("nobody", "410", epoch)

    def test_what_is_no_longer_named_goes_with_all_it_had(self, store: DeliveryStore, epoch: int) -> None:
        """Removed with cursors and parked rows; those of the other origin are left alone."""
        begin(store, epoch, "a", "b")
        store.register([spec("api")], MadeBy.API, {}, epoch)
        outcomes = [done("a", event(1)), failed("b"), done("api", event(1))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset({"a", "b", "api"})), outcomes, T0, epoch)
        version = store.group().version
        store.register([], MadeBy.FILE, {}, epoch)
        assert set(store.subscriptions()) == {"api"}
        assert store.group().members == {"api"}
        assert store.group().version > version
        assert store.cursors("b") == {}
        assert set(store.parked.counts()) == {"api"}

    def test_names_belong_to_one_origin(self, store: DeliveryStore, epoch: int) -> None:
        """The file cannot take over what the API made, nor name one twice, nor use an unusable name."""
        store.register([spec("a")], MadeBy.API, {}, epoch)
        before = snapshot(store)
        for specs in ([spec("a")], [spec("b"), spec("b")], [spec("")], [spec("x" * 300)]):
            with pytest.raises(ConfigError):
                store.register(specs, MadeBy.FILE, {}, epoch)
        assert snapshot(store) == before

    def test_gone_stays_disabled_until_its_url_changes(self, store: DeliveryStore, epoch: int) -> None:
        """410 is an answer about an address: a new one begins where the old one stopped."""
        begin(store, epoch, "a")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [Outcome("a", Fate.GONE, reason="410")], T0, epoch
        )
        store.register([spec("a", bundle=2)], MadeBy.FILE, {}, epoch)
        assert store.subscriptions()["a"].state is SubscriptionState.DISABLED
        store.register([spec("a", url="https://new.example")], MadeBy.FILE, {}, epoch)
        assert store.subscriptions()["a"].state is SubscriptionState.BEHIND
        assert store.cursors("a") == {P0: Cursor(0), P1: Cursor(0)}

    def test_a_person_pauses_and_resumes(self, store: DeliveryStore, epoch: int) -> None:
        """A pause keeps the place, no outcome lifts it, and resuming goes on from there."""
        begin(store, epoch, "a", "b")
        store.suspend("a", "maintenance", epoch)
        paused = store.subscriptions()["a"]
        assert (paused.state, paused.reason, paused.next_attempt_at) == ("suspended", "maintenance", None)
        assert store.group().members == {"b"}
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), done("a"), T0, epoch)
        assert store.subscriptions()["a"].state is SubscriptionState.SUSPENDED
        assert not store.join("a", epoch)
        store.resume("a", epoch)
        assert store.subscriptions()["a"].state is SubscriptionState.BEHIND
        assert store.cursors("a") == {P0: Cursor(1), P1: Cursor(0)}
        with pytest.raises(NotFoundError):
            store.suspend("nobody", "", epoch)

    def test_whatever_holds_one_back_a_person_resumes_it_at_once(self, store: DeliveryStore, epoch: int) -> None:
        """GIVEN one behind that was told to come back in a day WHEN a person resumes it THEN it waits for nothing."""
        begin(store, epoch, "a", "b")
        told = Outcome("a", Fate.ENDPOINT_FAILED, reason="429", retry_after_s=86_400.0)
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), [told, done("b")], T0, epoch)
        behind = store.subscription("a")
        assert behind.next_attempt_at is not None and behind.next_attempt_at >= T0 + timedelta(days=1)
        store.resume("a", epoch)
        found = store.subscription("a")
        assert (found.state, found.reason, found.failures, found.next_attempt_at) == ("behind", "", 0, None)
        assert store.cursors("a") == {P0: Cursor(0), P1: Cursor(0)}
        group = store.group()
        store.resume("b", epoch)
        assert (store.group(), store.subscription("b").state) == (group, SubscriptionState.LIVE)

    # the group

    def test_a_place_is_opened_once(self, store: DeliveryStore, epoch: int) -> None:
        """The group begins a new place at the given batch, everybody outside at 0; known places stay."""
        begin(store, epoch, "a")
        store.register([spec("a"), spec("b")], MadeBy.FILE, {"b": {P0: Cursor(0)}}, epoch)
        new = SourcePartition("blog", 0)
        store.open_partition(new, 7, epoch)
        store.open_partition(new, 9, epoch)
        assert store.group().cursors == {P0: Cursor(0), P1: Cursor(0), new: Cursor(7)}
        assert store.cursors("b") == {P0: Cursor(0), P1: Cursor(0), new: Cursor(0)}

    def test_settling_moves_the_group_and_parks(self, store: DeliveryStore, epoch: int) -> None:
        """All done: the cursor of this place moves, nobody leaves, parked events are in the queue."""
        begin(store, epoch, "a", "b")
        before = store.group()
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), [done("a", event(1)), done("b")], T0, epoch
        )
        after = store.group()
        assert after == store.group()
        assert after.cursors == {P0: Cursor(1), P1: Cursor(0)}
        assert (after.version, after.members) == (before.version, before.members)
        assert (store.parked.counts(), store.parked.oldest()) == ({"a": {"waiting": 1, "dead": 0}}, {"a": T0})

    def test_a_cursor_elsewhere_is_a_conflict_and_nothing_is_written(self, store: DeliveryStore, epoch: int) -> None:
        """Work that began elsewhere, that goes nowhere, or at an unknown place leaves no trace."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a")], T0, epoch)
        before = snapshot(store)
        for place, begun_at, done_to in (
            (P0, 0, 1),
            (P0, 2, 3),
            (P0, 1, 1),
            (P0, 1, 0),
            (SourcePartition("no", 0), 0, 1),
        ):
            with pytest.raises(ConflictError):
                store.settle_group(
                    GroupWork(place, Cursor(begun_at), Cursor(done_to), frozenset("a")),
                    [done("a", event(9))],
                    T0,
                    epoch,
                )
        assert snapshot(store) == before

    def test_who_is_not_done_leaves_with_the_whole_vector(self, store: DeliveryStore, epoch: int) -> None:
        """Failed, gone, unfinished and unheard-of members keep the cursor the work began at; nothing is parked."""
        begin(store, epoch, "a", "failed", "gone", "slow", "silent")
        everybody = store.group().members
        store.settle_group(
            GroupWork(P1, Cursor(0), Cursor(4), everybody), [done(name) for name in everybody], T0, epoch
        )
        version = store.group().version
        outcomes = [
            done("a"),
            replace(failed("failed"), parked=(event(1),)),
            Outcome("gone", Fate.GONE, parked=(event(1),)),
            Outcome("slow", Fate.UNFINISHED, parked=(event(1),)),
        ]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), everybody), outcomes, T0, epoch)
        after = store.group()
        assert after.members == {"a"}
        assert after.version > version
        assert after.cursors == {P0: Cursor(1), P1: Cursor(4)}
        left = {"failed": "behind", "gone": "disabled", "slow": "behind", "silent": "behind"}
        assert {n: s.state for n, s in store.subscriptions().items() if n != "a"} == left
        assert store.cursors_outside() == {name: {P0: Cursor(0), P1: Cursor(4)} for name in left}
        assert store.parked.counts() == {}
        assert store.subscriptions()["failed"].next_attempt_at > T0  # type: ignore[operator]
        assert store.subscriptions()["slow"].next_attempt_at is None

    def test_work_that_went_well_moves_the_cursor_and_nothing_else(self, store: DeliveryStore, epoch: int) -> None:
        """Once: a second settling of the same work, and one of a stale owner, are refused."""
        begin(store, epoch, "a", "b")
        group, before = store.group(), store.subscriptions()
        work = GroupWork(P0, Cursor(0), Cursor(2), group.members, group.version)
        with pytest.raises(StaleError):
            store.settle_group(work, [done("a"), done("b")], T0, epoch - 1)
        store.settle_group(work, [done("a"), done("b", accepted=0)], T0, epoch)
        assert store.group() == replace(group, cursors={P0: Cursor(2), P1: Cursor(0)})
        assert store.subscriptions() == before
        with pytest.raises(ConflictError):
            store.settle_group(work, [done("a"), done("b")], T0, epoch)

    def test_an_answer_clears_what_was_on_record(self, store: DeliveryStore, epoch: int) -> None:
        """GIVEN a member with a failure on record WHEN its receiver accepts events again THEN the record is clean."""
        begin(store, epoch, "a")
        group = store.group()
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), group.members), [failed("a")], T0, epoch)
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), done("a", accepted=0), T0, epoch)
        assert store.join("a", epoch)
        assert store.subscriptions()["a"].failures == 1
        group = store.group()
        work = GroupWork(P0, Cursor(1), Cursor(2), group.members, group.version)
        store.settle_group(work, [done("a")], T0, epoch)
        assert store.subscriptions()["a"].failures == 0
        assert store.group().cursors[P0] == Cursor(2)

    def test_split_outcomes_count_together(self, store: DeliveryStore, epoch: int) -> None:
        """A hot subscription worked on by two tasks is done only when both are."""
        begin(store, epoch, "a", "b")
        outcomes = [done("a", event(1)), done("a", event(2)), done("b", event(1)), failed("b")]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(2), frozenset("ab")), outcomes, T0, epoch)
        after = store.group()
        assert after.members == {"a"}
        assert store.parked.counts() == {"a": {"waiting": 2, "dead": 0}}

    def test_joining_in_mid_work_misses_nothing(self, store: DeliveryStore, epoch: int) -> None:
        """Who joined after the work began did not get its events, and leaves again to where it began."""
        begin(store, epoch, "a")
        work = store.group()
        store.register([spec("a"), spec("b")], MadeBy.FILE, {"b": {P0: Cursor(0), P1: Cursor(0)}}, epoch)
        assert store.join("b", epoch)
        assert store.group().members == {"a", "b"}
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), work.members, work.version), [done("a")], T0, epoch)
        after = store.group()
        assert after.members == {"a"}
        assert store.cursors("b") == {P0: Cursor(0), P1: Cursor(0)}
        assert store.subscriptions()["b"].state is SubscriptionState.BEHIND

    def test_leaving_in_mid_work_is_not_undone(self, store: DeliveryStore, epoch: int) -> None:
        """Who left meanwhile keeps its cursor, whatever the work says about it."""
        begin(store, epoch, "a", "b")
        store.suspend("b", "", epoch)
        before = store.subscriptions()["b"]
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), [done("a"), done("b", event(1))], T0, epoch
        )
        assert store.subscriptions()["b"] == before
        assert store.cursors("b") == {P0: Cursor(0), P1: Cursor(0)}
        assert store.parked.counts() == {}

    def test_removed_and_made_anew_in_mid_work_misses_nothing(self, store: DeliveryStore, epoch: int) -> None:
        """The outcome of its former self does not count for a new subscription of the same name."""
        begin(store, epoch, "a", "b")
        work = store.group()
        store.register([spec("a")], MadeBy.FILE, {}, epoch)
        store.register([spec("a"), spec("b")], MadeBy.FILE, {"b": {P0: Cursor(0)}}, epoch)
        assert store.join("b", epoch)
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), work.members, work.version), [done("a"), done("b")], T0, epoch
        )
        after = store.group()
        assert after.members == {"a"}
        assert store.cursors("b")[P0].batch == 0

    def test_too_much_parked_stops_the_subscription(self, store: DeliveryStore, epoch: int) -> None:
        """At the limit it leaves where the work began and parks nothing more; it goes on once there is room."""
        begin(store, epoch, "a", parked_max=2)
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(2), frozenset("a")), [done("a", event(1), event(2))], T0, epoch
        )
        store.settle_group(GroupWork(P0, Cursor(2), Cursor(3), frozenset("a")), [done("a", event(3))], T0, epoch)
        stopped = store.subscriptions()["a"]
        assert stopped.state is SubscriptionState.SUSPENDED
        assert "parked_max" in stopped.reason
        assert store.cursors("a")[P0].batch == 2
        assert store.parked.counts()["a"]["waiting"] == 2
        later = T0 + timedelta(minutes=1)
        rows = store.parked.claim(later, 10, 30, epoch)
        assert len(rows) == 2, "its endpoint works: what is parked may drain"
        store.parked.delivered([row.id for row in rows], epoch)
        store.settle_subscription("a", P0, Cursor(2), Cursor(3), done("a", event(3)), later, epoch)
        assert store.subscriptions()["a"].state is SubscriptionState.BEHIND
        assert store.cursors("a")[P0].batch == 3

    def test_expired_events_are_counted_with_the_move(self, store: DeliveryStore, epoch: int) -> None:
        """Counted iff the cursor passed them."""
        begin(store, epoch, "a", "b")
        outcomes = [done("a", expired=3), replace(failed("b"), expired=5)]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), outcomes, T0, epoch)
        assert store.counted("expired") == {"a": 3}
        store.settle_subscription("b", P0, Cursor(0), Cursor(1), done("b", expired=4), T0, epoch)
        assert store.counted("expired") == {"a": 3, "b": 4}

    # behind

    def test_a_subscription_behind_moves_on_its_own(self, store: DeliveryStore, epoch: int) -> None:
        """Done moves its cursor and parks; a success clears its record."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(3), frozenset("a")), [failed("a")], T0, epoch)
        store.settle_subscription("a", P0, Cursor(0), Cursor(2), done("a", event(1)), T0, epoch)
        assert store.cursors("a") == {P0: Cursor(2), P1: Cursor(0)}
        assert store.parked.counts() == {"a": {"waiting": 1, "dead": 0}}
        after = store.subscriptions()["a"]
        assert (after.state, after.failures, after.next_attempt_at, after.reason) == ("behind", 0, None, "")
        with pytest.raises(ConflictError):
            store.settle_subscription("a", P0, Cursor(0), Cursor(2), done("a", event(9)), T0, epoch)
        assert store.parked.counts() == {"a": {"waiting": 1, "dead": 0}}

    def test_one_for_which_the_log_cannot_be_read_says_so_until_it_goes_on(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """It stays behind, without a failure and without a wait; one answer ends it. A member leaves, and says why."""
        begin(store, epoch, "a", "b")
        stuck = Outcome("a", Fate.STUCK, reason="the file x is missing")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), [stuck, done("b")], T0, epoch)
        found = store.subscriptions()["a"]
        assert (found.state, found.reason, found.failures) == ("behind", "the file x is missing", 0)
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), replace(stuck, reason="so is y"), T0, epoch)
        found = store.subscriptions()["a"]
        assert (found.state, found.reason, found.failures, found.next_attempt_at) == ("behind", "so is y", 0, None)
        store.settle_subscription("a", P1, Cursor(0), Cursor(1), replace(done("a"), reason="so is y"), T0, epoch)
        assert store.subscriptions()["a"].reason == "so is y", "it goes on elsewhere"
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), done("a"), T0, epoch)
        assert store.subscriptions()["a"].reason == ""

    @pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.DONE])
    def test_no_other_fate_moves_or_parks(self, store: DeliveryStore, epoch: int, fate: Fate) -> None:
        """Nothing but done passes an event."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [failed("a")], T0, epoch)
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), Outcome("a", fate, 0, (event(1),)), T0, epoch)
        assert store.cursors("a") == {P0: Cursor(0), P1: Cursor(0)}
        assert store.parked.counts() == {}

    def test_ten_failures_in_a_row_suspend_and_a_success_resumes(self, store: DeliveryStore, epoch: int) -> None:
        """The backoff grows, a suspended one keeps its place and is tried again, one answer brings it back."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [failed("a")], T0, epoch)
        waits = []
        for _ in range(9):
            store.settle_subscription("a", P0, Cursor(0), Cursor(1), failed("a"), T0, epoch)
            waits.append((store.subscriptions()["a"].next_attempt_at or T0) - T0)
        assert store.subscriptions()["a"].state is SubscriptionState.SUSPENDED
        assert waits[0] < waits[-1] <= timedelta(minutes=10)
        assert store.cursors("a")[P0].batch == 0
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), done("a", accepted=0), T0, epoch)
        assert store.subscriptions()["a"].state is SubscriptionState.SUSPENDED, "nothing matched: no answer"
        store.settle_subscription("a", P0, Cursor(1), Cursor(2), done("a", accepted=1), T0, epoch)
        assert store.subscriptions()["a"].state is SubscriptionState.BEHIND

    def test_joining_needs_every_cursor_equal(self, store: DeliveryStore, epoch: int) -> None:
        """One batch behind or ahead anywhere keeps it out; equal lets it in, and it has no cursors of its own."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(2), frozenset("a")), [failed("a")], T0, epoch)
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), done("a"), T0, epoch)
        assert not store.join("a", epoch)
        store.settle_subscription("a", P0, Cursor(1), Cursor(2), done("a"), T0, epoch)
        store.settle_subscription("a", P1, Cursor(0), Cursor(1), done("a"), T0, epoch)
        assert not store.join("a", epoch)
        version = store.group().version
        store.settle_group(GroupWork(P1, Cursor(0), Cursor(1), frozenset()), [], T0, epoch)
        assert store.group().version == version
        assert store.join("a", epoch)
        assert store.join("a", epoch)
        assert store.group().version == version + 1
        assert store.group().members == {"a"}
        assert store.cursors("a") == {}
        assert not store.join("nobody", epoch)

    def test_work_for_one_that_joined_or_is_gone_is_a_conflict(self, store: DeliveryStore, epoch: int) -> None:
        """A follower that comes too late changes nothing."""
        begin(store, epoch, "a")
        before = snapshot(store)
        for name in ("a", "nobody"):
            with pytest.raises(ConflictError):
                store.settle_subscription(name, P0, Cursor(0), Cursor(1), done(name, event(1)), T0, epoch)
        assert snapshot(store) == before

    def test_work_for_one_that_was_made_anew_is_a_conflict(self, store: DeliveryStore, epoch: int) -> None:
        """The same name, the same cursor, and yet another subscription, which got none of it."""
        store.open_partition(P0, 0, epoch)
        store.register([spec("a")], MadeBy.FILE, {"a": {P0: Cursor(0)}}, epoch)
        generation = store.subscriptions()["a"].generation
        store.register([], MadeBy.FILE, {}, epoch)
        store.register([spec("a")], MadeBy.FILE, {"a": {P0: Cursor(0)}}, epoch)
        with pytest.raises(ConflictError):
            store.settle_subscription("a", P0, Cursor(0), Cursor(1), done("a"), T0, epoch, generation=generation)
        assert store.cursors("a") == {P0: Cursor(0)}

    # fencing

    def test_every_write_of_a_stale_owner_is_refused(self, store: DeliveryStore, take_over: TakeOver) -> None:
        """No method of the port escapes: a new one must be listed here, as a reader or with a call."""
        old = take_over()
        begin(store, old, "a", "b")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), [done("a", event(1)), failed("b")], T0, old
        )
        (row,) = store.parked.claim(T0 + timedelta(hours=1), 1, 30, old)
        calls = _writes(store, row)
        ports = (DeliveryStore, ParkedStore)
        methods = {name: of for port in ports for name, of in inspect.getmembers(port, inspect.isfunction)}
        public = {name for name in methods if not name.startswith("_")}
        assert public == READERS | set(calls), "list the new method in READERS, or in _writes and fence it"
        assert all("epoch" in inspect.signature(methods[name]).parameters for name in calls)
        take_over()
        before = snapshot(store)
        for name, call in calls.items():
            with pytest.raises(StaleError):
                call(old)
            assert snapshot(store) == before, name


def _writes(store: DeliveryStore, row: Parked) -> Mapping[str, Callable[[int], object]]:
    return {
        "spread": lambda epoch: store.spread(2, epoch),
        "register": lambda epoch: store.register([], MadeBy.FILE, {}, epoch),
        "add": lambda epoch: store.add(spec("new"), None, epoch),
        "change": lambda epoch: store.change("a", {"bundle": 2}, epoch),
        "rotate": lambda epoch: store.rotate("a", "sealed:new", None, T0, epoch),
        "retire": lambda epoch: store.retire("a", epoch),
        "remove": lambda epoch: store.remove("a", epoch),
        "suspend": lambda epoch: store.suspend("a", "", epoch),
        "disable": lambda epoch: store.disable("a", "gone", epoch),
        "retried": lambda epoch: store.retried("a", failed("a"), T0, epoch),
        "resume": lambda epoch: store.resume("b", epoch),
        "open_partition": lambda epoch: store.open_partition(SourcePartition("new", 0), 0, epoch),
        "settle_group": lambda epoch: store.settle_group(
            GroupWork(P0, Cursor(1), Cursor(2), frozenset("a")), [done("a")], T0, epoch
        ),
        "settle_subscription": lambda epoch: store.settle_subscription(
            "b", P0, Cursor(0), Cursor(1), done("b"), T0, epoch
        ),
        "join": lambda epoch: store.join("b", epoch),
        "claim": lambda epoch: store.parked.claim(T0 + timedelta(days=1), 10, 30, epoch),
        "delivered": lambda epoch: store.parked.delivered([row.id], epoch),
        "reschedule": lambda epoch: store.parked.reschedule(
            row, next_attempt_at=None, attempts=9, reason="", status=None, epoch=epoch
        ),
        "release": lambda epoch: store.parked.release([row.id], T0, epoch),
        "drop": lambda epoch: store.parked.drop([row.id], epoch),
        "expire": lambda epoch: store.parked.expire("a", T0 + timedelta(days=9), T0 + timedelta(days=9), epoch),
    }
