"""What the stores of SQLite and Postgres share: the steps of each transaction on tables, events and members."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from evermark.errors import BusyError, ConflictError, EvermarkError, FormatError, SetupError, UnreachableError
from evermark.replicas import clock
from evermark.replicas.base import Collected, Counts, Ingested, Quarantined
from evermark.replicas.event import Event, Operation, Version, beats, image_text, winners
from evermark.replicas.members import Member, Said
from evermark.replicas.paging import Stretch
from evermark.replicas.ranges import (
    NOTHING,
    Held,
    Ranges,
    held_as_json,
    held_from,
    union,
)
from evermark.replicas.sql_base import EVENT_COLUMNS
from evermark.replicas.sql_snapshots import SqlSnapshots
from evermark.replicas.values import OURS, Table


class SqlStore(SqlSnapshots):
    def install(self, table: str, columns: Sequence[str] | None, now_ms: int) -> Table:
        known = self.tables().get(table)
        if known is not None and columns is None:
            columns = list(known.columns)
        spec = self._described(table, columns)
        with self._writing():
            self._lock_table(table)
            self._run(
                "insert into replication_tables (name, form) values (?, ?) "
                "on conflict (name) do update set form = excluded.form",
                [table, json.dumps(spec.as_json())],
            )
            self._script(self._table_schema.format(t=table))
            self._migrate_events(table)
            if known is None:
                self._set_meta(self._seq_key(table), 0)
                self._set_meta(self._clock_key(table), 0)
                self._version_rows(spec, now_ms)
            elif known != spec:
                self._forget_events(table)
            self._capture(spec)
        return spec

    def _capture(self, spec: Table) -> None:
        self._script(self._indexes.format(t=spec.name))
        self._script(self._triggers(spec))
        self._set_meta(f"capture::{spec.name}", self._capture_digest(spec))

    def _capture_digest(self, spec: Table) -> str:
        return hashlib.sha256((self._indexes + self._triggers(spec)).encode()).hexdigest()

    def renew_capture(self, table: str) -> bool:
        spec = self._table(table)
        if self._meta(f"capture::{table}", "") == self._capture_digest(spec):
            return False
        try:
            with self._writing():
                self._lock_table(table)
                self._capture(spec)
        except (BusyError, UnreachableError):
            raise
        except EvermarkError as error:
            raise SetupError(
                f"the triggers of {table} were made by an older evermark, and cannot be renewed: {error.message}",
                hint=f"run as the table's owner: evermark replica init --table {table}",
            ) from error
        return True

    def identity(self) -> tuple[str, str]:
        return self._meta("origin", ""), self._meta("token", "")

    def set_token(self, token: str) -> None:
        with self._writing():
            self._set_meta("token", token)
            self._set_meta("token_kept", 0)
            self._set_meta("noted_head", self.head())
            for name in self.tables():
                self._set_meta(f"noted::{name}", self._meta(self._seq_key(name), "0"))

    def token_kept(self) -> None:
        with self._writing():
            self._set_meta("token_kept", 1)

    def is_noted(self) -> bool:
        return self._meta("token_kept", "0") == "1" and self._meta("noted_head", "-1") == str(self.head())

    def noted(self, table: str) -> int:
        return int(self._meta(f"noted::{table}", "0")) if self._meta("token_kept", "0") == "1" else 0

    def renew(self, origin: str, *, is_noted: bool = True) -> None:
        with self._writing():
            before = self._meta("origin", "")
            sure = {name: self.floors(name).get(before, 0) for name in self.tables()}
            if is_noted:
                sure = {name: max(floor, int(self._meta(f"noted::{name}", "0"))) for name, floor in sure.items()}
            self._renew(origin, sure)

    def _renew(self, origin: str, sure: Mapping[str, int]) -> None:
        """`sure`: up to where the numbers of a table are known to be the present origin's own. Later numbers it may
        have given to other events as well, before this database was restored: their events become the new origin's."""
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

    def said(self) -> Said:
        with self._writing():
            tick = int(self._meta("tick", "0")) + 1
            self._set_meta("tick", tick)
        with self._reading():
            origin = self._meta("origin")
            names = list(self.tables())
            held = {name: self.held(name) for name in names}
            return Said(origin, tick, held, self.clocks(), self.evicted())

    def clocks(self) -> dict[str, int]:
        return {name: int(self._meta(self._clock_key(name), "0")) for name in self.tables()}

    def head(self) -> int:
        rows = self._all("select value from replication_meta where key like 'origin_seq::%'")
        taken = self._all("select coalesce(sum(seen_seq), 0) from replication_checkpoints")
        return sum(int(value) for (value,) in rows) + int(taken[0][0])

    def _forget_events(self, table: str) -> None:
        """Their images are of other columns than the table's: peers that lack them take a snapshot."""
        self._raise_floors(table, {origin: ranges.highest for origin, ranges in self.held(table).items()})
        self._run(f'delete from "{table}_Events"')

    def given_up(self) -> frozenset[str]:
        return frozenset(name for name in self.tables() if self._given_up(name))

    def read(self, table: str, stretches: Sequence[Stretch]) -> list[Event]:
        spec, found = self._table(table), []
        for stretch in stretches:
            rows = self._all(
                f'select {EVENT_COLUMNS} from "{table}_Events" where origin_node_id = ? and origin_seq between ? and ? '
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
                f'select {EVENT_COLUMNS} from "{table}_Events" where origin_node_id = ? and origin_seq between ? and ?',
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
            f'select {EVENT_COLUMNS} from "{table}_Events" where (timestamp, id) > (?, ?) and hlc > 0 '
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

    def lost(self, table: str) -> Held:
        return held_from(json.loads(self._meta(f"lost::{table}", "{}")))

    def give_up(self, table: str, origin: str, numbers: Ranges) -> None:
        with self._writing():
            self._set_meta(f"lost::{table}", json.dumps(held_as_json(union(self.lost(table), {origin: numbers}))))

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
        some = (
            f'select v.record_id from "{table}_Versions" v '
            "join replication_checkpoints c on c.table_name = ? and c.origin_node_id = v.origin_node_id "
            "where v.is_deleted and v.hlc <= ? and v.origin_seq <= c.floor_seq limit ?"
        )
        # Looked for first: mostly there are none, and to find that out takes long, which no writer need wait for.
        while self._all(some, [table, clock, 1]):
            with self._writing():
                sql = f'delete from "{table}_Versions" where record_id in ({some})'
                gone = self._run(sql, [table, clock, batch])
            total += gone
            if gone < batch:
                break
        return total

    def count_as_collected(self, table: str) -> Collected:
        self._table(table)
        deleted, reached = 0, dict[str, int]()
        with self._writing():
            self._lock_numbers(table)
            floors = self.floors(table)
            for origin, ranges in self.held(table).items():
                last = self._last_lost(table, origin, ranges - Ranges.through(floors.get(origin, 0)))
                if last is not None:
                    deleted += self._run(
                        f'delete from "{table}_Events" where origin_node_id = ? and origin_seq <= ?', [origin, last]
                    )
                    reached[origin] = last
            self._raise_floors(table, reached)
        return Collected(deleted, 0, reached)

    def _last_lost(self, table: str, origin: str, numbers: Ranges) -> int | None:
        """The highest of these numbers whose event is not there."""
        between = f'from "{table}_Events" e where e.origin_node_id = ? and e.origin_seq between ? and ?'
        for start, end in reversed(numbers.parts):
            count, highest = self._all(f"select count(*), max(e.origin_seq) {between}", [origin, start, end])[0]
            if highest != end:
                return end
            if int(count) < end - start + 1:
                # Before the first of the numbers that reach to the end without a gap.
                first = self._all(
                    f'select max(e.origin_seq) {between} and not exists (select 1 from "{table}_Events" p '
                    "where p.origin_node_id = e.origin_node_id and p.origin_seq = e.origin_seq - 1)",
                    [origin, start, end],
                )
                return int(first[0][0]) - 1
        return None

    def counts(self, table: str) -> Counts:
        self._table(table)
        rows = self._all(f'select count(*) from "{table}"')[0][0]
        events = self._all(f'select count(*) from "{table}_Events"')[0][0]
        tombstones = self._all(f'select count(*) from "{table}_Versions" where is_deleted')[0][0]
        return Counts(int(rows), int(events), int(tombstones))

    def evict_self(self, origin: str) -> None:
        with self._writing():
            before = self._meta("origin")
            for name in self.tables():
                self._set_meta(f"given_up::{name}", json.dumps(sorted({*self._given_up(name), before})))
            self._renew(origin, {name: int(self._meta(self._seq_key(name), "0")) for name in self.tables()})


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
