"""What every `BotStore` promises of bots themselves: memberships that were learned, keys, and asking for them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from evermark.delivery.limits import KEY_ASKED_EVERY, KEY_ASKED_EVERY_MAX
from evermark.delivery.model import (
    BotMode,
    BotSpec,
    Cursor,
    GroupWork,
    MadeBy,
    Membership,
    MembershipDelta,
    Stay,
    Surplus,
)
from evermark.delivery.ports import DeliveryStore
from evermark.errors import ConfigError, ConflictError, NotFoundError, StaleError
from evermark.testing.contracts.bot_scene import SECOND, WISH, keyed, settle, waiting
from evermark.testing.contracts.owned import OwnedStore
from evermark.testing.contracts.scene import P0, T0, TakeOver, begin, done, failed, spec


class BotContract(OwnedStore):
    # what a bot is

    def test_what_makes_a_bot_comes_back_whole(self, store: DeliveryStore, epoch: int) -> None:
        """Every setting of a bot survives the store; a subscription without one has none."""
        wish = BotSpec("chat", "weather-bot", BotMode.MENTIONS_REPLIES_REACTIONS, "phone", "mail")
        store.register([spec("a", bot=wish), spec("b")], MadeBy.FILE, {}, epoch)
        assert {name: found.spec.bot for name, found in store.subscriptions().items()} == {"a": wish, "b": None}

    # membership

    def test_lessons_are_kept_by_user_and_partition(self, store: DeliveryStore, epoch: int) -> None:
        """What was learned comes back; streams that are named again are replaced, others stay."""
        assert store.bots.learned("chat", "bot") == Membership()
        open_, closed = (Stay((3, "a")),), (Stay((3, "a"), (7, "b")), Stay((9, "c"), None, inbox=True))
        store.bots.learn(
            "chat", 0, [MembershipDelta("bot", 0, 5, {"x": open_, "y": open_}), MembershipDelta("other", 0, 5)], epoch
        )
        store.bots.learn("chat", 0, [MembershipDelta("bot", 5, 9, {"x": closed})], epoch)
        store.bots.learn("chat", 1, [MembershipDelta("bot", 0, 2)], epoch)
        assert store.bots.learned("chat", "bot") == Membership({0: 9, 1: 2}, {"x": closed, "y": open_})
        assert store.bots.learned("chat", "other") == Membership({0: 5})
        assert store.bots.learned("elsewhere", "bot") == Membership()

    def test_a_lesson_that_begins_elsewhere_is_refused_whole(self, store: DeliveryStore, epoch: int) -> None:
        """Somebody else looked meanwhile: nothing is written, not for the others either."""
        store.bots.learn("chat", 0, [MembershipDelta("bot", 0, 5)], epoch)
        with pytest.raises(ConflictError):
            store.bots.learn(
                "chat", 0, [MembershipDelta("new", 0, 6, {"x": (Stay((1, "a")),)}), MembershipDelta("bot", 4, 6)], epoch
            )
        assert (store.bots.learned("chat", "bot").to, store.bots.learned("chat", "new")) == ({0: 5}, Membership())

    def test_users_that_no_bot_speaks_for_are_forgotten(self, store: DeliveryStore, epoch: int) -> None:
        """Only those: a bot that is there keeps what was learned for it."""
        store.register([spec("a", bot=replace(WISH, user="kept"))], MadeBy.FILE, {}, epoch)
        store.bots.learn(
            "shop", 0, [MembershipDelta(user, 0, 5, {"x": (Stay((1, "a")),)}) for user in ("kept", "gone")], epoch
        )
        assert store.bots.forget_users(epoch) == 1
        assert (store.bots.learned("shop", "kept").to, store.bots.learned("shop", "gone")) == ({0: 5}, Membership())

    # keys

    def test_keys_come_back_sealed_as_they_were(self, store: DeliveryStore, epoch: int) -> None:
        """By device and session, page by page; publishing again replaces."""
        store.bots.publish("phone", {"a": "sealed:1", "b": "sealed:2"}, T0, epoch)
        store.bots.publish("phone", {"a": "sealed:3"}, T0 + SECOND, epoch)
        store.bots.publish("tablet", {"a": "sealed:4"}, T0, epoch)
        assert store.bots.session_key("phone", "a").sealed == "sealed:3"
        assert [key.session for key in store.bots.session_keys("phone", limit=1)] == ["a"]
        assert [key.session for key in store.bots.session_keys("phone", after="a")] == ["b"]
        assert (keyed(store, "phone"), keyed(store, "nobody")) == ({"a", "b"}, set())
        with pytest.raises(NotFoundError):
            store.bots.session_key("phone", "c")

    def test_what_a_bot_is_may_be_changed_but_not_whom_it_speaks_for(self, store: DeliveryStore, epoch: int) -> None:
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

    def test_keys_that_cannot_be_any_are_refused(self, store: DeliveryStore, epoch: int) -> None:
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
                store.bots.publish(device, keys, T0, epoch)

    # asking

    def test_d3_a_missing_key_is_asked_for_at_most_once_in_five_seconds(self, store: DeliveryStore, epoch: int) -> None:
        """Noted before it is asked; then twice as late each time, up to minutes; with its key, not any more."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1), waiting(2, stream="later"), waiting(3, "s2", "den"), waiting(4, "s2"))
        first, second = store.bots.keys_wanted(T0, 10, epoch)
        assert (first.subscription, first.device, first.session, first.stream) == ("bot", "phone", "s1", "room")
        assert (first.since, first.asks, second.session, second.stream) == (T0, 1, "s2", "den")
        now, asked = T0, []
        for _ in range(600):
            now += SECOND
            asked += [now - T0 for one in store.bots.keys_wanted(now, 10, epoch) if one.session == "s1"]
        gaps = [later - sooner for sooner, later in zip([timedelta(), *asked], asked, strict=False)]
        assert gaps == sorted(gaps)
        assert (gaps[0], gaps[1], max(gaps) <= KEY_ASKED_EVERY_MAX) == (KEY_ASKED_EVERY, 2 * KEY_ASKED_EVERY, True)
        store.bots.publish("phone", {"s1": "sealed", "s2": "sealed"}, now, epoch)
        assert store.bots.keys_wanted(now + KEY_ASKED_EVERY_MAX, 10, epoch) == []

    def test_asking_is_bounded_and_takes_turns(self, store: DeliveryStore, epoch: int) -> None:
        """No more than asked for; those that were never asked for come first."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, *(waiting(n, f"s{n}") for n in range(1, 6)))
        turns = [[one.session for one in store.bots.keys_wanted(T0 + KEY_ASKED_EVERY, 2, epoch)] for _ in range(3)]
        assert turns == [["s1", "s2"], ["s3", "s4"], ["s5"]]
        settle(store, epoch, 1, waiting(6, "s6"))
        assert [one.session for one in store.bots.keys_wanted(T0 + 2 * KEY_ASKED_EVERY, 2, epoch)] == ["s6", "s1"]

    def test_d6_a_room_with_many_sessions_keeps_no_other_waiting(self, store: DeliveryStore, epoch: int) -> None:
        """One of each stream is asked for before the second of any, whichever came first, of other bots too."""
        begin(store, epoch, "bot", "twin", bot=WISH)
        many = [waiting(n, f"s{n}") for n in range(1, 6)]
        both = [done("bot", *many, waiting(7, "other", "den")), done("twin", waiting(8, "s1"))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), store.group().members), both, T0, epoch)
        asked = [(one.subscription, one.session) for one in store.bots.keys_wanted(T0, 4, epoch)]
        assert asked[3:] == [("bot", "s2")]
        assert sorted(asked[:3]) == [("bot", "other"), ("bot", "s1"), ("twin", "s1")]

    def test_a_receiver_that_fails_or_is_paused_is_not_asked(self, store: DeliveryStore, epoch: int) -> None:
        """It would only fail again: it is asked when it works."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1))
        store.settle_group(GroupWork(P0, Cursor(1), Cursor(2), store.group().members), [failed("bot")], T0, epoch)
        assert store.bots.keys_wanted(T0, 10, epoch) == []
        store.suspend("bot", "a person", epoch)
        assert store.bots.keys_wanted(T0, 10, epoch) == []
        store.resume("bot", epoch)
        assert [one.session for one in store.bots.keys_wanted(T0, 10, epoch)] == ["s1"]

    def test_d3_a_receiver_that_failed_once_is_asked_when_its_time_has_come(
        self, store: DeliveryStore, epoch: int
    ) -> None:
        """What only waits for keys clears no failure: without being asked it would wait until it expires."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1))
        store.settle_group(GroupWork(P0, Cursor(1), Cursor(2), store.group().members), [failed("bot")], T0, epoch)
        again_at = store.subscriptions()["bot"].next_attempt_at
        assert again_at is not None and again_at > T0
        assert store.bots.keys_wanted(again_at - SECOND / 1000, 10, epoch) == []
        assert [one.session for one in store.bots.keys_wanted(again_at, 10, epoch)] == ["s1"]

    def test_a_removed_bot_takes_its_events_and_asks_with_it(self, store: DeliveryStore, epoch: int) -> None:
        """Its device's keys stay: they are the device's."""
        begin(store, epoch, "bot", bot=WISH)
        settle(store, epoch, 0, waiting(1))
        store.bots.publish("phone", {"other": "sealed"}, T0, epoch)
        store.bots.keys_wanted(T0, 10, epoch)
        store.register([], MadeBy.FILE, {}, epoch)
        assert (store.parked.rows(), store.bots.keys_wanted(T0, 10, epoch)) == ([], [])
        store.register([spec("bot", bot=WISH)], MadeBy.FILE, {}, epoch)
        settle(store, epoch, 1, waiting(1))
        assert [one.asks for one in store.bots.keys_wanted(T0, 10, epoch)] == [1]
        assert keyed(store, "phone") == {"other"}

    def test_a_stale_owner_writes_nothing_about_bots(self, store: DeliveryStore, take_over: TakeOver) -> None:
        """Every call that writes is refused with an old epoch."""
        old = take_over()
        begin(store, old, "bot", bot=WISH)
        settle(store, old, 0, waiting(1))
        take_over()
        for write in (
            lambda: store.bots.learn("shop", 0, [MembershipDelta("helper", 0, 1)], old),
            lambda: store.bots.forget_users(old),
            lambda: store.bots.publish("phone", {"s1": "sealed"}, T0, old),
            lambda: store.bots.release_keyed(T0, old),
            lambda: store.bots.expire_surplus(Surplus("bot", "room", 99), T0, old),
            lambda: store.bots.withdraw("phone", "s1", T0, old),
            lambda: store.bots.keys_wanted(T0, 10, old),
        ):
            with pytest.raises(StaleError):
                write()
        assert (store.bots.learned("shop", "helper"), keyed(store, "phone")) == (Membership(), set())
