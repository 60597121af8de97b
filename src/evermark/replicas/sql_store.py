"""What the stores of SQLite and Postgres share: the steps of each transaction, in SQL that both understand.

An adapter adds how it connects, captures, locks, and reads and writes rows of users' tables.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from evermark.errors import ConflictError, FormatError, NotFoundError, SetupError
from evermark.replicas import clock
from evermark.replicas.base import Collected, Counts, Cut, Ingested, Quarantined, Row
from evermark.replicas.digests import RowDigest, Span
from evermark.replicas.event import Event, Image, Operation, Version, beats, image_text, row_digest, winners
from evermark.replicas.members import Member, Said
from evermark.replicas.paging import Stretch
from evermark.replicas.ranges import (
    NOTHING,
    RANGES_MAX,
    Held,
    Ranges,
    ranges_from,
)
from evermark.replicas.values import OURS, Table

FORMAT = 1
_EVENT = "id, operation_type, record_id, data, timestamp, origin_node_id, origin_seq, hlc"
_READ_ROWS = 2000


class SqlStore(ABC):
    def __init__(self, service: str) -> None:
        self._service = service
        self._forms: list[tuple[Any, ...]] = []
        self._tables: dict[str, Table] = {}

    # What an adapter adds.

    _uuid_sql: str  # a new one for each row

    @abstractmethod
    def _all(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def _many(self, sql: str, params: Iterable[Sequence[Any]]) -> None: ...

    @abstractmethod
    def _run(self, sql: str, params: Sequence[Any] = ()) -> int:
        """How many rows it touched."""

    @abstractmethod
    def _writing(self) -> AbstractContextManager[None]:
        """A transaction whose changes of users' tables are not captured."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[None]:
        """A transaction that sees one moment."""

    @abstractmethod
    def _lock_rows(self, table: Table, events: Mapping[str, Event]) -> set[str]:
        """Keep users' transactions off these rows; records for which a row had to be inserted for that."""

    @abstractmethod
    def _lock_numbers(self, table: str) -> None:
        """Keep users' transactions from numbering events of the table until this transaction ends."""

    @abstractmethod
    def _lock_table(self, table: str) -> None:
        """Keep users' transactions off the whole table."""

    @abstractmethod
    def _upsert(self, table: Table, events: Sequence[Event]) -> None: ...

    @abstractmethod
    def _delete(self, table: Table, records: Sequence[str]) -> None: ...

    @abstractmethod
    def _images(self, table: Table, records: Sequence[str]) -> dict[str, Image]:
        """The rows that are there, by record."""

    @abstractmethod
    def _upsert_staged(self, table: Table) -> None:
        """Write the rows of `replication_winners` with an image into the table."""

    @abstractmethod
    def _is_replaceable(self, table: Table) -> bool:
        """Whether a row may be deleted and inserted again: all of it is replicated, and nothing goes with it."""

    @abstractmethod
    def _record_sql(self, table: Table, row: str) -> str:
        """SQL for the record id of a row of the table, which stands under the name `row`."""

    @abstractmethod
    def _forget_types(self) -> None:
        """A table's form has changed."""

    @abstractmethod
    def install(self, table: str, columns: Sequence[str] | None, now_ms: int) -> Table: ...

    @abstractmethod
    def left_out(self, table: str) -> list[str]: ...

    @abstractmethod
    def close(self) -> None: ...

    # Tables and identity.

    def tables(self) -> Mapping[str, Table]:
        rows = self._all("select name, form from replication_tables order by name")
        if rows != self._forms:  # another process may have changed them
            self._forms, self._tables = rows, {name: Table.from_json(name, json.loads(form)) for name, form in rows}
            self._forget_types()
        return self._tables

    def _table(self, name: str) -> Table:
        found = self.tables().get(name)
        if found is None:
            raise NotFoundError(f"{name[:60]!r} is not replicated here", hint="evermark replica init --table NAME")
        return found

    def _meta(self, key: str, default: str | None = None) -> str:
        rows = self._all("select value from replication_meta where key = ?", [key])
        if rows:
            return str(rows[0][0])
        if default is None:
            raise SetupError(f"replication_meta has no {key}", hint="run: evermark replica init")
        return default

    def _set_meta(self, key: str, value: object) -> None:
        self._run(
            "insert into replication_meta (key, value) values (?, ?) "
            "on conflict (key) do update set value = excluded.value",
            [key, str(value)],
        )

    def _check_format(self) -> None:
        found = int(self._meta("format", str(FORMAT)))
        if found > FORMAT:
            raise FormatError(
                f"the replicated tables are of format {found}, this program knows {FORMAT}", hint="upgrade evermark"
            )

    def _seq_key(self, table: str) -> str:
        return f"origin_seq::{self._service}::{table}"

    def _clock_key(self, table: str) -> str:
        return f"hlc::{self._service}::{table}"

    def identity(self) -> tuple[str, str]:
        return self._meta("origin", ""), self._meta("token", "")

    def set_token(self, token: str) -> None:
        with self._writing():
            self._set_meta("token", token)
            for name in self.tables():
                self._set_meta(f"noted::{name}", self._meta(self._seq_key(name), "0"))

    def renew(self, origin: str, *, is_noted: bool = True) -> None:
        with self._writing():
            before = self._meta("origin", "")
            sure = {name: self.floors(name).get(before, 0) for name in self.tables()}
            if is_noted:
                sure = {name: max(floor, int(self._meta(f"noted::{name}", "0"))) for name, floor in sure.items()}
            self._renew(origin, sure)

    def _renew(self, origin: str, sure: Mapping[str, int]) -> None:
        """`sure`: up to where the numbers of a table are known to be the present origin's own. Those after them it may
        have given to other events as well, before this database was restored: these become the new origin's."""
        before, is_joined = self._meta("origin", ""), self.joined()
        for name in sorted(self.tables()):
            self._lock_numbers(name)
            last = int(self._meta(self._seq_key(name), "0"))
            if not is_joined:
                self._rename(name, before, origin)
            elif last:
                kept = min(last, sure[name])
                self._tell_anew(name, before, origin, kept)
                self._save_held(name, {before: Ranges.through(kept)})
                self._set_meta(self._seq_key(name), last - kept)
            self._set_meta(f"noted::{name}", 0)
        self._set_meta("origin", origin)

    def _tell_anew(self, table: str, before: str, origin: str, kept: int) -> None:
        """With the readings they had: what others know that came later must still win."""
        self._run(
            f'update "{table}_Events" set origin_node_id = ?, origin_seq = origin_seq - ?, id = {self._uuid_sql} '
            "where origin_node_id = ? and origin_seq > ?",
            [origin, kept, before, kept],
        )
        self._run(
            f'update "{table}_Versions" set origin_node_id = ?, origin_seq = origin_seq - ? '
            "where origin_node_id = ? and origin_seq > ?",
            [origin, kept, before, kept],
        )

    def _rename(self, table: str, before: str, origin: str) -> None:
        """Before this node has met others nobody knows its events, unless it is a backup: then they know them with
        other versions, which `join` gave them. So they become new ones."""
        self._run(
            f'update "{table}_Events" set origin_node_id = ?, id = {self._uuid_sql} where origin_node_id = ?',
            [origin, before],
        )
        for where in (f'"{table}_Versions"', "replication_checkpoints"):
            self._run(f"update {where} set origin_node_id = ? where origin_node_id = ?", [origin, before])

    def joined(self) -> bool:
        return self._meta("joined", "0") == "1"

    def join(self, clocks: Mapping[str, int]) -> None:
        with self._writing():
            origin = self._meta("origin")
            for name in sorted(self.tables()):
                self._lock_numbers(name)
                base, last = clocks.get(name, 0), int(self._meta(self._seq_key(name), "0"))
                for kind in ("Versions", "Events"):
                    # In the order they were made, and none further ahead than it must be: others quarantine the future.
                    self._run(
                        f'update "{name}_{kind}" set hlc = ? + origin_seq '
                        "where origin_node_id = ? and hlc < ? + origin_seq",
                        [base, origin, base],
                    )
                self._raise_clock(name, base + last)
            self._set_meta("joined", 1)

    # What is held.

    def held(self, table: str) -> dict[str, Ranges]:
        sql = "select origin_node_id, origin_seq, seen_seq, missing from replication_checkpoints where table_name = ?"
        found = {}
        for origin, _, seen, missing in self._all(sql, [table]):
            ranges = Ranges.through(int(seen)) - ranges_from(json.loads(missing))
            if ranges:
                found[origin] = ranges
        own = int(self._meta(self._seq_key(table), "0"))
        origin = self._meta("origin")
        if own:
            found[origin] = found.get(origin, NOTHING) | Ranges.through(own)
        return found

    def _save_held(self, table: str, held: Held) -> None:
        rows = []
        for origin, ranges in held.items():
            if len(ranges.parts) > RANGES_MAX:
                raise FormatError(
                    f"{table}: events of {origin} arrive with more than {RANGES_MAX} gaps between them",
                    hint="they are asked for again in order; look at what lies between the peers if this goes on",
                )
            missing = json.dumps([list(part) for part in ranges.missing])
            rows.append((table, origin, ranges.contiguous, ranges.highest, missing))
        self._many(
            "insert into replication_checkpoints (table_name, origin_node_id, origin_seq, seen_seq, missing) "
            "values (?, ?, ?, ?, ?) on conflict (table_name, origin_node_id) do update set "
            "origin_seq = excluded.origin_seq, seen_seq = excluded.seen_seq, missing = excluded.missing",
            rows,
        )

    def said(self) -> Said:
        with self._writing():
            tick = int(self._meta("tick", "0")) + 1
            self._set_meta("tick", tick)
        with self._reading():
            origin = self._meta("origin")
            names = list(self.tables())
            held = {name: self.held(name) for name in names}
            clocks = {name: int(self._meta(self._clock_key(name), "0")) for name in names}
            return Said(origin, tick, held, clocks, self.evicted())

    def head(self) -> int:
        rows = self._all("select value from replication_meta where key like 'origin_seq::%'")
        taken = self._all("select coalesce(sum(seen_seq), 0) from replication_checkpoints")
        return sum(int(value) for (value,) in rows) + int(taken[0][0])

    def floors(self, table: str) -> dict[str, int]:
        sql = "select origin_node_id, floor_seq from replication_checkpoints where table_name = ? and floor_seq > 0"
        return {origin: int(floor) for origin, floor in self._all(sql, [table])}

    def _raise_floors(self, table: str, floors: Mapping[str, int]) -> None:
        self._many(
            "insert into replication_checkpoints (table_name, origin_node_id, origin_seq, seen_seq, missing, "
            "floor_seq) values (?, ?, 0, 0, '[]', ?) on conflict (table_name, origin_node_id) do update set "
            "floor_seq = case when excluded.floor_seq > replication_checkpoints.floor_seq "
            "then excluded.floor_seq else replication_checkpoints.floor_seq end",
            [(table, origin, floor) for origin, floor in floors.items()],
        )

    def _forget_events(self, table: str) -> None:
        """Their images are of other columns than the table's: peers that lack them take a snapshot."""
        self._raise_floors(table, {origin: ranges.highest for origin, ranges in self.held(table).items()})
        self._run(f'delete from "{table}_Events"')

    def given_up(self) -> frozenset[str]:
        return frozenset(name for name in self.tables() if self._given_up(name))

    # Events.

    def read(self, table: str, stretches: Sequence[Stretch]) -> list[Event]:
        spec, found = self._table(table), []
        for stretch in stretches:
            rows = self._all(
                f'select {_EVENT} from "{table}_Events" where origin_node_id = ? and origin_seq between ? and ? '
                "order by origin_seq",
                [stretch.origin, stretch.start, stretch.end],
            )
            found += [_event(spec, row) for row in rows]
        return found

    def mend(self, table: str, stretch: Stretch) -> None:
        spec = self._table(table)
        if stretch.origin != self._meta("origin"):
            return
        with self._writing():
            rows = self._all(
                f'select {_EVENT} from "{table}_Events" where origin_node_id = ? and origin_seq between ? and ?',
                [stretch.origin, stretch.start, stretch.end],
            )
            for row in rows:
                if _is_readable(spec, row):
                    continue
                event_id, record, hlc, seq = row[0], row[2], int(row[7]), int(row[6])
                current = self._versions(table, [record]).get(record)
                if current is None or current <= Version(hlc, stretch.origin, seq):
                    continue
                image = self._images(spec, [record]).get(record)
                operation = Operation.DELETE if image is None else Operation.UPDATE
                self._run(
                    f'update "{table}_Events" set operation_type = ?, data = ? where id = ?',
                    [str(operation), image_text(image) or "", event_id],
                )

    def read_since(self, table: str, timestamp: int, event_id: str, limit: int) -> list[Event]:
        spec = self._table(table)
        rows = self._all(
            f'select {_EVENT} from "{table}_Events" where (timestamp, id) > (?, ?) and hlc > 0 '
            "order by timestamp, id limit ?",
            [timestamp, event_id, limit],
        )
        return [_event(spec, row) for row in rows]

    def ingest(self, table: str, events: Sequence[Event], now_ms: int, skew_ms: int) -> Ingested:
        spec = self._table(table)
        for event in events:
            _check(spec, event)
        early = {event.version[1:] for event in events if clock.is_ahead(event.version.hlc, now_ms, skew_ms)}
        quarantined = tuple(
            Quarantined(table, event.version.origin, event.version.seq, _ahead(event, now_ms))
            for event in events
            if event.version[1:] in early
        )
        calm = [event for event in events if event.version[1:] not in early]
        with self._writing():
            before = self.held(table)
            guess = winners(event for event in calm if event.version.seq not in before.get(event.version.origin, ()))
            inserted = self._lock_rows(spec, guess)
            self._lock_numbers(table)
            held = self.held(table)
            fresh = self._fresh(spec, calm, held)
            self._insert_events(table, fresh)
            best = winners(fresh)
            current = self._versions(table, list(best))
            won = [event for event in best.values() if beats(event.version, current.get(event.record_id))]
            self._apply(spec, won, inserted)
            self._take(table, held, fresh)
            self._note_quarantined(quarantined, fresh)
        return Ingested(len(fresh), len(won), len(calm) - len(fresh), quarantined)

    def _fresh(self, spec: Table, events: Sequence[Event], held: Held) -> list[Event]:
        """Events that are not held. What is held, and what comes twice, must be the same as before."""
        fresh: dict[tuple[str, int], Event] = {}
        known: list[Event] = []
        for event in events:
            number = (event.version.origin, event.version.seq)
            if number in fresh:
                _same(spec.name, event, fresh[number])
            elif event.version.seq in held.get(event.version.origin, ()):
                known.append(event)
            else:
                fresh[number] = event
        numbers = [Stretch(event.version.origin, event.version.seq, event.version.seq) for event in known]
        there = {event.version[1:]: event for event in self.read(spec.name, numbers)}
        for event in known:
            if event.version[1:] in there:
                _same(spec.name, event, there[event.version[1:]])
        return list(fresh.values())

    def _insert_events(self, table: str, events: Sequence[Event]) -> None:
        self._many(
            f'insert into "{table}_Events" (table_name, processed, {_EVENT}) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)',
            [
                (
                    table,
                    True,
                    event.id,
                    str(event.operation),
                    event.record_id,
                    image_text(event.image) or "",
                    event.timestamp,
                    event.version.origin,
                    event.version.seq,
                    event.version.hlc,
                )
                for event in events
            ],
        )

    def _versions(self, table: str, records: Sequence[str]) -> dict[str, Version]:
        found: dict[str, Version] = {}
        for at in range(0, len(records), 500):
            some = records[at : at + 500]
            marks = ", ".join("?" * len(some))
            rows = self._all(
                f'select record_id, hlc, origin_node_id, origin_seq from "{table}_Versions" '
                f"where record_id in ({marks})",
                some,
            )
            found.update({record: Version(int(hlc), origin, int(seq)) for record, hlc, origin, seq in rows})
        return found

    def _apply(self, spec: Table, won: Sequence[Event], inserted: set[str]) -> None:
        """Write the images that won, and take away the rows that were inserted for locking alone."""
        live = sorted((event for event in won if event.image is not None), key=lambda event: event.version)
        kept = {event.record_id for event in live}
        # First what goes, then rows in the order they were made: a later one may have what an index lets only one have.
        self._delete(spec, sorted(inserted - kept | {event.record_id for event in won if event.image is None}))
        self._writing_rows(
            spec, lambda: self._upsert(spec, live), lambda: self._delete(spec, [event.record_id for event in live])
        )
        self._save_versions(spec.name, [(event.record_id, event.version, event.image is None) for event in won])

    def _writing_rows(self, spec: Table, write: Callable[[], None], clear: Callable[[], object]) -> None:
        """Rows that swapped what an index lets only one of them have can be written when none of them is there."""
        self._run("savepoint rows")
        try:
            write()
        except SetupError:
            self._run("rollback to savepoint rows")
            if not self._is_replaceable(spec):
                raise
            clear()
            write()
        self._run("release savepoint rows")

    def _save_versions(self, table: str, rows: Iterable[tuple[str, Version, bool]]) -> None:
        self._many(
            f'insert into "{table}_Versions" (record_id, hlc, origin_node_id, origin_seq, is_deleted) '
            "values (?, ?, ?, ?, ?) on conflict (record_id) do update set hlc = excluded.hlc, "
            "origin_node_id = excluded.origin_node_id, origin_seq = excluded.origin_seq, "
            "is_deleted = excluded.is_deleted",
            [(record, version.hlc, version.origin, version.seq, deleted) for record, version, deleted in rows],
        )

    def _take(self, table: str, held: Held, events: Sequence[Event]) -> None:
        """The checkpoints, and the clock, after these events."""
        new: dict[str, list[int]] = {}
        for event in events:
            new.setdefault(event.version.origin, []).append(event.version.seq)
        self._save_held(
            table, {origin: held.get(origin, NOTHING) | Ranges.of(numbers) for origin, numbers in new.items()}
        )
        if events:
            self._raise_clock(table, max(event.version.hlc for event in events))

    def raise_clocks(self, clocks: Mapping[str, int]) -> None:
        behind = [t for t in sorted(self.tables()) if clocks.get(t, 0) > int(self._meta(self._clock_key(t), "0"))]
        if behind:
            with self._writing():
                for name in behind:
                    self._lock_numbers(name)
                    self._raise_clock(name, clocks[name])

    def _raise_clock(self, table: str, reading: int) -> None:
        key = self._clock_key(table)
        if reading > int(self._meta(key, "0")):
            self._set_meta(key, reading)

    def _note_quarantined(self, quarantined: Sequence[Quarantined], taken: Sequence[Event]) -> None:
        self._many(
            "insert into replication_quarantine (table_name, origin_node_id, origin_seq, reason) values (?, ?, ?, ?) "
            "on conflict (table_name, origin_node_id, origin_seq) do update set reason = excluded.reason",
            [(each.table, each.origin, each.seq, each.reason) for each in quarantined],
        )
        self._many(
            "delete from replication_quarantine where table_name = ? and origin_node_id = ? and origin_seq = ?",
            [(event.table, event.version.origin, event.version.seq) for event in taken],
        )

    def quarantined(self) -> list[Quarantined]:
        sql = "select table_name, origin_node_id, origin_seq, reason from replication_quarantine order by 1, 2, 3"
        return [Quarantined(*row) for row in self._all(sql)]

    # Members and collection.

    def members(self) -> dict[str, Member]:
        found = {}
        for name, said, settled, heard_ms in self._all("select name, said, settled, heard_ms from replication_members"):
            what = None if said == "" else Said.from_json(json.loads(said))
            found[name] = Member(name, what, json.loads(settled), int(heard_ms))
        return found

    def save_members(self, members: Mapping[str, Member], evicted: frozenset[str]) -> None:
        with self._writing():
            self._many(
                "insert into replication_members (name, said, settled, heard_ms) values (?, ?, ?, ?) "
                "on conflict (name) do update set said = excluded.said, settled = excluded.settled, "
                "heard_ms = excluded.heard_ms",
                [
                    (
                        name,
                        "" if member.said is None else json.dumps(member.said.as_json()),
                        json.dumps(dict(member.settled)),
                        member.heard_ms,
                    )
                    for name, member in members.items()
                ],
            )
            self._many(
                "insert into replication_evicted (origin_node_id) values (?) on conflict (origin_node_id) do nothing",
                [(origin,) for origin in sorted(evicted)],
            )

    def forget_member(self, name: str) -> None:
        with self._writing():
            self._run("delete from replication_members where name = ?", [name])

    def evicted(self) -> frozenset[str]:
        return frozenset(origin for (origin,) in self._all("select origin_node_id from replication_evicted"))

    def collect(self, table: str, floors: Mapping[str, int], clock: int, before_ms: int, batch: int) -> Collected:
        self._table(table)
        deleted, reached = 0, dict[str, int]()
        for origin, floor in sorted(floors.items()):
            end = self._collectable(table, origin, floor, before_ms)
            while self.floors(table).get(origin, 0) < end:
                with self._writing():
                    done = self.floors(table).get(origin, 0)
                    last = min(end, done + batch)
                    self._raise_floors(table, {origin: last})
                    deleted += self._run(
                        f'delete from "{table}_Events" where origin_node_id = ? and origin_seq <= ?', [origin, last]
                    )
                    reached[origin] = last
        return Collected(deleted, self._collect_tombstones(table, clock, batch), reached)

    def _collectable(self, table: str, origin: str, floor: int, before_ms: int) -> int:
        """The last number up to the floor before the first event that is too young."""
        young = self._all(
            f'select min(origin_seq) from "{table}_Events" where origin_node_id = ? and origin_seq <= ? '
            "and timestamp >= ?",
            [origin, floor, before_ms],
        )[0][0]
        return floor if young is None else min(floor, int(young) - 1)

    def _collect_tombstones(self, table: str, clock: int, batch: int) -> int:
        total = 0
        while True:
            with self._writing():
                gone = self._run(
                    f'delete from "{table}_Versions" where record_id in (select v.record_id from "{table}_Versions" v '
                    "join replication_checkpoints c on c.table_name = ? and c.origin_node_id = v.origin_node_id "
                    "where v.is_deleted and v.hlc <= ? and v.origin_seq <= c.floor_seq limit ?)",
                    [table, clock, batch],
                )
            total += gone
            if gone < batch:
                return total

    def counts(self, table: str) -> Counts:
        self._table(table)
        rows = self._all(f'select count(*) from "{table}"')[0][0]
        events = self._all(f'select count(*) from "{table}_Events"')[0][0]
        tombstones = self._all(f'select count(*) from "{table}_Versions" where is_deleted')[0][0]
        return Counts(int(rows), int(events), int(tombstones))

    # Snapshots.

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

    def evict_self(self, origin: str) -> None:
        with self._writing():
            before = self._meta("origin")
            for name in self.tables():
                self._set_meta(f"given_up::{name}", json.dumps(sorted({*self._given_up(name), before})))
            self._renew(origin, {name: int(self._meta(self._seq_key(name), "0")) for name in self.tables()})

    def _given_up(self, table: str) -> set[str]:
        """Origins under which this node was evicted, and whose events are still to be told under its present one."""
        return set(json.loads(self._meta(f"given_up::{table}", "[]")))

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

    # Comparing.

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


def _event(spec: Table, row: tuple[Any, ...]) -> Event:
    event_id, operation, record, data, timestamp, origin, seq, hlc = row
    image = None if operation == Operation.DELETE else spec.checked(json.loads(data), record, OURS)
    version = Version(int(hlc), origin, int(seq))
    return Event(str(event_id), spec.name, Operation(operation), record, image, int(timestamp), version)


def _is_readable(spec: Table, row: tuple[Any, ...]) -> bool:
    try:
        _event(spec, row)
    except FormatError:
        return False
    return True


def _check(spec: Table, event: Event) -> None:
    if event.table != spec.name or event.version.seq < 1 or event.version.hlc < 1:
        raise FormatError(f"{spec.name}: an event has an impossible table, number or clock", hint="the peer is damaged")
    if (event.image is None) != (event.operation is Operation.DELETE):
        raise FormatError(f"{spec.name}: a {event.operation} has no image, or a delete has one", hint="it is damaged")


def _same(table: str, event: Event, other: Event) -> None:
    if event.content != other.content:
        raise ConflictError(
            f"{table}: event {event.version.seq} of {event.version.origin} has another content than the one held here",
            hint="two nodes write under one origin: stop one, and run `evermark replica init --new-origin` on it",
        )


def _ahead(event: Event, now_ms: int) -> str:
    ahead_s = (clock.ms_of(event.version.hlc) - now_ms) / 1000
    return f"its clock is {ahead_s:.0f} s ahead of ours"
