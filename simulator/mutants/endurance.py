"""Bugs of receivers that fail, are slow, or refuse for long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from evermark.delivery.decide import backlog, group, retry
from evermark.delivery.decide.group import Step, SubscriptionRecord
from evermark.delivery.model import Cursor, Outcome, SourcePartition, Subscription, SubscriptionState
from evermark.delivery.run import follower
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.store.memory_parked import MemoryParked
from evermark.delivery.work import Span
from simulator.mutants.mutant import Mutant

_is_due = group.is_due
_after_done = group._after_done
_register = MemoryDelivery.register
_release = MemoryParked.release
_next_span = backlog.next_span


def _behind_only(subscription: Subscription, now: datetime) -> bool:
    return subscription.state is SubscriptionState.BEHIND and _is_due(subscription, now)


def _behind_always(subscription: Subscription, now: datetime) -> bool:
    return subscription.state is SubscriptionState.BEHIND or _is_due(subscription, now)


def _paused_too(subscription: Subscription, now: datetime) -> bool:
    paused = subscription.state is SubscriptionState.SUSPENDED and subscription.next_attempt_at is None
    return paused or _is_due(subscription, now)


def _register_afresh(self: MemoryDelivery, *given: Any) -> None:
    _register(self, *given)
    for name, (spec, standing) in self.tables.known.items():
        self.tables.known[name] = (spec, group.clean(standing))


def _gone_is_behind(standing: SubscriptionRecord, reason: str) -> SubscriptionRecord:
    return replace(standing, state=SubscriptionState.BEHIND, reason=reason)


def _drop_beyond_limit(standing: SubscriptionRecord, outcome: Outcome, parked_now: int, *rest: Any) -> Step:
    room = max(0, standing.parked_max - parked_now)
    return _after_done(standing, replace(outcome, parked=outcome.parked[:room]), parked_now, *rest)


def _park_beyond_limit(standing: SubscriptionRecord, outcome: Outcome, parked_now: int, *rest: Any) -> Step:
    return _after_done(standing, outcome, -len(outcome.parked), *rest)


def _release_once(self: MemoryParked, ids: Sequence[int], now: datetime, epoch: int) -> int:
    for row_id in ids:
        row = self._tables.rows.get(row_id)
        if row is not None and row.next_attempt_at is None and row.event.retry_after_s == 0:
            del self._tables.rows[row_id]
    count = _release(self, ids, now, epoch)
    for row_id in ids:
        if row_id in self._tables.rows:
            row = self._tables.rows[row_id]
            self._tables.rows[row_id] = replace(row, event=replace(row.event, retry_after_s=0))
    return count


def _expire_uncounted(self: MemoryParked, subscription: str, before: datetime, now: datetime, epoch: int) -> int:
    with self._tables.fenced(epoch):
        old = [r.id for r in self._tables.rows.values() if r.subscription == subscription and r.created_at < before]
        for row_id in old:
            del self._tables.rows[row_id]
        return len(old)


def _from_the_first_event(place: SourcePartition, begun: Cursor, *rest: Any) -> Span | None:
    return _next_span(place, Cursor(begun.batch), *rest)


ENDURANCE: tuple[Mutant, ...] = (
    Mutant("suspended-for-good", "a suspended one is never probed", ((follower, "is_due", _behind_only),)),
    Mutant("never-suspended", "no number of failures suspends", ((retry, "should_suspend", lambda *_: False),)),
    Mutant("backoff-ignored", "one that failed is tried again at once", ((follower, "is_due", _behind_always),)),
    Mutant("paused-worked-for", "one that a person paused is worked for", ((follower, "is_due", _paused_too),)),
    Mutant(
        "success-forgotten", "a success leaves the failures on record", ((group, "clean", lambda standing: standing),)
    ),
    Mutant("failures-forgotten", "a new owner forgets the failures", ((MemoryDelivery, "register", _register_afresh),)),
    Mutant("gone-tried-again", "410 does not disable", ((group, "disabled", _gone_is_behind),), 120),
    Mutant(
        "progress-forgotten",
        "a batch that was not finished is begun again from its first event",
        ((follower, "next_span", _from_the_first_event),),
        120,
    ),
    Mutant(
        "parked-beyond-dropped",
        "what exceeds `parked_max` is dropped",
        ((group, "_after_done", _drop_beyond_limit),),
        120,
    ),
    Mutant("parked-without-limit", "`parked_max` is not kept", ((group, "_after_done", _park_beyond_limit),), 120),
    Mutant(
        "retried-once",
        "a dead letter that is retried again is lost",
        ((MemoryParked, "release", _release_once),),
        300,
    ),
    Mutant(
        "queue-expiry-uncounted",
        "what expires in the queue is not counted",
        ((MemoryParked, "expire", _expire_uncounted),),
    ),
)
