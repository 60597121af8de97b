"""What must hold of replays, looked at after every request and every write that landed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evermark.cluster.fence import DELIVER_LEASE, source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.model import SourcePartition, SubscriptionSpec
from evermark.delivery.replay.memory import MemoryReplays
from evermark.delivery.replay.plan import Replay, ReplayState, Request, Target, TargetState
from evermark.delivery.replay.timeslice import Mark, moment_at
from evermark.event import Op
from simulator.account import Account
from simulator.broken import require
from simulator.promises import gets, who
from simulator.scenario import STREAMS
from simulator.source import Row, SimLog
from simulator.truth import require_epoch

_READS = frozenset({"open", "newest", "one", "open_sources", "parked_now", "uncleared"})
_OVER = (ReplayState.DONE, ReplayState.CANCELLED, ReplayState.FAILED)


@dataclass(frozen=True)
class _Begun:
    """One target when its replay started: whose it is, and how often that had changed its mind."""

    one: str
    changes: int


def asks_for(request: Request, row: Row) -> bool:
    """Whether a replay is about an event. The only predicate that is asked for here names a key."""
    inside = request.since <= moment_at(row.made_us) <= request.until and row.place.source == request.source
    where = request.where is None or row.key == request.where.split("'")[1]
    return inside and where and (not request.streams or row.stream in request.streams)


class ReplayAccount:
    """Knows what each replay owes to whom. What it owes is all that was in its window when it started."""

    def __init__(
        self, account: Account, replays: MemoryReplays, leases: MemoryLeases, logs: Mapping[str, SimLog]
    ) -> None:
        self._account = account
        self._replays = replays
        self._leases = leases
        self._logs = logs
        self._begun: dict[tuple[str, str], _Begun] = {}
        self._marks: dict[tuple[str, str], Mark] = {}
        self._offered: set[tuple[str, str, str]] = set()
        self._offered_to: dict[tuple[str, str, SourcePartition, str, str], tuple[datetime, str]] = {}
        self._handled_to: dict[tuple[str, str, SourcePartition, str, str], tuple[datetime, str]] = {}
        self._states: dict[str, ReplayState] = {}
        self._asked: dict[str, frozenset[str]] = {}  # who was there when it was asked for

    def before_offer(self, spec: SubscriptionSpec, row: Row, replay: str) -> None:
        one, found = who(spec), self._replays.one(replay)
        said = f"{one} was sent {row.event_id} by {replay}"
        begun = self._begun.get((replay, spec.name))
        require(begun is not None and begun.one == one, f"{said}, which was not begun for it")
        require(row.op != Op.CONTROL, f"{said}: a control event")
        require(asks_for(found.request, row), f"{said}, which did not ask for it")
        require(row.batch <= found.heads.get(row.place.partition, 0), f"{said}: it came after its start")
        wishes = self._account.promises.wishes_from(one, begun.changes if begun else 0)
        require(any(gets(wish, row) for wish in wishes), f"{said}, and never asked for such")
        self._look_at_order(one, spec.name, row, replay, said)

    def _look_at_order(self, one: str, name: str, row: Row, replay: str, said: str) -> None:
        if (one, replay, row.event_id) in self._offered:
            return
        self._offered.add((one, replay, row.event_id))
        if len(self._account.promises.wishes_from(one, self._begun[replay, name].changes)) > 1:
            return  # what it did not want before it may be sent later than what followed
        at = (moment_at(row.made_us), row.event_id)
        for key in row.keys:
            last = self._offered_to.get((one, replay, *key))
            require(last is None or last < at or bool(row.about.session), f"{said} after {last} of its key")
            self._offered_to[one, replay, *key] = at

    def on_handled(self, spec: SubscriptionSpec, row: Row, replay: str) -> None:
        one = who(spec)
        self._account.replayed[one, replay].add(row.event_id)
        wishes = self._account.promises.wishes_from(one, self._begun[replay, spec.name].changes)
        if len(wishes) == 1 and wishes[0].ordered:
            at = (moment_at(row.made_us), row.event_id)
            for key in row.keys:
                last = self._handled_to.get((one, replay, *key))
                said = f"{one} (ordered): {row.event_id} by {replay} handled after {last} of its key"
                require(last is None or last < at, said)
                self._handled_to[one, replay, *key] = at

    def landed(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method in _READS:
            return
        lease = source_lease(args[0].source) if method == "register" else DELIVER_LEASE
        require_epoch(self._leases, lease, args[-1], f"replays.{method}")
        self._account.look(f"replays.{method}", args, kwargs)
        if method == "start":
            self._start(*args[:4])
        elif method in ("settle", "pass_by"):
            self._settled(args[0])
        elif method == "end_target":
            self._ended(*args[:3])
        every = self._replays.newest(1000)
        asked = Counter(r.request.control.event_id for r in every if r.request.control is not None)
        require(max(asked.values(), default=1) == 1, f"{asked.most_common(1)} has asked more than once")
        self._look_at_cancelled({replay.id for replay in every if replay.state is ReplayState.CANCELLED})
        for replay in every:
            was = self._states.get(replay.id)
            self._asked.setdefault(replay.id, frozenset(self._account.current.values()))
            require(was not in _OVER or was is replay.state, f"{replay.id} was {was}, and is {replay.state}")
            self._states[replay.id] = replay.state

    def _look_at_cancelled(self, cancelled: set[str]) -> None:
        left = [r.event.event_id for r in self._replays._tables.rows.values() if r.event.replay_id in cancelled]
        require(not left, f"{left[:3]} are parked for a replay that was cancelled")

    def _start(self, replay: str, heads: Mapping[int, int], _rows: int, targets: list[Target]) -> None:
        """It goes to all there are, or to the one that was named."""
        request, account = self._replays.one(replay).request, self._account
        for target in targets:
            one = account.by_generation.get(target.generation, "")
            self._begun[replay, target.subscription] = _Begun(one, account.promises.changes(one))
            self._marks[replay, target.subscription] = target.mark
        asked = request.control
        seen = asked is None or heads.get(asked.partition, 0) >= asked.batch
        require(seen, f"{replay} has started at {heads}, before what asked for it")
        begun = {target.subscription for target in targets}
        for name in {request.subscription} if request.subscription is not None else set(account.current):
            one = account.current.get(name or "", "")
            # Whoever is made, resumed or changed just then may be left out.
            late = one not in self._asked[replay] or one in account.ever_disabled or account.promises.changes(one) > 1
            apart = bool(request.streams) and not set(request.streams) & set(STREAMS if late else self._streams(one))
            apart = apart or self._is_deaf(name or "", request.source)
            require(name in begun or late or apart, f"{replay} was not begun for {name}")

    def _is_deaf(self, name: str, source: str) -> bool:
        bot = self._account._store.subscription(name).spec.bot if name in self._account.current else None
        return bot is not None and bot.source != source

    def _streams(self, one: str) -> tuple[str, ...]:
        return self._account.promises.asked(one).streams or STREAMS

    def _settled(self, begun: Target) -> None:
        """Nothing before the mark is left behind, and the mark never goes back."""
        replay = self._replays.one(begun.replay)
        target = next(t for t in replay.targets if t.subscription == begun.subscription)
        key = (begun.replay, begun.subscription)
        was, self._marks[key] = self._marks[key], target.mark
        require(_place(target.mark) >= _place(was), f"the mark of {key} went back from {was} to {target.mark}")
        self._require_done(replay, target, whole=target.state is TargetState.DONE)

    def _ended(self, replay: str, name: str, _reason: str) -> None:
        one, state = self._begun[replay, name].one, self._account.states().get(name)
        # One that was disabled when it was looked may have been resumed since.
        gone = self._account.current.get(name) != one or one in self._account.ever_disabled
        require(gone, f"{replay} was ended for {name}, which is {state}")

    def _require_done(self, replay: Replay, target: Target, *, whole: bool) -> None:
        name, begun = target.subscription, self._begun[replay.id, target.subscription]
        for row in self._owed(replay, begun):
            before = whole or (moment_at(row.made_us), row.event_id) <= _place(target.mark)
            if before and not self._account.is_handled(begun.one, row.event_id, replay.id):
                parked = self._account.queued.has(name, row.event_id, replay.id)
                given_up = (begun.one, row.event_id, replay.id) in self._account.queued.given_up
                require(parked or given_up, f"{replay.id} has passed {row.event_id} for {begun.one}: not handled")

    def _owed(self, replay: Replay, begun: _Begun) -> list[Row]:
        log, wishes = self._logs[replay.request.source], self._account.promises.wishes_from(begun.one, begun.changes)
        return [
            row
            for append in log.commits
            if append.batch <= replay.heads.get(append.partition, 0)
            for row in log.rows_of(append)
            if asks_for(replay.request, row) and all(gets(wish, row) for wish in wishes)
        ]

    def account_for(self, count: Callable[[str], None]) -> int:
        """At rest: each is over, and what is done reached its handlers; returns how many events did."""
        for replay in self._replays.newest(1000):
            require(replay.state in _OVER, f"{replay.id} is {replay.state}")
            count(f"replay {replay.state}")
            for target in replay.targets if replay.state is ReplayState.DONE else ():
                if target.state is TargetState.DONE:
                    self._require_done(replay, target, whole=True)
        return sum(map(len, self._account.replayed.values()))


def _place(mark: Mark) -> tuple[datetime, str]:
    return mark.time, mark.event_id or ""
