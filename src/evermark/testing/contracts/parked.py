"""What every `DeliveryStore` promises about parked deliveries."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.ports import DeliveryStore
from evermark.testing.contracts.owned import OwnedStore
from evermark.testing.contracts.scene import P0, P1, T0, TakeOver, begin, done, event, failed, snapshot, spec

SOON = T0 + timedelta(minutes=1)  # the first retry is due
LEASE_S = 30.0
AFTER_LEASE = SOON + timedelta(seconds=LEASE_S)


class ParkedContract(OwnedStore):
    def test_a_parked_event_comes_back_whole_when_due(self, store: DeliveryStore, epoch: int) -> None:
        """Not before its time; then with all that was known about it."""
        begin(store, epoch, "a")
        parked = event(1, key="k")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", parked)], T0, epoch)
        assert store.parked.claim(T0, 10, LEASE_S, epoch) == []
        (row,) = store.parked.claim(SOON, 10, LEASE_S, epoch)
        assert (row.subscription, row.event, row.attempt) == ("a", parked, 1)
        assert row.claimed_until == AFTER_LEASE

    def test_an_event_is_parked_once(self, store: DeliveryStore, epoch: int) -> None:
        """Parking the same event again, after work that was repeated, makes no second row."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
        store.settle_group(
            GroupWork(P0, Cursor(1), Cursor(2), frozenset("a")), [done("a", event(1), event(2))], T0, epoch
        )
        assert [row.event.event_id for row in store.parked.rows()] == ["e1", "e2"]

    def test_texts_from_outside_cannot_break_parking(self, store: DeliveryStore, epoch: int) -> None:
        """A receiver that answers with NUL, half characters or a novel only gets its words changed."""
        begin(store, epoch, "a")
        odd = replace(event(1, key="k\x00"), reason="\x00\ud800" + "x" * 5000)
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", odd)], T0, epoch)
        (row,) = store.parked.rows("a")
        assert len(row.event.reason) <= 500
        store.settle_group(GroupWork(P0, Cursor(1), Cursor(2), frozenset("a")), [failed("a", "\x00" * 9000)], T0, epoch)
        assert len(store.subscriptions()["a"].reason) <= 500

    def test_a_claimed_row_is_invisible_until_its_lease_ends(self, store: DeliveryStore, epoch: int) -> None:
        """A claimer that died in silence is replaced once its time is up."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
        assert len(store.parked.claim(SOON, 10, LEASE_S, epoch)) == 1
        assert store.parked.claim(AFTER_LEASE - timedelta(seconds=1), 10, LEASE_S, epoch) == []
        assert len(store.parked.claim(AFTER_LEASE, 10, LEASE_S, epoch)) == 1

    def test_a_new_owner_need_not_wait_for_the_claims_of_the_old(
        self, store: DeliveryStore, take_over: TakeOver
    ) -> None:
        """The old owner's claims ended with its epoch."""
        old = take_over()
        begin(store, old, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, old)
        assert len(store.parked.claim(SOON, 10, LEASE_S, old)) == 1
        assert len(store.parked.claim(SOON, 10, LEASE_S, take_over())) == 1

    def test_claims_are_bounded_and_oldest_first(self, store: DeliveryStore, epoch: int) -> None:
        """As many as asked for, never a row twice."""
        begin(store, epoch, "a")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(9), frozenset("a")), [done("a", *map(event, range(1, 6)))], T0, epoch
        )
        first = store.parked.claim(SOON, 2, LEASE_S, epoch)
        rest = store.parked.claim(SOON, 100, LEASE_S, epoch)
        assert [len(first), len(rest)] == [2, 3]
        assert len({row.id for row in first + rest}) == 5
        assert store.parked.claim(SOON, 100, LEASE_S, epoch) == []

    def test_whom_a_claim_leaves_out_keeps_its_rows_for_the_next(self, store: DeliveryStore, epoch: int) -> None:
        """Also when an earlier claim of them has run out."""
        begin(store, epoch, "a", "b", "c")
        outcomes = [done(name, event(1), replace(event(2), replay_id="r7")) for name in "abc"]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("abc")), outcomes, T0, epoch)
        assert len(store.parked.claim(SOON, 1, LEASE_S, epoch, without=["b", "c"])) == 1
        for without, claimed in ((["a", "b", "nobody"], {"c"}), ({"b": 1}, {"a"}), ([], {"b"})):
            rows = store.parked.claim(AFTER_LEASE, 10, LEASE_S, epoch, without=without)
            assert {row.subscription for row in rows} == claimed
            assert len(rows) == 2

    def test_delivered_rows_are_gone_even_after_the_claim_ran_out(self, store: DeliveryStore, epoch: int) -> None:
        """2xx is 2xx, however late; repeating it is harmless."""
        begin(store, epoch, "a")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1), event(2))], T0, epoch
        )
        first, second = store.parked.claim(SOON, 10, LEASE_S, epoch)
        store.parked.claim(AFTER_LEASE, 10, LEASE_S, epoch)
        store.parked.delivered([first.id], epoch)
        store.parked.delivered([first.id], epoch)
        assert [row.id for row in store.parked.rows()] == [second.id]

    def test_the_first_retry_of_a_refused_event_is_when_its_subscription_says(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """Not when others are tried again."""
        begin(store, epoch, "a", "b", retry_waits_s=(60.0, 120.0))
        store.register([spec("a", retry_waits_s=(60.0, 120.0)), spec("b")], MadeBy.FILE, {}, epoch)
        outcomes = [done("a", event(1)), done("b", event(1))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), outcomes, T0, epoch)
        assert [row.subscription for row in store.parked.claim(SOON, 10, LEASE_S, epoch)] == ["b"]
        assert [row.subscription for row in store.parked.claim(T0 + timedelta(seconds=75), 10, LEASE_S, epoch)] == ["a"]
        assert store.subscription("a").spec.retry_waits_s == (60.0, 120.0)

    def test_rescheduled_rows_wait_again_or_are_dead(self, store: DeliveryStore, epoch: int) -> None:
        """A later time brings it back then; none keeps it until a person moves it."""
        begin(store, epoch, "a")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1), event(2))], T0, epoch
        )
        one, two = store.parked.claim(SOON, 10, LEASE_S, epoch)
        later = SOON + timedelta(minutes=5)
        store.parked.reschedule(one, next_attempt_at=later, attempts=2, reason="no", status=422, epoch=epoch)
        store.parked.reschedule(two, next_attempt_at=None, attempts=8, reason="never", status=400, epoch=epoch)
        assert store.parked.counts() == {"a": {"waiting": 1, "dead": 1}}
        assert store.parked.claim(AFTER_LEASE, 10, LEASE_S, epoch) == []
        (again,) = store.parked.claim(later, 10, LEASE_S, epoch)
        assert (again.id, again.attempt, again.event.reason, again.event.status) == (one.id, 2, "no", 422)
        assert store.parked.release([two.id, 999_999], later, epoch) == 1
        (revived,) = store.parked.claim(later, 10, LEASE_S, epoch)
        assert (revived.id, revived.attempt) == (two.id, 8)

    def test_a_persons_retry_that_fails_spends_no_attempt_and_leaves_the_schedule(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """GIVEN one that waits and one that is dead WHEN a person's retry is refused THEN both are as before."""
        begin(store, epoch, "a")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1), event(2))], T0, epoch
        )
        one, two = store.parked.claim(SOON, 10, LEASE_S, epoch)
        later, now = SOON + timedelta(hours=2), SOON + timedelta(minutes=5)
        store.parked.reschedule(one, next_attempt_at=later, attempts=2, reason="no", status=422, epoch=epoch)
        store.parked.reschedule(two, next_attempt_at=None, attempts=8, reason="no", status=422, epoch=epoch)
        before = store.parked.rows()
        store.parked.release([one.id, two.id], now, epoch)
        assert [row.next_attempt_at for row in store.parked.rows()] == [now, now]
        store.parked.release([one.id, two.id], now, epoch)  # an impatient person
        for row in store.parked.claim(now, 10, LEASE_S, epoch):
            store.parked.reschedule(
                row,
                next_attempt_at=now + timedelta(days=1),
                attempts=row.attempt + 1,
                reason="no",
                status=422,
                epoch=epoch,
            )
        assert store.parked.rows() == before
        (again,) = store.parked.claim(later, 10, LEASE_S, epoch)
        store.parked.reschedule(again, next_attempt_at=None, attempts=3, reason="no", status=422, epoch=epoch)
        assert [(row.attempts, row.is_dead) for row in store.parked.rows()] == [(3, True), (8, True)], (
            "its own attempt counts"
        )

    def test_a_retry_that_found_nobody_there_is_still_the_persons(self, store: DeliveryStore, epoch: int) -> None:
        """GIVEN a person's retry WHEN the endpoint is down at first and then refuses THEN no attempt is spent."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
        (due_at,) = (row.next_attempt_at for row in store.parked.rows())
        store.parked.release([row.id for row in store.parked.rows()], T0, epoch)
        (row,) = store.parked.claim(T0, 10, LEASE_S, epoch)
        store.parked.reschedule(row, next_attempt_at=SOON, attempts=1, reason="down", status=503, epoch=epoch)
        assert [(each.attempts, each.next_attempt_at) for each in store.parked.rows()] == [(1, SOON)]
        (row,) = store.parked.claim(SOON, 10, LEASE_S, epoch)
        store.parked.reschedule(row, next_attempt_at=AFTER_LEASE, attempts=2, reason="no", status=422, epoch=epoch)
        assert [(each.attempts, each.next_attempt_at) for each in store.parked.rows()] == [(1, due_at)]

    def test_what_is_due_anyway_spends_its_own_attempt(self, store: DeliveryStore, epoch: int) -> None:
        """GIVEN one whose time has come WHEN a person asks for it too THEN the attempt is its own."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
        store.parked.release([row.id for row in store.parked.rows()], SOON, epoch)
        (row,) = store.parked.claim(SOON, 10, LEASE_S, epoch)
        store.parked.reschedule(row, next_attempt_at=AFTER_LEASE, attempts=2, reason="no", status=422, epoch=epoch)
        assert [(each.attempts, each.next_attempt_at) for each in store.parked.rows()] == [(2, AFTER_LEASE)]

    @pytest.mark.parametrize("how", ["resume", "another url by file", "another url by the API"])
    def test_what_an_endpoint_put_off_is_due_when_a_person_resumes_or_moves_it(
        self, store: DeliveryStore, epoch: int, how: str
    ) -> None:
        """GIVEN one put off for a day by its endpoint, and one refused WHEN it is resumed THEN the first is due."""
        made_by = MadeBy.API if "API" in how else MadeBy.FILE
        store.open_partition(P0, 0, epoch)
        store.register([spec("a")], made_by, {}, epoch)
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1), event(2))], T0, epoch
        )
        one, two = store.parked.claim(SOON, 10, LEASE_S, epoch)
        tomorrow = SOON + timedelta(days=1)
        store.parked.reschedule(one, next_attempt_at=tomorrow, attempts=1, reason="down", status=503, epoch=epoch)
        store.parked.reschedule(two, next_attempt_at=tomorrow, attempts=2, reason="no", status=422, epoch=epoch)
        assert [row.next_attempt_at for row in store.parked.rows()] == [tomorrow, tomorrow]
        assert store.parked.claim(AFTER_LEASE, 10, LEASE_S, epoch) == []
        if how == "resume":
            store.resume("a", epoch)
        elif made_by is MadeBy.API:
            store.change("a", {"url": "https://elsewhere.example/"}, epoch)
        else:
            store.register([spec("a", url="https://elsewhere.example/")], made_by, {}, epoch)
        assert [row.id for row in store.parked.claim(AFTER_LEASE, 10, LEASE_S, epoch)] == [one.id]
        assert [row.next_attempt_at for row in store.parked.rows(after_id=one.id)] == [tomorrow]

    def test_a_lost_claim_cannot_reschedule(self, store: DeliveryStore, epoch: int) -> None:
        """Who took too long must not undo what the next claimer did."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
        (late,) = store.parked.claim(SOON, 10, LEASE_S, epoch)
        (row,) = store.parked.claim(AFTER_LEASE, 10, LEASE_S, epoch)
        store.parked.reschedule(late, next_attempt_at=None, attempts=9, reason="", status=None, epoch=epoch)
        assert store.parked.counts() == {"a": {"waiting": 1, "dead": 0}}
        store.parked.reschedule(row, next_attempt_at=AFTER_LEASE, attempts=2, reason="", status=None, epoch=epoch)
        assert store.parked.claim(AFTER_LEASE, 10, LEASE_S, epoch)[0].attempt == 2

    def test_nothing_is_claimed_for_who_cannot_take_it(self, store: DeliveryStore, epoch: int) -> None:
        """Backing off, paused and disabled subscriptions keep their rows untouched; a suspended one until it is due."""
        names = ("backing", "suspended", "paused", "gone", "well")
        begin(store, epoch, *names)
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset(names)), [done(name, event(1)) for name in names], T0, epoch
        )
        outcomes = [failed("backing"), failed("suspended"), done("paused"), Outcome("gone", Fate.GONE), done("well")]
        store.settle_group(GroupWork(P0, Cursor(1), Cursor(2), frozenset(names)), outcomes, SOON, epoch)
        for _ in range(9):
            store.settle_subscription("suspended", P0, Cursor(1), Cursor(2), failed("suspended"), SOON, epoch)
        store.suspend("paused", "", epoch)
        assert store.subscriptions()["suspended"].state is SubscriptionState.SUSPENDED
        assert {row.subscription for row in store.parked.claim(SOON, 10, LEASE_S, epoch)} == {"well"}
        much_later = SOON + timedelta(days=1)
        assert {row.subscription for row in store.parked.claim(much_later, 10, LEASE_S, epoch)} == {
            "well",
            "backing",
            "suspended",
        }

    def test_order_holds_per_key_through_retries(self, store: DeliveryStore, epoch: int) -> None:
        """With `ordered`, a row waits for every earlier one of its key and place, dead ones too, and no other."""
        store.open_partition(P0, 0, epoch)
        store.open_partition(P1, 0, epoch)
        store.register([spec("a", ordered=True), spec("b")], MadeBy.FILE, {}, epoch)
        events = (event(3, key="k"), event(1, key="k"), event(2, key="l"), event(4), event(5))
        elsewhere = event(6, P1, key="k")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(9), frozenset("ab")),
            [done("a", *events, elsewhere), done("b", *events)],
            T0,
            epoch,
        )
        held = {"a": {(P0, "orders", "k"): 2, (P0, "orders", "l"): 1, (P1, "orders", "k"): 1}}
        assert store.parked.held_keys(["a", "b"]) == held
        assert store.parked.held_keys(["a"], [P1]) == {"a": {(P1, "orders", "k"): 1}}
        assert (store.parked.held_keys(["b"]), store.parked.held_keys([]), store.parked.held_keys(["a"], [])) == (
            {},
            {},
            {},
        )
        rows = store.parked.claim(SOON, 20, LEASE_S, epoch)
        assert [r.event.event_id for r in rows if r.subscription == "a"] == ["e1", "e2", "e4", "e5", "e6"]
        assert [r.event.event_id for r in rows if r.subscription == "b"] == ["e1", "e2", "e3", "e4", "e5"]
        first = rows[0]
        store.parked.reschedule(first, next_attempt_at=None, attempts=8, reason="", status=400, epoch=epoch)
        assert store.parked.claim(SOON, 20, LEASE_S, epoch) == []
        store.parked.drop([first.id], epoch)
        assert [r.event.event_id for r in store.parked.claim(SOON, 20, LEASE_S, epoch)] == ["e3"]

    def test_a_change_of_a_key_waits_for_both_keys_and_holds_both_back(self, store: DeliveryStore, epoch: int) -> None:
        """GIVEN k1, k2 and a change of k1 to k2 parked, and what follows THEN each waits for what has a key of its."""
        store.open_partition(P0, 0, epoch)
        store.register([spec("a", ordered=True)], MadeBy.FILE, {}, epoch)
        moved = replace(event(3, key="k2"), previous_key="k1")
        parked = [
            event(1, key="k1"),
            event(2, key="k2"),
            moved,
            event(4, key="k1"),
            event(5, key="k2"),
            event(6, key="l"),
        ]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(9), frozenset("a")), [done("a", *parked)], T0, epoch)
        held = {(P0, "orders", "k1"): 3, (P0, "orders", "k2"): 3, (P0, "orders", "l"): 1}
        assert store.parked.held_keys(["a"]) == {"a": held}
        late = SOON

        def claimed() -> dict[str, int]:
            nonlocal late
            late += timedelta(days=1)
            rows = store.parked.claim(late, 10, LEASE_S, epoch)
            assert all(row.event == moved for row in rows if row.event.event_id == "e3")
            return {row.event.event_id: row.id for row in rows}

        for event_id, others in (("e2", {"e1", "e6"}), ("e1", {"e6"}), ("e3", {"e6"}), ("e4", {"e5", "e6"})):
            found = claimed()
            assert found.keys() == {event_id, *others}
            store.parked.delivered([found[event_id]], epoch)
        # AND two that leave the same key keep their order
        store.parked.drop(list(claimed().values()), epoch)
        left = [replace(event(n, key=f"n{n}"), previous_key="k") for n in (7, 8)]
        store.settle_group(GroupWork(P0, Cursor(9), Cursor(10), frozenset("a")), [done("a", *left)], T0, epoch)
        assert claimed().keys() == {"e7"}

    def test_the_same_key_of_another_stream_is_another_key(self, store: DeliveryStore, epoch: int) -> None:
        """Two tables of a source may use the same keys: order 1 has nothing to do with user 1."""
        store.open_partition(P0, 0, epoch)
        store.register([spec("a", ordered=True)], MadeBy.FILE, {}, epoch)
        parked = [event(1, key="1"), event(2, key="1", stream="users"), event(3, key="1")]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(9), frozenset("a")), [done("a", *parked)], T0, epoch)
        assert store.parked.held_keys(["a"]) == {"a": {(P0, "orders", "1"): 2, (P0, "users", "1"): 1}}
        rows = store.parked.claim(SOON, 10, LEASE_S, epoch)
        assert [(row.event.event_id, row.event.stream) for row in rows] == [("e1", "orders"), ("e2", "users")]

    def test_dropped_and_expired_are_counted(self, store: DeliveryStore, epoch: int) -> None:
        """What is given up is counted with it; what is being delivered just now does not expire."""
        begin(store, epoch, "a", "b")
        outcomes = [done("a", *map(event, range(1, 5))), done("b", event(1))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(9), frozenset("ab")), outcomes, T0, epoch)
        first = store.parked.rows("a")[0]
        assert store.parked.drop([first.id, 999_999], epoch) == 1
        store.suspend("b", "so that the next claim is one of a", epoch)
        (claimed,) = store.parked.claim(SOON, 1, LEASE_S, epoch)
        assert store.parked.expire("a", T0, SOON, epoch) == 0
        assert store.parked.expire("a", SOON, SOON, epoch) == 2
        assert [row.id for row in store.parked.rows("a")] == [claimed.id]
        assert store.counted("dropped") == {"a": 1}
        assert store.counted("expired") == {"a": 2}
        assert store.parked.counts()["b"] == {"waiting": 1, "dead": 0}

    def test_parked_rows_are_listed_page_by_page(self, store: DeliveryStore, epoch: int) -> None:
        """By id, of one subscription or of all."""
        begin(store, epoch, "a", "b")
        outcomes = [done("a", event(1), event(2)), done("b", event(1, SourcePartition("shop", 0)))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(9), frozenset("ab")), outcomes, T0, epoch)
        page = store.parked.rows(limit=2)
        assert [row.subscription for row in page] == ["a", "a"]
        assert [row.subscription for row in store.parked.rows(after_id=page[-1].id)] == ["b"]
        assert [row.event.event_id for row in store.parked.rows("b")] == ["e1"]
        assert page[0].created_at == T0

    def test_d7_rows_parked_too_long_ago_go_a_few_at_a_time(self, store: DeliveryStore, epoch: int) -> None:
        """GIVEN old and new rows WHEN the old expire THEN no more than the limit go at once; all are counted."""
        begin(store, epoch, "a", "b")
        outcomes = [done("a", *(event(n) for n in (1, 2, 3))), done("b")]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), outcomes, T0, epoch)
        later = T0 + timedelta(days=9)
        assert [store.parked.expire("a", T0, later, epoch), store.parked.expire("b", later, later, epoch)] == [0, 0]
        assert [store.parked.expire("a", later, later, epoch, 2) for _ in range(3)] == [2, 1, 0]
        assert store.counted("expired") == {"a": 3}
        assert store.parked.rows("a") == []

    # what retries say about an endpoint

    def test_a_failed_retry_takes_it_out_of_the_group_where_the_group_stands(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """As any failure of the endpoint: behind, backing off as long as was asked, and its rows untouched."""
        begin(store, epoch, "a", "b")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(3), frozenset("ab")), [done("a", event(1)), done("b")], T0, epoch
        )
        before, rows = store.group(), store.parked.rows()
        store.retried("a", replace(failed("a", "HTTP 503"), retry_after_s=120.0), SOON, epoch)
        found = store.subscription("a")
        assert (found.state, found.failures, found.reason) == (SubscriptionState.BEHIND, 1, "HTTP 503")
        assert found.next_attempt_at is not None
        assert timedelta(seconds=120) <= found.next_attempt_at - SOON <= timedelta(seconds=150)
        assert store.cursors("a") == {P0: Cursor(3), P1: Cursor(0)}
        after = store.group()
        assert after.members == {"b"}
        assert (after.version, after.cursors) == (before.version + 1, before.cursors)
        assert store.parked.rows() == rows
        assert store.parked.claim(SOON + timedelta(seconds=119), 10, LEASE_S, epoch) == []
        assert len(store.parked.claim(found.next_attempt_at, 10, LEASE_S, epoch)) == 1

    def test_a_failure_found_twice_at_once_counts_once(self, store: DeliveryStore, epoch: int) -> None:
        """Retries and deliveries may be under way together: what the one found out the other need not add."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [failed("a")], T0, epoch)
        before = store.subscription("a")
        store.retried("a", failed("a", "503"), T0, epoch)
        assert store.subscription("a") == before

    def test_ten_failed_retries_suspend_and_the_next_ones_find_out_that_it_works(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """There may be nothing but parked rows to ask it with."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
        now = SOON
        for failures in range(1, 11):
            store.retried("a", failed("a"), now, epoch)
            found = store.subscription("a")
            assert found.failures == failures
            assert found.next_attempt_at is not None
            assert (found.state is SubscriptionState.SUSPENDED) == (failures == 10)
            now = found.next_attempt_at
        assert store.parked.claim(now - timedelta(seconds=1), 10, LEASE_S, epoch) == []
        (row,) = store.parked.claim(now, 10, LEASE_S, epoch)
        assert row.attempt == 1, "its attempts are its own"
        store.retried("a", done("a"), now, epoch)
        found = store.subscription("a")
        assert (found.state, found.failures, found.next_attempt_at) == (SubscriptionState.BEHIND, 0, None)

    def test_an_accepted_retry_leaves_a_member_where_it_is(self, store: DeliveryStore, epoch: int) -> None:
        """A success is no reason to leave."""
        begin(store, epoch, "a")
        before = snapshot(store)
        store.retried("a", done("a"), T0, epoch)
        assert snapshot(store) == before

    def test_gone_said_to_a_retry_disables_and_keeps_the_rows(self, store: DeliveryStore, epoch: int) -> None:
        """410 is 410, whatever it was the answer to."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1))], T0, epoch)
        store.retried("a", Outcome("a", Fate.GONE, reason="HTTP 410"), SOON, epoch)
        found = store.subscription("a")
        assert (found.state, found.reason) == (SubscriptionState.DISABLED, "HTTP 410")
        assert store.group().members == frozenset()
        assert store.cursors("a") == {P0: Cursor(1), P1: Cursor(0)}
        assert len(store.parked.rows()) == 1
        assert store.parked.claim(SOON + timedelta(days=30), 10, LEASE_S, epoch) == []

    def test_retries_say_nothing_of_one_that_was_paused_removed_or_made_anew(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """Whoever it was that failed, it is not the one that is there now."""
        begin(store, epoch, "a", "paused")
        old = store.subscription("a").generation
        store.suspend("paused", "", epoch)
        store.register([spec("paused")], MadeBy.FILE, {}, epoch)
        store.retried("a", failed("a"), T0, epoch)
        store.register([spec("a"), spec("paused")], MadeBy.FILE, {}, epoch)
        before = snapshot(store)
        for outcome in (failed("a"), done("a"), Outcome("a", Fate.GONE)):
            store.retried("a", outcome, T0, epoch, generation=old)
        for outcome in (failed("paused"), done("paused")):
            store.retried("paused", outcome, T0, epoch)
        assert snapshot(store) == before

    def test_one_that_is_full_is_suspended_at_once_and_drains(self, store: DeliveryStore, epoch: int) -> None:
        """Without a failure on record: its rows go on being tried, and the first work that is done brings it back."""
        begin(store, epoch, "a")
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", event(1), event(2))], T0, epoch
        )
        store.settle_group(
            GroupWork(P0, Cursor(1), Cursor(2), frozenset("a")), [Outcome("a", Fate.FULL, reason="no room")], T0, epoch
        )
        full = store.subscription("a")
        assert (full.state, full.failures, full.reason) == (SubscriptionState.SUSPENDED, 0, "no room")
        assert full.next_attempt_at is not None and full.next_attempt_at > SOON
        assert store.cursors("a") == {P0: Cursor(1), P1: Cursor(0)}
        rows = store.parked.claim(SOON, 10, LEASE_S, epoch)
        assert len(rows) == 2
        store.parked.delivered([row.id for row in rows], epoch)
        store.retried("a", done("a"), SOON, epoch)
        assert store.subscription("a") == full, "its batch would be sent again for every row that goes"
        store.settle_subscription("a", P0, Cursor(1), Cursor(2), done("a"), full.next_attempt_at, epoch)
        assert store.subscription("a").state is SubscriptionState.BEHIND
