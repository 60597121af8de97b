"""Where subscriptions stand, and what of it is shown as metrics and lines in the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from evermark.app.delivering import DeliveryReport
from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import Cursor, Fate, Group, GroupWork, MadeBy, Outcome, Parked, SourcePartition
from evermark.delivery.status import Account, account, accounts, durable_heads, least_cursors
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.webhook.base import Answer
from evermark.log.head import Head, MemoryHeads
from evermark.log.read import FileRange
from evermark.observe.metrics import Metrics
from evermark.testing.contracts.scene import P0, P1, T0, begin, done, event, failed, spec


class Scene:
    """Two in the group, one behind, one with a parked delivery; a batch of ten events each minute."""

    def __init__(self) -> None:
        leases = MemoryLeases(is_gone=lambda _: True)
        lease = leases.acquire(DELIVER_LEASE, Holder("i", "h", "b", 1, "1"), 60)
        assert lease is not None
        self.epoch = lease.epoch
        self.store = MemoryDelivery(leases, jitter=lambda: 0.0)
        begin(self.store, self.epoch, "good", "picky", "down")
        outcomes = [done("good"), done("picky", event(1)), failed("down")]
        members = self.store.group().members
        self.store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), members), outcomes, T0, self.epoch)

    def files(self, source: str) -> Sequence[FileRange]:
        moments = [T0 + timedelta(minutes=n) for n in range(4)]
        return [FileRange(f"f{n}", 0, 0, n, n, 10, 1, moments[n], None, moments[n], moments[n]) for n in (1, 2, 3)]

    def known(self) -> dict[str, Account]:
        return accounts(self.store, {P0: 3}, self.files)


def test_d7_lag_age_and_parked_rows_are_told_for_each() -> None:
    """GIVEN one that is level with the group, one with a parked event, one behind THEN each has its own numbers."""
    scene = Scene()
    known = scene.known()
    told = {name: (one.lag_batches, one.lag_events, one.waiting, one.dead) for name, one in known.items()}
    assert told == {"good": (2, 20, 0, 0), "picky": (2, 20, 1, 0), "down": (3, 30, 0, 0)}
    assert known["good"].oldest == T0 + timedelta(minutes=2)
    assert known["down"].oldest == T0 + timedelta(minutes=1)
    assert known["picky"].oldest is not None and known["picky"].oldest <= T0 + timedelta(minutes=2)
    for name, one in known.items():
        assert account(scene.store, name, {P0: 3}, scene.files) == one


def test_the_least_cursor_counts_what_a_reader_has_not_seen() -> None:
    """GIVEN readers at different batches WHEN the least cursor is asked for THEN unseen places count from 0."""
    group = Group(1, frozenset({"a"}), {P0: Cursor(9), P1: Cursor(4), SourcePartition("crm", 0): Cursor(3)})
    assert least_cursors([group], {"b": {P0: Cursor(5)}}, "shop") == {0: 5, 1: 0}
    assert least_cursors([group], {}, "shop") == {0: 9, 1: 4}


def test_heads_of_all_sources_are_one_vector() -> None:
    """GIVEN heads of two sources WHEN asked for one of them THEN the other's are not in it, nor is a partition that
    has begun and has no event yet."""

    def at(batch: int) -> Head:
        return Head(batch, 1, "", 1)

    class Heads(MemoryHeads):
        def load_all(self) -> dict[tuple[str, int], Head]:
            return {("shop", 0): at(7), ("crm", 0): at(2), ("crm", 1): at(3), ("crm", 2): at(0)}

    leases = MemoryLeases(is_gone=lambda _: True)
    assert durable_heads(Heads(leases), ["shop"]) == {P0: 7}
    assert durable_heads(Heads(leases), ["shop", "crm"]) == {
        P0: 7,
        SourcePartition("crm", 0): 2,
        SourcePartition("crm", 1): 3,
    }


class Lines:
    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []

    def warning(self, what: str, **values: Any) -> None:
        self.written.append((what, values["subscription"]))


@pytest.fixture
def lines() -> Lines:
    return Lines()


def test_d7_gauges_are_there_for_everybody_and_go_with_the_subscription(lines: Lines) -> None:
    """GIVEN accounts WHEN shown THEN each has lag, age, state and rows; WHEN one is removed THEN its gauges are."""
    scene, metrics = Scene(), Metrics()
    report = DeliveryReport(metrics, lines)
    report.accounts(scene.known(), T0 + timedelta(minutes=11))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"evermark_{name}", labels)

    assert value("subscription_lag_batches", subscription="down") == 3
    assert value("subscription_lag_events", subscription="down") == 30
    assert value("subscription_oldest_seconds", subscription="down") == 600
    assert value("subscription_state", subscription="down", state="behind") == 1
    assert value("subscription_state", subscription="down", state="live") == 0
    assert value("parked_rows", subscription="picky", state="waiting") == 1
    scene.store.register([spec("good"), spec("picky")], MadeBy.FILE, {}, scene.epoch)
    report.accounts(scene.known(), T0)
    left = [
        s for family in metrics.registry.collect() for s in family.samples if s.labels.get("subscription") == "down"
    ]
    assert left == []
    assert value("subscription_lag_batches", subscription="good") == 2


def test_a_turn_that_ended_is_no_failure_but_leaving_the_group_is(lines: Lines) -> None:
    """GIVEN work that was not finished WHEN the group did it THEN it is told; WHEN a follower did THEN it is not."""
    metrics = Metrics()
    report = DeliveryReport(metrics, lines)
    late = replace(Outcome("late", Fate.UNFINISHED, accepted=5, reason="slow"), reached=Cursor(0))
    report.by_group(P0, [late])
    report.by_follower(P0, [late])
    report.by_follower(P0, [replace(failed("down"), reached=Cursor(0))])
    assert lines.written == [("subscription fell behind", "late"), ("subscription stays behind", "down")]
    failures = {s.labels["subscription"]: s.value for s in _of(metrics, "evermark_delivery_failures_total")}
    assert failures == {"late": 1, "down": 1}
    assert metrics.registry.get_sample_value("evermark_events_delivered_total", {"subscription": "late"}) == 10


def test_d7_retries_are_counted_by_what_came_of_them(lines: Lines) -> None:
    """GIVEN retries of all kinds WHEN told THEN each is counted; what was not sent is not, and a replay's apart."""
    metrics = Metrics()
    report = DeliveryReport(metrics, lines)
    answers = [
        Answer(Verdict.ACCEPTED, 204),
        Answer(Verdict.ACCEPTED, 204),
        Answer(Verdict.REFUSED, 422),
        Answer(Verdict.ENDPOINT, 503),
        Answer(Verdict.ENDPOINT, 503, sent=False),
        Answer(Verdict.BUSY, 409),
        Answer(Verdict.BUSY, sent=False),
        Answer(Verdict.GONE, 410),
    ]
    report.by_queue([(Parked(n, "a", event(n), 1, T0), answer) for n, answer in enumerate(answers)])
    report.by_queue([(Parked(9, "a", replace(event(9), replay_id="r1"), 1, T0), Answer(Verdict.ACCEPTED, 204))])
    tried = {s.labels["outcome"]: s.value for s in _of(metrics, "evermark_delivery_attempts_total")}
    assert tried == {"accepted": 3, "refused": 1, "endpoint": 1, "busy": 1, "gone": 1}
    assert metrics.registry.get_sample_value("evermark_events_delivered_total", {"subscription": "a"}) == 2
    assert metrics.registry.get_sample_value("evermark_replay_delivered_total", {"subscription": "a"}) == 1


def test_d7_first_deliveries_are_counted_by_what_came_of_them(lines: Lines) -> None:
    """GIVEN accepted, refused and held ones and a failure WHEN told THEN all but the held ones were tried."""
    metrics = Metrics()
    report = DeliveryReport(metrics, lines)
    report.by_group(P0, [replace(done("a", event(1), event(2, status=None), accepted=7), reached=Cursor(1))])
    report.by_follower(
        P0, [replace(failed("a"), reached=Cursor(0)), replace(Outcome("a", Fate.GONE), reached=Cursor(0))]
    )
    tried = {s.labels["outcome"]: s.value for s in _of(metrics, "evermark_delivery_attempts_total")}
    assert tried == {"accepted": 7, "refused": 1, "endpoint": 1, "gone": 1}


def test_d6_d7_what_expired_and_what_was_dropped_is_shown_as_state_counts_it(lines: Lines) -> None:
    """GIVEN durable counts WHEN shown again and again, and by another process THEN they are never added up twice."""
    scene = Scene()
    for _ in range(2):
        metrics = Metrics()
        report = DeliveryReport(metrics, lines)
        for _ in range(3):
            report.counted(scene.store.counted("expired"), scene.store.counted("dropped"))
    assert _of(metrics, "evermark_events_expired_total") == []
    scene.store.settle_subscription(
        "down", P0, Cursor(0), Cursor(1), done("down", event(2), expired=3), T0, scene.epoch
    )
    scene.store.parked.drop([row.id for row in scene.store.parked.rows("picky")], scene.epoch)
    for _ in range(2):
        report.counted(scene.store.counted("expired"), scene.store.counted("dropped"))
        report = DeliveryReport(metrics, lines)  # of the lane that follows
    assert {s.labels["subscription"]: s.value for s in _of(metrics, "evermark_events_expired_total")} == {"down": 3}
    assert {s.labels["subscription"]: s.value for s in _of(metrics, "evermark_events_dropped_total")} == {"picky": 1}


def _of(metrics: Metrics, name: str) -> list[Any]:
    return [s for family in metrics.registry.collect() for s in family.samples if s.name == name]
