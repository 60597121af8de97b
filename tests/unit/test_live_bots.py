"""Bots in the live group: those about whom too much is unknown are served by themselves, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evermark.bots.base import BotWish
from evermark.bots.sight import QUICK_ROWS_MAX, Sight
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.base import Fate, MadeBy, Outcome, Place, SubscriptionState
from evermark.delivery.live import LOOKED_UP, LiveGroup
from evermark.delivery.memory import MemoryDelivery
from evermark.delivery.work import Delivered, Errand, Manner, Span
from evermark.log.read import FileRange
from evermark.testing.contracts.scene import T0, spec
from evermark.testing.states import owners

PLACE = Place("chat", 0)


class Deliverer:
    def __init__(self) -> None:
        self.errands: list[Errand] = []

    def deliver(self, errands: Sequence[Errand], manner: Manner) -> list[Delivered]:
        self.errands += errands
        return [Delivered(e.spec.name, e.span.to, Outcome(e.spec.name, Fate.DONE, 1)) for e in errands]


def test_d13_a_bot_that_must_be_looked_up_first_leaves_the_group() -> None:
    """GIVEN a bot made in a long log WHEN a fresh batch comes THEN the others get it; the bot is behind, with a reason,
    and without a failure on record."""
    leases = MemoryLeases(is_gone=lambda holder: True)
    store, epoch = MemoryDelivery(leases), owners(leases)(DELIVER_LEASE)
    store.open_place(PLACE, 8, epoch)
    bot = BotWish("chat", "bot")
    store.register(
        [spec("plain"), spec("helper", bot=bot), spec("away", bot=BotWish("shop", "bot"))], MadeBy.FILE, {}, epoch
    )

    def files(_source: str) -> list[FileRange]:
        return [FileRange("f", 0, 0, 1, 9, 100 * QUICK_ROWS_MAX, 1)]

    def read(*_: Any) -> list[dict[str, Any]]:
        raise AssertionError("nobody may look through that much while others wait")

    deliverer = Deliverer()
    live = LiveGroup(store, deliverer, epoch, lambda: T0, sight=Sight(store, files, epoch, read))
    assert live.hand_over(Span(PLACE, 8, 9, ("f",), 10, exact=True))
    assert [errand.spec.name for errand in deliverer.errands] == ["away", "plain"]
    views = {errand.spec.name: errand.bot for errand in deliverer.errands}
    assert views["plain"] is None and views["away"] is not None and not views["away"].streams
    helper = store.subscriptions()["helper"]
    assert (helper.state, helper.reason, helper.failures) == (SubscriptionState.BEHIND, LOOKED_UP, 0)
    assert store.cursors("helper") == {PLACE: 8}
