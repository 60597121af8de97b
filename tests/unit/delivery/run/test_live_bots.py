"""Bots in the live group: those about whom too much is unknown are served by themselves, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.bots.views import BotViews, ViewLimits
from evermark.delivery.model import BotSpec, Cursor, Fate, MadeBy, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.run.live import LOOKED_UP, LiveGroup
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.log.read import FileRange
from evermark.testing.contracts.scene import T0, spec
from evermark.testing.states import owners

PLACE = SourcePartition("chat", 0)


class Deliverer:
    def __init__(self) -> None:
        self.assignments: list[Assignment] = []

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        self.assignments += assignments
        return [replace(Outcome(e.spec.name, Fate.DONE, 1), reached=Cursor(e.span.to)) for e in assignments]


def test_d13_a_bot_that_must_be_looked_up_first_leaves_the_group() -> None:
    """GIVEN a bot made in a long log WHEN a fresh batch comes THEN the others get it; the bot is behind, with a reason,
    and without a failure on record."""
    leases = MemoryLeases(is_gone=lambda holder: True)
    store, epoch = MemoryDelivery(leases), owners(leases)(DELIVER_LEASE)
    store.open_partition(PLACE, 8, epoch)
    bot = BotSpec("chat", "bot")
    store.register(
        [spec("plain"), spec("helper", bot=bot), spec("away", bot=BotSpec("shop", "bot"))], MadeBy.FILE, {}, epoch
    )

    def files(_source: str) -> list[FileRange]:
        return [FileRange("f", 0, 0, 1, 9, 100 * ViewLimits().quick_rows_max, 1)]

    def read(*_: Any) -> list[dict[str, Any]]:
        raise AssertionError("nobody may look through that much while others wait")

    deliverer = Deliverer()
    live = LiveGroup(store, deliverer, epoch, lambda: T0, bot_views=BotViews(store.bots, files, epoch, read))
    assert live.hand_over(Span(PLACE, Cursor(8), 9, ("f",), 10, exact=True))
    assert [assignment.spec.name for assignment in deliverer.assignments] == ["away", "plain"]
    views = {assignment.spec.name: assignment.bot for assignment in deliverer.assignments}
    assert views["plain"] is None and views["away"] is not None and not views["away"].streams
    helper = store.subscriptions()["helper"]
    assert (helper.state, helper.reason, helper.failures) == (SubscriptionState.BEHIND, LOOKED_UP, 0)
    assert store.cursors("helper") == {PLACE: Cursor(8)}
