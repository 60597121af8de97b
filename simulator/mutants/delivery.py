"""Bugs of the live group, the follower and the parked_retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from evermark.cluster.fence import DELIVER_LEASE
from evermark.delivery import work
from evermark.delivery.decide import backlog, group, shards
from evermark.delivery.decide.group import Step, SubscriptionRecord
from evermark.delivery.model import (
    Cursor,
    CursorVector,
    Fate,
    Group,
    GroupWork,
    HeldKey,
    Outcome,
    ParkedEvent,
    SourcePartition,
    SubscriptionState,
)
from evermark.delivery.run import follower, live, parked_retries
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.run.parked_retries import ParkedQueue
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.store.memory_parked import MemoryParked
from evermark.delivery.webhook.base import Try
from evermark.delivery.work import Result, Span
from evermark.log.read import FileRange
from simulator.mutants.mutant import Mutant

_settle_group = MemoryDelivery.settle_group
_claim = MemoryParked.claim
_require_outside = group.require_outside
_after_outcome = group.after_outcome
_next_span = backlog.next_span
_folded = work._folded
_stages = live.stages
_spread = shards.spread
_group_outcome = live.group_outcome
_BEYOND = "~"  # after every position


def _new_key_alone(self: ParkedEvent) -> tuple[HeldKey, ...]:
    return ((self.place, self.stream, self.key),) if self.key is not None else ()


def _settle_current_members(
    self: MemoryDelivery, work: GroupWork, outcomes: Sequence[Outcome], now: datetime, epoch: int
) -> None:
    current = self.group().members
    named = {outcome.subscription for outcome in outcomes}
    everybody = [*outcomes, *(Outcome(name, Fate.DONE) for name in sorted(current - named))]
    _settle_group(self, replace(work, members=current, version=None), everybody, now, epoch)


def _settle_any_version(self: MemoryDelivery, work: GroupWork, *given: Any) -> None:
    _settle_group(self, replace(work, version=None), *given)


def _any_generation(name: str, standing: SubscriptionRecord | None, generation: int | None) -> SubscriptionRecord:
    return _require_outside(name, standing, None)


def _pass_failed_endpoint(standing: SubscriptionRecord, outcome: Outcome, *rest: Any) -> Step:
    failed = outcome.fate is Fate.ENDPOINT_FAILED
    return _after_outcome(standing, replace(outcome, fate=Fate.DONE) if failed else outcome, *rest)


def _pass_unreadable(standing: SubscriptionRecord, outcome: Outcome, *rest: Any) -> Step:
    stuck = outcome.fate is Fate.STUCK
    return _after_outcome(standing, replace(outcome, fate=Fate.DONE) if stuck else outcome, *rest)


def _blame_for_unreadable(standing: SubscriptionRecord, outcome: Outcome, *rest: Any) -> Step:
    stuck = outcome.fate is Fate.STUCK
    return _after_outcome(standing, replace(outcome, fate=Fate.ENDPOINT_FAILED) if stuck else outcome, *rest)


def _delete_before_post(self: ParkedQueue) -> int:
    claimed = self.store.parked.claim(self.runtime.now(), 100, parked_retries.CLAIM_LEASE_S, self.epoch)
    known = self.store.subscriptions()
    mine = [p for p in claimed if p.subscription in known]
    if mine:
        self.store.parked.delivered([p.id for p in mine], self.epoch)
        tries = [Try(known[p.subscription].spec, p.event.event, p.attempt + 1) for p in mine]
        self.sink.attempt(tries, parked_retries.ATTEMPT_DEADLINE_S)
    return len(mine)


def _claim_unfenced(self: MemoryParked, now: datetime, limit: int, lease_s: float, epoch: int, **named: Any) -> Any:
    held = self._tables._leases._held[DELIVER_LEASE]
    return _claim(self, now, limit, lease_s, held.epoch, **named) if held.holder else []


def _claim_anyway(self: MemoryParked, *given: Any, without: object = ()) -> Any:
    return _claim(self, *given)


def _join_anyway(standing: SubscriptionRecord, cursors: CursorVector, of: Group) -> bool:
    return standing.state is SubscriptionState.BEHIND


def _span_to_tail(
    place: SourcePartition, begun: Cursor, head: int, files: Sequence[FileRange], rows_max: int
) -> Span | None:
    tail = max((f.batch_max for f in files if f.partition_min == f.partition_max == place.partition), default=head)
    return _next_span(place, begun, max(head, tail), files, rows_max)


def _settle_whole_span(span: Span, outcome: Outcome) -> list[tuple[Cursor, Outcome]]:
    return [(Cursor(span.to), replace(outcome, fate=Fate.DONE))]


def _settle_failure_on_the_spot(span: Span, outcome: Outcome) -> list[tuple[Cursor, Outcome]]:
    return [(outcome.reached or span.begun, outcome)]


def _beyond(outcome: Outcome) -> Outcome:
    return replace(outcome, reached=Cursor(outcome.reached.batch, _BEYOND)) if outcome.reached else outcome


def _keep_more_than_was_done(span: Span, outcome: Outcome) -> list[tuple[Cursor, Outcome]]:
    return _stages(span, outcome if outcome.fate is Fate.DONE else _beyond(outcome))


def _keep_unparked(span: Span, outcome: Outcome) -> list[tuple[Cursor, Outcome]]:
    return [(to, replace(part, parked=()) if to.through else part) for to, part in _stages(span, outcome)]


def _leave_beyond(outcome: Outcome) -> Outcome:
    return _beyond(_group_outcome(outcome))


def _hand_over_anyway(self: LiveGroup, *spans: Span) -> bool:
    span = spans[-1]
    with self.lock:
        group = self.store.group()
        at = group.cursors.get(span.place)
        return at is not None and self.work(replace(span, begun=at), group, budget_s=None)


def _unfinished_is_done(outcome: Outcome) -> Outcome:
    return replace(outcome, fate=Fate.DONE) if outcome.fate is Fate.UNFINISHED else outcome


def _expired_uncounted(span: Span, results: Mapping[int, Result]) -> Outcome:
    return replace(_folded(span, results), expired=0)


def _spread_wherever_it_stands(placed: shards.Placed, outside: Any, groups: Mapping[int, Group], wanted: int) -> Any:
    """As if all groups stood where the first one does."""
    first = groups[shards.FIRST].cursors
    after = _spread(placed, outside, {shard: replace(one, cursors=first) for shard, one in groups.items()}, wanted)
    cursors = {shard: groups[shard].cursors if shard in groups else first for shard in after.groups}
    return replace(after, groups={shard: replace(one, cursors=cursors[shard]) for shard, one in after.groups.items()})


DELIVERY: tuple[Mutant, ...] = (
    Mutant(
        "moved-wherever-it-stands",
        "a member moves to the group of another shard, which stands elsewhere",
        ((shards, "spread", _spread_wherever_it_stands),),
    ),
    Mutant(
        "settle-current-members",
        "a settlement covers whoever is in the group by then",
        ((MemoryDelivery, "settle_group", _settle_current_members),),
        200,
    ),
    Mutant(
        "former-member-settled",
        "a member that left and came back meanwhile is taken for one that stayed",
        ((MemoryDelivery, "settle_group", _settle_any_version),),
        300,
    ),
    Mutant(
        "former-self-settled",
        "work done for a subscription moves the cursor of a later one of its name",
        ((group, "require_outside", _any_generation),),
        300,
    ),
    Mutant(
        "failed-endpoint-passed",
        "a cursor moves although the endpoint failed",
        ((group, "after_outcome", _pass_failed_endpoint),),
    ),
    Mutant(
        "unreadable-passed",
        "a cursor moves over a file of the log that is missing",
        ((group, "after_outcome", _pass_unreadable),),
    ),
    Mutant(
        "unreadable-blamed",
        "a file of the log that is missing counts as a failure of the endpoint",
        ((group, "after_outcome", _blame_for_unreadable),),
    ),
    Mutant(
        "parked-deleted-first",
        "a parked row goes before it is sent",
        ((ParkedQueue, "run", _delete_before_post),),
    ),
    Mutant("claim-unfenced", "a stale owner may claim parked rows", ((MemoryParked, "claim", _claim_unfenced),)),
    Mutant(
        "claimed-while-tried",
        "parked rows of a subscription are claimed while others of it are under way",
        ((MemoryParked, "claim", _claim_anyway),),
    ),
    Mutant(
        "join-anywhere",
        "joining does not compare the cursors",
        ((group, "may_join", _join_anyway), (follower, "level_with", lambda mine, theirs: True)),
    ),
    Mutant("beyond-the-head", "the follower reads to the log's tail", ((follower, "next_span", _span_to_tail),), 120),
    Mutant(
        "whole-span-settled",
        "the follower settles a span it did not finish",
        ((follower, "stages", _settle_whole_span),),
    ),
    Mutant(
        "failure-not-settled",
        "a failure is settled as a move to where the cursor is",
        ((follower, "stages", _settle_failure_on_the_spot),),
    ),
    Mutant(
        "progress-before-delivery",
        "the follower keeps a batch that failed in its middle as done",
        ((follower, "stages", _keep_more_than_was_done),),
    ),
    Mutant(
        "progress-unparked",
        "what is kept of a batch passes events that were refused, and does not park them",
        ((follower, "stages", _keep_unparked),),
        120,
    ),
    Mutant(
        "left-beyond",
        "whoever leaves the group in the middle of a batch is taken to have got all of it",
        ((live, "group_outcome", _leave_beyond),),
        120,
    ),
    Mutant(
        "full-forgets-failures",
        "no room to park more wipes out the failures of an endpoint that nobody asked",
        ((group, "is_answered", lambda outcome: True),),
        300,
    ),
    Mutant(
        "handed-over-anywhere",
        "a fresh batch is delivered wherever the group stands",
        ((LiveGroup, "hand_over", _hand_over_anyway),),
    ),
    Mutant(
        "unfinished-is-done",
        "running out of time counts as done",
        ((live, "group_outcome", _unfinished_is_done),),
        120,
    ),
    Mutant(
        "dead-at-once",
        "a parked event is given up at its first retry",
        ((parked_retries, "next_attempt", lambda *_: None),),
    ),
    Mutant("expired-uncounted", "expired events are not counted", ((work, "_folded", _expired_uncounted),)),
    Mutant(
        "held-keys-forgotten",
        "with `ordered`, later events of a parked key are sent",
        ((MemoryParked, "held_keys", lambda self, *_, **__: {}),),
        120,
    ),
    Mutant(
        "held-rows-claimed",
        "with `ordered`, parked rows of one key overtake each other",
        ((MemoryParked, "_is_held", lambda self, row: False),),
        120,
    ),
    Mutant(
        "left-key-not-held",
        "with `ordered`, a parked change of a key holds back the new key alone",
        ((ParkedEvent, "held_keys", property(_new_key_alone)),),
        300,
    ),
)
