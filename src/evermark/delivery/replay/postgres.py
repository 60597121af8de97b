"""Replays in State. `replay.plan` decides; here it is done, fenced."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from evermark.cluster.fence import DELIVER_LEASE, fenced, source_lease
from evermark.delivery.decide.group import shortened
from evermark.delivery.replay import plan
from evermark.delivery.replay import queries as sql
from evermark.delivery.replay.base import (
    CLEARED_AT_ONCE_MAX,
    LIST_MAX,
    moved,
    new_replay_id,
    not_waiting,
    require_begun,
    unknown,
)
from evermark.delivery.replay.plan import AskedBy, Control, Replay, Replayed, ReplayState, Request, Target, TargetState
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.delivery.store.postgres import lock_record
from evermark.delivery.store.postgres_parked import park, storable
from evermark.state import counters
from evermark.state.connection import Connection, State


class PostgresReplays:
    """A `ReplayStore`."""

    def __init__(self, state: State) -> None:
        self._state = state

    def _fenced(self, epoch: int) -> AbstractContextManager[Connection]:
        return fenced(self._state, DELIVER_LEASE, epoch)

    def register(self, request: Request, epoch: int, *, partition: int = 0) -> bool:
        source = request.source
        with fenced(self._state, source_lease(source), epoch, source_lease(source, partition)) as conn:
            return conn.execute(sql.REGISTER, _given(request, new_replay_id())).rowcount == 1

    def request(self, request: Request, epoch: int) -> str:
        made = new_replay_id()
        with self._fenced(epoch) as conn:
            conn.execute(sql.REGISTER, _given(request, made))
        return made

    def cancel(self, replay: str, epoch: int) -> bool:
        with self._fenced(epoch) as conn:
            if _lock(conn, replay) not in (ReplayState.WAITING, ReplayState.RUNNING):
                return False
            _end(conn, replay, ReplayState.CANCELLED, "cancelled by a person")
            counters.count(conn, "dropped", dict(conn.execute(sql.DROP_PARKED, (replay,)).fetchall()))
        return True

    def open(self) -> list[Replay]:
        return self._read(sql.OPEN)

    def newest(self, limit: int) -> list[Replay]:
        return self._read(sql.NEWEST, max(0, min(limit, LIST_MAX)))

    def one(self, replay: str) -> Replay:
        found = self._read(sql.ONE, replay)
        if not found:
            raise unknown(replay)
        return found[0]

    def open_sources(self) -> set[str]:
        with self._state.connection() as conn:
            return {row[0] for row in conn.execute(sql.OPEN_SOURCES)}

    def start(self, replay: str, heads: Mapping[int, int], rows: int, targets: Sequence[Target], epoch: int) -> None:
        with self._fenced(epoch) as conn:
            if _lock(conn, replay) is not ReplayState.WAITING:
                raise not_waiting(replay)
            fixed = json.dumps({str(partition): batch for partition, batch in heads.items()})
            conn.execute(sql.START, {"id": replay, "heads": fixed, "log_rows": rows})
            for target in targets:
                conn.execute(sql.ADD_TARGET, _target_row(target))

    def note_waiting(self, replay: str, reason: str, epoch: int) -> None:
        with self._fenced(epoch) as conn:
            conn.execute(sql.NOTE_WAITING, (storable(shortened(reason)), replay))

    def settle(self, begun: Target, piece: TimeSlice, step: Replayed, pace: float, now: datetime, epoch: int) -> Target:
        with self._fenced(epoch) as conn:
            record = lock_record(conn, begun.subscription)
            target = _locked(conn, begun)
            if record is None or record.generation != target.generation:
                raise moved(begun)
            parked_max, parked = record.parked_max, step.outcome.parked
            parked_now = _parked_now(conn, begun.subscription) if parked else 0
            if parked and parked_now + len(parked) > parked_max:
                after = plan.without_room(target, now, random.random, parked_max)
            else:
                after = plan.after_step(target, piece, step, pace, now, random.random, plan.SLICES)
                park(conn, {begun.subscription: parked}, now, random.random)
            conn.execute(sql.SET_TARGET, _target_row(after))
        return after

    def pass_by(self, begun: Target, epoch: int) -> Target:
        with self._fenced(epoch) as conn:
            after = plan.passed(_locked(conn, begun))
            conn.execute(sql.SET_TARGET, _target_row(after))
        return after

    def note_stuck(self, target: Target, since: datetime, epoch: int) -> None:
        with self._fenced(epoch) as conn:
            conn.execute(sql.STUCK, (since, target.replay, target.subscription))

    def end_target(self, replay: str, subscription: str, reason: str, epoch: int) -> None:
        with self._fenced(epoch) as conn:
            conn.execute(sql.END_TARGETS, (shortened(reason), replay, subscription, subscription))

    def end(self, replay: str, state: ReplayState, reason: str, epoch: int) -> None:
        with self._fenced(epoch) as conn:
            if _lock(conn, replay) in (ReplayState.WAITING, ReplayState.RUNNING):
                _end(conn, replay, state, storable(shortened(reason)))

    def finish(self, replay: str, epoch: int) -> bool:
        with self._fenced(epoch) as conn:
            return conn.execute(sql.FINISH, (replay,)).rowcount == 1

    def parked_now(self, subscription: str) -> int:
        with self._state.connection() as conn:
            return _parked_now(conn, subscription)

    def uncleared(self) -> list[Replay]:
        return self._read(sql.UNCLEARED, CLEARED_AT_ONCE_MAX)

    def cleared(self, replay: str, epoch: int) -> None:
        with self._fenced(epoch) as conn:
            conn.execute(sql.CLEARED, (replay,))

    def _read(self, query: str, *given: int | str) -> list[Replay]:
        """Replays and their targets, at one moment."""
        with self._state.transaction() as conn:
            conn.execute("set transaction isolation level repeatable read, read only")
            rows = conn.execute(query, given).fetchall()
            targets: dict[str, list[Target]] = defaultdict(list)
            for row in conn.execute(sql.TARGETS, ([row[0] for row in rows],)) if rows else []:
                targets[row[0]].append(_target(row))
        return [_replay(row, tuple(targets[row[0]])) for row in rows]


def _lock(conn: Connection, replay: str) -> ReplayState:
    row = conn.execute(sql.STATE_LOCKED, (replay,)).fetchone()
    if row is None:
        raise unknown(replay)
    return ReplayState(row[0])


def _end(conn: Connection, replay: str, state: ReplayState, reason: str) -> None:
    conn.execute(sql.END, (state, reason, replay))
    conn.execute(sql.END_TARGETS, (reason, replay, None, None))


def _locked(conn: Connection, begun: Target) -> Target:
    row = conn.execute(sql.TARGET_LOCKED, (begun.replay, begun.subscription)).fetchone()
    return require_begun(begun, _target(row) if row is not None else None)


def _parked_now(conn: Connection, subscription: str) -> int:
    row = conn.execute(sql.PARKED_OF_REPLAYS, (subscription,)).fetchone()
    return int(row[0]) if row is not None else 0


def _given(request: Request, made: str) -> dict[str, Any]:
    control = request.control
    return {
        **vars(request),
        "id": made,
        "control_event_id": storable(control.event_id) if control else None,
        "asked_partition": control.partition if control else None,
        "asked_batch": control.batch if control else None,
        "streams": [storable(stream) for stream in request.streams],
        "where_sql": storable(request.where) if request.where else None,
        "cleared": control is None,
    }


def _target_row(target: Target) -> dict[str, Any]:
    return {
        **vars(target),
        "state": target.state.value,
        "reason": storable(target.reason),
        "at_time": target.mark.time,
        "at_id": target.mark.event_id,
    }


def _target(row: Sequence[Any]) -> Target:
    replay, subscription, generation, state, at_time, at_id, *rest = row
    return Target(replay, subscription, generation, TargetState(state), Mark(at_time, at_id), *rest)


def _replay(row: Sequence[Any], targets: tuple[Target, ...]) -> Replay:
    (made, nth, asked_by, source, since, until, streams, where, subscription, rate), asked = row[:10], row[10:12]
    (control_id, partition, batch), (state, reason, heads, log_rows, created_at, changed_at) = row[12:15], row[15:]
    stream = streams[0] if streams else ""
    control = Control(control_id, partition, batch, stream, None, None) if control_id is not None else None
    by, wanted = AskedBy(asked_by), (tuple(streams), where, subscription, rate)
    request = Request(by, source, since, until, *wanted, control, *asked)
    fixed = {int(partition): int(batch) for partition, batch in (heads or {}).items()}
    return Replay(made, nth, request, ReplayState(state), reason, fixed, log_rows, created_at, changed_at, targets)
