"""Which events of an outbox wait to be taken, seen without its slot, which belongs to the reader.

An event's row tells the WAL position of its *insert*, and when its transaction began; where it was committed, only the
slot knows. So two things are looked at. Rows that were inserted at the log's end or after it were certainly committed
after it: they wait. Rows that were inserted before it, by a transaction that ended after it, cannot be told apart from
rows that were taken; but their commit moved the WAL on, and a reader passes all WAL within seconds, whether it holds
events or not (pace.py). WAL that no reader has passed for longer than that counts as waiting, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from evermark.errors import EvermarkError, UnreachableError
from evermark.sources.base import Untaken
from evermark.sources.marks import Marks
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.lsn import Position, lsn_text
from evermark.sources.postgres.outbox import filled
from evermark.sources.postgres.read.pace import IDLE_OFFER_S
from evermark.sources.postgres.survey import look, stranger, unfit
from evermark.sources.postgres.target import PostgresTarget

CONNECT_TIMEOUT_S = 3
_STATEMENT_TIMEOUT = "2s"
# A reader passes WAL that holds nothing of ours after IDLE_OFFER_S, and needs a moment to do it.
STANDS_STILL_S = 2 * IDLE_OFFER_S
NEWEST_MAX = 1000
_EXACT_S = 1.0
_STEPS_MAX = 40

# Through the index on (created_at, id). Times that are none to us (infinity) would stand in front of all others.
_NEWEST = """
select count(*), count(*) filter (where waits),
       extract(epoch from now() - min(created_at) filter (where waits and {mine}))::float8
from (select created_at, key, lsn >= %s::pg_lsn as waits from @schema@.events
      where created_at < now() + interval '1 hour'
      order by created_at desc, id desc limit %s) newest
"""
_OLDEST = """
select extract(epoch from now() - created_at)::float8, lsn >= %s::pg_lsn from @schema@.events
where created_at > '-infinity' and created_at >= {since} order by created_at, id limit 1
"""
# Whatever the server's statistics say: a look never reads a whole table.
_PLAN = {"enable_seqscan": "off", "enable_bitmapscan": "off", "max_parallel_workers_per_gather": "0"}


class OutboxLook:
    """Looks at the events of one slot. Has a connection of its own, and never waits long."""

    def __init__(self, target: PostgresTarget, clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._clock = clock
        self._link: Link | None = None
        self._marks = Marks()

    def untaken(self, after: str) -> Untaken | None:
        """What the slot will give from `after` on, if anything of it is ours, or may be for too long already."""
        kept = self._link is not None
        try:
            return self._untaken(Position.parse(after))
        except EvermarkError as error:
            self.close()  # after any error the next look begins with a new connection
            if kept and isinstance(error, UnreachableError):
                # A connection that was kept may have been cut at any time since: that says nothing of the server now.
                return self.untaken(after)
            raise

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _untaken(self, after: Position) -> Untaken | None:
        if self._link is None:
            self._link = connect(self._target.dsn, CONNECT_TIMEOUT_S, statement_timeout=_STATEMENT_TIMEOUT, **_PLAN)
        survey = look(self._link, self._target)
        trouble = unfit(survey) or stranger(survey, after)
        if trouble is not None:
            raise trouble
        now, at = self._clock(), str(after)
        upto = survey.incarnation.at(survey.flush_lsn)
        self._marks.note(upto, now)
        if survey.flush_lsn <= after.lsn:
            return None
        found: list[float] = []
        began_s = self._oldest_s(self._link, after)
        if began_s is not None:
            # A transaction may have begun long ago: nothing of it was there when the WAL was last seen not to go on.
            level_s = self._marks.level_s(at, now)
            found.append(began_s if level_s is None else min(began_s, level_s))
        still_s = self._marks.behind_s(at, now)
        if still_s > STANDS_STILL_S:
            found.append(still_s)
        return Untaken(upto, max(found)) if found else None

    def _oldest_s(self, link: Link, after: Position) -> float | None:
        """How long ago the transaction of the oldest row began that was certainly not taken; None: there is none."""
        query = filled(_NEWEST.format(mine=self._target.share_sql()), self._target)
        args = (lsn_text(after.lsn), NEWEST_MAX)
        seen, waiting, oldest_s = link.one(query, args, doing="looking for events to take")
        if oldest_s is None:
            return None
        if waiting < seen or seen < NEWEST_MAX:
            return float(max(0.0, oldest_s))
        return self._searched_s(link, after, max(0.0, oldest_s))

    def _searched_s(self, link: Link, after: Position, young_s: float) -> float:
        """Too many wait to look at each: times and WAL positions of rows grow together, so halves are looked at."""
        first = self._row_after(link, after, None)
        if first is None:
            return young_s
        old_s, waits = first
        if waits:
            return old_s
        for _ in range(_STEPS_MAX):
            if old_s - young_s <= _EXACT_S:
                break
            middle_s = (old_s + young_s) / 2
            row = self._row_after(link, after, middle_s)
            if row is None or row[1]:
                young_s = middle_s
            else:
                old_s = min(row[0], middle_s)
        return young_s

    def _row_after(self, link: Link, after: Position, age_s: float | None) -> tuple[float, bool] | None:
        since = "'-infinity'" if age_s is None else f"now() - make_interval(secs => {age_s:.3f})"
        query = filled(_OLDEST.format(since=since), self._target)
        found = link.row(query, (lsn_text(after.lsn),), doing="looking for the oldest event to take")
        return (float(found[0]), bool(found[1])) if found is not None else None
