"""Deliberate bugs, applied to the product's own code while a seed runs. A check that no mutant trips guards nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from unittest import mock

from evermark.checkpoints.base import Checkpoint
from evermark.cluster import memory as lease_memory
from evermark.cluster.base import Holder
from evermark.cluster.liveness import Held, IsGone
from evermark.delivery import backlog, follower, group, live, queue, work
from evermark.delivery.base import CursorVector, Fate, Group, Outcome, Place, SubscriptionState
from evermark.delivery.group import Standing, Step
from evermark.delivery.live import LiveGroup
from evermark.delivery.memory import MemoryDelivery
from evermark.delivery.queue import ParkedQueue
from evermark.delivery.sinks.base import Try
from evermark.delivery.work import Delivered, Span
from evermark.ingest import take
from evermark.ingest.resume import Resume
from evermark.ingest.take import Taken, Taker
from evermark.log import memory as log_memory
from evermark.log.base import Append, Tail
from evermark.log.head import Head
from evermark.log.memory import MemoryLog
from evermark.log.read import FileRange


@dataclass(frozen=True)
class Mutant:
    """`seeds_max`: it must be caught within this many seeds. A module is named where importing it would be a circle."""

    name: str
    what: str
    patches: tuple[tuple[object, str, object], ...]
    seeds_max: int = 60
    first: int = 0  # where to begin: a bug that is met once in a hundred seeds need not cost a hundred each time

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, attribute, replacement in self.patches:
                where = importlib.import_module(target) if isinstance(target, str) else target
                stack.enter_context(mock.patch.object(where, attribute, replacement))
            yield


# ingest


def _checkpoint_before_sync(self: Taker, taken: Taken) -> None:
    if taken.append.files:
        self._log.commit(taken.append)
    self._save(taken.partition, taken.end, taken.batch if taken.append.files else taken.batch - 1)
    version = self._log.sync()
    if taken.append.files:
        self._heads.move(self.name, taken.partition, Head(taken.batch, self.epoch, taken.end, version))


def _head_before_sync(self: Taker, taken: Taken) -> None:
    if taken.append.files:
        self._log.commit(taken.append)
        self._heads.move(self.name, taken.partition, Head(taken.batch, self.epoch, taken.end, taken.batch))
        self._log.sync()
    self._save(taken.partition, taken.end, taken.batch if taken.append.files else taken.batch - 1)


def _confirm_before_checkpoint(self: Taker, taken: Taken) -> None:
    if taken.append.files:
        self._log.commit(taken.append)
        version = self._log.sync()
        self._heads.move(self.name, taken.partition, Head(taken.batch, self.epoch, taken.end, version))
    self.confirm(taken.partition, taken.end)
    self._save(taken.partition, taken.end, taken.batch if taken.append.files else taken.batch - 1)


def _resume_without_tail(
    tail: Tail, head_batch: int, checkpoint: Checkpoint | None, logged_to: str | None, where: str
) -> Resume:
    return Resume(checkpoint.position if checkpoint else None, tail.batch)


def _resume_forgets_repeats(
    tail: Tail, head_batch: int, checkpoint: Checkpoint | None, logged_to: str | None, where: str
) -> Resume:
    if checkpoint is not None and checkpoint.batch == tail.batch:
        return Resume(checkpoint.position, tail.batch)
    if tail.batch == 0 or tail.end is not None:
        return Resume(tail.end, tail.batch)
    return Resume(checkpoint.position if checkpoint else logged_to, tail.batch, repeats_to=logged_to)


def _tail_unfenced(self: MemoryLog, partition: int, epoch: int) -> Tail:
    return self.tail(partition)


def _tail_not_compared(tail: tuple[int, int], append: Append, where: str) -> None:
    """The commit lands whatever the tail is."""


def _nothing_excluded(start: str, may_repeat_from: str, repeats_to: str | None) -> str | None:
    return None


def _same_epoch(held: Held | None, holder: Holder, now: datetime, is_gone: IsGone) -> int | None:
    if held is None:
        return 1
    owner = held.holder
    free = owner is None or owner == holder or held.expires_at <= now or is_gone(owner)
    return held.epoch if free else None


# delivery

_settle_group = MemoryDelivery.settle_group
_claim = MemoryDelivery.claim
_require_outside = group.require_outside
_after_outcome = group.after_outcome
_next_span = backlog.next_span
_folded = work._folded


def _settle_current_members(
    self: MemoryDelivery,
    place: Place,
    begun_at: int,
    done_to: int,
    members: frozenset[str],
    outcomes: Sequence[Outcome],
    now: datetime,
    epoch: int,
    *,
    version: int | None = None,
) -> Group:
    current = self.group().members
    named = {outcome.subscription for outcome in outcomes}
    everybody = [*outcomes, *(Outcome(name, Fate.DONE) for name in sorted(current - named))]
    return _settle_group(self, place, begun_at, done_to, current, everybody, now, epoch)


def _settle_any_version(self: MemoryDelivery, *given: Any, version: int | None = None) -> Group:
    return _settle_group(self, *given)


def _any_generation(name: str, standing: Standing | None, generation: int | None) -> Standing:
    return _require_outside(name, standing, None)


def _pass_failed_endpoint(standing: Standing, outcome: Outcome, *rest: Any) -> Step:
    failed = outcome.fate is Fate.ENDPOINT_FAILED
    return _after_outcome(standing, replace(outcome, fate=Fate.DONE) if failed else outcome, *rest)


def _delete_before_post(self: ParkedQueue) -> int:
    claimed = self.store.claim(self.clock(), queue.CLAIM_LIMIT, queue.CLAIM_LEASE_S, self.epoch)
    known = self.store.subscriptions()
    mine = [p for p in claimed if p.subscription in known]
    if mine:
        self.store.delivered([p.id for p in mine], self.epoch)
        tries = [Try(known[p.subscription].spec, p.event.event, p.attempt + 1) for p in mine]
        self.sink.attempt(tries, queue.ATTEMPT_DEADLINE_S)
    return len(mine)


def _claim_unfenced(self: MemoryDelivery, now: datetime, limit: int, lease_s: float, epoch: int) -> Any:
    held = self._leases._held[self._lease]
    return _claim(self, now, limit, lease_s, held.epoch) if held.holder else []


def _join_anyway(standing: Standing, cursors: CursorVector, of: Group) -> bool:
    return standing.state is SubscriptionState.BEHIND


def _span_to_tail(place: Place, after: int, head: int, files: Sequence[FileRange], rows_max: int) -> Span | None:
    tail = max((f.batch_max for f in files if f.partition_min == f.partition_max == place.partition), default=head)
    return _next_span(place, after, max(head, tail), files, rows_max)


def _settle_whole_span(span: Span, result: Delivered) -> list[tuple[int, Outcome]]:
    return [(span.to, replace(result.outcome, fate=Fate.DONE))]


def _settle_failure_on_the_spot(span: Span, result: Delivered) -> list[tuple[int, Outcome]]:
    return [(result.done_to, result.outcome)]


def _hand_over_anyway(self: LiveGroup, span: Span) -> bool:
    with self.lock:
        at = self._store.group().cursors.get(span.place)
        return at is not None and self.work(replace(span, after=at), budget_s=None)


def _unfinished_is_done(result: Delivered) -> Outcome:
    unfinished = result.outcome.fate is Fate.UNFINISHED
    return replace(result.outcome, fate=Fate.DONE) if unfinished else result.outcome


def _expired_uncounted(name: str, span: Span, outcomes: Mapping[int, Outcome]) -> Delivered:
    result = _folded(name, span, outcomes)
    return replace(result, outcome=replace(result.outcome, expired=0))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "checkpoint-before-sync",
        "a batch is checkpointed before it is durable",
        ((Taker, "take", _checkpoint_before_sync),),
    ),
    Mutant("head-before-sync", "the head moves before the batch is durable", ((Taker, "take", _head_before_sync),)),
    Mutant(
        "confirm-before-checkpoint",
        "the source may forget what no checkpoint has passed",
        ((Taker, "take", _confirm_before_checkpoint),),
    ),
    Mutant("resume-without-tail", "the log is not asked where to resume", ((take, "resume", _resume_without_tail),)),
    Mutant(
        "resume-forgets-repeats",
        "a second begin forgets that the log is ahead of the checkpoint",
        ((take, "resume", _resume_forgets_repeats),),
        200,
    ),
    Mutant("fence-skipped", "a new owner does not raise the log's epoch", ((MemoryLog, "fence", _tail_unfenced),), 120),
    Mutant(
        "tail-not-compared",
        "a commit lands whatever the tail is",
        ((log_memory, "require_tail", _tail_not_compared),),
        120,
    ),
    Mutant(
        "repeats-logged",
        "ids that the log holds are not excluded",
        (("evermark.testing.simulator.instance", "excluded_from", _nothing_excluded),),
    ),
    Mutant("epoch-kept", "a lease changes hands without a new epoch", ((lease_memory, "epoch_for", _same_epoch),)),
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
        1000,
    ),
    Mutant(
        "failed-endpoint-passed",
        "a cursor moves although the endpoint failed",
        ((group, "after_outcome", _pass_failed_endpoint),),
    ),
    Mutant(
        "parked-deleted-first",
        "a parked row goes before it is sent",
        ((ParkedQueue, "run", _delete_before_post),),
    ),
    Mutant("claim-unfenced", "a stale owner may claim parked rows", ((MemoryDelivery, "claim", _claim_unfenced),)),
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
        "member-at-zero",
        "a member, which has no cursors, is sent the whole log",
        ((follower, "_comparable", lambda mine, theirs: True),),
        300,
        2000,
    ),
    Mutant(
        "dead-at-once", "a parked event is given up at its first retry", ((queue, "next_attempt", lambda *_: None),)
    ),
    Mutant("expired-uncounted", "expired events are not counted", ((work, "_folded", _expired_uncounted),)),
    Mutant(
        "held-keys-forgotten",
        "with `ordered`, later events of a parked key are sent",
        ((MemoryDelivery, "held_keys", lambda self: {}),),
        120,
    ),
    Mutant(
        "held-rows-claimed",
        "with `ordered`, parked rows of one key overtake each other",
        ((MemoryDelivery, "_is_held", lambda self, row: False),),
        120,
    ),
)

BY_NAME: dict[str, Mutant] = {mutant.name: mutant for mutant in MUTANTS}
