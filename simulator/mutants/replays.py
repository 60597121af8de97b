"""Bugs of replays. They are met in worlds where windows of the log are asked for again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from evermark import predicate
from evermark.cluster.fence import source_lease
from evermark.delivery.model import Fate, Outcome, Subscription
from evermark.delivery.replay import owner
from evermark.delivery.replay import plan as replay
from evermark.delivery.replay.memory import MemoryReplays
from evermark.delivery.replay.plan import Due, Replayed, ReplayWork, Request, Round, Target
from evermark.delivery.replay.timeslice import TimeSlice
from evermark.delivery.run import parked_retries
from evermark.delivery.store.memory_parked import MemoryParked
from evermark.ingest import batch_taker
from simulator.mutants.mutant import Mutant

_after_step = replay.after_step
_settle = MemoryReplays.settle
_cancel = MemoryReplays.cancel
_folded = replay.folded
_endpoint_outcomes = parked_retries.endpoint_outcomes
_work_of = replay.work_of
_held_keys = MemoryParked.held_keys


def _own_ids(event_ids: Sequence[str], replay_id: str | None = None) -> list[str]:
    return list(event_ids)


def _mark_moves_anyway(target: Target, piece: TimeSlice, result: Replayed, *rest: Any) -> Target:
    return _after_step(target, piece, replace(result, mark=piece.end), *rest)


def _settles_anywhere(self: MemoryReplays, begun: Target, *rest: Any) -> Target:
    now = self._targets.get((begun.replay, begun.subscription), begun)
    return _settle(self, replace(begun, mark=now.mark), *rest)


def _parks_nothing(self: MemoryReplays, begun: Target, piece: TimeSlice, result: Replayed, *rest: Any) -> Target:
    outcome = replace(result.outcome, parked=())
    return _settle(self, begun, piece, replace(result, outcome=outcome), *rest)


def _limit_is_the_end(work: ReplayWork, some: Sequence[Round], limit: int) -> Replayed:
    return _folded(work, some, limit + 1)


def _all_blamed(subscription: Subscription, tried: Sequence[parked_retries.Tried]) -> list[Outcome]:
    live = [(replace(parked, event=replace(parked.event, replay_id="")), answer) for parked, answer in tried]
    return _endpoint_outcomes(subscription, live)


def _reads_beyond(one: Due, *rest: Any, **named: Any) -> ReplayWork:
    return replace(_work_of(one, *rest, **named), heads=None)


def _replays_hold_nothing(self: MemoryParked, *rest: Any, replay_id: str = "") -> Any:
    return {} if replay_id else _held_keys(self, *rest)


def _busy_as_of_now(due: Sequence[Due], busy: Collection[str], served: Mapping[str, float], at_once: int) -> list[Due]:
    return list(due)[:at_once]


def _asks_each_time(self: MemoryReplays, request: Request, epoch: int, *, partition: int = 0) -> bool:
    with self._tables.fenced(epoch, source_lease(request.source)):
        self._add(request)
    return True


def _over_when_suspended(target: Target, subscriptions: Mapping[str, Subscription], _now: datetime, **_: object) -> str:
    found = subscriptions.get(target.subscription)
    return "" if found is not None and found.failures == 0 else "the subscription is unwell"


def _seen_to_the_tail(tail: Any, head: Any, checkpoint: Any) -> int:
    return int(tail.batch)


def _cancels_without_dropping(self: MemoryReplays, asked: str, epoch: int) -> bool:
    rows = dict(self._tables.rows)
    done = _cancel(self, asked, epoch)
    self._tables.rows.update(rows)
    return done


def _failure_ends_window(target: Target, piece: TimeSlice, result: Replayed, *rest: Any) -> Target:
    failed = result.outcome.fate is Fate.ENDPOINT_FAILED
    done = replace(result, outcome=replace(result.outcome, fate=Fate.DONE), mark=piece.end) if failed else result
    return _after_step(target, piece, done, *rest)


_RECEIVER = "simulator.receiver"

REPLAYS: tuple[Mutant, ...] = (
    Mutant(
        "replayed-under-own-ids", "a replay has the ids of first deliveries", ((_RECEIVER, "delivery_ids", _own_ids),)
    ),
    Mutant(
        "mark-moves-anyway",
        "a step passes its slice whatever became of it",
        ((replay, "after_step", _mark_moves_anyway),),
    ),
    Mutant(
        "failed-slice-passed",
        "a slice whose receiver failed is passed",
        ((replay, "after_step", _failure_ends_window),),
    ),
    Mutant(
        "refused-and-passed", "what a replay was refused is not parked", ((MemoryReplays, "settle", _parks_nothing),)
    ),
    Mutant(
        "limit-is-the-end",
        "a slice of which only a part was looked for is passed whole",
        (("simulator.replaying", "folded", _limit_is_the_end),),
    ),
    Mutant(
        "replay-beyond-its-start",
        "what came after its start is replayed, too",
        ((replay, "work_of", _reads_beyond),),
    ),
    Mutant(
        "replay-overtaken",
        "with `ordered`, a replay sends later events of a key it has parked",
        ((MemoryParked, "held_keys", _replays_hold_nothing),),
    ),
    Mutant(
        "replay-settled-twice",
        "a step is settled wherever its target stands by then",
        (
            (MemoryReplays, "settle", _settles_anywhere),
            (owner, "to_begin", _busy_as_of_now),
        ),
    ),
    Mutant(
        "worked-for-by-two",
        "whoever was worked for when it was looked is worked for by what was seen then",
        ((owner, "to_begin", _busy_as_of_now),),
    ),
    Mutant(
        "replay-blames-live",
        "failures of a replay's retries count as the subscription's",
        ((parked_retries, "endpoint_outcomes", _all_blamed),),
    ),
    Mutant("control-sent", "control events are delivered", ((predicate, "UNDELIVERED_OPS", frozenset()),)),
    Mutant(
        "control-missed",
        "after a crash nobody looks for control events",
        ((batch_taker, "controls_seen_to", _seen_to_the_tail),),
    ),
    Mutant(
        "control-asks-again",
        "a control event that is found again asks again",
        ((MemoryReplays, "register", _asks_each_time),),
    ),
    Mutant(
        "ended-when-unwell",
        "a replay ends with the first failure of its subscription",
        ((replay, "is_over_for", _over_when_suspended),),
    ),
    Mutant(
        "cancelled-but-parked",
        "what a cancelled replay has parked stays",
        ((MemoryReplays, "cancel", _cancels_without_dropping),),
    ),
)
