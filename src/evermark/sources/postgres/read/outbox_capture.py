"""The outbox as what a slot carries: rows that were inserted into `<schema>.events`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from evermark.event import Seen
from evermark.sources.postgres.connect import Link
from evermark.sources.postgres.failures import where
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.outbox import UNWATCHED, filled
from evermark.sources.postgres.read.capture import Capture, Decoder, RunQuery
from evermark.sources.postgres.read.outbox_rows import OutboxDecoder
from evermark.sources.postgres.read.xmin_floor import Sample, XminFloor
from evermark.sources.postgres.survey import Survey, forgotten, look
from evermark.sources.postgres.target import PostgresTarget

STREAMS_MAX = 100_000

_PROBE = """
with m as materialized (
    select x, get_byte(d, 0) as kind, substring(d from 2 for 8) as lsn
    from pg_catalog.pg_logical_slot_peek_binary_changes(@slot_literal@, %s, null, 'proto_version', '1',
         'publication_names', '@publication@', 'binary', 'true') as t(l, x, d))
select exists (select from m where kind = 73 and x in (select x from m where kind = 66 and lsn >= %s))
"""

_KNOWN = """
select exists (select from @schema@.events where created_at = %s and id = %s::uuid),
       to_regclass('@schema@.events_p' || to_char(%s at time zone 'UTC', 'YYYYMMDD')) is not null,
       (select installed_at from @schema@.meta where installed_at > %s)
"""
# Two steps in one: what had ended when the snapshot was taken committed before the position read after it.
_SAMPLE = """
with ended as materialized (select pg_snapshot_xmin(pg_current_snapshot())::text as xmin)
select xmin, (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint from ended
"""


class OutboxCapture(Capture):
    options: ClassVar[Mapping[str, str]] = {"binary": "true"}
    probe = _PROBE

    def __init__(self, target: PostgresTarget) -> None:
        super().__init__(target)
        self._floor = XminFloor()
        self._streams: dict[int, str] = {}

    def look(self, link: Link) -> Survey:
        return look(link, self.target)

    def decoder(self, run_query: RunQuery, start: Position, end: Position, encoding: str) -> Decoder:
        def stream_name(number: int) -> str | None:
            return self._stream_name(run_query, number)

        return OutboxDecoder(self.target.schema, start, end, stream_name=stream_name, encoding=encoding)

    def require_known(self, run_query: RunQuery, seen: Seen) -> None:
        """A copy of the server has its identity; it does not have what happened after it was made."""
        if seen.event_time is None or seen.event_id.startswith("poison:"):
            return
        args = (seen.event_time, seen.event_id, seen.event_time, seen.event_time)
        found = run_query(filled(_KNOWN, self.target), args, doing="looking back")
        if found is not None and found[:2] == (False, True):
            raise forgotten(where(self.target.dsn.open()), seen.event_id, found[2])

    def confirmed(self, run_query: RunQuery, position: Position) -> None:
        proven = self._floor.proven(position.lsn)
        if proven is not None:
            query = filled("select @schema@.note_floor(%s, %s::text::xid8)", self.target)
            run_query(query, (self.target.slot, str(proven)), doing="noting the floor")
            self._floor.done(proven, time.monotonic())
        elif self._floor.wants_sample(time.monotonic()):
            found = run_query(_SAMPLE, doing="sampling the floor")
            if found is not None:
                self._floor.sample = Sample(int(found[0]), int(found[1]))

    def connected(self) -> None:
        self._floor.sample = None  # it may be another server's

    def _stream_name(self, run_query: RunQuery, number: int) -> str | None:
        if number not in self._streams:
            query = filled("select name from @schema@.streams where id = %s", self.target)
            found = run_query(query, (number,), doing="looking up a stream")
            if found is None:
                return None
            if len(self._streams) >= STREAMS_MAX:
                self._streams.clear()
            self._streams[number] = str(found[0])
        return self._streams[number]


def unwatched_partitions(run_query: RunQuery, target: PostgresTarget) -> frozenset[str]:
    """Partitions of captured tables whose truncate would not be captured."""
    found = run_query(filled(UNWATCHED, target), doing="looking at partitions of captured tables")
    return frozenset(found[0]) if found else frozenset()
