"""The model of what Spark does for replays."""

from __future__ import annotations

from typing import Any

from evermark.delivery.model import Fate, Outcome
from evermark.delivery.replay.plan import Replayed, ReplayWork, Round, folded
from evermark.delivery.replay.timeslice import Mark, moment_at
from evermark.delivery.work import DeliveryOptions
from evermark.log.opened import lost
from simulator.posting import Job, SimDeliverer, concerns, matching
from simulator.source import Row

ROUND_ROWS = 3


class SimBothDeliverer(SimDeliverer):
    """A `ReplayDeliverer`, too: reads the files of a slice, in its order, and posts a few rows at a time."""

    def replay(self, work: ReplayWork, ahead: ReplayWork | None = None) -> Replayed:
        self.begin()
        if gone := [path for path in work.slice.paths if self.is_missing(path)]:
            raise lost(gone[0])
        found = self._window(work)[: work.rows_max]
        room, held, left_s = work.parked_room, set(work.held), work.budget_s
        rounds: list[Round] = []
        for first in range(0, len(found), ROUND_ROWS):
            some = found[first : first + ROUND_ROWS]
            mine = [row for row in some if concerns(work.bot, row)]
            clear = work.bot.clear if work.bot is not None else None
            pace_s = self.takes_s(work.spec)
            job = Job(work.spec, mine, held, pace_s, clear, replay=work.replay, room=room)
            self.work(job, DeliveryOptions(budget_s=left_s, grace_s=1.0), float("inf"))
            rounds.append(_round(job, mine, some))
            room, left_s, held = room - len(job.parked), max(0.0, left_s - job.took_s), job.held
            if job.took_s > 0:
                self.sleep(job.took_s)
            if rounds[-1].outcome.fate is not Fate.DONE:
                break
        return folded(work, rounds, work.rows_max)

    def _window(self, work: ReplayWork) -> list[Row]:
        contents = {path: rows for log in self.logs.values() for path, rows in log.contents.items()}
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
