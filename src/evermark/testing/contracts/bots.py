"""What every `BotStore` promises: memberships that were learned, and deliveries that wait for session keys."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import pytest

from evermark.bots.base import ASK_EVERY, ASK_EVERY_MAX, BotMode, BotStore, BotWish, Learned, Lesson, Stay
from evermark.delivery.base import DeliveryStore, MadeBy, ParkedEvent, SubscriptionState
from evermark.errors import ConfigError, ConflictError, NotFoundError, StaleError
from evermark.testing.contracts.owned import OwnedStore
from evermark.testing.contracts.scene import P0, T0, TakeOver, begin, done, event, failed, spec

LEASE_S = 30.0
SECOND = timedelta(seconds=1)
WISH = BotWish("shop", "helper", device="phone")


class Store(DeliveryStore, BotStore, Protocol):
    """Both in one: what waits for a key is parked."""


def waiting(number: int, session: str = "s1", stream: str = "room") -> ParkedEvent:
    return replace(event(number, key=stream, status=None, stream=stream), session=session)


def settle(store: Store, epoch: int, at: int, *parked: ParkedEvent, name: str = "bot") -> None:
    store.settle_group(P0, at, at + 1, store.group().members, [done(name, *parked)], T0, epoch)


def claimed(store: Store, epoch: int, now: Any = T0, limit: int = 100) -> list[str]:
    return [row.event.event_id for row in store.claim(now, limit, LEASE_S, epoch)]


class BotContract(OwnedStore):
    # what a bot is

    def test_what_makes_a_bot_comes_back_whole(self, store: Store, epoch: int) -> None:
        """Every setting of a bot survives the store; a subscription without one has none."""
        wish = BotWish("chat", "weather-bot", BotMode.MENTIONS_REPLIES_REACTIONS, "phone", "mail")
        store.register([spec("a", bot=wish), spec("b")], MadeBy.FILE, {}, epoch)
        assert {name: found.spec.bot for name, found in store.subscriptions().items()} == {"a": wish, "b": None}

    # membership

    def test_lessons_are_kept_by_user_and_partition(self, store: Store, epoch: int) -> None:
        """What was learned comes back; streams that are named again are replaced, others stay."""
        assert store.learned("chat", "bot") == Learned()
        open_, closed = (Stay((3, "a")),), (Stay((3, "a"), (7, "b")), Stay((9, "c"), None, inbox=True))
        store.learn("chat", 0, [Lesson("bot", 0, 5, {"x": open_, "y": open_}), Lesson("other", 0, 5)], epoch)
        store.learn("chat", 0, [Lesson("bot", 5, 9, {"x": closed})], epoch)
        store.learn("chat", 1, [Lesson("bot", 0, 2)], epoch)
        assert store.learned("chat", "bot") == Learned({0: 9, 1: 2}, {"x": closed, "y": open_})
        assert store.learned("chat", "other") == Learned({0: 5})
        assert store.learned("elsewhere", "bot") == Learned()

    def test_a_lesson_that_begins_elsewhere_is_refused_whole(self, store: Store, epoch: int) -> None:
        """Somebody else looked meanwhile: nothing is written, not for the others either."""
        store.learn("chat", 0, [Lesson("bot", 0, 5)], epoch)
        with pytest.raises(ConflictError):
            store.learn("chat", 0, [Lesson("new", 0, 6, {"x": (Stay((1, "a")),)}), Lesson("bot", 4, 6)], epoch)
        assert (store.learned("chat", "bot").to, store.learned("chat", "new")) == ({0: 5}, Learned())

    def test_users_that_no_bot_speaks_for_are_forgotten(self, store: Store, epoch: int) -> None:
        """Only those: a bot that is there keeps what was learned for it."""
        store.register([spec("a", bot=replace(WISH, user="kept"))], MadeBy.FILE, {}, epoch)
        store.learn("shop", 0, [Lesson(user, 0, 5, {"x": (Stay((1, "a")),)}) for user in ("kept", "gone")], epoch)
        assert store.forget_users(epoch) == 1
        assert (store.learned("shop", "kept").to, store.learned("shop", "gone")) == ({0: 5}, Learned())

    # waiting for a key

    def test_d3_an_event_waits_iff_its_key_is_not_published(self, store: Store, epoch: int) -> None:
        """Without a key it waits, alive, whatever the time; with one it is due at once."""
        begin(store, epoch, "bot", bot=WISH)
        store.publish("phone", {"known": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2, "known"))
        assert claimed(store, epoch) == ["e2"]
        assert claimed(store, epoch, T0 + timedelta(days=30)) == ["e2"]
        assert store.parked_counts() == {"bot": {"waiting": 2, "dead": 0}}
        assert [row.event.event_id for row in store.parked(dead=True)] == []
        assert [(row.waits, row.is_dead) for row in store.parked(dead=False)] == [(True, False), (False, False)]
        assert store.parked_since() == {"bot": T0}

    def test_d3_publishing_releases_what_waits_in_order(self, store: Store, epoch: int) -> None:
        """All of its device and session, nothing of another; in the order in which they were parked."""
        begin(store, epoch, "bot", "tablet", bot=WISH)
        store.register(
            [spec("bot", bot=WISH), spec("tablet", bot=replace(WISH, device="tablet"))], MadeBy.FILE, {}, epoch
        )
        both = [done("bot", waiting(1), waiting(2, "s2"), waiting(3, stream="other")), done("tablet", waiting(1))]
        store.settle_group(P0, 0, 1, store.group().members, both, T0, epoch)
        assert store.publish("phone", {"s1": "sealed"}, T0 + SECOND, epoch) == 2
        assert store.publish("phone", {"s1": "sealed again"}, T0 + SECOND, epoch) == 0
        rows = store.claim(T0 + SECOND, 10, LEASE_S, epoch)
        assert [(row.subscription, row.event.event_id) for row in rows] == [("bot", "e1"), ("bot", "e3")]
        assert rows[0].event == waiting(1)

    def test_d3_newer_events_queue_behind_those_of_their_session(self, store: Store, epoch: int) -> None:
        """One that is parked after the key came is not tried before those that waited for it."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), waiting(2))
        assert store.sessions_queued(["bot"]) == {}, "what has no key is not clear anyway"
        store.publish("phone", {"s1": "sealed"}, T0, epoch)
        assert store.sessions_queued(["bot"]) == {"bot": {"s1"}}
        first, *rest = store.claim(T0, 1, LEASE_S, epoch)
        assert (first.event.event_id, rest) == ("e1", [])
        assert claimed(store, epoch) == [], "e1 is under way, and e2 must not overtake it"
        settle(store, epoch, 1, waiting(3))
        later = T0 + timedelta(minutes=5)
        store.reschedule(first, next_attempt_at=later, attempts=0, reason="503", status=503, epoch=epoch)
        assert claimed(store, epoch) == [], "e1 is not due"
        assert claimed(store, epoch, later) == ["e1", "e2", "e3"]

    def test_d3_a_limit_never_lets_one_overtake(self, store: Store, epoch: int) -> None:
        """One that was put back has the later time, and is claimed first all the same."""
        begin(store, epoch, "bot", bot=WISH)
        store.publish("phone", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, *map(waiting, range(1, 5)))
        (first,) = store.claim(T0, 1, LEASE_S, epoch)
        store.reschedule(first, next_attempt_at=T0 + SECOND, attempts=0, reason="503", status=503, epoch=epoch)
        found = claimed(store, epoch, T0 + SECOND, limit=2)
        assert found == ["e1", "e2"]
        assert claimed(store, epoch, T0 + SECOND, limit=100) == [], "two are under way, the others behind them"

    def test_d6_one_that_was_refused_holds_back_nobody(self, store: Store, epoch: int) -> None:
        """It was tried: it has a schedule of its own, dead at its end, and the session goes on."""
        begin(store, epoch, "bot", bot=WISH)
        store.publish("phone", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2))
        first, second = store.claim(T0, 10, LEASE_S, epoch)
        store.reschedule(first, next_attempt_at=None, attempts=1, reason="400", status=400, epoch=epoch)
        store.reschedule(second, next_attempt_at=T0, attempts=0, reason="busy", status=409, epoch=epoch)
        assert claimed(store, epoch) == ["e2"]
        assert store.parked_counts() == {"bot": {"waiting": 1, "dead": 1}}
        store.delivered([second.id], epoch)
        assert store.sessions_queued(["bot"]) == {}

    def test_d6_what_waits_takes_no_room_from_others(self, store: Store, epoch: int) -> None:
        """However much of one room waits, the bot stays live, and what it refuses in another is parked; what it
        refused stops it at its limit, as it does any subscription, and it is still asked for its keys."""
        begin(store, epoch, "bot", bot=WISH, parked_max=2)
        settle(store, epoch, 0, *map(waiting, range(1, 6)))
        settle(store, epoch, 1, *map(waiting, range(6, 9)), event(20, stream="den"), event(21, stream="den"))
        assert store.parked_counts() == {"bot": {"waiting": 10, "dead": 0}}
        settle(store, epoch, 2, waiting(9))
        assert store.subscriptions()["bot"].state is SubscriptionState.LIVE
        settle(store, epoch, 3, waiting(10), event(22, stream="den"))
        assert store.subscriptions()["bot"].state is SubscriptionState.SUSPENDED
        assert [one.session for one in store.keys_wanted(T0, 10, epoch)] == ["s1"]
        assert store.publish("phone", {"s1": "sealed"}, T0, epoch) == 9

    def test_d6_the_same_for_a_bot_that_is_behind(self, store: Store, epoch: int) -> None:
        """Outside the group what waits takes no room either, and what was refused does."""
        store.open_place(P0, 5, epoch)
        store.register([spec("bot", bot=WISH, parked_max=1)], MadeBy.FILE, {"bot": {P0: 0}}, epoch)
        store.settle_subscription("bot", P0, 0, 1, done("bot", *map(waiting, range(1, 6)), event(9)), T0, epoch)
        store.settle_subscription("bot", P0, 1, 2, done("bot", waiting(6)), T0, epoch)
        assert (store.cursors("bot")[P0], store.parked_counts()["bot"]["waiting"]) == (2, 7)
        store.settle_subscription("bot", P0, 2, 3, done("bot", event(10)), T0, epoch)
        assert (store.cursors("bot")[P0], store.subscriptions()["bot"].state) == (2, SubscriptionState.SUSPENDED)

    def test_d7_what_leaves_too_slowly_stops_the_bot(
        self, store: Store, epoch: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A flush takes no room; but behind one that grows without end, no more is parked at some time."""
        for module in ("store", "memory_rows"):
            monkeypatch.setattr(f"evermark.delivery.{module}.WAITING_MAX", 3)
        begin(store, epoch, "bot", bot=WISH, parked_max=2)
        settle(store, epoch, 0, *map(waiting, range(1, 6)), waiting(6, "s2"))
        assert store.publish("phone", {"s1": "sealed"}, T0, epoch) == 5
        settle(store, epoch, 1, waiting(7))
        assert store.subscriptions()["bot"].state is SubscriptionState.LIVE
        settle(store, epoch, 2, waiting(8))
        assert store.subscriptions()["bot"].state is SubscriptionState.SUSPENDED

    def test_d6_each_stream_keeps_its_newest_and_the_rest_expires_counted(self, store: Store, epoch: int) -> None:
        """Only of what waits, only beyond the limit, the oldest first; other streams, bots and replays lose nothing,
        however old what they have is."""
        begin(store, epoch, "another", "bot", bot=WISH)
        store.publish("phone", {"known": "sealed"}, T0, epoch)
        others = [waiting(1, stream="den"), waiting(2, stream="den"), replace(waiting(1), replay_id="r1"), event(3)]
        leaving = [waiting(n, "known") for n in range(4, 8)]
        mine = [waiting(n, f"s{n % 2}") for n in range(11, 16)]
        both = [done("bot", *others, *leaving, *mine), done("another", waiting(1), waiting(2))]
        store.settle_group(P0, 0, 1, store.group().members, both, T0, epoch)
        assert [store.expire_waiting(epoch, keep=2, limit=2) for _ in range(3)] == [2, 1, 0]
        left = sorted(row.event.event_id for row in store.parked("bot", limit=100))
        assert left == ["e1", "e1", "e14", "e15", "e2", "e3", "e4", "e5", "e6", "e7"]
        assert len(store.parked("another")) == 2
        assert store.counted("expired") == {"bot": 3}

    def test_a_person_cannot_send_what_has_no_key_but_can_drop_it(self, store: Store, epoch: int) -> None:
        """Retrying leaves it waiting; dropping and expiry take it, counted."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), waiting(2))
        one, two = store.parked()
        store.release([one.id], T0, epoch)
        assert claimed(store, epoch) == []
        assert store.parked()[0].waits
        assert store.drop([one.id], epoch) == 1
        assert store.expire("bot", T0 + SECOND, T0 + SECOND, epoch) == 1
        assert (store.counted("dropped"), store.counted("expired")) == ({"bot": 1}, {"bot": 1})
        assert two.event.event_id == "e2"

    def test_d3_a_sweep_releases_what_need_not_wait(self, store: Store, epoch: int) -> None:
        """A bot that has another device now, or none, waits for the keys of that one, or for none."""
        begin(store, epoch, "bot", bot=WISH)
        store.publish("tablet", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2, "s2"))
        assert store.release_keyed(T0, epoch) == 0
        store.register([spec("bot", bot=replace(WISH, device="tablet"))], MadeBy.FILE, {}, epoch)
        assert store.release_keyed(T0, epoch) == 1
        assert claimed(store, epoch) == ["e1"]
        store.register([spec("bot", bot=replace(WISH, device=""))], MadeBy.FILE, {}, epoch)
        assert store.release_keyed(T0, epoch) == 1

    def test_replays_queue_by_themselves(self, store: Store, epoch: int) -> None:
        """Neither do they wait for the first deliveries of a session, nor these for them."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), replace(waiting(2), replay_id="r1"))
        assert store.publish("phone", {"s1": "sealed"}, T0, epoch) == 2
        assert store.sessions_queued(["bot"], "r1") == store.sessions_queued(["bot"]) == {"bot": {"s1"}}
        assert store.sessions_queued(["bot"], "r2") == {}
        (first,) = store.claim(T0, 1, LEASE_S, epoch)
        store.reschedule(first, next_attempt_at=T0 + SECOND, attempts=0, reason="503", status=503, epoch=epoch)
        assert claimed(store, epoch) == ["e2"]

    # keys

    def test_keys_come_back_sealed_as_they_were(self, store: Store, epoch: int) -> None:
        """By device and session, page by page; publishing again replaces."""
        store.publish("phone", {"a": "sealed:1", "b": "sealed:2"}, T0, epoch)
        store.publish("phone", {"a": "sealed:3"}, T0 + SECOND, epoch)
        store.publish("tablet", {"a": "sealed:4"}, T0, epoch)
        assert store.session_key("phone", "a").sealed == "sealed:3"
        assert [key.session for key in store.session_keys("phone", limit=1)] == ["a"]
        assert [key.session for key in store.session_keys("phone", after="a")] == ["b"]
        assert store.published(["phone", "nobody"]) == {"phone": {"a", "b"}}
        with pytest.raises(NotFoundError):
            store.session_key("phone", "c")

    def test_d3_what_was_not_tried_waits_again_for_a_key_that_was_withdrawn(self, store: Store, epoch: int) -> None:
        """Of that device and session, but for what is under way; what comes later too, until it is published again."""
        begin(store, epoch, "bot", bot=WISH)
        store.publish("phone", {"s1": "sealed", "s2": "sealed"}, T0, epoch)
        store.publish("tablet", {"s1": "sealed"}, T0, epoch)
        settle(store, epoch, 0, waiting(1), waiting(2), waiting(3), waiting(4, "s2"), event(9))
        (first,) = store.claim(T0, 1, LEASE_S, epoch)
        assert store.withdraw("tablet", "s1", T0, epoch) == 0
        assert store.withdraw("phone", "s1", T0, epoch) == 2
        assert [row.event.event_id for row in store.parked() if row.waits] == ["e2", "e3"]
        store.delivered([first.id], epoch)
        settle(store, epoch, 1, waiting(5))
        assert claimed(store, epoch) == ["e4"]
        assert store.published(["phone", "tablet"]) == {"phone": {"s2"}}
        assert [one.session for one in store.keys_wanted(T0, 10, epoch)] == ["s1"]
        for device, session in (("phone", "s1"), ("tablet", "s2"), ("phone", "x\x00")):
            with pytest.raises(NotFoundError):
                store.withdraw(device, session, T0, epoch)
        assert store.publish("phone", {"s1": "sealed"}, T0, epoch) == 3
        assert claimed(store, epoch) == ["e2", "e3", "e5"]

    def test_d3_what_a_dead_owner_had_claimed_waits_again_too(self, store: Store, take_over: TakeOver) -> None:
        """A claim that ran out, or whose owner is gone, keeps nothing from waiting."""
        first = take_over()
        begin(store, first, "bot", bot=WISH)
        store.publish("phone", {"s1": "sealed"}, T0, first)
        settle(store, first, 0, waiting(1))
        assert claimed(store, first) == ["e1"]
        epoch = take_over()
        assert store.withdraw("phone", "s1", T0, epoch) == 1
        store.publish("phone", {"s1": "sealed"}, T0, epoch)
        assert claimed(store, epoch) == ["e1"]
        assert store.withdraw("phone", "s1", T0 + LEASE_S * SECOND, epoch) == 1

    def test_what_a_bot_is_may_be_changed_but_not_whom_it_speaks_for(self, store: Store, epoch: int) -> None:
        """Mode, device and inbox; another user, or none, would make what was learned wrong."""
        store.add(spec("bot", bot=WISH), None, epoch)
        store.add(spec("plain"), None, epoch)
        store.change("bot", {"bot": {"mode": BotMode.NONE, "device": "tablet"}}, epoch)
        store.change("bot", {"bot": {"inbox": "mail"}}, epoch)
        wanted = replace(WISH, mode=BotMode.NONE, device="tablet", inbox="mail")
        assert store.subscription("bot").spec.bot == wanted
        changes: tuple[dict[str, object], ...] = ({"bot": {"user": "x"}}, {"bot": {"source": "x"}}, {"ordered": True})
        for change in changes:
            with pytest.raises(ConfigError):
                store.change("bot", change, epoch)
        with pytest.raises(NotFoundError):
            store.change("plain", {"bot": {"mode": BotMode.NONE}}, epoch)
        store.change("bot", {"bot": {"device": ""}, "ordered": True}, epoch)
        assert store.subscription("bot").spec.bot == replace(wanted, device="")

    def test_keys_that_cannot_be_any_are_refused(self, store: Store, epoch: int) -> None:
        """None at all, too many, and sessions without a usable name."""
        for device, keys in (
            ("phone", {}),
            ("phone", {f"s{n}": "k" for n in range(101)}),
            ("phone", {"": "k"}),
            ("phone", {"x\x00": "k"}),
            ("phone", {"x" * 1000: "k"}),
            ("", {"s": "k"}),
        ):
            with pytest.raises(ConfigError):
                store.publish(device, keys, T0, epoch)

    # asking

    def test_d3_a_missing_key_is_asked_for_at_most_once_in_five_seconds(self, store: Store, epoch: int) -> None:
        """Noted before it is asked; then twice as late each time, up to minutes; with its key, not any more."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), waiting(2, stream="later"), waiting(3, "s2", "den"), waiting(4, "s2"))
        first, second = store.keys_wanted(T0, 10, epoch)
        assert (first.subscription, first.device, first.session, first.stream) == ("bot", "phone", "s1", "room")
        assert (first.since, first.asks, second.session, second.stream) == (T0, 1, "s2", "den")
        now, asked = T0, []
        for _ in range(600):
            now += SECOND
            asked += [now - T0 for one in store.keys_wanted(now, 10, epoch) if one.session == "s1"]
        gaps = [later - sooner for sooner, later in zip([timedelta(), *asked], asked, strict=False)]
        assert gaps == sorted(gaps)
        assert (gaps[0], gaps[1], max(gaps) <= ASK_EVERY_MAX) == (ASK_EVERY, 2 * ASK_EVERY, True)
        store.publish("phone", {"s1": "sealed", "s2": "sealed"}, now, epoch)
        assert store.keys_wanted(now + ASK_EVERY_MAX, 10, epoch) == []

    def test_asking_is_bounded_and_takes_turns(self, store: Store, epoch: int) -> None:
        """No more than asked for; those that were never asked for come first."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, *(waiting(n, f"s{n}") for n in range(1, 6)))
        turns = [[one.session for one in store.keys_wanted(T0 + ASK_EVERY, 2, epoch)] for _ in range(3)]
        assert turns == [["s1", "s2"], ["s3", "s4"], ["s5"]]
        settle(store, epoch, 1, waiting(6, "s6"))
        assert [one.session for one in store.keys_wanted(T0 + 2 * ASK_EVERY, 2, epoch)] == ["s6", "s1"]

    def test_d6_a_room_with_many_sessions_keeps_no_other_waiting(self, store: Store, epoch: int) -> None:
        """One of each stream is asked for before the second of any, whichever came first, of other bots too."""
        begin(store, epoch, "bot", "twin", bot=WISH)
        many = [waiting(n, f"s{n}") for n in range(1, 6)]
        both = [done("bot", *many, waiting(7, "other", "den")), done("twin", waiting(8, "s1"))]
        store.settle_group(P0, 0, 1, store.group().members, both, T0, epoch)
        asked = [(one.subscription, one.session) for one in store.keys_wanted(T0, 4, epoch)]
        assert asked[3:] == [("bot", "s2")]
        assert sorted(asked[:3]) == [("bot", "other"), ("bot", "s1"), ("twin", "s1")]

    def test_a_receiver_that_fails_or_is_paused_is_not_asked(self, store: Store, epoch: int) -> None:
        """It would only fail again: it is asked when it works."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1))
        store.settle_group(P0, 1, 2, store.group().members, [failed("bot")], T0, epoch)
        assert store.keys_wanted(T0, 10, epoch) == []
        store.suspend("bot", "a person", epoch)
        assert store.keys_wanted(T0, 10, epoch) == []
        store.resume("bot", epoch)
        assert [one.session for one in store.keys_wanted(T0, 10, epoch)] == ["s1"]

    def test_d3_a_receiver_that_failed_once_is_asked_when_its_time_has_come(self, store: Store, epoch: int) -> None:
        """What only waits for keys clears no failure: without being asked it would wait until it expires."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1))
        store.settle_group(P0, 1, 2, store.group().members, [failed("bot")], T0, epoch)
        again_at = store.subscriptions()["bot"].next_attempt_at
        assert again_at is not None and again_at > T0
        assert store.keys_wanted(again_at - SECOND / 1000, 10, epoch) == []
        assert [one.session for one in store.keys_wanted(again_at, 10, epoch)] == ["s1"]

    def test_a_removed_bot_takes_its_events_and_asks_with_it(self, store: Store, epoch: int) -> None:
        """Its device's keys stay: they are the device's."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1))
        store.publish("phone", {"other": "sealed"}, T0, epoch)
        store.keys_wanted(T0, 10, epoch)
        store.register([], MadeBy.FILE, {}, epoch)
        assert (store.parked(), store.keys_wanted(T0, 10, epoch)) == ([], [])
        store.register([spec("bot", bot=WISH)], MadeBy.FILE, {}, epoch)
        settle(store, epoch, 1, waiting(1))
        assert [one.asks for one in store.keys_wanted(T0, 10, epoch)] == [1]
        assert store.published(["phone"]) == {"phone": {"other"}}

    def test_a_stale_owner_writes_nothing_about_bots(self, store: Store, take_over: TakeOver) -> None:
        """Every call that writes is refused with an old epoch."""
        old = take_over()
        begin(store, old, "bot", bot=WISH)
        settle(store, old, 0, waiting(1))
        take_over()
        for write in (
            lambda: store.learn("shop", 0, [Lesson("helper", 0, 1)], old),
            lambda: store.forget_users(old),
            lambda: store.publish("phone", {"s1": "sealed"}, T0, old),
            lambda: store.release_keyed(T0, old),
            lambda: store.expire_waiting(old, keep=0),
            lambda: store.withdraw("phone", "s1", T0, old),
            lambda: store.keys_wanted(T0, 10, old),
        ):
            with pytest.raises(StaleError):
                write()
        assert (store.learned("shop", "helper"), store.published(["phone"])) == (Learned(), {})
