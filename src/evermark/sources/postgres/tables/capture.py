"""The user's own tables as what a slot carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from evermark.sources.postgres.connect import Link
from evermark.sources.postgres.lsn import Position, WalPages
from evermark.sources.postgres.read.capture import Capture, Decoder, RunQuery
from evermark.sources.postgres.read.pgoutput import MESSAGE_LATE_MAX
from evermark.sources.postgres.survey import Survey
from evermark.sources.postgres.tables.catalog import Catalog
from evermark.sources.postgres.tables.publication import look
from evermark.sources.postgres.tables.rows import CopyMarks, TablesDecoder
from evermark.sources.postgres.tables.versions import TableVersions
from evermark.sources.postgres.target import PostgresTarget

# Insert, update, delete, truncate, and messages of a transaction; messages outside one tell where they end themselves.
_PROBE = """
with m as materialized (
    select x, get_byte(d, 0) as kind, substring(d from 2 for 8) as lsn, substring(d from 3 for 8) as message_lsn
    from pg_catalog.pg_logical_slot_peek_binary_changes(@slot_literal@, %s, null, 'proto_version', '1',
         'publication_names', '@publication@', 'messages', 'true') as t(l, x, d)),
since as (select %s::bytea as lsn)
select exists (select from m, since where (kind in (68, 73, 77, 84, 85)
                                           and x in (select x from m where kind = 66 and m.lsn >= since.lsn))
                                       or (kind = 77 and message_lsn > since.lsn))
"""
_PAGES = """
select (select setting::bigint from pg_settings where name = 'wal_block_size'),
       (select setting::bigint from pg_settings where name = 'wal_segment_size')
"""


class TablesCapture(Capture):
    """Values come as text: it is what every type has, and what its digits are exact in."""

    options: ClassVar[Mapping[str, str]] = {"messages": "true"}
    margin = MESSAGE_LATE_MAX
    probe = _PROBE

    def __init__(
        self,
        target: PostgresTarget,
        versions: Callable[[], TableVersions],
        marks: Callable[[], CopyMarks | None] = lambda: None,
    ) -> None:
        super().__init__(target)
        self._versions, self._marks = versions, marks

    def look(self, link: Link) -> Survey:
        return look(link, self.target)

    def decoder(self, run_query: RunQuery, start: Position, end: Position, encoding: str) -> Decoder:
        return TablesDecoder(
            start,
            end,
            pages=wal_pages(run_query),
            catalog=Catalog(run_query, self.target.publication),
            versions=self._versions(),
            hashed={table.stream: table.hash for table in self.target.tables},
            encoding=encoding,
            marks=self._marks(),
        )


def wal_pages(run_query: RunQuery) -> WalPages:
    return WalPages(*(run_query(_PAGES, doing="asking for the WAL's pages") or (8192, 16 * 1024 * 1024)))
