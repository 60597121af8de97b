"""Replays in this process: for tests and simulations. Shipped, and held to the same contract as replays in State."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from evermark.cluster.fence import source_lease
from evermark.delivery.decide.group import shortened
from evermark.delivery.replay import plan
from evermark.delivery.replay.base import (
    CLEARED_AT_ONCE_MAX,
    LIST_MAX,
    moved,
    new_replay_id,
    not_waiting,
    require_begun,
    unknown,
)
from evermark.delivery.replay.plan import (
    SLICES,
    Replay,
    Replayed,
    ReplayState,
    Request,
    SliceLimits,
    Target,
    TargetState,
)
from evermark.delivery.replay.timeslice import TimeSlice
from evermark.delivery.store.memory import MemoryDelivery

_OPEN = (ReplayState.WAITING, ReplayState.RUNNING)


class MemoryReplays:
    """A `ReplayStore` beside the delivery store it parks in."""

    def __init__(
        self,
        delivery: MemoryDelivery,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        new_id: Callable[[], str] = new_replay_id,
        slices: SliceLimits = SLICES,
    ) -> None:
        self._tables, self._parked, self._jitter = delivery.tables, delivery.parked, delivery.jitter
        self._clock = clock
        self._new_id = new_id
        self._slices = slices
        self._replays: dict[str, Replay] = {}  # in the order of the requests
        self._targets: dict[tuple[str, str], Target] = {}
        self._cleared: set[str] = set()
        delivery.on_try_now = self._try_now

    def _try_now(self, subscription: str) -> None:
        for at, target in self._targets.items():
            if target.subscription == subscription and target.state is TargetState.RUNNING:
                self._targets[at] = replace(target, failures=0, next_attempt_at=None)

    def register(self, request: Request, epoch: int, *, partition: int = 0) -> bool:
        source = request.source
        with self._tables.fenced(epoch, source_lease(source), source_lease(source, partition)):
            known = {r.request.control.event_id for r in self._replays.values() if r.request.control is not None}
            if request.control is not None and request.control.event_id in known:
                return False
            self._add(request)
            return True

    def request(self, request: Request, epoch: int) -> str:
        with self._tables.fenced(epoch):
            return self._add(request)

    def cancel(self, replay: str, epoch: int) -> bool:
        with self._tables.fenced(epoch):
            if self._found(replay).state not in _OPEN:
                return False
            self._end(replay, ReplayState.CANCELLED, "cancelled by a person")
            self._tables.delete([r for r in self._tables.rows.values() if r.event.replay_id == replay], "dropped")
            return True

    def open(self) -> list[Replay]:
        return [replay for replay in self._read() if replay.state in _OPEN]

    def newest(self, limit: int) -> list[Replay]:
        return self._read()[::-1][: max(0, min(limit, LIST_MAX))]

    def one(self, replay: str) -> Replay:
        with self._tables.lock:
            return self._whole(self._found(replay))

    def open_sources(self) -> set[str]:
        return {replay.request.source for replay in self._read() if replay.state in _OPEN}

    def start(self, replay: str, heads: Mapping[int, int], rows: int, targets: Sequence[Target], epoch: int) -> None:
        with self._tables.fenced(epoch):
            found = self._found(replay)
            if found.state is not ReplayState.WAITING:
                raise not_waiting(replay)
            self._set(replace(found, state=ReplayState.RUNNING, reason="", heads=dict(heads), log_rows=rows))
            self._targets.update({(replay, target.subscription): target for target in targets})

    def note_waiting(self, replay: str, reason: str, epoch: int) -> None:
        with self._tables.fenced(epoch):
            found = self._found(replay)
            if found.state is ReplayState.WAITING:
                self._set(replace(found, reason=shortened(reason)))

    def settle(self, begun: Target, piece: TimeSlice, step: Replayed, pace: float, now: datetime, epoch: int) -> Target:
        with self._tables.fenced(epoch):
            known = self._tables.known.get(begun.subscription)
            target = self._begun(begun)
            if known is None or known[1].generation != target.generation:
                raise moved(begun)
            parked, parked_max = step.outcome.parked, known[1].parked_max
            if parked and self.parked_now(begun.subscription) + len(parked) > parked_max:
                return self._set_target(plan.without_room(target, now, self._jitter, parked_max))
            after = plan.after_step(target, piece, step, pace, now, self._jitter, self._slices)
            self._parked.park(begun.subscription, parked, now)
            return self._set_target(after)

    def pass_by(self, begun: Target, epoch: int) -> Target:
        with self._tables.fenced(epoch):
            return self._set_target(plan.passed(self._begun(begun)))

    def note_stuck(self, target: Target, since: datetime, epoch: int) -> None:
        with self._tables.fenced(epoch):
            found = self._targets.get((target.replay, target.subscription))
            if found is not None and found.state is TargetState.RUNNING and found.stuck_since is None:
                self._set_target(replace(found, stuck_since=since))

    def end_target(self, replay: str, subscription: str, reason: str, epoch: int) -> None:
        with self._tables.fenced(epoch):
            self._end_targets(replay, shortened(reason), subscription)

    def end(self, replay: str, state: ReplayState, reason: str, epoch: int) -> None:
        with self._tables.fenced(epoch):
            if self._found(replay).state in _OPEN:
                self._end(replay, state, shortened(reason))

    def finish(self, replay: str, epoch: int) -> bool:
        with self._tables.fenced(epoch):
            found = self._replays.get(replay)
            runs = any(t.replay == replay and t.state is TargetState.RUNNING for t in self._targets.values())
            if found is None or found.state is not ReplayState.RUNNING or runs:
                return False
            self._set(replace(found, state=ReplayState.DONE))
            return True

    def parked_now(self, subscription: str) -> int:
        with self._tables.lock:
            rows = self._tables.rows.values()
            return sum(row.subscription == subscription and bool(row.event.replay_id) for row in rows)

    def uncleared(self) -> list[Replay]:
        """A later request for the same window keeps the source's record until it is over, too."""
        every = self._read()
        shown = {_shown(replay) for replay in every if replay.state in _OPEN}
        ended = [r for r in every if r.state not in _OPEN and r.id not in self._cleared and _shown(r) not in shown]
        return ended[:CLEARED_AT_ONCE_MAX]

    def cleared(self, replay: str, epoch: int) -> None:
        with self._tables.fenced(epoch):
            self._cleared.add(replay)

    def _add(self, request: Request) -> str:
        made, now = self._new_id(), self._clock()
        # The payload of a control event is not kept: the request was made of it.
        control = replace(request.control, event_time=None, payload=None) if request.control is not None else None
        asked, nth = replace(request, control=control), len(self._replays) + 1
        self._replays[made] = Replay(made, nth, asked, ReplayState.WAITING, created_at=now, changed_at=now)
        if control is None:
            self._cleared.add(made)
        return made

    def _found(self, replay: str) -> Replay:
        if replay not in self._replays:
            raise unknown(replay)
        return self._replays[replay]

    def _begun(self, begun: Target) -> Target:
        running = self._replays[begun.replay].state is ReplayState.RUNNING
        return require_begun(begun, self._targets.get((begun.replay, begun.subscription)) if running else None)

    def _set(self, replay: Replay) -> None:
        self._replays[replay.id] = replace(replay, changed_at=self._clock())

    def _set_target(self, target: Target) -> Target:
        self._targets[target.replay, target.subscription] = target
        return target

    def _end(self, replay: str, state: ReplayState, reason: str) -> None:
        self._set(replace(self._found(replay), state=state, reason=reason))
        self._end_targets(replay, reason)

    def _end_targets(self, replay: str, reason: str, subscription: str | None = None) -> None:
        for target in list(self._targets.values()):
            mine = target.replay == replay and subscription in (None, target.subscription)
            if mine and target.state is TargetState.RUNNING:
                self._set_target(replace(target, state=TargetState.CANCELLED, reason=reason, next_attempt_at=None))

    def _read(self) -> list[Replay]:
        with self._tables.lock:
            return [self._whole(replay) for replay in self._replays.values()]

    def _whole(self, replay: Replay) -> Replay:
        mine = [target for target in self._targets.values() if target.replay == replay.id]
        return replace(replay, targets=tuple(sorted(mine, key=lambda target: target.subscription)))


def _shown(replay: Replay) -> tuple[object, ...]:
    request = replay.request
    return request.source, request.streams, request.asked_since, request.asked_until
