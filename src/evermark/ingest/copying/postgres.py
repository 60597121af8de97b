"""Copies in State, fenced by the lease of their source."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from evermark.cluster.fence import fence, fenced, source_lease
from evermark.errors import BusyError, ConflictError
from evermark.secrets import Hidden
from evermark.sources.copies import (
    CANCELLED,
    TEXT_MAX,
    AskedBy,
    Bounds,
    ChoosePlace,
    Chunk,
    ChunkState,
    Copy,
    CopyState,
    CopyStore,
    Mark,
    no_such_copy,
    refuse_cancel,
)
from evermark.state.connection import Connection, State

_REQUESTS = "evermark_copies"  # a channel of the whole database: what is said names the deployment
_LISTED = """
select c.id, c.source, c.stream, c.condition, c.asked_by, c.state, c.chunks,
       (select count(*) from copy_chunks k where k.copy = c.id and k.state <> 'done'),
       c.rows + (select coalesce(sum(k.rows), 0) from copy_chunks k where k.copy = c.id and k.state = 'done')::bigint,
       c.tries, c.error, c.made_at, c.changed_at
from copies c where {} order by c.made_at desc, c.id
"""
_CHUNK = "select copy, number, after, upto, state, attempt, position, file, rows, ready_at, told from copy_chunks"
_ASK = "insert into copies (id, source, stream, condition, asked_by) values (%s, %s, %s, %s, %s)"
_SAME = """
select id from copies where source = %s and stream = %s and condition = %s and state in ('planned', 'running')
order by made_at limit 1
"""
_BEGIN = """
update copy_chunks set state = 'writing', attempt = attempt + 1, position = '', file = '', rows = 0, ready_at = null
where copy = %s and number = %s and state in ('open', 'writing') returning attempt
"""
_READY = """
update copy_chunks set state = 'ready', position = %s, file = %s, rows = %s, ready_at = clock_timestamp()
where copy = %s and number = %s and attempt = %s and state = 'writing'
"""
_GIVE_UP = (
    "update copy_chunks set state = 'open' where copy = %s and number = %s and attempt = %s and state = 'writing'"
)
_GIVE_UP_ALL = """
update copy_chunks set state = 'open' where state = 'writing' and copy in (select id from copies where source = %s)
"""
_DONE = "update copy_chunks set state = 'done' where copy = %s and number = any (%s) and state = 'ready'"
_REOPEN = """
update copy_chunks set state = 'open', told = array(select distinct unnest(told || %s::integer[]) order by 1)
where copy = %s and number = %s and state = 'ready'
"""
_REACH = """
insert into copy_horizons (source, position) values (%s, %s)
on conflict (source) do update set position = greatest(copy_horizons.position, excluded.position)
"""
_PLACE = """
update copy_chunks set position = %s where copy = %s and number = %s and attempt = %s and state = 'writing'
"""
_PLACED = f"""
{_CHUNK} where state in ('writing', 'ready') and position >= %s and position <> ''
and copy in (select id from copies where source = %s) order by position
"""
# A copy that is over needs its chunks no more: a mark of it is void, as one of a chunk that is done.
_FINISH = """
update copies set state = 'done', error = '', changed_at = clock_timestamp(),
       rows = (select coalesce(sum(rows), 0) from copy_chunks where copy = id)
where id = %s and state = 'running' and not exists (select from copy_chunks where copy = id and state <> 'done')
"""
_FORGET = "delete from copy_chunks where copy = %s and exists (select from copies where id = %s and state = 'done')"
_CANCEL = """
update copies set state = 'failed', error = %s, changed_at = clock_timestamp()
where id = %s and state in ('planned', 'running')
"""
_TROUBLE = """
update copies set error = %s, tries = case when %s = '' then 0 else tries + %s end,
       state = case when %s then 'failed' else state end, changed_at = clock_timestamp()
where id = %s and state in ('planned', 'running') and (%s <> '' or error <> '')
"""


def copies_in_state(dsn: Hidden, schema: str) -> CopyStore:
    """For a process of Spark's."""
    return StateCopies(State(dsn.open, schema, connections_max=2))


class StateCopies:
    """A `CopyStore`."""

    def __init__(self, state: State) -> None:
        self._state = state

    def request(self, source: str, stream: str, condition: str) -> Copy:
        with self._state.transaction() as conn:
            found = conn.execute(_SAME, (source, stream, condition)).fetchone()
            number = found[0] if found else _asked(conn, source, stream, condition, AskedBy.PERSON)
            conn.execute("select pg_notify(%s, %s)", (_REQUESTS, f"{self._state.schema}/{source}"))
            return _copy(conn.execute(_LISTED.format("c.id = %s"), (number,)).fetchone())

    @contextmanager
    def requests(self) -> Iterator[Callable[[float], Collection[str]]]:
        with self._state.connection() as conn:
            conn.execute(f"listen {_REQUESTS}".encode())
            ours = f"{self._state.schema}/"

            def heard(wait_s: float) -> Collection[str]:
                said = [each.payload for each in conn.notifies(timeout=wait_s, stop_after=1)]
                return {each.removeprefix(ours) for each in said if each.startswith(ours)}

            try:
                yield heard
            finally:
                conn.close()  # its next user is not to hear anything

    def cancel(self, copy: str) -> Copy:
        listed = _LISTED.format("c.id = %s").encode()
        with self._state.transaction() as conn:
            found = conn.execute(listed, (copy,)).fetchone()
            if found is None:
                raise no_such_copy(copy)
            refuse_cancel(_copy(found))
            conn.execute(_CANCEL, (CANCELLED, copy))
            return _copy(conn.execute(listed, (copy,)).fetchone())

    def want(self, source: str, streams: Sequence[str], epoch: int) -> None:
        with fenced(self._state, source_lease(source), epoch) as conn:
            query = "select stream, id, state from copies where source = %s and asked_by = %s"
            known = {stream: (each, state) for stream, each, state in conn.execute(query, (source, AskedBy.START))}
            for stream in streams:
                if stream not in known:
                    _asked(conn, source, stream, "", AskedBy.START)
                elif known[stream][1] == CopyState.FAILED:
                    again = """update copies set tries = 0, error = '', changed_at = clock_timestamp(),
                        state = case when chunks = 0 then 'planned' else 'running' end where id = %s"""
                    conn.execute(again, (known[stream][0],))

    def listed(self, source: str | None = None) -> list[Copy]:
        query, args = (_LISTED.format("true"), ()) if source is None else (_LISTED.format("c.source = %s"), (source,))
        with self._state.connection() as conn:
            return [_copy(row) for row in conn.execute(query.encode(), args).fetchall()]

    def plan(self, copy: str, bounds: Sequence[Bounds], epoch: int) -> None:
        with self._fenced(copy, epoch) as conn:
            query = """update copies set state = 'running', chunks = %s, changed_at = clock_timestamp()
                where id = %s and state = 'planned'"""
            if conn.execute(query, (len(bounds), copy)).rowcount != 1:
                return
            rows = [(copy, number, _text(after), _text(upto)) for number, (after, upto) in enumerate(bounds)]
            with conn.cursor() as cursor:
                cursor.executemany("insert into copy_chunks (copy, number, after, upto) values (%s, %s, %s, %s)", rows)
            if not bounds:
                conn.execute(_FINISH, (copy,))

    def chunks(self, copy: str, states: Sequence[ChunkState], limit: int | None = None) -> list[Chunk]:
        query = f"{_CHUNK} where copy = %s and state = any (%s) order by number limit %s"
        with self._state.connection() as conn:
            return [_chunk(row) for row in conn.execute(query.encode(), (copy, list(states), limit)).fetchall()]

    def begin(self, copy: str, number: int, epoch: int) -> int:
        with self._fenced(copy, epoch) as conn:
            row = conn.execute(_BEGIN, (copy, number)).fetchone()
        if row is None:
            raise BusyError(f"chunk {number} of copy {copy} is written already", hint="it is left as it is")
        return int(row[0])

    def ready(self, mark: Mark, position: str, rows: int, epoch: int) -> bool:
        with self._fenced(mark.copy, epoch) as conn:
            args = (position, mark.file, rows, mark.copy, mark.number, mark.attempt)
            return conn.execute(_READY, args).rowcount == 1

    def chunk(self, copy: str, number: int) -> Chunk | None:
        with self._state.connection() as conn:
            row = conn.execute(f"{_CHUNK} where copy = %s and number = %s".encode(), (copy, number)).fetchone()
        return _chunk(row) if row else None

    def give_up(self, mark: Mark) -> None:
        with self._state.connection() as conn:
            conn.execute(_GIVE_UP, (mark.copy, mark.number, mark.attempt))

    def give_up_all(self, source: str, epoch: int) -> None:
        with fenced(self._state, source_lease(source), epoch) as conn:
            conn.execute(_GIVE_UP_ALL, (source,))

    def reach(self, source: str, position: str, epoch: int) -> None:
        with fenced(self._state, source_lease(source), epoch) as conn:
            conn.execute(_REACH, (source, position))

    def place(self, mark: Mark, choose: ChoosePlace, epoch: int) -> str | None:
        with self._fenced(mark.copy, epoch) as conn:
            source = "(select source from copies where id = %s)"
            query = f"select position from copy_horizons where source = {source} for update"
            row = conn.execute(query.encode(), (mark.copy,)).fetchone()
            position, horizon = choose(row[0] if row else None)
            if conn.execute(_PLACE, (position, mark.copy, mark.number, mark.attempt)).rowcount != 1:
                return None
            query = f"update copy_horizons set position = %s where source = {source}"
            conn.execute(query.encode(), (horizon, mark.copy))
            return position

    def placed(self, source: str, since: str) -> list[Chunk]:
        with self._state.connection() as conn:
            return [_chunk(row) for row in conn.execute(_PLACED.encode(), (since, source)).fetchall()]

    def done(self, copy: str, numbers: Sequence[int], epoch: int) -> None:
        with self._fenced(copy, epoch) as conn:
            conn.execute(_DONE, (copy, list(numbers)))
            if conn.execute(_FINISH, (copy,)).rowcount:
                conn.execute(_FORGET, (copy, copy))

    def reopen(self, copy: str, number: int, epoch: int, told: Sequence[int] = ()) -> None:
        with self._fenced(copy, epoch) as conn:
            conn.execute(_REOPEN, (list(told), copy, number))

    def trouble(self, copy: str, error: str, epoch: int, *, failed: bool = False, counts: bool = True) -> None:
        with self._fenced(copy, epoch) as conn:
            said = error[:TEXT_MAX]
            conn.execute(_TROUBLE, (said, said, int(counts), failed, copy, said))

    def close(self) -> None:
        self._state.close()

    @contextmanager
    def _fenced(self, copy: str, epoch: int) -> Iterator[Connection]:
        """A transaction that only the owner of the copy's source can make."""
        with self._state.transaction() as conn:
            row = conn.execute("select source from copies where id = %s", (copy,)).fetchone()
            if row is None:
                raise no_such_copy(copy)
            fence(conn, source_lease(row[0]), epoch)
            yield conn


def _asked(conn: Connection, source: str, stream: str, condition: str, by: AskedBy) -> str:
    number = secrets.token_hex(8)
    conn.execute(_ASK, (number, source, stream, condition, by))
    return number


def _text(key: Sequence[str] | None) -> str | None:
    return None if key is None else json.dumps(list(key), ensure_ascii=False)


def _key(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(json.loads(text))


def _copy(row: Any) -> Copy:
    if row is None:
        raise ConflictError("the copy is gone", hint="ask for it again")
    number, source, stream, condition, asked_by, state, *rest = row
    return Copy(number, source, stream, condition, AskedBy(asked_by), CopyState(state), *rest)


def _chunk(row: Any) -> Chunk:
    copy, number, after, upto, state, *rest, told = row
    found = Chunk(copy, number, (_key(after), _key(upto)), ChunkState(state), *rest)
    return replace(found, told=tuple(told)) if told else found
