"""Recoveries in State, fenced by the lease of their partition."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from evermark.cluster.fence import fenced, source_lease
from evermark.errors import ConflictError
from evermark.ingest.repair.base import KEPT_MAX, TEXT_MAX, Choice, Recovery, Step, chosen_otherwise
from evermark.state.connection import Connection, State

_COLUMNS = (
    "id, source, partition, choice, asked_by = 'person', reason, left_at, step, position, tries, taken, error,"
    " opened_at, changed_at"
)
_LISTED = f"select {_COLUMNS} from recoveries where source = %s order by id desc limit {KEPT_MAX}"
_CURRENT = f"select {_COLUMNS} from recoveries where source = %s and partition = %s and step in ('opened', 'closed')"
_KNOWN = "select source, bool_or(step in ('opened', 'closed')) from recoveries group by source"
# A person's choice replaces the choice under way, unless the gap is closed already.
_SET_CHOICE = """
update recoveries set choice = %s, asked_by = 'person', reason = %s, tries = 0, changed_at = clock_timestamp()
where source = %s and partition = %s and step = 'opened'
"""
# The last gap of each partition that tail clients must hear of: given up, let be by a person, or large. A large
# one is told once it is closed: told by its number before, it could not be told again if it fails then. Beside it what
# a person took out of the log, which may come while a gap with a lower id is open: so the number is a sum.
_TO_TELL = """
with gaps as (
    select distinct on (source, partition) source, partition, id, step, choice, reason, error, changed_at
    from recoveries
    where step = 'failed' or (step in ('closed', 'done') and (choice = 'skip' or large))
    order by source, partition, id desc
)
select source, partition, coalesce(id, 0) + coalesce(times, 0), step, choice, reason, error,
    case when at > coalesce(changed_at, '-infinity') then said end
from gaps full join given_up using (source, partition)
"""
# Partitions without a head have nothing in the log.
_GIVE_UP = """
insert into given_up (source, partition, times, said)
select source, partition, 1, %(said)s from log_head
where source = %(source)s
    and exists (
        select from unnest(%(first)s::integer[], %(last)s::integer[]) as r (first, last)
        where partition between r.first and r.last
    )
on conflict (source, partition) do update
set times = given_up.times + 1, said = excluded.said, at = clock_timestamp()
"""
_SET_LARGE = "update recoveries set large = true where id = %s and not large"
_OPEN = """
insert into recoveries (source, partition, choice, asked_by, reason, left_at, step)
values (%s, %s, %s, %s, %s, %s, 'opened') on conflict do nothing
"""
_MOVE = """
update recoveries
set step = %s, error = %s, tries = tries + %s, changed_at = clock_timestamp()
where id = %s and step in ('opened', 'closed')
"""
_TAKING = """
update recoveries
set taken = taken + case when taking_batch <= %(logged)s then taking_rows else 0 end,
    taking_batch = %(logged)s + 1, taking_rows = %(rows)s
where id = %(id)s and step in ('opened', 'closed')
"""
_CLOSE = """
update recoveries
set step = 'closed', position = %s, taken = taken + taking_rows, taking_rows = 0, error = '',
    changed_at = clock_timestamp()
where id = %s and choice = %s and step in ('opened', 'closed')
"""


class Recoveries:
    """A `RecoveryStore`."""

    def __init__(self, state: State) -> None:
        self._state = state

    def current(self, source: str, partition: int) -> Recovery | None:
        with self._state.connection() as conn:
            row = conn.execute(_CURRENT, (source, partition)).fetchone()
        return _recovery(row) if row else None

    def past(self, source: str) -> list[Recovery]:
        with self._state.connection() as conn:
            return [_recovery(row) for row in conn.execute(_LISTED, (source,)).fetchall()]

    def known(self) -> dict[str, bool]:
        """Every source that ever had a recovery, and whether one is open."""
        with self._state.connection() as conn:
            return dict(conn.execute(_KNOWN).fetchall())

    def to_tell(self) -> dict[tuple[str, int], tuple[int, str]]:
        """By source and partition: what left events out last, or was large, by a number that only grows, and a
        sentence.
        """
        with self._state.connection() as conn:
            rows = conn.execute(_TO_TELL).fetchall()
        return {
            (source, partition): (number, said or f"{_told(step, choice)}: {error or reason}"[:TEXT_MAX])
            for source, partition, number, step, choice, reason, error, said in rows
        }

    def give_up(self, source: str, ranges: Sequence[tuple[int, int]], said: str) -> None:
        """Files of these partitions, from one to another, are taken out of the log: to be told. Not fenced: a person
        does so beside the owner.
        """
        first, last = [low for low, _ in ranges], [high for _, high in ranges]
        with self._state.connection() as conn:
            conn.execute(_GIVE_UP, {"source": source, "first": first, "last": last, "said": said[:TEXT_MAX]})

    def set_large(self, recovery: Recovery) -> bool:
        """Whether that is news. Not fenced: how large a gap is does not depend on who found it."""
        with self._state.connection() as conn:
            return conn.execute(_SET_LARGE, (recovery.id,)).rowcount == 1

    def open(
        self, source: str, partition: int, reason: str, left_at: str, epoch: int, chosen: Choice | None = None
    ) -> Recovery:
        with fenced(self._state, source_lease(source), epoch, source_lease(source, partition)) as conn:
            if chosen is not None:
                conn.execute(_SET_CHOICE, (chosen, reason[:TEXT_MAX], source, partition))
            made = (chosen or Choice.REPAIR, "itself" if chosen is None else "person", reason[:TEXT_MAX], left_at)
            conn.execute(_OPEN, (source, partition, *made))
            row = conn.execute(_CURRENT, (source, partition)).fetchone()
        if row is None:
            raise ConflictError(f"the recovery of {source}/{partition} ended just now", hint="look again")
        return _recovery(row)

    def _fenced(self, recovery: Recovery, epoch: int) -> AbstractContextManager[Connection]:
        source, partition = recovery.source, recovery.partition
        return fenced(self._state, source_lease(source), epoch, source_lease(source, partition))

    def move(self, recovery: Recovery, step: Step, epoch: int, *, error: str = "", tried: bool = False) -> None:
        with self._fenced(recovery, epoch) as conn:
            conn.execute(_MOVE, (step, error[:TEXT_MAX], int(tried), recovery.id))

    def taking(self, recovery: Recovery, logged: int, rows: int, epoch: int) -> None:
        with self._fenced(recovery, epoch) as conn:
            conn.execute(_TAKING, {"id": recovery.id, "logged": logged, "rows": rows})

    def close_gap(self, recovery: Recovery, position: str, epoch: int) -> None:
        with self._fenced(recovery, epoch) as conn:
            if conn.execute(_CLOSE, (position, recovery.id, recovery.choice)).rowcount != 1:
                raise chosen_otherwise(recovery)


def _told(step: str, choice: str) -> str:
    if step == Step.FAILED:
        return "a gap could not be closed"
    if choice == Choice.SKIP and step in (Step.CLOSED, Step.DONE):
        return "a gap was accepted"
    return "a gap was so large that what you keep should be fetched anew"


def _recovery(row: Any) -> Recovery:
    number, source, partition, choice, by_person, reason, left_at, step, *rest = row
    return Recovery(number, source, partition, Choice(choice), by_person, reason, left_at, Step(step), *rest)
