"""Copying the rows of published tables beside the slot: what a Spark task does, and how a table is cut into chunks.

A task has a temporary slot of its own. For each chunk: a snapshot; the rows of the chunk's keys in it, in a draft; a
**mark**, a logical message, in the same transaction, whose lock on the table keeps `alter table` and `truncate` out
from the snapshot to the mark. Then the slot says which rows were changed by transactions that the snapshot does not
show and that commit before the mark: those are told by the stream itself, and left out (overlap.py).

A commit may be in the WAL, and in every slot, before other sessions see it. So changes that were read from the slot are
kept for as long as there may be a snapshot that does not show them. And commits just before the place where a new slot
begins may be such: all transactions that were running when it was made are waited for before the first snapshot. That
also makes sure that the publication had the table already in all that a snapshot does not show.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from evermark import failpoint
from evermark.errors import BusyError, DeniedError, EvermarkError, SetupError
from evermark.event import UNKNOWN, Op
from evermark.event_file import as_batches
from evermark.sources.chunk_file import written_attempt, written_in_turn
from evermark.sources.copies import (
    Bounds,
    ChunkWork,
    Copying,
    CopyPlace,
    CopyStore,
    Mark,
    row_id,
    row_ids,
    rows_of_chunk,
)
from evermark.sources.postgres.connect import Link, connect, server_encoding
from evermark.sources.postgres.failures import python_encoding, translated, where
from evermark.sources.postgres.lsn import Incarnation, Position, lsn_of
from evermark.sources.postgres.names import TableNameError, table_name
from evermark.sources.postgres.read.chunks import chunked, in_order, peek_query, unpack
from evermark.sources.postgres.tables.capture import TablesCapture, wal_pages
from evermark.sources.postgres.tables.catalog import Catalog
from evermark.sources.postgres.tables.chunk_file import ChunkAbout, rewrite, write_rows
from evermark.sources.postgres.tables.overlap import Change, Overlap
from evermark.sources.postgres.tables.publication import look
from evermark.sources.postgres.tables.rows import OWN_PREFIX, CopyMarks, TablesDecoder
from evermark.sources.postgres.tables.scan import KeyRange, TableScan, relation_of
from evermark.sources.postgres.tables.snapshot import Snapshot
from evermark.sources.postgres.tables.versions import TableVersion, TableVersions
from evermark.sources.postgres.target import PostgresTarget, TableChoice, suffixed
from evermark.storage import storage_of

_PAGES_A_CHUNK = 30
_PERCENT_MAX = 10.0
# Others' transactions are waited for this long, then the task ends, says so, and another begins.
_LOCK_TIMEOUT = "30s"
_ENDED_POLL_S = 0.05
_ENDED_WAIT_S = 30.0
_LAST_LSN = (1 << 64) - 1
_CHANGES = ("stream", "key", "previous_key", "op", "tx", "position", "payload", "flags")
_ROW_OPS = pa.array([str(op) for op in (Op.INSERT, Op.UPDATE, Op.DELETE, Op.TRUNCATE)])
# A table that was never analyzed does not say how many rows it has. Rows whose large values are elsewhere are short.
_SIZE = """
select coalesce(sum(pg_catalog.pg_table_size(c.oid)), 0)::bigint,
       coalesce(sum(case when c.reltuples > 0 then c.reltuples
                         else pg_catalog.pg_relation_size(c.oid) / 128 end), 0)::bigint,
       coalesce(sum(pg_catalog.pg_relation_size(c.oid)), 0)::bigint / current_setting('block_size')::int
from pg_catalog.pg_class c
where c.oid = %s or c.oid in (select relid from pg_catalog.pg_partition_tree(%s::bigint::oid::regclass))
"""


def sampled_percent(chunks: int, pages: int) -> float | None:
    """How much of a table is looked at to cut it into about equal chunks; None: so much that it is walked instead, by
    its key's index. Rows come by whole pages, which may have neighbours only: so it is pages that count. Pure."""
    percent = 100 * chunks * _PAGES_A_CHUNK / pages if pages else 100.0
    return percent if 0 < percent <= _PERCENT_MAX else None


class TablesCopying(Copying):
    """Picklable; `versions` opens what is remembered of the tables."""

    def __init__(self, target: PostgresTarget, place: CopyPlace, versions: Callable[[], TableVersions]) -> None:
        self._target, self._place, self._versions = target, place, versions
        self.folder = place.folder

    @property
    def streams(self) -> Sequence[str]:
        return [table.stream for table in self._target.tables]

    @property
    def wanted(self) -> Sequence[str]:
        return self.streams if self._place.all_wanted else []

    def stream(self, text: str) -> str:
        try:
            found = table_name(text).stream
        except TableNameError as error:
            raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None
        if found not in self.streams:
            raise ValueError(f"{found} does not stand in the file, which names {', '.join(self.streams)}")
        return found

    def plan(self, stream: str) -> list[Bounds]:
        choice = chosen(self._target, stream)
        with connect(self._target.dsn) as link, _told_what_to_grant(link, choice):
            scan = TableScan(link, self._target, choice)
            if hidden := sorted(set(scan.key) & set(choice.hash)):
                raise SetupError(
                    f"table {stream} cannot be copied: its key has the column {hidden[0]}, which is hashed, and"
                    " copies are cut by keys, which are kept",
                    hint="take it out of `hash`, or use `start: now`",
                )
            size, rows, pages = link.one(_SIZE, (scan.relation.oid, scan.relation.oid), doing=f"looking at {stream}")
            every = rows_of_chunk(size, rows, self._place.chunk_rows_max)
            percent = sampled_percent(rows // every, pages)
            inner = scan.bounds(every) if percent is None else scan.sampled_bounds(every, percent)
            edges = [None, *inner, None]
        return list(pairwise(edges))

    def write(self, works: Sequence[ChunkWork], epoch: int, until_s: float) -> Iterator[ChunkWork]:
        copies, versions = self._place.open(), self._versions()
        try:
            with ChunkWriter(self._target, copies, versions, self._place, epoch) as writer:
                writer.begin({work.stream for work in works})
                yield from written_in_turn(works, writer.write, until_s, "the reader of the slot")
        finally:
            copies.close()
            versions.close()

    def compare(self, position: str, checkpoint: str) -> bool | None:
        mark, at = Position.parse(position), Position.parse(checkpoint)
        return at.lsn > mark.lsn if at.incarnation == mark.incarnation else None


def chosen(target: PostgresTarget, stream: str) -> TableChoice:
    for table in target.tables:
        if table.stream == stream:
            return table
    raise SetupError(f"table {stream} does not stand in the file", hint="name it under `tables`, then install")


class ChunkWriter:
    """One task's connection and temporary slot. Chunks are written one after another."""

    def __init__(
        self, target: PostgresTarget, copies: CopyStore, versions: TableVersions, place: CopyPlace, epoch: int
    ) -> None:
        self._target, self._copies, self._epoch = target, copies, epoch
        self._folder, self._source = place.folder, place.source
        self._versions = versions
        self._slot = suffixed(target.slot, f"_copy_{secrets.token_hex(4)}")
        self._marks = _SeenMarks()
        self._unfit: dict[str, SetupError] = {}  # streams that were not published when the slot was made
        self._seen: list[pa.RecordBatch] = []  # changes that a later snapshot may not show

    def __enter__(self) -> Self:
        self._link = connect(self._target.dsn, lock_timeout=_LOCK_TIMEOUT)
        try:
            self._aside = connect(self._target.dsn)  # the catalog is asked while the other is in the middle of a COPY
        except BaseException:
            self._link.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()  # the slot goes with it
        self._aside.close()

    def begin(self, streams: set[str]) -> None:
        link = self._link
        storage_of(self._folder).make_folder(self._folder)
        for stream in streams:
            try:
                relation_of(link, self._target, chosen(self._target, stream))  # published before the slot is made
            except SetupError as error:
                self._unfit[stream] = error
        self._streams = pa.array(sorted(streams), pa.string())
        self._incarnation: Incarnation = look(link, self._target).incarnation
        query = "select pg_catalog.pg_create_logical_replication_slot(%s, 'pgoutput', true)"
        link.row(query, (self._slot,), doing="making a slot for a copy")
        self._wait_for_transactions()
        encoding = python_encoding(server_encoding(link.connection))
        self._decoder = TablesDecoder(
            Position(self._incarnation, 0),
            Position(self._incarnation, _LAST_LSN),
            pages=wal_pages(self._aside.row),
            catalog=Catalog(self._aside.row, self._target.publication),
            versions=_Remembered(self._versions),
            hashed={table.stream: table.hash for table in self._target.tables},
            encoding=encoding,
            marks=self._marks,
        )

    def _wait_for_transactions(self) -> None:
        link, give_up_at = self._link, time.monotonic() + _ENDED_WAIT_S
        (upto,) = link.one("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint", doing="looking around")
        query = "select pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
        while link.one(query, doing="waiting for transactions")[0] < upto:
            if time.monotonic() > give_up_at:
                raise BusyError(
                    f"a copy at {where(link.dsn)} waits for a transaction that has been open for long",
                    hint="select pid, xact_start, query from pg_stat_activity where backend_xid is not null"
                    " order by xact_start; end it, or wait: it is tried again",
                )
            time.sleep(_ENDED_POLL_S)

    def write(self, work: ChunkWork) -> bool:
        """Whether the chunk is ready; if not, its attempt was given up by a reader meanwhile."""
        if work.stream in self._unfit:
            raise self._unfit[work.stream]
        return written_attempt(self._copies, work, self._folder, self._epoch, partial(self._written, work))

    def _written(self, work: ChunkWork, mark: Mark, draft: Path, path: Path) -> tuple[str, int]:
        snapshot, rows = self._scan(work, mark, draft)
        failpoint.hit("copy.marked")
        self._catch_up()
        lsn = self._marks.lsns.pop(mark, None)
        if lsn is None:
            raise EvermarkError(f"the mark of {work.stream} did not come out of the slot", hint="report this")
        overlap = Overlap.of(self._after(snapshot, work.stream, lsn))
        left = rewrite(draft, path, overlap, lambda key: row_id(work.copy, work.stream, f"{mark} {key}"))
        return self._incarnation.at(lsn, 1), rows if left is None else left

    def _scan(self, work: ChunkWork, mark: Mark, draft: Path) -> tuple[Snapshot, int]:
        """The rows of the chunk into a draft, and the mark: one transaction."""
        link, choice = self._link, chosen(self._target, work.stream)
        with (
            _told_what_to_grant(link, choice),
            translated(link.dsn, f"copying {work.stream}"),
            link.connection.transaction(),
        ):
            link.connection.execute("set transaction isolation level repeatable read")
            # Before the snapshot: a transaction that alters or empties the table has ended by then, or has to wait.
            link.connection.execute(sql.SQL("lock table {} in access share mode").format(_identifier(choice)))
            snapshot = Snapshot.parse(link.one("select pg_current_snapshot()::text", doing="taking a snapshot")[0])
            scan = TableScan(link, self._target, choice, self._decoder.latest(work.stream))
            batches = scan.rows(KeyRange(*work.bounds), work.condition)
            about = ChunkAbout(self._source, scan.message, scan.table.hashed)
            rows = write_rows(draft, about, _with_ids(batches, work, mark))
            failpoint.hit("copy.scanned")
            self._catch_up()  # so that little is left to read behind the mark, where the stream's reader may wait
            query = "select pg_catalog.pg_logical_emit_message(true, %s, %s::text)"
            link.row(query, (OWN_PREFIX, str(mark)), doing="making a mark")
        return snapshot, rows

    def _catch_up(self) -> None:
        """Read the slot up to now."""
        link = self._link
        (flush,) = link.one("select pg_current_wal_flush_lsn()::text", doing="asking for the WAL")
        query = peek_query(self._slot, self._target.publication, lsn_of(flush), TablesCapture.options, consumes=True)
        with translated(link.dsn, "reading the slot of a copy"), link.connection.cursor().copy(query) as copy:
            for lengths, data in chunked(in_order(unpack(copy))):
                for batch in as_batches(self._decoder.batches(lengths, data)):
                    mine = pc.and_(
                        pc.is_in(batch.column("op"), value_set=_ROW_OPS),
                        pc.is_in(batch.column("stream"), value_set=self._streams),
                    )
                    some = batch.select(_CHANGES).filter(mine)
                    if some.num_rows:
                        self._seen.append(_light(some))
        link.refuse_warnings("decoding")

    def _after(self, snapshot: Snapshot, stream: str, mark_lsn: int) -> Iterator[Change]:
        """Changes of the table that the snapshot does not show, up to the mark. What it shows, all later ones do."""
        self._seen = [left for batch in self._seen if (left := _not_shown(batch, snapshot)).num_rows]
        last = pa.scalar(self._incarnation.at(mark_lsn))
        for batch in self._seen:
            mine = pc.and_(pc.equal(batch.column("stream"), stream), pc.less(batch.column("position"), last))
            for row in batch.filter(mine).to_pylist():
                lacks = any(flag.startswith(UNKNOWN) for flag in row["flags"] or ())
                yield Change(row["op"], row["key"], row["previous_key"], row["payload"] if lacks else None)


class _SeenMarks(CopyMarks):
    """Where marks stand; nothing else does, in a slot that is read for its changes."""

    def __init__(self) -> None:
        self.lsns: dict[Mark, int] = {}

    def rows_at(self, mark: Mark, lsn: int) -> None:
        self.lsns[mark] = lsn


class _Remembered(TableVersions):
    """What is remembered of the tables, for a reader that tells of no changes of tables."""

    def __init__(self, versions: TableVersions) -> None:
        self._versions = versions

    def before(self, position: Position) -> dict[str, TableVersion]:
        return self._versions.before(Position(position.incarnation, _LAST_LSN >> 1))

    def keep(self, versions: object) -> None: ...

    def close(self) -> None: ...


def _light(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Without payloads, except where a value is lacking: a great many changes may come while a chunk is read."""
    lacks = [any(flag.startswith(UNKNOWN) for flag in flags or ()) for flags in batch.column("flags").to_pylist()]
    at = batch.schema.get_field_index("payload")
    payloads = pc.if_else(pa.array(lacks, pa.bool_()), batch.column(at), pa.scalar(None, pa.string()))
    return batch.set_column(at, batch.schema.field(at), payloads)


def _not_shown(batch: pa.RecordBatch, snapshot: Snapshot) -> pa.RecordBatch:
    xids = batch.column("tx").cast(pa.int64()).to_numpy(zero_copy_only=False)
    each, which = np.unique(xids, return_inverse=True)
    shown = np.array([snapshot.shows(int(xid)) for xid in each], np.bool_)[which.reshape(-1)]
    return batch.filter(pa.array(~shown)) if shown.any() else batch


def _with_ids(batches: Iterator[pa.RecordBatch], work: ChunkWork, mark: Mark) -> Iterator[pa.RecordBatch]:
    number = 0
    for batch in batches:
        keys = batch.column("key")
        # A row that cannot be read has no key that could be trusted.
        unfit = pc.or_(pc.is_null(keys), pc.not_equal(batch.column("op"), str(Op.READ)))
        if pc.any(unfit).as_py():
            keys = pc.if_else(unfit, pa.array([f"{mark} {number + n}" for n in range(len(keys))], pa.string()), keys)
        number += len(keys)
        at = batch.schema.get_field_index("event_id")
        yield batch.set_column(at, batch.schema.field(at), row_ids(work.copy, work.stream, keys))


@contextmanager
def _told_what_to_grant(link: Link, choice: TableChoice) -> Iterator[None]:
    try:
        yield
    except DeniedError as error:
        hint = f"grant select on {choice.name} to {link.connection.info.user}; it is tried again"
        raise DeniedError(error.message, hint=hint) from error


def _identifier(choice: TableChoice) -> sql.Identifier:
    """The file's name may have a reserved word in it, which SQL takes in quotes alone: order.items."""
    name = table_name(choice.name)
    return sql.Identifier(name.schema, name.table)
