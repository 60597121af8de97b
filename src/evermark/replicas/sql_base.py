"""SQL that the stores of SQLite and Postgres both understand: what an adapter adds, and what all steps build upon."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa

from evermark.errors import FormatError, NotFoundError, SetupError
from evermark.replicas.event import Event, Version, image_text
from evermark.replicas.ranges import (
    NOTHING,
    RANGES_MAX,
    Held,
    Ranges,
    ranges_from,
)
from evermark.replicas.values import Table

FORMAT = 1
EVENT_COLUMNS = "id, operation_type, record_id, data, timestamp, origin_node_id, origin_seq, hlc"


class SqlBase(ABC):
    # What an adapter adds: how it connects, captures, locks, and reads and writes rows of users' tables.

    _uuid_sql: str  # a new one for each row
    _table_schema: str  # of the tables beside `{t}`, and
    _indexes: str  # their indexes, which come when rows of an older program have their numbers

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
    def _live(self, table: Table, rows_max: int) -> Iterator[pa.Table]:
        """All rows with their versions, as of the transaction that is open, in pieces."""

    @abstractmethod
    def _live_of(self, table: Table, records: Sequence[str]) -> pa.Table:
        """The rows that are there of these records, with their versions."""

    @abstractmethod
    def _insert_rows(self, table: Table, rows: pa.Table) -> None:
        """Write rows that are not there yet."""

    @abstractmethod
    def _upsert_rows(self, table: Table, rows: pa.Table) -> None: ...

    @abstractmethod
    def _insert_columns(self, name: str, columns: pa.Table) -> None:
        """Write new rows into a table of ours, whose columns are called like these."""

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
    def _described(self, table: str, columns: Sequence[str] | None) -> Table:
        """The table with these columns, or with all that can be replicated. Raises what stands against it."""

    @abstractmethod
    def _script(self, text: str) -> None:
        """Run several statements."""

    @abstractmethod
    def _migrate_events(self, table: str) -> None:
        """Give an events table of an older program its columns and numbers."""

    @abstractmethod
    def _version_rows(self, spec: Table, now_ms: int) -> None:
        """Give the rows that are there versions of this node's."""

    @abstractmethod
    def _triggers(self, spec: Table) -> str:
        """A script that makes the capture of the table, in place of the one that is there."""

    @abstractmethod
    def left_out(self, table: str) -> list[str]: ...

    @abstractmethod
    def close(self) -> None: ...

    # Tables, checkpoints, versions.

    def __init__(self, service: str) -> None:
        self._service = service
        self._forms: list[tuple[Any, ...]] = []
        self._tables: dict[str, Table] = {}

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

    def _insert_events(self, table: str, events: Sequence[Event]) -> None:
        self._many(
            f'insert into "{table}_Events" (table_name, processed, {EVENT_COLUMNS}) '
            "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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

    def _save_versions(self, table: str, rows: Iterable[tuple[str, Version, bool]]) -> None:
        self._many(
            f'insert into "{table}_Versions" (record_id, hlc, origin_node_id, origin_seq, is_deleted) '
            "values (?, ?, ?, ?, ?) on conflict (record_id) do update set hlc = excluded.hlc, "
            "origin_node_id = excluded.origin_node_id, origin_seq = excluded.origin_seq, "
            "is_deleted = excluded.is_deleted",
            [(record, version.hlc, version.origin, version.seq, deleted) for record, version, deleted in rows],
        )

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

    def _raise_clock(self, table: str, reading: int) -> None:
        key = self._clock_key(table)
        if reading > int(self._meta(key, "0")):
            self._set_meta(key, reading)

    def _given_up(self, table: str) -> set[str]:
        """Origins under which this node was evicted, and whose events are still to be told under its present one."""
        return set(json.loads(self._meta(f"given_up::{table}", "[]")))
