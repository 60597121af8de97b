"""The plan and the state of block streams, kept in State."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from evermark.error_policy import backoff_s
from evermark.errors import ConfigError, NotFoundError
from evermark.sources.blocks.chain import Cookie
from evermark.sources.blocks.decide.resume import StreamState
from evermark.sources.blocks.decide.ticks import Item, Move, Tick, way_to
from evermark.sources.blocks.store.base import UNREADABLE, PlanState, Stale
from evermark.state.connection import Connection, State

STALE_PAUSE_S_MAX = 300.0
_REASON_MAX = 500
_CLEANED_AT_ONCE = 1000
_FORK_ACCEPTED = "fork accepted/"  # before the incarnation once a person accepted a fork of it; no id has a slash


class StatePlans:
    """`Plans` in State."""

    def __init__(self, state: State, source: str, on_close: Callable[[], None] | None = None) -> None:
        self._state, self._source = state, source
        self._on_close = on_close or state.close

    def close(self) -> None:
        self._on_close()

    def _all(self, query: str, *values: Any, conn: Connection | None = None) -> list[tuple[Any, ...]]:
        with nullcontext(conn) if conn is not None else self._state.connection() as used:
            return used.execute(query, (self._source, *values)).fetchall()

    def _do(self, statement: str, values: Any) -> None:
        with self._state.connection() as conn:
            conn.execute(statement, values)

    def state(self, partition: int) -> PlanState:
        rows = self._all(
            """select confirmed, last_tick, touched, wanted, cold_before, forgot_us,
                exists (select from block_ticks t where (t.source, t.partition) = (p.source, p.partition)),
                exists (select from block_stale t where (t.source, t.partition) = (p.source, p.partition)),
                exists (select from block_streams t where (t.source, t.partition) = (p.source, p.partition) and t.more)
            from block_partitions p where source = %s and partition = %s""",
            partition,
        )
        return PlanState(*rows[0]) if rows else PlanState()

    def begin(self, partition: int, cold_before: int) -> None:
        self._do(
            """insert into block_partitions (source, partition, cold_before) values (%s, %s, %s)
            on conflict do nothing""",
            (self._source, partition, cold_before),
        )

    def ticks(self, partition: int, conn: Connection | None = None) -> list[Tick]:
        asked = """select starts, ends, touched, wanted, void from block_ticks
            where source = %s and partition = %s order by ends"""
        return [Tick(*row) for row in self._all(asked, partition, conn=conn)]

    def items(self, partition: int, ends: int) -> list[Item]:
        asked = f"""select stream, pins, leave_out, carried, repeats, {_MOVE} from block_plan
            where source = %s and partition = %s and ends = %s order by item"""
        return [
            Item(
                stream,
                tuple((int(number), str(before)) for number, before in json.loads(pins)),
                _split(leave_out),
                tuple((int(block), int(ordinal), event) for block, ordinal, event in json.loads(carried)),
                repeats,
                _move(move) if move[0] else None,
            )
            for stream, pins, leave_out, carried, repeats, *move in self._all(asked, partition, ends)
        ]

    def moves(self, partition: int, ends: Sequence[int], conn: Connection | None = None) -> dict[str, Move]:
        asked = f"""select stream, {_MOVE} from block_plan
            where source = %s and partition = %s and ends = any(%s) and moves order by ends, item"""
        rows = self._all(asked, partition, list(ends), conn=conn) if ends else []
        return {stream: _move(move) for stream, *move in rows}

    def known(self, streams: Sequence[str]) -> dict[str, Move]:
        found = self._confirmed(streams).items()
        return {stream: it for stream, (anew, it) in found if not anew or (it.known and it.known.fork_accepted)}

    def witness(self, stream: str) -> StreamState | None:
        found = self._confirmed([stream]).get(stream)
        return found[1].known if found is not None else None

    def _confirmed(self, streams: Sequence[str]) -> dict[str, tuple[bool, Move]]:
        asked = """select s.stream, s.anew, s.kind, y.snapshot_miniblock, y.minipool_gen, y.prev_miniblock_hash,
            s.incarnation, s.pool, s.more, s.repeats_below, s.restored_us
            from block_streams s
            join stream_sync_state y on y.stream_id = convert_to(s.source || '/' || s.stream, 'UTF8')
            where s.source = %s and s.stream = any(%s)"""
        found = {}
        for stream, anew, kind, snapshot, gen, before, incarnation, *rest in self._all(asked, list(streams)):
            pool, more, below, restored_us = rest
            accepted, name = incarnation.startswith(_FORK_ACCEPTED), incarnation.removeprefix(_FORK_ACCEPTED)
            cookie = Cookie(gen, bytes(before).hex())
            known = StreamState(snapshot, cookie, name, _split(pool), below, accepted, restored_us)
            found[stream] = (anew, Move(kind, known, more))
        return found

    def unfinished(self, partition: int) -> list[str]:
        asked = """select stream from block_streams
            where source = %s and partition = %s and more order by stream limit 1000"""
        return [stream for (stream,) in self._all(asked, partition)]

    def repeats(self, partition: int, starts: int) -> bool:
        asked = """select exists (select from block_ticks join block_plan using (source, partition, ends)
            where source = %s and partition = %s and starts = %s and repeats)"""
        return self._all(asked, partition, starts) == [(True,)]

    def add(self, partition: int, tick: Tick, items: Sequence[Item]) -> int:
        number = """update block_partitions set last_tick = greatest(last_tick, %s) + 1
            where source = %s and partition = %s returning last_tick"""
        insert = """insert into block_ticks (source, partition, ends, starts, touched, wanted)
            values (%s, %s, %s, %s, %s, %s)"""
        with self._state.transaction() as conn:
            row = conn.execute(number, (tick.starts, self._source, partition)).fetchone()
            if row is None:
                raise ConfigError(f"partition {partition} of {self._source} was never begun", hint="begin it first")
            ends = int(row[0])
            head = (self._source, partition, ends)
            conn.execute(insert, (*head, tick.starts, tick.touched, tick.choice))
            with conn.cursor() as cursor:
                cursor.executemany(_INSERT_ITEM, [(*head, at, *_row(item)) for at, item in enumerate(items)])
        return ends

    def note_listed(self, partition: int, confirmed: int, touched: int, choice: str) -> None:
        self._do(
            """update block_partitions set touched = %s, wanted = %s
            where source = %s and partition = %s and confirmed = %s and (touched < %s or wanted <> %s)""",
            (touched, choice, self._source, partition, confirmed, touched, choice),
        )

    def void(self, partition: int, starts: int) -> None:
        self._do(
            "update block_ticks set void = true where source = %s and partition = %s and starts >= %s and not void",
            (self._source, partition, starts),
        )

    def confirm(self, partition: int, to: int) -> None:
        here = (self._source, partition)
        with self._locked(partition) as (conn, confirmed):
            if to <= confirmed:
                return
            way = way_to(self.ticks(partition, conn), confirmed, to)
            if way[0].root:
                self._keep_as_witnesses(conn, partition)
            self._apply(conn, partition, [tick.ends for tick in way])
            conn.execute(
                """update block_partitions set confirmed = %s, touched = %s, wanted = %s
                where source = %s and partition = %s""",
                (to, way[-1].touched, way[-1].choice, *here),
            )
            # Ticks that start before this belong to the past, whether they were taken or not.
            conn.execute("delete from block_ticks where source = %s and partition = %s and starts < %s", (*here, to))

    def _apply(self, conn: Connection, partition: int, ends: Sequence[int]) -> None:
        moves = self.moves(partition, ends, conn)
        conn.execute(_NOT_STALE, (self._source, partition, list(ends)))
        gone = [stream for stream, move in moves.items() if move.known is None]
        if gone:
            self._remove(conn, gone)
        if any(move.forgotten for move in moves.values()):
            conn.execute(_FORGOT, (self._source, partition))
        synced, about = [], []
        for stream, move in moves.items():
            if move.known is not None:
                known, cookie = move.known, move.known.cookie
                before = bytes.fromhex(cookie.prev_miniblock_hash)
                synced.append((self._id(stream), known.snapshot, cookie.minipool_gen, before))
                pool = (_joined(known.pool), move.more, known.repeats_below, known.restored_us)
                about.append((self._source, stream, partition, move.kind, known.incarnation, *pool))
        with conn.cursor() as cursor:
            cursor.executemany(_SYNCED, synced)
            cursor.executemany(_ABOUT, about)

    def adopt(self, partition: int, tick: int, now_us: int) -> None:
        here = (self._source, partition)
        with self._locked(partition) as (conn, confirmed):
            if confirmed > tick:
                root = """insert into block_ticks (source, partition, ends, starts, touched, wanted)
                    values (%s, %s, %s, %s, 0, '') on conflict do nothing"""
                conn.execute(root, (*here, tick, tick))
                return
            self._keep_as_witnesses(conn, partition)
            conn.execute("delete from block_ticks where source = %s and partition = %s", here)
            conn.execute(
                """insert into block_partitions (source, partition, confirmed, last_tick, forgot_us)
                values (%s, %s, %s, %s, %s) on conflict (source, partition) do update
                set confirmed = excluded.confirmed, touched = 0, forgot_us = excluded.forgot_us,
                    last_tick = greatest(block_partitions.last_tick, excluded.last_tick)""",
                (*here, tick, tick, now_us),
            )

    def _keep_as_witnesses(self, conn: Connection, partition: int) -> None:
        here = (self._source, partition)
        conn.execute("update block_streams set anew = true, more = false where source = %s and partition = %s", here)
        conn.execute(_FORGOT, here)

    def stale(self, partition: int) -> dict[str, Stale]:
        asked = """select stream, block, reason, next_at <= clock_timestamp(), tick,
            (extract(epoch from next_at) * 1e6)::bigint, extract(epoch from clock_timestamp() - since)::float8
            from block_stale where source = %s and partition = %s order by next_at limit 10000"""
        return {stream: Stale(*mark) for stream, *mark in self._all(asked, partition)}

    def mark_stale(self, partition: int, stream: str, block: int, reason: str) -> None:
        asked = f"""insert into block_stale (source, stream, partition, block, reason, tick, next_at)
            values (%(source)s, %(stream)s, %(partition)s, %(block)s, %(reason)s, {_LAST_TICK},
                    clock_timestamp() + make_interval(secs => %(first)s))
            on conflict (source, stream) do update
            set block = excluded.block, reason = excluded.reason, tick = excluded.tick,
                since = case when {_ALIKE} then block_stale.since else excluded.since end,
                attempts = case when {_ALIKE} then least(block_stale.attempts + 1, 30) else 1 end,
                next_at = case when {_ALIKE} then clock_timestamp()
                    + make_interval(secs => least(%(max)s, %(first)s * 2 ^ least(block_stale.attempts, 30)))
                    else excluded.next_at end"""
        said = {"source": self._source, "stream": stream, "partition": partition, "block": block}
        pauses = {"reason": reason.replace("\0", "")[:_REASON_MAX], "first": backoff_s(1), "max": STALE_PAUSE_S_MAX}
        self._do(asked, {**said, **pauses})

    def unmark_stale(self, stream: str, seen: Stale) -> None:
        self._do(
            """delete from block_stale where source = %s and stream = %s
            and (extract(epoch from next_at) * 1e6)::bigint = %s""",
            (self._source, stream, seen.mark),
        )

    def accept_fork(self, partition: int, stream: str) -> None:
        with self._locked(partition) as (conn, _):
            here = {"source": self._source, "partition": partition, "stream": stream, "accepted": _FORK_ACCEPTED}
            now = f"""update block_stale set block = 0, tick = {_LAST_TICK}, next_at = clock_timestamp()
                where source = %(source)s and stream = %(stream)s"""
            if conn.execute(now, here).rowcount == 0:
                raise NotFoundError(
                    f"stream {stream} of {self._source} is not stale: there is nothing to accept",
                    hint="`evermark doctor` names the streams that are",
                )
            # The state stays until the stream was taken anew: after a crash in between, the same is asked for again.
            conn.execute(
                """update block_streams set incarnation = %(accepted)s || incarnation
                where source = %(source)s and stream = %(stream)s and not starts_with(incarnation, %(accepted)s)""",
                here,
            )

    def known_nodes(self, partitions: int) -> frozenset[str]:
        found = self._all("select partitions, nodes from block_sources where source = %s")
        before, nodes = found[0] if found else (partitions, ())
        if before != partitions:
            raise ConfigError(
                f"sources.{self._source}.partitions is {partitions}; its streams were shared among {before}",
                hint=f"put it back to {before}: events would change their order; or choose a new source name",
            )
        return frozenset(nodes)

    def remember_nodes(self, partitions: int, nodes: Sequence[str]) -> None:
        asked = """insert into block_sources (source, partitions, nodes) values (%(source)s, %(partitions)s, %(nodes)s)
            on conflict (source) do update set nodes = array(
                select distinct unnest(block_sources.nodes || excluded.nodes) order by 1 limit 100)"""
        self._do(asked, {"source": self._source, "partitions": partitions, "nodes": sorted(nodes)})

    def forget(self, partition: int, older_s: float, chosen: Callable[[str, str], bool], now_us: int) -> int:
        asked = """select s.stream, s.kind, s.anew from stream_sync_state y
            join block_streams s on y.stream_id = convert_to(s.source || '/' || s.stream, 'UTF8')
            where s.source = %s and s.partition = %s and y.updated_at < clock_timestamp() - make_interval(secs => %s)
              and s.stream > %s order by s.stream limit %s"""
        after, count = "", 0
        while True:
            rows = self._all(asked, partition, older_s, after, _CLEANED_AT_ONCE)
            if not rows:
                return count
            after = rows[-1][0]
            gone = [stream for stream, kind, anew in rows if anew or not chosen(stream, kind)]
            if not gone:
                continue
            with self._locked(partition) as (conn, _):
                conn.execute(
                    "update block_partitions set forgot_us = %s where source = %s and partition = %s",
                    (now_us, self._source, partition),
                )
                self._remove(conn, gone)
            count += len(gone)

    @contextmanager
    def _locked(self, partition: int) -> Iterator[tuple[Connection, int]]:
        """A transaction in which no other process changes the partition, and the confirmed tick."""
        asked = "select confirmed from block_partitions where source = %s and partition = %s for update"
        with self._state.transaction() as conn:
            row = conn.execute(asked, (self._source, partition)).fetchone()
            yield conn, int(row[0]) if row else 0

    def _remove(self, conn: Connection, streams: Sequence[str]) -> None:
        ids = [self._id(stream) for stream in streams]
        conn.execute("delete from stream_sync_state where stream_id = any(%s)", (ids,))
        conn.execute("delete from block_streams where source = %s and stream = any(%s)", (self._source, list(streams)))

    def _id(self, stream: str) -> bytes:
        return f"{self._source}/{stream}".encode()


_FORGOT = """update block_partitions set forgot_us = (extract(epoch from clock_timestamp()) * 1e6)::bigint
where source = %s and partition = %s"""
# `more` of a stream without `gen`: it is not gone, only forgotten.
_MOVE = "moves, kind, snapshot, gen, hash, incarnation, pool, more, repeats_below, restored_us"
_INSERT_ITEM = f"""insert into block_plan
(source, partition, ends, item, stream, pins, leave_out, carried, repeats, {_MOVE})
values ({", ".join(["%s"] * 19)})"""
_SYNCED = """insert into stream_sync_state (stream_id, snapshot_miniblock, minipool_gen, prev_miniblock_hash)
values (%s, %s, %s, %s)
on conflict (stream_id) do update set snapshot_miniblock = excluded.snapshot_miniblock,
    minipool_gen = excluded.minipool_gen, prev_miniblock_hash = excluded.prev_miniblock_hash, updated_at = now()
where (stream_sync_state.minipool_gen, stream_sync_state.prev_miniblock_hash)
    is distinct from (excluded.minipool_gen, excluded.prev_miniblock_hash)"""
# Marks that were made after a tick stay: the tick was planned without them.
_NOT_STALE = """delete from block_stale using (
    select source, stream, max(ends) as ends from block_plan
    where source = %s and partition = %s and ends = any(%s) and moves group by source, stream
) moved
where block_stale.source = moved.source and block_stale.stream = moved.stream and block_stale.tick < moved.ends"""
_LAST_TICK = """coalesce((select last_tick from block_partitions
    where source = %(source)s and partition = %(partition)s), 0)"""
_ALIKE = f"starts_with(block_stale.reason, '{UNREADABLE}') = starts_with(excluded.reason, '{UNREADABLE}')"
# A tick does not undo a person's acceptance that came after it was made; the stale mark is still there then.
_ABOUT = f"""insert into block_streams
(source, stream, partition, kind, incarnation, pool, more, repeats_below, restored_us)
values (%s, %s, %s, %s, %s, %s, %s, %s, %s)
on conflict (source, stream) do update set partition = excluded.partition, kind = excluded.kind,
    incarnation = case when starts_with(block_streams.incarnation, '{_FORK_ACCEPTED}') and exists (
            select from block_stale s where s.source = excluded.source and s.stream = excluded.stream)
        then '{_FORK_ACCEPTED}' || excluded.incarnation else excluded.incarnation end,
    pool = excluded.pool, more = excluded.more, repeats_below = excluded.repeats_below,
    restored_us = excluded.restored_us, anew = excluded.anew
where block_streams is distinct from excluded"""


def _row(item: Item) -> tuple[Any, ...]:
    pins = json.dumps(item.pins)
    carried = json.dumps(item.carried, separators=(",", ":"))
    about = (item.stream, pins, _joined(item.leave_out), carried, item.repeats)
    if item.move is None:
        return (*about, False, *[None] * 9)
    known = item.move.known
    if known is None:
        return (*about, True, item.move.kind, *[None] * 5, item.move.forgotten, None, None)
    cookie = (known.cookie.minipool_gen, known.cookie.prev_miniblock_hash)
    rest = (known.incarnation, _joined(known.pool), item.move.more, known.repeats_below, known.restored_us)
    return (*about, True, item.move.kind, known.snapshot, *cookie, *rest)


def _move(columns: Sequence[Any]) -> Move:
    _, kind, snapshot, gen, before, incarnation, pool, more, below, restored_us = columns
    if gen is None:
        return Move(kind, None, forgotten=bool(more))
    cookie = Cookie(gen, before)
    known = StreamState(snapshot, cookie, incarnation, _split(pool), below, restored_us=restored_us or 0)
    return Move(kind, known, more)


def _joined(hashes: frozenset[str]) -> bytes:
    return b"".join(bytes.fromhex(each) for each in sorted(hashes))


def _split(joined: Any) -> frozenset[str]:
    raw = bytes(joined or b"")
    return frozenset(raw[at : at + 32].hex() for at in range(0, len(raw), 32))
