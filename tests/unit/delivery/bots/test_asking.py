"""D3: a missing session key is asked for: noted before it is sent, as a signed event of its own type."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.bots.keys import key_asked_next_at
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.limits import KEY_ASKED_EVERY, KEY_ASKED_EVERY_MAX
from evermark.delivery.model import KeyWanted
from evermark.delivery.run.key_requests import ASK_TIMEOUT_S, KeyAsker, ask_event
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.webhook.base import Answer, Try
from evermark.testing.contracts.bot_scene import WISH, settle, waiting
from evermark.testing.contracts.scene import T0, begin
from evermark.testing.states import owners


class Died(Exception):
    """The process ended here."""


class Sink:
    def __init__(self, *, dies: bool = False) -> None:
        self.tries: list[Try] = []
        self.dies = dies

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        if self.dies:
            raise Died
        self.tries += tries
        return [Answer(Verdict.ENDPOINT, 503)] * len(tries)


def asker_of(store: MemoryDelivery, epoch: int, sink: Sink) -> KeyAsker:
    return KeyAsker(store.bots, store.subscriptions, sink, str, epoch, lambda: T0)  # type: ignore[arg-type]


def test_what_is_asked_carries_all_a_bot_needs() -> None:
    """GIVEN events that wait WHEN asked THEN one event a session, signed and guarded as any, with a short timeout."""
    leases = MemoryLeases(is_gone=lambda holder: True)
    store, epoch = MemoryDelivery(leases), owners(leases)(DELIVER_LEASE)
    begin(store, epoch, "bot", bot=WISH, timeout_s=60.0)
    settle(store, epoch, 0, waiting(1), waiting(2), waiting(3, "s2"))
    sink = Sink()
    assert asker_of(store, epoch, sink).run() == 2
    first, second = (json.loads(one.event) for one in sink.tries)
    assert (first["stream"], first["op"]) == ("evermark.session_key", "wanted")
    assert json.loads(first["payload"])["session"] == "s1" and json.loads(second["payload"])["session"] == "s2"
    assert first["event_id"] != second["event_id"]
    assert [one.spec.timeout_s for one in sink.tries] == [ASK_TIMEOUT_S] * 2
    assert store.subscriptions()["bot"].failures == 0, "a bot that does not answer is not a failing receiver"


def test_a_look_that_takes_long_is_followed_by_a_rest() -> None:
    """GIVEN so many missing keys that looking for them takes seconds THEN State is left alone for most of
    the time, and not for longer."""
    leases = MemoryLeases(is_gone=lambda holder: True)
    store, epoch = MemoryDelivery(leases), owners(leases)(DELIVER_LEASE)
    begin(store, epoch, "bot", bot=WISH)
    settle(store, epoch, 0, *(waiting(n, f"s{n}") for n in range(1, 9)))
    now, look, looks = [T0], store.bots.keys_wanted, [0]
    passed = [0.0]

    def slow(*given: Any) -> list[KeyWanted]:
        passed[0] += 2
        looks[0] += 1
        now[0] += timedelta(hours=1) if looks[0] % 2 else -timedelta(hours=1)  # somebody sets the clock, too
        return look(*given)

    store.bots.keys_wanted = slow  # type: ignore[method-assign]
    asker = asker_of(store, epoch, Sink())
    asker.clock = lambda: now[0]
    asker.timer = lambda: passed[0]
    for _ in range(100):
        asker.run()
        passed[0] += 1
    assert looks[0] == 6


def test_d3_a_crash_never_asks_twice_within_five_seconds() -> None:
    """GIVEN a process that dies while it asks WHEN the next owner looks at once THEN it does not ask."""
    leases = MemoryLeases(is_gone=lambda holder: True)
    store, take_over = MemoryDelivery(leases), owners(leases)
    epoch = take_over(DELIVER_LEASE)
    begin(store, epoch, "bot", bot=WISH)
    settle(store, epoch, 0, waiting(1))
    with pytest.raises(Died):
        asker_of(store, epoch, Sink(dies=True)).run()
    sink = Sink()
    assert asker_of(store, take_over(DELIVER_LEASE), sink).run() == 0
    assert sink.tries == []


def test_asks_become_rare_but_never_end() -> None:
    """GIVEN a key that never comes THEN the pauses double from five seconds to five minutes, and stay there."""
    pauses = [key_asked_next_at(T0, asks, T0) - T0 for asks in range(1, 100)]
    assert pauses[:3] == [KEY_ASKED_EVERY, 2 * KEY_ASKED_EVERY, 4 * KEY_ASKED_EVERY]
    assert pauses == sorted(pauses) and pauses[-1] == KEY_ASKED_EVERY_MAX
    assert key_asked_next_at(None, 0, T0) == T0


def test_two_asks_are_two_events() -> None:
    """GIVEN the same key asked for again THEN the receiver does not take it for a repeat."""
    wanted = KeyWanted("bot", "phone", "s1", "room", T0, 1)
    again = ask_event(KeyWanted("bot", "phone", "s1", "room", T0, 2), T0 + timedelta(seconds=5))
    assert json.loads(ask_event(wanted, T0))["event_id"] != json.loads(again)["event_id"]
