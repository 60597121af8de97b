"""Delivery in metrics and in the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from evermark.delivery.base import Fate, KeyWanted, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.run.parked_retries import Tried
from evermark.delivery.status import Account
from evermark.delivery.webhook.base import Answer
from evermark.observe.metrics import Metrics

_PARKED_STATES = ("waiting", "dead")
_ATTEMPT = {
    Verdict.ACCEPTED: "accepted",
    Verdict.EVENT: "refused",
    Verdict.ENDPOINT: "endpoint",
    Verdict.GONE: "gone",
    Verdict.BUSY: "busy",
}
_STOPPED = {Fate.ENDPOINT_FAILED: "endpoint", Fate.GONE: "gone"}


class DeliveryReport:
    def __init__(self, metrics: Metrics, log: Any) -> None:
        self._metrics = metrics
        self._log = log
        self._shown: set[str] = set()
        self._counted: dict[tuple[str, str], int] = {}
        self._kept: set[str] = set()

    def accounts(self, known: Mapping[str, Account], now: datetime) -> None:
        """Gauges for every subscription there is, and for no other."""
        metrics = self._metrics
        for name, account in known.items():
            metrics.lag_batches.labels(name).set(account.lag_batches)
            metrics.lag_events.labels(name).set(account.lag_events)
            age_s = (now - account.oldest).total_seconds() if account.oldest is not None else 0.0
            metrics.oldest_s.labels(name).set(max(0.0, age_s))
            for state in SubscriptionState:
                metrics.state.labels(name, state.value).set(state is account.subscription.state)
            for kind, rows in zip(_PARKED_STATES, (account.waiting, account.dead), strict=True):
                metrics.queue_rows.labels(name, kind).set(rows)
        for name in self._shown - known.keys():  # removed: its last values would look like present ones
            for gauge in (metrics.lag_batches, metrics.lag_events, metrics.oldest_s):
                gauge.remove(name)
            for state in SubscriptionState:
                metrics.state.remove(name, state.value)
            for kind in _PARKED_STATES:
                metrics.queue_rows.remove(name, kind)
        self._shown = set(known)

    def kept(self, events: Mapping[str, int]) -> None:
        """Subscriptions that keep the log beyond its retention: a line when it begins, a gauge while it lasts."""
        for name, number in events.items():
            self._metrics.kept_events.labels(name).set(number)
        for name in sorted(events.keys() - self._kept):
            self._log.warning(
                "the log keeps events beyond log.retention, because this subscription has not passed them",
                subscription=name,
                events=events[name],
                hint=f"resume, change its ttl or remove it: evermark subscription resume | set --ttl | remove {name}",
            )
        for name in self._kept - events.keys():
            self._metrics.kept_events.remove(name)
        self._kept = set(events)

    def counted(self, expired: Mapping[str, int], dropped: Mapping[str, int]) -> None:
        """The all-time counts in State, so that a restart neither forgets an event nor counts it twice."""
        for what, counter, by_name in (
            ("expired", self._metrics.expired, expired),
            ("dropped", self._metrics.dropped, dropped),
        ):
            for name, number in by_name.items():
                counter.labels(name).inc(max(0, number - self._counted.get((what, name), 0)))
                self._counted[what, name] = number

    def by_queue(self, tried: Sequence[Tried]) -> None:
        """Retries of parked deliveries, one by one. Deliveries of a replay are counted apart."""
        for parked, answer in tried:
            if answer.sent:
                self._metrics.attempts.labels(parked.subscription, _ATTEMPT[answer.verdict]).inc()
            if answer.verdict is Verdict.ACCEPTED:
                metric = self._metrics.replay_delivered if parked.event.replay_id else self._metrics.delivered
                metric.labels(parked.subscription).inc()

    def by_asker(self, asked: Sequence[tuple[KeyWanted, Answer]]) -> None:
        for wanted, answer in asked:
            self._metrics.keys_asked.labels(wanted.subscription, _ATTEMPT[answer.verdict]).inc()

    def by_group(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None:
        """A subscription that did not finish leaves the group: worth one line."""
        for outcome in outcomes:
            self._count(outcome)
            if outcome.fate is not Fate.DONE:
                self._fail(place, outcome, "subscription fell behind")

    def by_follower(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None:
        """A turn that ended before its work is no failure: the next one goes on where it stopped."""
        for outcome in outcomes:
            self._count(outcome)
            if outcome.fate not in (Fate.DONE, Fate.UNFINISHED):
                self._fail(place, outcome, "subscription stays behind")

    def _count(self, outcome: Outcome) -> None:
        name = outcome.subscription
        self._metrics.delivered.labels(name).inc(outcome.accepted)
        if outcome.expired:
            self._log.warning(
                "events expired: older than the subscription's ttl", subscription=name, events=outcome.expired
            )
        if outcome.parked:
            self._metrics.parked.labels(name).inc(len(outcome.parked))
        refused = sum(event.status is not None for event in outcome.parked)
        tried = {"accepted": outcome.accepted, "refused": refused}
        if outcome.fate in _STOPPED:  # once: whatever else was under way was not waited for
            tried[_STOPPED[outcome.fate]] = 1
        for what, number in tried.items():
            if number:
                self._metrics.attempts.labels(name, what).inc(number)

    def _fail(self, place: SourcePartition, outcome: Outcome, what: str) -> None:
        name, fate, reason = outcome.subscription, outcome.fate, outcome.reason
        self._metrics.failures.labels(name, fate).inc()
        self._log.warning(what, subscription=name, source=place.source, fate=str(fate), reason=reason)
