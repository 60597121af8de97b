"""What every `BotStore` promises about deliveries that wait for session keys: order, room, and who they wait for."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from evermark.delivery.model import Cursor, GroupWork, MadeBy, SubscriptionState
from evermark.delivery.ports import DeliveryStore
from evermark.errors import NotFoundError
from evermark.testing.contracts.bot_scene import LEASE_S, SECOND, WISH, claimed, keyed, settle, waiting
from evermark.testing.contracts.owned import OwnedStore
from evermark.testing.contracts.scene import P0, T0, TakeOver, begin, done, event, spec


def _give_device(store: DeliveryStore, epoch: int, made_by: MadeBy, device: str) -> None:
    """To a bot that is made if it is not there, and with it another one, which keeps its own."""
    bots = [spec("bot", bot=replace(WISH, device=device)), spec("other", bot=WISH)]
    if made_by is MadeBy.FILE:
        store.register(bots, made_by, {}, epoch)
    elif store.subscriptions():
        store.change("bot", {"bot": {"device": device}}, epoch)
    else:
        for one in bots:
            store.add(one, None, epoch)


def _waits(store: DeliveryStore, name: str) -> dict[str, bool]:
    return {row.event.event_id: row.waits for row in store.parked.rows(name)}


class SessionContract(OwnedStore):
    """The store's clock stands at `T0`."""

    def test_d3_an_event_waits_iff_its_key_is_not_published(self, store: DeliveryStore, epoch: int) -> None:
        """Without a key it waits, alive, whatever the time; with one it is due at once."""
        begin(store, epoch, "bot", bot=WISH)
        store.bots.publish("phone", {"known": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2, "known"))
        assert claimed(store, epoch) == ["e2"]
        assert claimed(store, epoch, T0 + timedelta(days=30)) == ["e2"]
        assert store.parked.counts() == {"bot": {"waiting": 2, "dead": 0}}
        assert [row.event.event_id for row in store.parked.rows(dead=True)] == []
        assert [(row.waits, row.is_dead) for row in store.parked.rows(dead=False)] == [(True, False), (False, False)]
        assert store.parked.oldest() == {"bot": T0}

    def test_d3_publishing_releases_what_waits_in_order(self, store: DeliveryStore, epoch: int) -> None:
        """All of its device and session, nothing of another; in the order in which they were parked."""
        begin(store, epoch, "bot", "tablet", bot=WISH)
        store.register(
            [spec("bot", bot=WISH), spec("tablet", bot=replace(WISH, device="tablet"))], MadeBy.FILE, {}, epoch
        )
        both = [done("bot", waiting(1), waiting(2, "s2"), waiting(3, stream="other")), done("tablet", waiting(1))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), store.group().members), both, T0, epoch)
        assert store.bots.publish("phone", {"s1": "sealed"}, T0 + SECOND, epoch) == 2
        assert store.bots.publish("phone", {"s1": "sealed again"}, T0 + SECOND, epoch) == 0
        rows = store.parked.claim(T0 + SECOND, 10, LEASE_S, epoch)
        assert [(row.subscription, row.event.event_id) for row in rows] == [("bot", "e1"), ("bot", "e3")]
        assert rows[0].event == waiting(1)

    def test_d3_newer_events_queue_behind_those_of_their_session(self, store: DeliveryStore, epoch: int) -> None:
        """One that is parked after the key came is not tried before those that waited for it."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), waiting(2))
        assert store.bots.sessions_clear(["bot"]) == {}, "what has no key is not clear"
        store.bots.publish("phone", {"s1": "sealed"}, T0, epoch)
        assert store.bots.sessions_clear(["bot"]) == {"bot": set()}
        first, *rest = store.parked.claim(T0, 1, LEASE_S, epoch)
        assert (first.event.event_id, rest) == ("e1", [])
        assert claimed(store, epoch) == [], "e1 is under way, and e2 must not overtake it"
        settle(store, epoch, 1, waiting(3))
        later = T0 + timedelta(minutes=5)
        store.parked.reschedule(first, next_attempt_at=later, attempts=0, reason="503", status=503, epoch=epoch)
        assert claimed(store, epoch) == [], "e1 is not due"
        assert claimed(store, epoch, later) == ["e1", "e2", "e3"]

    def test_d3_a_limit_never_lets_one_overtake(self, store: DeliveryStore, epoch: int) -> None:
        """One that was put back has the later time, and is claimed first all the same."""
        begin(store, epoch, "bot", bot=WISH)
        store.bots.publish("phone", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, *map(waiting, range(1, 5)))
        (first,) = store.parked.claim(T0, 1, LEASE_S, epoch)
        store.parked.reschedule(first, next_attempt_at=T0 + SECOND, attempts=0, reason="503", status=503, epoch=epoch)
        found = claimed(store, epoch, T0 + SECOND, limit=2)
        assert found == ["e1", "e2"]
        assert claimed(store, epoch, T0 + SECOND, limit=100) == [], "two are under way, the others behind them"

    def test_d3_one_that_a_person_releases_keeps_its_place(self, store: DeliveryStore, epoch: int) -> None:
        """Asked for now, it is claimed before those behind it, which have been due for longer."""
        begin(store, epoch, "bot", bot=WISH)
        store.bots.publish("phone", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, *map(waiting, range(1, 5)))
        (first,) = store.parked.claim(T0, 1, LEASE_S, epoch)
        store.parked.reschedule(
            first, next_attempt_at=T0 + 9 * SECOND, attempts=0, reason="503", status=503, epoch=epoch
        )
        assert claimed(store, epoch, T0 + SECOND, limit=2) == [], "it rests, and the others are behind it"
        store.parked.release([first.id], T0 + SECOND, epoch)
        assert claimed(store, epoch, T0 + SECOND, limit=2) == ["e1", "e2"]

    def test_d6_one_that_was_refused_holds_back_nobody(self, store: DeliveryStore, epoch: int) -> None:
        """It was tried: it has a schedule of its own, dead at its end, and the session goes on."""
        begin(store, epoch, "bot", bot=WISH)
        store.bots.publish("phone", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2))
        first, second = store.parked.claim(T0, 10, LEASE_S, epoch)
        store.parked.reschedule(first, next_attempt_at=None, attempts=1, reason="400", status=400, epoch=epoch)
        store.parked.reschedule(second, next_attempt_at=T0, attempts=0, reason="busy", status=409, epoch=epoch)
        assert claimed(store, epoch) == ["e2"]
        assert store.parked.counts() == {"bot": {"waiting": 1, "dead": 1}}
        store.parked.delivered([second.id], epoch)
        assert store.bots.sessions_clear(["bot"]) == {"bot": {"s1"}}

    def test_d6_what_waits_takes_no_room_from_others(self, store: DeliveryStore, epoch: int) -> None:
        """However much of one room waits, the bot stays live, and what it refuses in another is parked; what it
        refused stops that room at its limit, and nothing else."""
        begin(store, epoch, "bot", bot=WISH, parked_max=2)
        settle(store, epoch, 0, *map(waiting, range(1, 6)))
        settle(store, epoch, 1, *map(waiting, range(6, 9)), event(20, stream="den"), event(21, stream="den"))
        assert store.parked.counts() == {"bot": {"waiting": 10, "dead": 0}}
        settle(store, epoch, 2, waiting(9), event(23, stream="hall"))
        assert store.bots.stopped(["bot", "nobody"]) == {"bot": {"den"}}
        settle(store, epoch, 3, event(22, stream="den"))
        assert store.subscriptions()["bot"].state is SubscriptionState.LIVE
        assert store.parked.room(["bot"]) == {"bot": 2}
        assert [one.session for one in store.bots.keys_wanted(T0, 10, epoch)] == ["s1"]
        assert store.bots.publish("phone", {"s1": "sealed"}, T0, epoch) == 9

    def test_d6_the_same_for_a_bot_that_is_behind(self, store: DeliveryStore, epoch: int) -> None:
        """Outside the group what waits takes no room either, and what was refused in one stream only there."""
        store.open_partition(P0, 5, epoch)
        store.register([spec("bot", bot=WISH, parked_max=1)], MadeBy.FILE, {"bot": {P0: Cursor(0)}}, epoch)
        store.settle_subscription(
            "bot", P0, Cursor(0), Cursor(1), done("bot", *map(waiting, range(1, 6)), event(9)), T0, epoch
        )
        store.settle_subscription("bot", P0, Cursor(1), Cursor(2), done("bot", waiting(6)), T0, epoch)
        assert (store.cursors("bot")[P0].batch, store.parked.counts()["bot"]["waiting"]) == (2, 7)
        store.settle_subscription("bot", P0, Cursor(2), Cursor(3), done("bot", event(10)), T0, epoch)
        assert (store.cursors("bot")[P0].batch, store.subscriptions()["bot"].state) == (3, SubscriptionState.BEHIND)
        assert store.bots.stopped(["bot"]) == {"bot": {event(10).stream}}

    def test_d6_of_what_a_stream_has_refused_the_newest_are_kept_and_the_rest_expires_counted(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """Of each stream by itself; not what is being tried, and not what another subscription refused."""
        begin(store, epoch, "bot", bot=WISH, parked_max=2)
        rows = [event(n, stream="den") for n in range(1, 6)]
        settle(store, epoch, 0, *rows, *(event(10 + n, stream="hall") for n in range(2)))
        (surplus,) = store.bots.surplus(2)
        assert (surplus.stream, surplus.waits) == ("den", False)
        soon = T0 + timedelta(seconds=30)
        assert len(store.parked.claim(soon, 10, LEASE_S, epoch)) == 7
        assert store.bots.expire_surplus(surplus, soon, epoch) == 0
        assert store.bots.expire_surplus(surplus, soon + timedelta(seconds=LEASE_S), epoch) == 3
        assert [row.event.event_id for row in store.parked.rows("bot")] == ["e4", "e5", "e10", "e11"]
        assert store.counted("expired") == {"bot": 3}

    def test_d7_what_leaves_too_slowly_stops_the_bot(
        self, store: DeliveryStore, epoch: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A flush takes no room; but behind one that grows without end, no more is parked at some time."""
        for module in ("postgres_parked", "memory_parked"):
            monkeypatch.setattr(f"evermark.delivery.store.{module}.WAITING_MAX", 3)
        begin(store, epoch, "bot", bot=WISH, parked_max=2)
        settle(store, epoch, 0, *map(waiting, range(1, 6)), waiting(6, "s2"))
        assert store.bots.publish("phone", {"s1": "sealed"}, T0, epoch) == 5
        settle(store, epoch, 1, waiting(7))
        assert store.subscriptions()["bot"].state is SubscriptionState.LIVE
        settle(store, epoch, 2, waiting(8))
        assert store.subscriptions()["bot"].state is SubscriptionState.SUSPENDED

    def test_d6_as_much_of_each_stream_may_leave_as_may_wait(
        self, store: DeliveryStore, epoch: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rooms that are full, and whose keys come at once, do not stop the bot; one that is more than full does."""
        for module in ("postgres_parked", "memory_parked"):
            monkeypatch.setattr(f"evermark.delivery.store.{module}.WAITING_MAX", 3)
        begin(store, epoch, "bot", bot=WISH, parked_max=1)
        rooms = [waiting(10 * room + n, f"s{room}", f"room{room}") for room in range(4) for n in range(3)]
        settle(store, epoch, 0, *rooms)
        assert store.bots.publish("phone", {f"s{room}": "sealed" for room in range(4)}, T0, epoch) == 12
        settle(store, epoch, 1, event(50))
        assert (store.subscriptions()["bot"].state, store.parked.room(["bot"])) == (SubscriptionState.LIVE, {"bot": 1})
        settle(store, epoch, 2, waiting(4, "s0", "room0"))
        settle(store, epoch, 3, waiting(5, "s1", "room1"))
        assert store.subscriptions()["bot"].state is SubscriptionState.LIVE
        settle(store, epoch, 4, waiting(6, "s1", "room1"))
        assert store.subscriptions()["bot"].state is SubscriptionState.SUSPENDED

    def test_d6_each_stream_keeps_its_newest_and_the_rest_expires_counted(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """Only of what waits, only beyond the limit, the oldest first; other streams, bots and replays lose nothing,
        however old what they have is."""
        begin(store, epoch, "another", "bot", bot=WISH)
        store.bots.publish("phone", {"known": "sealed"}, T0, epoch)
        others = [waiting(1, stream="den"), waiting(2, stream="den"), replace(waiting(1), replay_id="r1"), event(3)]
        leaving = [waiting(n, "known") for n in range(4, 8)]
        mine = [waiting(n, f"s{n % 2}") for n in range(11, 16)]
        both = [done("bot", *others, *leaving, *mine), done("another", waiting(1), waiting(2))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), store.group().members), both, T0, epoch)
        (surplus,) = store.bots.surplus(2)
        assert (surplus.subscription, surplus.stream) == ("bot", "room")
        assert [store.bots.expire_surplus(surplus, T0, epoch, 2) for _ in range(3)] == [2, 1, 0]
        assert store.bots.surplus(2) == []
        left = sorted(row.event.event_id for row in store.parked.rows("bot", limit=100))
        assert left == ["e1", "e1", "e14", "e15", "e2", "e3", "e4", "e5", "e6", "e7"]
        assert len(store.parked.rows("another")) == 2
        assert store.counted("expired") == {"bot": 3}

    def test_d6_what_is_released_meanwhile_makes_no_newer_one_expire(self, store: DeliveryStore, epoch: int) -> None:
        """Of what was found beyond the limit only that goes which still waits."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), waiting(2, "s2"), *map(waiting, range(3, 6)))
        (surplus,) = store.bots.surplus(2)
        store.bots.publish("phone", {"s2": "sealed"}, T0, epoch)
        assert store.bots.expire_surplus(surplus, T0, epoch) == 2
        assert [row.event.event_id for row in store.parked.rows()] == ["e2", "e4", "e5"]

    def test_a_person_cannot_send_what_has_no_key_but_can_drop_it(self, store: DeliveryStore, epoch: int) -> None:
        """Retrying leaves it waiting; dropping and expiry take it, counted."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), waiting(2))
        one, two = store.parked.rows()
        store.parked.release([one.id], T0, epoch)
        assert claimed(store, epoch) == []
        assert store.parked.rows()[0].waits
        assert store.parked.drop([one.id], epoch) == 1
        assert store.parked.expire("bot", T0 + SECOND, T0 + SECOND, epoch) == 1
        assert (store.counted("dropped"), store.counted("expired")) == ({"bot": 1}, {"bot": 1})
        assert two.event.event_id == "e2"

    @pytest.mark.parametrize("made_by", MadeBy)
    def test_d3_another_device_decides_anew_what_waits(self, store: DeliveryStore, epoch: int, made_by: MadeBy) -> None:
        """What was not tried and has no key there waits again, but for what is under way; what has one is due, and
        nothing overtakes it; without a device nothing waits. Of no other bot."""
        store.open_partition(P0, 0, epoch)
        _give_device(store, epoch, made_by, "phone")
        store.bots.publish("phone", {"s1": "sealed", "s3": "sealed"}, T0, epoch)
        store.bots.publish("tablet", {"s2": "sealed", "s3": "sealed"}, T0, epoch)
        both = [done("bot", waiting(1)), done("other")]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), store.group().members), both, T0, epoch)
        assert claimed(store, epoch) == ["e1"]
        rest = [waiting(2), waiting(3, "s2"), waiting(4, "s3"), event(5)]
        both = [done("bot", *rest), done("other", *rest)]
        store.settle_group(GroupWork(P0, Cursor(1), Cursor(2), store.group().members), both, T0, epoch)
        _give_device(store, epoch, made_by, "tablet")
        assert _waits(store, "bot") == {"e1": False, "e2": True, "e3": False, "e4": False, "e5": False}
        assert _waits(store, "other") == {"e2": False, "e3": True, "e4": False, "e5": False}
        assert store.bots.sessions_clear(["bot", "other"]) == {"bot": set(), "other": set()}
        mine = [row.event.event_id for row in store.parked.claim(T0, 10, LEASE_S, epoch) if row.subscription == "bot"]
        assert mine == ["e3", "e4"]
        _give_device(store, epoch, made_by, "")
        assert set(_waits(store, "bot").values()) == {False}

    def test_d3_a_session_is_clear_with_a_key_and_nothing_queued(self, store: DeliveryStore, epoch: int) -> None:
        """By the device the bot has now, and of the same replay; what only waits is not clear either."""
        begin(store, epoch, "bot", "none", bot=WISH)
        store.bots.publish("phone", {"s1": "sealed", "s2": "sealed"}, T0, epoch)
        store.bots.publish("tablet", {"s3": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2, "s3"), replace(waiting(3, "s2"), replay_id="r1"))
        assert store.bots.sessions_clear(["bot", "none", "unknown"]) == {"bot": {"s2"}, "none": {"s1", "s2"}}
        assert store.bots.sessions_clear(["bot"], "r1") == {"bot": {"s1"}}
        assert store.bots.withdraw("phone", "s1", T0, epoch) == 1
        assert store.bots.sessions_clear(["bot"]) == {"bot": {"s2"}}
        store.register([spec("bot", bot=replace(WISH, device="tablet"))], MadeBy.FILE, {}, epoch)
        assert store.bots.sessions_clear(["bot"]) == {"bot": set()}

    def test_d3_a_sweep_finds_nothing_to_release(self, store: DeliveryStore, epoch: int) -> None:
        """Whatever made a key come or go released what it had to."""
        begin(store, epoch, "bot", bot=WISH)
        store.bots.publish("tablet", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2, "s2"))
        assert store.bots.release_keyed(T0, epoch) == 0
        store.register([spec("bot", bot=replace(WISH, device="tablet"))], MadeBy.FILE, {}, epoch)
        store.bots.publish("tablet", {"s2": "sealed"}, T0, epoch)
        assert store.bots.release_keyed(T0, epoch) == 0
        assert set(_waits(store, "bot").values()) == {False}

    def test_replays_queue_by_themselves(self, store: DeliveryStore, epoch: int) -> None:
        """Neither do they wait for the first deliveries of a session, nor these for them."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), replace(waiting(2), replay_id="r1"))
        assert store.bots.publish("phone", {"s1": "sealed"}, T0, epoch) == 2
        assert store.bots.sessions_clear(["bot"], "r1") == store.bots.sessions_clear(["bot"]) == {"bot": set()}
        assert store.bots.sessions_clear(["bot"], "r2") == {"bot": {"s1"}}
        (first,) = store.parked.claim(T0, 1, LEASE_S, epoch)
        store.parked.reschedule(first, next_attempt_at=T0 + SECOND, attempts=0, reason="503", status=503, epoch=epoch)
        assert claimed(store, epoch) == ["e2"]

    def test_d3_what_was_not_tried_waits_again_for_a_key_that_was_withdrawn(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """Of that device and session, but for what is under way; what comes later too, until it is published again."""
        begin(store, epoch, "bot", bot=WISH)
        store.bots.publish("phone", {"s1": "sealed", "s2": "sealed"}, T0, epoch)
        store.bots.publish("tablet", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2), waiting(3), waiting(4, "s2"), event(9))
        (first,) = store.parked.claim(T0, 1, LEASE_S, epoch)
        assert store.bots.withdraw("tablet", "s1", T0, epoch) == 0
        assert store.bots.withdraw("phone", "s1", T0, epoch) == 2
        assert [row.event.event_id for row in store.parked.rows() if row.waits] == ["e2", "e3"]
        store.parked.delivered([first.id], epoch)
        settle(store, epoch, 1, waiting(5))
        assert claimed(store, epoch) == ["e4"]
        assert (keyed(store, "phone"), keyed(store, "tablet")) == ({"s2"}, set())
        assert [one.session for one in store.bots.keys_wanted(T0, 10, epoch)] == ["s1"]
        for device, session in (("phone", "s1"), ("tablet", "s2"), ("phone", "x\x00")):
            with pytest.raises(NotFoundError):
                store.bots.withdraw(device, session, T0, epoch)
        assert store.bots.publish("phone", {"s1": "sealed"}, T0, epoch) == 3
        assert claimed(store, epoch) == ["e2", "e3", "e5"]

    def test_d3_an_event_that_was_under_way_when_its_key_was_withdrawn_is_not_sent_without_it(
        self, store: DeliveryStore, take_over: TakeOver
    ) -> None:
        """Put back untried, or left by a dead owner: it is held, asked for, and sent when the key is there again."""
        epoch = take_over()
        begin(store, epoch, "bot", bot=WISH)
        store.bots.publish("phone", {"s1": "sealed", "s2": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2, "s2"))
        (first, _) = store.parked.claim(T0, 10, LEASE_S, epoch)
        for session in ("s1", "s2"):
            assert store.bots.withdraw("phone", session, T0, epoch) == 0
        later = T0 + SECOND
        store.parked.reschedule(first, next_attempt_at=later, attempts=0, reason="503", status=503, epoch=epoch)
        epoch = take_over()
        assert claimed(store, epoch, later) == []
        assert store.bots.release_keyed(later, epoch) == 0
        assert sorted(one.session for one in store.bots.keys_wanted(later, 10, epoch)) == ["s1", "s2"]
        assert store.bots.publish("phone", {"s1": "sealed"}, later, epoch) == 1
        assert claimed(store, epoch, later) == ["e1"]

    def test_d3_what_a_dead_owner_had_claimed_waits_again_too(self, store: DeliveryStore, take_over: TakeOver) -> None:
        """A claim that ran out, or whose owner is gone, keeps nothing from waiting."""
        first = take_over()
        begin(store, first, "bot", bot=WISH)
        store.bots.publish("phone", {"s1": "sealed"}, T0, first)
        settle(store, first, 0, waiting(1))
        assert claimed(store, first) == ["e1"]
        epoch = take_over()
        assert store.bots.withdraw("phone", "s1", T0, epoch) == 1
        store.bots.publish("phone", {"s1": "sealed"}, T0, epoch)
        assert claimed(store, epoch) == ["e1"]
        assert store.bots.withdraw("phone", "s1", T0 + LEASE_S * SECOND, epoch) == 1
