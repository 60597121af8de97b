"""D3: a process that is killed between what it writes about session keys and what it says of it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.limits import KEY_ASKED_EVERY
from evermark.delivery.run.key_requests import KeyAsker
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.webhook.base import Answer, Try
from evermark.secrets import KeyRef, SecretBox
from evermark.server.bots import BotService
from evermark.server.subscriptions import SubscriptionService
from evermark.state.connection import State
from evermark.testing.contracts.bot_scene import WISH, claimed, keyed, settle, waiting
from evermark.testing.contracts.scene import T0, begin
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners

KEY = "EVERMARK_TEST_BOT_CRASHES"


@pytest.fixture
def state(pg_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    monkeypatch.setenv(KEY, "a key for sealing, of some length")
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


class Asked:
    """A sink that writes down in a file that it was asked to send."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        with self._path.open("a") as file:
            file.writelines("asked\n" for _ in tries)
        return [Answer(Verdict.ACCEPTED, 200)] * len(tries)


def _ask(state: State, epoch: int, sent: Path, after: timedelta = timedelta()) -> int:
    """Ask for the keys that are missing, `after` the events began to wait."""
    store = PostgresDelivery(state, clock=lambda: T0)
    sink: Any = Asked(sent)
    return KeyAsker(store.bots, store.subscriptions, sink, str, epoch, lambda: T0 + after).run()


def _publish(state: State, epoch: int, told: Path) -> int:
    """Publish the key of the session, and tell how many deliveries waited for it."""
    store = PostgresDelivery(state, clock=lambda: T0)
    nothing: Any = None
    box = SecretBox(KeyRef("env", KEY))
    subscriptions = SubscriptionService(
        store, box, lambda step: step(epoch), dict, nothing, nothing, nothing, nothing, clock=lambda: T0
    )
    released = BotService(subscriptions, store.bots, {WISH.source}).publish("bot", {"keys": {"s1": "the key"}}).released
    told.write_text("published")
    return released


def _in_a_process(step: Callable[[State, int, Path], int], dsn: str, schema: str, epoch: int, path: Path) -> None:
    step(State(lambda: dsn, schema), epoch, path)


def _killed_at(
    name: str, monkeypatch: pytest.MonkeyPatch, step: Callable[[State, int, Path], int], *given: object
) -> None:
    """Do the step in a process of its own, which must end at the failpoint."""
    with monkeypatch.context() as armed:
        armed.setenv("EVERMARK_FAILPOINT", name)
        armed.delenv("EVERMARK_PID", raising=False)
        process = multiprocessing.get_context("spawn").Process(target=_in_a_process, args=(step, *given))
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_d3_killed_after_it_noted_what_it_asks_for_it_asks_later_and_not_twice(
    state: State, pg_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an event that waits WHEN the asker dies at keys.noted THEN nobody was asked; the next owner asks when the
    pause is over, and not before."""
    take_over = owners(PostgresLeases(state, is_gone=lambda holder: True))
    epoch, sent = take_over(DELIVER_LEASE), tmp_path / "sent"
    store = PostgresDelivery(state, clock=lambda: T0)
    begin(store, epoch, "bot", bot=WISH)
    settle(store, epoch, 0, waiting(1))
    _killed_at("keys.noted", monkeypatch, _ask, pg_server.socket_dsn(), state.schema, epoch, sent)
    assert not sent.exists()
    epoch = take_over(DELIVER_LEASE)
    assert _ask(state, epoch, sent) == 0
    assert not sent.exists()
    assert _ask(state, epoch, sent, KEY_ASKED_EVERY) == 1
    assert sent.read_text() == "asked\n"


def test_d3_killed_after_it_published_keys_what_waited_is_sent_and_the_keys_may_come_again(
    state: State, pg_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an event that waits WHEN the process dies at keys.published, before it answers THEN the key is kept and the
    event is due; whoever publishes again, for want of an answer, is not refused and sends nothing twice."""
    take_over = owners(PostgresLeases(state, is_gone=lambda holder: True))
    epoch, told = take_over(DELIVER_LEASE), tmp_path / "told"
    store = PostgresDelivery(state, clock=lambda: T0)
    begin(store, epoch, "bot", bot=WISH)
    settle(store, epoch, 0, waiting(1))
    _killed_at("keys.published", monkeypatch, _publish, pg_server.socket_dsn(), state.schema, epoch, told)
    assert not told.exists()
    assert keyed(store, WISH.device) == {"s1"}
    epoch = take_over(DELIVER_LEASE)
    assert _publish(state, epoch, told) == 0
    assert claimed(store, epoch) == ["e1"]
