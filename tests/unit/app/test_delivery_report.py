"""What is told of thousands of subscriptions: what changed, all now and then, and nothing of those that are gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from evermark.app.delivering import _ALL_SHOWN_EVERY, DeliveryReport
from evermark.delivery.model import Fate, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.status import Account
from evermark.observe.metrics import Labelled, Metrics

NOW = datetime(2026, 11, 16, tzinfo=UTC)


class Heard(Metrics):
    """Real metrics that remember how many gauges they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def set_all(self, gauges: Mapping[Labelled, float], gone: Iterable[Labelled] = ()) -> None:
        self.told.append(len(gauges))
        super().set_all(gauges, gone)


def account(lag_events: int) -> Account:
    subscription = cast("Any", SimpleNamespace(state=SubscriptionState.LIVE))
    return Account(subscription, 0, lag_events, None, waiting=0, dead=0)


def test_only_what_changed_is_told_until_all_is_told_again() -> None:
    """GIVEN a hundred subscriptions WHEN one changes THEN one gauge is told; after some reports all are; one that is
    gone is shown no more.
    """
    metrics = Heard()
    report = DeliveryReport(metrics, None)
    known = {f"s{n}": account(0) for n in range(100)}
    report.accounts(known, NOW)
    report.accounts(known | {"s7": account(5)}, NOW)
    lag = {"subscription": "s7"}
    assert metrics.told[0] >= 500
    assert metrics.told[1:] == [1]
    assert metrics.registry.get_sample_value("evermark_subscription_lag_events", lag) == 5
    for _ in range(_ALL_SHOWN_EVERY - 1):
        report.accounts(known, NOW)
    assert metrics.told[-1] == metrics.told[0]
    del known["s7"]
    report.accounts(known, NOW)
    assert metrics.registry.get_sample_value("evermark_subscription_lag_events", lag) is None


def test_of_a_settled_batch_each_count_is_told_once() -> None:
    """GIVEN outcomes of a batch WHEN they are settled THEN what was accepted, and who failed, is counted by name."""
    metrics, said = Heard(), cast("Any", SimpleNamespace(warning=lambda *_, **__: None))
    report = DeliveryReport(metrics, said)
    outcomes = [
        Outcome("a", Fate.DONE, accepted=3),
        Outcome("b", Fate.DONE),
        Outcome("c", Fate.ENDPOINT_FAILED, reason="HTTP 503"),
    ]
    for _ in range(2):
        report.by_group(SourcePartition("shop", 0), outcomes)
    value = metrics.registry.get_sample_value
    assert [value("evermark_events_delivered_total", {"subscription": name}) for name in "abc"] == [6, 0, 0]
    assert value("evermark_delivery_attempts_total", {"subscription": "c", "outcome": "endpoint"}) == 2
    assert value("evermark_delivery_failures_total", {"subscription": "c", "fate": str(Fate.ENDPOINT_FAILED)}) == 2
