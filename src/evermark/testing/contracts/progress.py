"""What every `DeliveryStore` promises about cursors inside a batch, and about room and turns of parked deliveries."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest

from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, SubscriptionState
from evermark.delivery.ports import DeliveryStore
from evermark.errors import ConflictError
from evermark.testing.contracts.owned import OwnedStore
from evermark.testing.contracts.scene import P0, P1, T0, begin, done, event, failed, snapshot, spec

SOON = T0 + timedelta(minutes=1)  # the first retry is due
LEASE_S = 30.0
MIDDLE, LATER = "000005", "000009"


class ProgressContract(OwnedStore):
    # inside a batch

    def test_what_was_done_of_a_batch_is_kept_with_what_was_refused(self, store: DeliveryStore, epoch: int) -> None:
        """The cursor stays, and says how far it is in the next batch; what was parked and expired up to there is kept.

        The rest of the batch ends it.
        """
        begin(store, epoch, "a", "b")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(3), frozenset("ab")), [failed("a"), failed("b")], T0, epoch)
        outcome = done("a", event(2), expired=1)
        store.settle_subscription("a", P0, Cursor(0), Cursor(0, MIDDLE), outcome, T0, epoch)
        assert store.cursors("a") == {P0: Cursor(0, MIDDLE), P1: Cursor(0)}
        assert store.cursors_outside() == {"a": store.cursors("a"), "b": {P0: Cursor(0), P1: Cursor(0)}}
        assert (store.parked.counts(), store.counted("expired")) == ({"a": {"waiting": 1, "dead": 0}}, {"a": 1})
        store.settle_subscription("a", P0, Cursor(0, MIDDLE), Cursor(2, LATER), done("a"), T0, epoch)
        assert store.cursors("a") == {P0: Cursor(2, LATER), P1: Cursor(0)}
        store.settle_subscription("a", P0, Cursor(2, LATER), Cursor(3), done("a"), T0, epoch)
        assert store.cursors("a") == {P0: Cursor(3), P1: Cursor(0)}

    def test_work_that_began_elsewhere_in_the_batch_is_a_conflict(self, store: DeliveryStore, epoch: int) -> None:
        """The place inside a batch is part of the cursor, and only goes forward."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(3), frozenset("a")), [failed("a")], T0, epoch)
        store.settle_subscription("a", P0, Cursor(0), Cursor(0, MIDDLE), done("a"), T0, epoch)
        before = snapshot(store)
        for begun, done_to, through in (("", 1, ""), (LATER, 1, ""), (MIDDLE, 0, MIDDLE), (MIDDLE, 0, "000001")):
            with pytest.raises(ConflictError):
                store.settle_subscription(
                    "a", P0, Cursor(0, begun), Cursor(done_to, through), done("a", event(9)), T0, epoch
                )
        assert snapshot(store) == before

    @pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.DONE])
    def test_no_other_fate_moves_it_inside_a_batch(self, store: DeliveryStore, epoch: int, fate: Fate) -> None:
        """Nothing but done passes an event, and what was kept before stays."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [failed("a")], T0, epoch)
        store.settle_subscription("a", P0, Cursor(0), Cursor(0, MIDDLE), done("a"), T0, epoch)
        outcome = Outcome("a", fate, 0, (event(1),))
        store.settle_subscription("a", P0, Cursor(0, MIDDLE), Cursor(1, LATER), outcome, T0, epoch)
        assert store.cursors("a") == {P0: Cursor(0, MIDDLE), P1: Cursor(0)}
        assert store.parked.counts() == {}

    def test_whoever_leaves_the_group_keeps_what_it_got(self, store: DeliveryStore, epoch: int) -> None:
        """Inside the work it began with and nowhere else; one that was done, or joined meanwhile, has nothing of it."""
        begin(store, epoch, "slow", "failing", "before", "after", "well")
        work = store.group()
        store.settle_group(
            GroupWork(P1, Cursor(0), Cursor(4), work.members), [done(name) for name in work.members], T0, epoch
        )
        outcomes = [
            Outcome("slow", Fate.UNFINISHED, 7, reached=Cursor(2, MIDDLE)),
            replace(failed("failing"), reached=Cursor(0, MIDDLE)),
            Outcome("before", Fate.UNFINISHED, reached=Cursor(0)),
            Outcome("after", Fate.UNFINISHED, reached=Cursor(3, MIDDLE)),
            done("well"),
        ]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(3), work.members, work.version), outcomes, T0, epoch)
        after = store.group()
        assert after.members == {"well"}
        assert after.cursors == {P0: Cursor(3), P1: Cursor(4)}
        assert store.cursors_outside() == {
            "slow": {P0: Cursor(2, MIDDLE), P1: Cursor(4)},
            "failing": {P0: Cursor(0, MIDDLE), P1: Cursor(4)},
            "before": {P0: Cursor(0), P1: Cursor(4)},
            "after": {P0: Cursor(0), P1: Cursor(4)},
        }
        assert store.subscription("failing").failures == 1

    def test_one_that_comes_back_or_is_made_anew_is_inside_no_batch(self, store: DeliveryStore, epoch: int) -> None:
        """Members have no cursors of their own; a later one of the same name begins where it was told to."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [failed("a")], T0, epoch)
        store.settle_subscription("a", P0, Cursor(0), Cursor(0, MIDDLE), done("a"), T0, epoch)
        assert not store.join("a", epoch)
        store.register([], MadeBy.FILE, {}, epoch)
        store.register([spec("a")], MadeBy.FILE, {"a": {P0: Cursor(0)}}, epoch)
        assert store.cursors("a") == {P0: Cursor(0), P1: Cursor(0)}
        store.settle_subscription("a", P0, Cursor(0), Cursor(1), done("a"), T0, epoch)
        assert store.join("a", epoch)
        assert store.cursors("a") == {}
        store.suspend("a", "", epoch)
        assert store.cursors("a") == {P0: Cursor(1), P1: Cursor(0)}

    # room, and whose turn it is

    def test_room_is_what_first_deliveries_have_left(self, store: DeliveryStore, epoch: int) -> None:
        """Of those that were asked for and are there; negative for one that is over its limit."""
        begin(store, epoch, "a", "b", parked_max=3)
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), [done("a", event(1), event(2)), done("b")], T0, epoch
        )
        assert store.parked.room(["a", "b", "nobody"]) == {"a": 1, "b": 3}
        store.register([spec("a", parked_max=1), spec("b")], MadeBy.FILE, {}, epoch)
        assert store.parked.room(["a"]) == {"a": -1}

    def test_much_that_is_due_for_one_does_not_hold_up_the_others(self, store: DeliveryStore, epoch: int) -> None:
        """Everybody's first row comes before anybody's second one, however old the rows of one are."""
        begin(store, epoch, "b", "c", "much")
        members = store.group().members
        outcomes = [done("b"), done("c"), done("much", *map(event, range(1, 41)))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), members), outcomes, T0, epoch)
        outcomes = [done("b", event(1), event(2)), done("c", event(3)), done("much")]
        store.settle_group(GroupWork(P0, Cursor(1), Cursor(2), members), outcomes, T0 + timedelta(seconds=30), epoch)
        rows = store.parked.claim(SOON, 5, LEASE_S, epoch)
        assert Counter(row.subscription for row in rows) == {"b": 2, "c": 1, "much": 2}
        assert Counter(row.subscription for row in store.parked.claim(SOON, 3, LEASE_S, epoch)) == {"much": 3}

    def test_where_not_all_can_have_a_turn_each_has_one_in_the_end(self, store: DeliveryStore, epoch: int) -> None:
        """GIVEN six with much that is due WHEN two rows are claimed at a time THEN none is left out for long."""
        names = [f"s{n}" for n in range(6)]
        begin(store, epoch, *names)
        outcomes = [done(name, *map(event, range(1, 31))) for name in names]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset(names)), outcomes, T0, epoch)
        served: set[str] = set()
        for turn in range(30):
            served |= {row.subscription for row in store.parked.claim(SOON + timedelta(seconds=turn), 2, 3600, epoch)}
        assert served == set(names)

    # full, and failing

    def test_one_that_is_full_is_not_forgiven_for_what_nobody_asked(self, store: DeliveryStore, epoch: int) -> None:
        """GIVEN failures on record WHEN there is no room THEN they stay, and its parked rows go on with finding out."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
        for _ in range(6):
            now = store.subscription("a").next_attempt_at or SOON
            store.retried("a", failed("a"), now, epoch)
        before = store.subscription("a")
        now = before.next_attempt_at or SOON
        store.settle_group(GroupWork(P0, Cursor(1), Cursor(2), frozenset()), [], now, epoch)
        store.settle_subscription("a", P0, Cursor(1), Cursor(2), Outcome("a", Fate.FULL, reason="no room"), now, epoch)
        full = store.subscription("a")
        assert (full.state, full.failures, full.reason) == (SubscriptionState.SUSPENDED, 6, "no room")
        assert full.next_attempt_at == now, "it was due, and still is"
        assert len(store.parked.claim(now, 10, LEASE_S, epoch)) == 1
        store.retried("a", failed("a"), now, epoch)
        later = store.subscription("a").next_attempt_at or now
        assert (store.subscription("a").failures, later - now >= timedelta(seconds=60)) == (7, True)
        assert store.parked.claim(later - timedelta(seconds=1), 10, LEASE_S, epoch) == []
        # WHEN it answers
        store.settle_subscription("a", P0, Cursor(1), Cursor(2), Outcome("a", Fate.FULL, accepted=1), later, epoch)
        found = store.subscription("a")
        assert (found.state, found.failures) == (SubscriptionState.SUSPENDED, 0)
