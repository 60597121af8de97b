"""Replays of one instance: its look-out and its workers, and the model of what Spark does for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evermark.delivery.base import Fate, Outcome
from evermark.delivery.replay.plan import Due, Replayed, ReplayWork, Round, folded, to_begin
from evermark.delivery.replay.replayer import Replayer
from evermark.delivery.replay.timeslice import Mark, moment_at
from evermark.delivery.work import DeliveryOptions
from evermark.errors import ConflictError, EvermarkError, StaleError
from evermark.testing.simulator.baton import Task
from evermark.testing.simulator.instance import Idle, Instance
from evermark.testing.simulator.posting import Job, SimDeliverer, concerns, matching
from evermark.testing.simulator.source import Row

ROUND_ROWS = 3
_AT_ONCE = 2


@dataclass
class SimReplays:
    """`ReplayDeliverer`: reads the files of a slice, in its order, and posts a few rows at a time."""

    deliverer: SimDeliverer

    def replay(self, work: ReplayWork, ahead: ReplayWork | None = None) -> Replayed:
        found = self._rows(work)[: work.rows_max]
        room, held, left_s = work.parked_room, set(work.held), work.budget_s
        rounds: list[Round] = []
        for first in range(0, len(found), ROUND_ROWS):
            some = found[first : first + ROUND_ROWS]
            mine = [row for row in some if concerns(work.bot, row)]
            clear = work.bot.clear if work.bot is not None else None
            pace_s = self.deliverer.takes_s(work.spec)
            job = Job(work.spec, mine, held, pace_s, clear, replay=work.replay, room=room)
            self.deliverer.work(job, DeliveryOptions(budget_s=left_s, grace_s=1.0), float("inf"))
            rounds.append(_round(job, mine, some))
            room, left_s, held = room - len(job.parked), max(0.0, left_s - job.took_s), job.held
            if job.took_s > 0:
                self.deliverer.sleep(job.took_s)
            if rounds[-1].outcome.fate is not Fate.DONE:
                break
        return folded(work, rounds, work.rows_max)

    def _rows(self, work: ReplayWork) -> list[Row]:
        contents = {path: rows for log in self.deliverer.logs.values() for path, rows in log.contents.items()}
        start = (work.slice.mark.time, work.slice.mark.event_id or "")
        rows = [
            row
            for path in work.slice.paths
            for row in matching(work.spec, contents[path])
            if start < _place(row) and moment_at(row.made_us) <= work.slice.to
            if work.heads is None or row.batch <= work.heads.get(row.place.partition, 0)
            if not work.streams or row.stream in work.streams
            if work.where is None or work.where == f"key = '{row.key}'"
        ]
        return sorted(rows, key=_place)


def _place(row: Row) -> tuple[Any, str]:
    return moment_at(row.made_us), row.event_id


def _round(job: Job, mine: list[Row], looked_at: list[Row]) -> Round:
    """The first rows that are done with; all that was looked at goes with the last of them that had to be sent."""
    finished = [row.event_id in job.accepted or row.event_id in job.parked for row in mine]
    count = finished.index(False) if False in finished else len(mine)
    whole = count == len(mine)
    passed, rows = (looked_at, len(looked_at)) if whole else (mine, count)
    fate = Fate.DONE if whole else job.fate or Fate.UNFINISHED
    parked = tuple(job.parked[row.event_id] for row in mine[:count] if row.event_id in job.parked)
    outcome = Outcome(job.spec.name, fate, len(job.accepted), parked, "" if whole else job.reason)
    return Round(outcome, rows, Mark(*_place(passed[rows - 1])) if rows else None)


@dataclass
class ReplayingRunner:
    """The loop of `evermark.app.replaying`: looks for what is due, works for a few at once, and tells the sources."""

    instance: Instance
    replayer: Replayer
    over: Callable[[], bool]
    busy: dict[str, Task] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        idle = Idle(self.instance.world, 0.5)
        while not self.over():
            moved = False
            try:
                moved = self._look()
                self._clear()
            except StaleError:
                return
            except EvermarkError:
                self.instance.world.count("replays wait")
            idle.wait(moved=moved)

    def _look(self) -> bool:
        busy = set(self.busy)
        _, due = self.replayer.look()
        for one in to_begin(due, busy, self.served, _AT_ONCE):
            name = one.target.subscription
            self.served[name] = self.instance.world.baton.now
            self.busy[name] = self.instance.spawn(f"replay {one.replay.id} {name}", self._worker(one))
        return bool(due)

    def _worker(self, one: Due) -> Callable[[], None]:
        def work() -> None:
            world = self.instance.world
            try:
                self.replayer.step(one, flowing=self.replayer.flowing())
            except ConflictError:
                world.count("replays look again")
            except EvermarkError:
                world.baton.sleep(0.5)
            finally:
                self.busy.pop(one.target.subscription, None)

        return work

    def _clear(self) -> None:
        """Tell the sources that what their rows asked for is over."""
        world, replays = self.instance.world, self.instance.replays
        for replay in replays.uncleared():
            request = replay.request
            if request.source in world.sources and request.asked_since is not None:
                for stream in request.streams:
                    source = self.instance.port(f"source {request.source}", world.sources[request.source], _nothing)
                    source.replayed(stream, request.asked_since, request.asked_until)
            replays.cleared(replay.id, self.replayer.epoch)


def _nothing(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The source's row is looked at when all is at rest."""
