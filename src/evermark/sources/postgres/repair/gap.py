"""The rows of `events` that the log may lack, read under one snapshot, in pieces of each partition's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg import sql

from evermark.event import taken_batch
from evermark.sources.base import Gap, Slice
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import translated
from evermark.sources.postgres.lsn import Incarnation, hex_columns, positions
from evermark.sources.postgres.outbox import filled
from evermark.sources.postgres.target import PostgresTarget

RECOVERED = "recovered"
_BLOCKS = 32_768  # of 8 KiB: a piece is a quarter of a gigabyte at most
_ROWS = 10_000
_TYPES = ("text", "int8", "text", "text", "text", "text", "text", "int4", "int8", "text", "text")
_BYTES = 16 * 1024 * 1024

_TABLES = """
select c.relname::text, greatest(1, (pg_relation_size(c.oid) / current_setting('block_size')::bigint))
from pg_inherits i join pg_class c on c.oid = i.inhrelid
where i.inhparent = '@schema@.events'::regclass and c.relkind = 'r' order by 1
"""
_PREVIOUS_KEY = """
select exists (select from pg_attribute where attrelid = '@schema@.events'::regclass and attname = 'previous_key')
"""
_SANE = "{column} >= '0001-01-01 00:00:00Z' and {column} < '10000-01-01 00:00:00Z'"
_CANDIDATES = """
select count(*), min(created_at) filter (where {sane}), count(*) filter (where not ({sane}))
from only {table} where {young}
"""
_ROWS_OF = """
select e.id::text,
       case when {sane} then (extract(epoch from e.created_at) * 1000000)::bigint end,
       coalesce(e.stream, s.name), e.op, e.key, e.payload::text, e.before::text, e.schema_version,
       (e.lsn - '0/0'::pg_lsn)::bigint, e.tx::xid::text, {previous_key}
from only {table} e left join {streams} s on s.id = e.stream_id
where e.ctid >= {first}::tid and e.ctid < {last}::tid and {young}
"""


@dataclass
class OutboxGap(Gap):
    """What is found carries the flag `recovered`. Its place in the log is just below the LSN reading goes on from:
    WAL records begin at multiples of eight, so no commit is ever found there."""

    target: PostgresTarget
    snapshot: str
    incarnation: Incarnation
    lsn: int  # where the new slot begins: what the snapshot shows was committed before, all else comes from the slot
    floor: str | None
    pieces: Sequence[Slice] = ()
    since: datetime | None = None

    @property
    def position(self) -> str:
        return self.incarnation.at(self.lsn)

    def positions(self, first: int, count: int) -> pa.Array:
        lsns = np.full(count, self.lsn - 1, dtype=np.uint64)
        return positions(self.incarnation, lsns, np.arange(first, first + count, dtype=np.uint32))

    def survey(self) -> None:
        """Find the pieces. Partitions without a candidate are left out: most of the days kept hold none."""
        found: list[Slice] = []
        oldest: list[datetime] = []
        whole_log = False
        with seeing(self.snapshot, self.target) as link:
            # Not in an outbox of version 2. If it comes after this, it is null in all that the snapshot shows.
            (previous_key,) = link.one(filled(_PREVIOUS_KEY, self.target), doing="looking at the columns of events")
            for table, blocks in link.rows(filled(_TABLES, self.target), doing="listing partitions"):
                sane = sql.SQL(_SANE.format(column="created_at"))
                query = sql.SQL(_CANDIDATES).format(table=self._table(table), young=self._young(), sane=sane)
                count, since, timeless = link.one(query.as_string(), doing=f"looking through {table}")
                oldest += [since] if since else []
                whole_log = whole_log or timeless > 0
                for first in range(0, blocks, _BLOCKS) if count else ():
                    # The last piece is open at its end: rows added since are not in the snapshot.
                    last = first + _BLOCKS if first + _BLOCKS < blocks else 2**32 - 1
                    detail = {"table": table, "first": str(first), "last": str(last)}
                    detail |= {"previous_key": "there"} if previous_key else {}
                    found.append(Slice(0, "", self.position, detail))
        self.pieces = tuple(found)
        # An event whose time is none to us may be in any file.
        self.since = None if whole_log else min(oldest, default=None)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        query = sql.SQL(_ROWS_OF).format(
            table=self._table(piece.detail["table"]),
            streams=sql.Identifier(self.target.schema, "streams"),
            first=sql.Literal(f"({piece.detail['first']},0)"),
            last=sql.Literal(f"({piece.detail['last']},0)"),
            young=self._young("e."),
            sane=sql.SQL(_SANE.format(column="e.created_at")),
            previous_key=sql.SQL("e.previous_key" if piece.detail.get("previous_key") else "null::text"),
        )
        copy_out = sql.SQL("copy ({}) to stdout").format(query)
        with (
            seeing(self.snapshot, self.target) as link,
            translated(link.dsn, "reading events the log may lack"),
            link.connection.cursor().copy(copy_out) as copy,
        ):
            copy.set_types(_TYPES)
            yield from self._batches(copy.rows())

    def _batches(self, rows: Iterator[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
        """Cut by bytes as well as by number: ten thousand rows may be ten gigabytes."""
        some: list[tuple[Any, ...]] = []
        size = 0
        for row in rows:
            some.append(row)
            size += len(row[5] or "") + len(row[6] or "")
            if size >= _BYTES or len(some) >= _ROWS:
                yield self._batch(some)
                some, size = [], 0
        if some:
            yield self._batch(some)

    def _batch(self, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        ids, times, streams, ops, keys, payloads, befores, versions, lsns, xids, previous_keys = zip(*rows, strict=True)
        order = np.array(lsns, dtype=np.uint64)
        columns: dict[str, object] = {
            "event_id": ids,
            "position": [bytes(digits).decode() for digits in hex_columns(order, 16)],
            "stream": [stream or f"{self.target.schema}.events" for stream in streams],
            "op": ops,
            "key": keys,
            "tx": xids,
            "event_time": pa.array(times, pa.int64()),
            "payload": payloads,
            "before": befores,
            "schema_version": versions,
            "flags": [[RECOVERED]] * len(rows),
            "previous_key": previous_keys,
        }
        return taken_batch(columns, len(rows))

    def _table(self, name: str) -> sql.Identifier:
        return sql.Identifier(self.target.schema, name)

    def _young(self, prefix: str = "") -> sql.Composable:
        since = sql.SQL("{}tx >= {}::xid8").format(sql.SQL(prefix), sql.Literal(self.floor or "0"))
        return sql.SQL(" and ").join([sql.SQL(self.target.share_sql(f"{prefix}key")), since])


@contextmanager
def seeing(snapshot: str, target: PostgresTarget) -> Iterator[Link]:
    """A connection that sees exactly what the exported snapshot shows."""
    with connect(target.dsn) as link:
        with translated(link.dsn, "going back to the moment of the new slot"):
            link.connection.execute("begin isolation level repeatable read, read only")
            link.connection.execute(sql.SQL("set transaction snapshot {}").format(sql.Literal(snapshot)))
        yield link
