"""Rows of one moment as a snapshot, a snapshot merged into what is there, and rows compared by their digests."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from evermark.errors import FormatError
from evermark.replicas import clock
from evermark.replicas.base import Cut
from evermark.replicas.columns import VERSION_FIELDS, images_of, row_digests, tombstones
from evermark.replicas.digests import RowDigest, Span
from evermark.replicas.event import Event, Image, Operation, Version
from evermark.replicas.native import NotNative
from evermark.replicas.ranges import (
    NOTHING,
    Held,
)
from evermark.replicas.sql_base import SqlBase
from evermark.replicas.values import Table

_READ_ROWS = 5000
_FETCH_ROWS = 200
_PIECE_BYTES = 64 * 1024 * 1024
_VERSION = [field.name for field in VERSION_FIELDS]
_TAKEN = (
    "record_id text primary key, hlc bigint not null, origin_node_id text not null, origin_seq bigint not null, "
    'is_deleted boolean not null, piece integer not null, "row" integer not null'
)
_TEMPORARY = ("replication_taken", "replication_ours", "replication_winners", "replication_vanished")


class SqlSnapshots(SqlBase):
    @contextmanager
    def snapshot(self, table: str, rows_max: int) -> Iterator[tuple[Cut, Iterator[pa.Table]]]:
        spec = self._table(table)
        with self._reading():
            cut = Cut(self.held(table), int(self._meta(self._clock_key(table), "0")))
            pieces = itertools.chain(self._live(spec, min(rows_max, _READ_ROWS)), self._tombstones(spec, rows_max))
            yield cut, _together(pieces, rows_max)

    def _tombstones(self, spec: Table, rows_max: int) -> Iterator[pa.Table]:
        after, sign = "", ">="
        while True:
            found = self._all(
                f'select record_id, hlc, origin_node_id, origin_seq from "{spec.name}_Versions" '
                f"where is_deleted and record_id {sign} ? order by record_id limit ?",
                [after, rows_max],
            )
            if not found:
                return
            yield tombstones(spec, found)
            after, sign = found[-1][0], ">"

    def _images(self, spec: Table, records: Sequence[str]) -> dict[str, Image]:
        """The rows that are there, by record."""
        return images_of(spec, self._live_of(spec, records))

    def merge(self, table: str, cut: Cut, rows: Callable[[], Iterator[pa.Table]], now_ms: int) -> int:
        def load(spec: Table, is_empty: bool) -> int:
            known = partial(_not_beyond, cut, spec, rows)
            return self._load(spec, known) if is_empty else self._merge_rows(spec, known)

        return self._merge(table, cut, load, now_ms)

    def is_empty(self, table: str) -> bool:
        self._table(table)
        has_rows = any(self._all(f'select 1 from "{table}{kind}" limit 1') for kind in ("", "_Versions"))
        return not has_rows and not self.held(table)

    def native_form(self, table: str) -> str | None:
        return None

    def dump(
        self, table: str, folder: Path, made: Callable[[Path], None] = lambda _: None
    ) -> tuple[Cut, Sequence[Path]]:
        raise NotNative(f"{table} is in a database without files", hint="its snapshot is made as columns")

    def take_dump(self, table: str, cut: Cut, files: Sequence[Path], now_ms: int) -> int:
        raise NotNative(f"{table} is in a database without files", hint="its snapshot is taken as columns")

    def _merge(self, table: str, cut: Cut, load: Callable[[Table, bool], int], now_ms: int) -> int:
        spec = self._table(table)
        with self._writing():
            self._lock_table(table)
            self._lock_numbers(table)
            given_up = self._given_up(table)
            held = {origin: ranges for origin, ranges in self.held(table).items() if origin not in given_up}
            self._note_cut(cut.held)
            unseen = self._unseen(table, given_up)
            changed = load(spec, self.is_empty(table))
            self._raise_clock(table, cut.clock)
            self._rebase(spec, unseen, given_up, cut.held, now_ms)
            new = {
                origin: ranges for origin, ranges in cut.held.items() if not held.get(origin, NOTHING).covers(ranges)
            }
            self._save_held(table, {origin: held.get(origin, NOTHING) | ranges for origin, ranges in new.items()})
            self._raise_floors(table, {origin: ranges.highest for origin, ranges in new.items()})
            self._run(
                "delete from replication_quarantine where table_name = ? and exists (select 1 from replication_cut c "
                "where c.origin_node_id = replication_quarantine.origin_node_id "
                "and replication_quarantine.origin_seq between c.first_seq and c.last_seq)",
                [table],
            )
        return changed

    def _load(self, spec: Table, rows: Callable[[], Iterator[pa.Table]]) -> int:
        """There is nothing yet that a row of the snapshot could lose against."""
        changed = 0
        for piece in rows():
            self._insert_rows(spec, piece.filter(pc.invert(piece["is_deleted"])))
            self._insert_columns(f"{spec.name}_Versions", piece.select(_VERSION))
            changed += piece.num_rows
        return changed

    def _note_cut(self, held: Held) -> None:
        self._run("delete from replication_cut")
        sql = "insert into replication_cut (origin_node_id, first_seq, last_seq) values (?, ?, ?)"
        self._many(sql, _flat(held))

    def _merge_rows(self, spec: Table, rows: Callable[[], Iterator[pa.Table]]) -> int:
        name, quoted = spec.name, f'"{spec.name}"'
        seen = (
            "exists (select 1 from replication_cut c where c.origin_node_id = v.origin_node_id "
            "and v.origin_seq between c.first_seq and c.last_seq)"
        )
        # We had this version, and have no word of the row: it was deleted, and the tombstone is collected.
        was_here = (
            "exists (select 1 from replication_ours o where o.origin_node_id = s.origin_node_id "
            "and s.origin_seq between o.first_seq and o.last_seq)"
        )
        for each in _TEMPORARY:
            self._run(f"drop table if exists {each}")
        self._run(f"create temporary table replication_taken ({_TAKEN})")
        self._run("create temporary table replication_ours (origin_node_id text, first_seq bigint, last_seq bigint)")
        given_up = self._given_up(name)
        self._many("insert into replication_ours values (?, ?, ?)", _flat(self.held(name), without=given_up))
        for at, piece in enumerate(rows()):
            where = {"piece": pa.repeat(pa.scalar(at), piece.num_rows), "row": pa.array(range(piece.num_rows))}
            taken = piece.select(_VERSION)
            for column, values in where.items():
                taken = taken.append_column(column, values)
            self._insert_columns("replication_taken", taken)
        self._run(
            "create temporary table replication_winners as select s.* from replication_taken s "
            f'left join "{name}_Versions" v on v.record_id = s.record_id where v.record_id is null and not {was_here} '
            "or (s.hlc, s.origin_node_id, s.origin_seq) > (v.hlc, v.origin_node_id, v.origin_seq)"
        )
        self._run(
            f'create temporary table replication_vanished as select v.record_id from "{name}_Versions" v '
            f"where not v.is_deleted and {seen} and not exists "
            "(select 1 from replication_taken s where s.record_id = v.record_id)"
        )
        gone = "select record_id from replication_winners where is_deleted union select record_id from "
        self._run(f'delete from "{name}" where {self._record_sql(spec, quoted)} in ({gone} replication_vanished)')
        vanished = self._run(
            f'delete from "{name}_Versions" where record_id in (select record_id from replication_vanished)'
        )
        live = "select record_id from replication_winners where not is_deleted"
        self._writing_rows(
            spec,
            lambda: self._upsert_winners(spec, rows),
            lambda: self._run(f'delete from "{name}" where {self._record_sql(spec, quoted)} in ({live})'),
        )
        won = self._run(
            f'insert into "{name}_Versions" (record_id, hlc, origin_node_id, origin_seq, is_deleted) '
            "select record_id, hlc, origin_node_id, origin_seq, is_deleted from replication_winners where true "
            "on conflict (record_id) do update set hlc = excluded.hlc, origin_node_id = excluded.origin_node_id, "
            "origin_seq = excluded.origin_seq, is_deleted = excluded.is_deleted"
        )
        for each in _TEMPORARY:
            self._run(f"drop table {each}")
        return vanished + won

    def _upsert_winners(self, spec: Table, rows: Callable[[], Iterator[pa.Table]]) -> None:
        for at, piece in enumerate(rows()):
            found = self._all(
                'select "row" from replication_winners where piece = ? and not is_deleted order by "row"', [at]
            )
            if found:
                self._upsert_rows(spec, piece.take(pa.array([int(row) for (row,) in found])))

    def _unseen(self, table: str, given_up: set[str]) -> list[str]:
        """Records whose version is of a given-up origin, and unknown to the maker of the snapshot."""
        rows = (
            self._all(
                f'select v.record_id, v.origin_node_id from "{table}_Versions" v where not exists '
                "(select 1 from replication_cut c where c.origin_node_id = v.origin_node_id "
                "and v.origin_seq between c.first_seq and c.last_seq)"
            )
            if given_up
            else []
        )
        return [record for record, origin in rows if origin in given_up]

    def _rebase(self, spec: Table, unseen: Sequence[str], given_up: set[str], seen: Held, now_ms: int) -> None:
        """What others have not seen of the origins that were given up becomes new events, unless it was beaten."""
        if not given_up:
            return
        name, own = spec.name, self._meta("origin")
        for origin in given_up:
            last = seen.get(origin, NOTHING).contiguous
            self._run(f'delete from "{name}_Events" where origin_node_id = ? and origin_seq > ?', [origin, last])
            self._run("delete from replication_checkpoints where table_name = ? and origin_node_id = ?", [name, origin])
        still = self._versions(name, unseen)
        kept = [record for record in unseen if record in still and still[record].origin in given_up]
        images = self._images(spec, kept)
        seq = int(self._meta(self._seq_key(name), "0"))
        reading = max(int(self._meta(self._clock_key(name), "0")), clock.at_ms(now_ms))
        made = []
        for at, record in enumerate(kept, 1):
            image = images.get(record)
            operation = Operation.UPDATE if image is not None else Operation.DELETE
            version = Version(reading + at, own, seq + at)
            made.append(Event(str(uuid.uuid4()), name, operation, record, image, now_ms, version))
        self._insert_events(name, made)
        self._save_versions(name, [(event.record_id, event.version, event.image is None) for event in made])
        self._set_meta(self._seq_key(name), seq + len(made))
        self._set_meta(self._clock_key(name), reading + len(made))
        self._set_meta(f"given_up::{name}", "[]")

    def row_digests(self, table: str, spans: Sequence[Span]) -> Iterator[Iterator[RowDigest]]:
        spec = self._table(table)
        with self._reading():
            for span in spans:
                yield (digest for rows in self._span(spec, span) for digest in row_digests(spec, rows))

    def _span(self, spec: Table, span: Span) -> Iterator[pa.Table]:
        """Rows of a span by record id; a version without a row is left out."""
        end, after, sign = span[1], span[0] or "", ">="
        upper = "" if end is None else " and record_id < ?"
        while True:
            found = self._all(
                f'select record_id from "{spec.name}_Versions" where not is_deleted and record_id {sign} ?{upper} '
                "order by record_id limit ?",
                [after, *([] if end is None else [end]), _READ_ROWS],
            )
            if not found:
                return
            yield self._live_of(spec, [record for (record,) in found]).sort_by("record_id")
            after, sign = found[-1][0], ">"

    def cuts(self, table: str, span: Span, pieces: int) -> list[str]:
        self._table(table)
        start, end = span
        upper = "" if end is None else " and record_id < ?"
        params: list[Any] = [start or "", *([] if end is None else [end])]
        where = f'from "{table}_Versions" where not is_deleted and record_id >= ?{upper}'
        count = int(self._all(f"select count(*) {where}", params)[0][0])
        step = max(1, -(-count // pieces))
        rows = self._all(
            f"select record_id from (select record_id, row_number() over (order by record_id) as n {where}) numbered "
            "where n > 1 and (n - 1) % ? = 0 order by record_id",
            [*params, step],
        )
        return [record for (record,) in rows]

    def uncaptured(self, table: str, limit: int) -> list[str]:
        spec = self._table(table)
        record = self._record_sql(spec, "b")
        rows = self._all(
            f'select {record} from "{table}" b where not exists (select 1 from "{table}_Versions" v '
            f"where v.record_id = {record} and not v.is_deleted) limit ?",
            [limit],
        )
        return sorted(record for (record,) in rows)


def _not_beyond(cut: Cut, spec: Table, rows: Callable[[], Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """A table's clock is never behind its versions: so who has looked at the clock has looked at all of them."""
    for piece in rows():
        if piece.num_rows and pc.max(piece["hlc"]).as_py() > cut.clock:
            raise FormatError(f"{spec.name}: a row of a snapshot is newer than its clock", hint="the peer is damaged")
        yield piece


def _flat(held: Held, without: Collection[str] = ()) -> list[tuple[str, int, int]]:
    return [(origin, start, end) for origin, ranges in held.items() if origin not in without for start, end in ranges]


def fetched(fetch: Callable[[int], list[tuple[Any, ...]]], rows_max: int) -> Iterator[list[tuple[Any, ...]]]:
    """What a cursor gives, in lists of so many rows at most, or of so many characters: rows may be of megabytes."""
    rows: list[tuple[Any, ...]] = []
    size = 0
    while some := fetch(min(_FETCH_ROWS, rows_max - len(rows))):
        rows += some
        size += sum([len(value) for row in some for value in row if type(value) is str])
        if len(rows) >= rows_max or size > _PIECE_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _together(pieces: Iterable[pa.Table], rows_max: int) -> Iterator[pa.Table]:
    """Small pieces put together to larger ones: of so many rows at most, and of so many bytes but for its last part."""
    waiting: list[pa.Table] = []
    rows = size = 0
    for piece in pieces:
        if waiting and (rows + piece.num_rows > rows_max or size > _PIECE_BYTES):
            yield pa.concat_tables(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(piece)
        rows, size = rows + piece.num_rows, size + piece.nbytes
    if waiting:
        yield pa.concat_tables(waiting)
