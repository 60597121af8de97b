"""Rows of one moment as a snapshot, a snapshot merged into what is there, and rows compared by their digests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from evermark.errors import ConflictError
from evermark.replicas import clock
from evermark.replicas.base import Cut, Row
from evermark.replicas.digests import RowDigest, Span
from evermark.replicas.event import Event, Operation, Version, image_text, row_digest
from evermark.replicas.ranges import (
    NOTHING,
    Held,
)
from evermark.replicas.sql_base import SqlBase
from evermark.replicas.values import Table

_READ_ROWS = 2000


class SqlSnapshots(SqlBase):
    @contextmanager
    def snapshot(self, table: str, rows_max: int) -> Iterator[tuple[Cut, Iterator[list[Row]]]]:
        spec = self._table(table)
        with self._reading():
            cut = Cut(self.held(table), int(self._meta(self._clock_key(table), "0")))
            yield cut, self._rows(spec, (None, None), rows_max, tombstones=True)

    def _rows(self, spec: Table, span: Span, rows_max: int, *, tombstones: bool) -> Iterator[list[Row]]:
        """Rows of a span by record id; a row whose version is here and whose image is not is left out."""
        start, end = span
        after, sign = (start, ">=") if start is not None else ("", ">=")
        upper = "" if end is None else " and record_id < ?"
        only = "" if tombstones else " and not is_deleted"
        while True:
            params = [after, *([] if end is None else [end]), rows_max]
            found = self._all(
                f'select record_id, hlc, origin_node_id, origin_seq, is_deleted from "{spec.name}_Versions" '
                f"where record_id {sign} ?{upper}{only} order by record_id limit ?",
                params,
            )
            if not found:
                return
            images = self._images(spec, [row[0] for row in found if not row[4]])
            yield [
                Row(record, Version(int(hlc), origin, int(seq)), images.get(record))
                for record, hlc, origin, seq, deleted in found
                if deleted or record in images
            ]
            after, sign = found[-1][0], ">"

    def stage(self, table: str, snapshot: str, chunk: int, rows: Sequence[Row]) -> None:
        self._table(table)
        with self._writing():
            if self._meta(f"staged::{table}", "") != snapshot:
                self._run(f'delete from "{table}_Staged"')
                self._set_meta(f"staged::{table}", snapshot)
            self._run(f'delete from "{table}_Staged" where chunk = ?', [chunk])
            self._many(
                f'insert into "{table}_Staged" (chunk, record_id, hlc, origin_node_id, origin_seq, data) '
                "values (?, ?, ?, ?, ?, ?)",
                [
                    (chunk, row.record_id, row.version.hlc, row.version.origin, row.version.seq, image_text(row.image))
                    for row in rows
                ],
            )

    def staged(self, table: str, snapshot: str) -> set[int]:
        self._table(table)
        if self._meta(f"staged::{table}", "") != snapshot:
            return set()
        return {int(chunk) for (chunk,) in self._all(f'select distinct chunk from "{table}_Staged"')}

    def merge(self, table: str, snapshot: str, cut: Cut, now_ms: int) -> int:
        spec = self._table(table)
        with self._writing():
            self._lock_table(table)
            self._lock_numbers(table)
            if self._meta(f"staged::{table}", "") != snapshot:
                raise ConflictError(f"{table}: another snapshot was staged meanwhile", hint="begin again")
            given_up = self._given_up(table)
            held = {origin: ranges for origin, ranges in self.held(table).items() if origin not in given_up}
            self._note_cut(cut.held)
            unseen = self._unseen(table, given_up)
            changed = self._merge_rows(spec)
            self._run(f'delete from "{table}_Staged"')
            self._set_meta(f"staged::{table}", "")
            self._raise_clock(table, cut.clock)
            self._rebase(spec, unseen, given_up, cut.held, now_ms)
            new = {
                origin: ranges for origin, ranges in cut.held.items() if not held.get(origin, NOTHING).covers(ranges)
            }
            self._save_held(table, {origin: held.get(origin, NOTHING) | ranges for origin, ranges in new.items()})
            self._raise_floors(table, {origin: ranges.highest for origin, ranges in new.items()})
        return changed

    def _note_cut(self, held: Held) -> None:
        self._run("delete from replication_cut")
        rows = [(origin, start, end) for origin, ranges in held.items() for start, end in ranges]
        self._many("insert into replication_cut (origin_node_id, first_seq, last_seq) values (?, ?, ?)", rows)

    def _merge_rows(self, spec: Table) -> int:
        name, quoted = spec.name, f'"{spec.name}"'
        seen = (
            "exists (select 1 from replication_cut c where c.origin_node_id = v.origin_node_id "
            "and v.origin_seq between c.first_seq and c.last_seq)"
        )
        self._run("drop table if exists replication_winners")
        self._run(
            f'create temporary table replication_winners as select s.* from "{name}_Staged" s '
            f'left join "{name}_Versions" v on v.record_id = s.record_id where v.record_id is null '
            "or (s.hlc, s.origin_node_id, s.origin_seq) > (v.hlc, v.origin_node_id, v.origin_seq)"
        )
        self._run("drop table if exists replication_vanished")
        self._run(
            f'create temporary table replication_vanished as select v.record_id from "{name}_Versions" v '
            f"where not v.is_deleted and {seen} and not exists "
            f'(select 1 from "{name}_Staged" s where s.record_id = v.record_id)'
        )
        gone = "select record_id from replication_winners where data is null union select record_id from "
        self._run(f'delete from "{name}" where {self._record_sql(spec, quoted)} in ({gone} replication_vanished)')
        vanished = self._run(
            f'delete from "{name}_Versions" where record_id in (select record_id from replication_vanished)'
        )
        live = "select record_id from replication_winners where data is not null"
        self._writing_rows(
            spec,
            lambda: self._upsert_staged(spec),
            lambda: self._run(f'delete from "{name}" where {self._record_sql(spec, quoted)} in ({live})'),
        )
        won = self._run(
            f'insert into "{name}_Versions" (record_id, hlc, origin_node_id, origin_seq, is_deleted) '
            "select record_id, hlc, origin_node_id, origin_seq, data is null from replication_winners where true "
            "on conflict (record_id) do update set hlc = excluded.hlc, origin_node_id = excluded.origin_node_id, "
            "origin_seq = excluded.origin_seq, is_deleted = excluded.is_deleted"
        )
        self._run("drop table replication_winners")
        self._run("drop table replication_vanished")
        return vanished + won

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
                yield (
                    (row.record_id, row_digest(row.record_id, row.version, row.image))
                    for rows in self._rows(spec, span, _READ_ROWS, tombstones=False)
                    for row in rows
                )

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
