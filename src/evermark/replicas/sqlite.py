"""Replicated tables in a SQLite file. Writers are serialised by SQLite itself, so triggers number events at once."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from evermark.errors import BusyError, DiskFullError, EvermarkError, NotFoundError, SetupError, UnreachableError
from evermark.replicas import clock, native
from evermark.replicas.base import Cut
from evermark.replicas.columns import live_rows, value_name
from evermark.replicas.event import Event
from evermark.replicas.sql_base import FORMAT
from evermark.replicas.sql_snapshots import fetched
from evermark.replicas.sql_store import SqlStore
from evermark.replicas.values import OURS, Kind, Table

_BUSY_S = 30.0
_CHECKPOINT_PAGES = 1000  # SQLite's own
_BREAK_OFF_EVERY_S = 0.05
_SCHEMA_ROWS = 20
_PARAMETERS = 900  # of one statement
_TRIGGERS = ("insert", "update", "delete", "moved")
_SCHEMA = """
create table if not exists replication_meta (key text primary key, value text not null) without rowid;
create table if not exists replication_tables (name text primary key, form text not null);
create table if not exists replication_checkpoints (
  table_name text not null, origin_node_id text not null,
  origin_seq integer not null default 0,           -- the highest number with none missing up to it
  seen_seq integer not null default 0,             -- the highest number there is
  missing text not null default '[]',              -- ranges between the two that are still missing
  floor_seq integer not null default 0,            -- up to here events were collected
  primary key (table_name, origin_node_id)) without rowid;
create table if not exists replication_members (
  name text primary key, said text not null, settled text not null, heard_ms integer not null);
create table if not exists replication_evicted (origin_node_id text primary key);
create table if not exists replication_quarantine (
  table_name text, origin_node_id text, origin_seq integer, reason text not null,
  primary key (table_name, origin_node_id, origin_seq));
create table if not exists replication_cut (origin_node_id text, first_seq integer, last_seq integer);
insert into replication_meta values ('applying', '0') on conflict (key) do nothing;
"""
_TABLE_SCHEMA = """
create table if not exists "{t}_Events" (
  id text primary key, table_name text not null, operation_type text not null, record_id text not null,
  data text, timestamp integer not null, origin_node_id text not null, origin_seq integer not null,
  processed boolean default false, hlc integer not null);
create table if not exists "{t}_Versions" (
  record_id text primary key, hlc integer not null, origin_node_id text not null, origin_seq integer not null,
  is_deleted boolean not null) without rowid;
drop table if exists "{t}_Staged";  -- of older programs
"""
_INDEXES = """
create unique index if not exists "{t}_Events_origin" on "{t}_Events" (origin_node_id, origin_seq);
create index if not exists "{t}_Events_time" on "{t}_Events" (timestamp, id);
create index if not exists "{t}_Versions_deleted" on "{t}_Versions" (hlc) where is_deleted;
"""
_NOW = "(cast(strftime('%s', 'now') as integer) * 1000 + cast(substr(strftime('%f', 'now'), 4) as integer))"
# In the order of time (version 7): random ones would each be a page of a large table's index to read and to write.
_UUID = (
    f"(printf('%08x-%04x-7', {_NOW} >> 16, {_NOW} & 65535) || lower(substr(hex(randomblob(2)), 2) || '-a' || "
    "substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))))"
)


class SqliteStore(SqlStore):
    _uuid_sql, _table_schema, _indexes = _UUID, _TABLE_SCHEMA, _INDEXES

    def __init__(self, path: Path | str, service: str = "replica") -> None:
        super().__init__(service)
        if str(path) != ":memory:" and not Path(path).exists():
            raise NotFoundError(f"there is no SQLite file {path}", hint="create it with your tables in it first")
        try:
            self._checkpointing: threading.Thread | None = None
            self._path = None if str(path) == ":memory:" else Path(path)
            self._file = self._file_there()
            self.connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self.connection.execute("pragma journal_mode = wal")
            self.connection.execute("pragma synchronous = full")
            self.connection.execute("pragma cell_size_check = on")  # it reads files of peers
            is_there = "select 1 from sqlite_master where name = 'replication_meta'"
            if self.connection.execute(is_there).fetchone() is None:
                self.connection.executescript(f"begin immediate;{_SCHEMA}commit;")
                self._set_meta("format", FORMAT)
        except sqlite3.Error as error:
            raise _failure(error) from error
        self._check_format()

    def close(self) -> None:
        if self._checkpointing:
            self._checkpointing.join()
        self.connection.close()

    def _file_there(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _check_file(self) -> None:
        """Users of the database open it by its path: where that leads to another file, what is written to the one that
        is open here is seen by nobody."""
        if self._file_there() != self._file:
            raise UnreachableError(
                f"{self._path} was replaced, or taken away, while it was open",
                hint="it is opened anew as soon as it is there; stop the node before you put a database back",
            )

    def _all(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        self._check_file()
        try:
            return self.connection.execute(sql, params).fetchall()
        except sqlite3.Error as error:
            raise _failure(error) from error

    def _many(self, sql: str, params: Iterable[Sequence[Any]]) -> None:
        try:
            self.connection.executemany(sql, params)
        except sqlite3.Error as error:
            raise _failure(error) from error

    def _run(self, sql: str, params: Sequence[Any] = ()) -> int:
        try:
            return self.connection.execute(sql, params).rowcount
        except sqlite3.Error as error:
            raise _failure(error) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._run("begin immediate")
        try:
            self._check_file()
            self._run("update replication_meta set value = '1' where key = 'applying'")
            yield
            self._run("update replication_meta set value = '0' where key = 'applying'")
            self._run("commit")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("rollback")
            raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._run("begin")
        try:
            yield
        finally:
            if self.connection.in_transaction:
                self.connection.execute("rollback")

    def _lock_rows(self, table: Table, events: Mapping[str, Event]) -> set[str]:
        return set()  # nobody else writes while this transaction lasts

    def _lock_numbers(self, table: str) -> None: ...

    def _lock_table(self, table: str) -> None: ...

    def _forget_types(self) -> None: ...

    # Installing.

    def _script(self, text: str) -> None:
        for statement in text.split(";\n"):
            if statement.strip():
                self._run(statement)

    def _described(self, table: str, columns: Sequence[str] | None) -> Table:
        rows = self._all("select name, type, pk from pragma_table_xinfo(?) where hidden = 0", [table])
        found = self._all("select name from sqlite_master where type = 'table' and lower(name) = lower(?)", [table])
        if not rows or not found:
            raise NotFoundError(f"there is no table {table} in this SQLite file", hint="create it first")
        if found[0][0] != table:
            raise SetupError(f"the table {table} is called {found[0][0]}", hint="write its name as it was created")
        kinds = {name: _kind(declared) for name, declared, _ in rows}
        chosen = list(kinds) if columns is None else list(columns)
        for column in chosen:
            if column not in kinds:
                raise SetupError(f"{table} has no column {column}", hint=f"it has {', '.join(kinds)}")
        key = [name for name, _, at in sorted(rows, key=lambda row: row[2]) if at]
        collations = self._all(
            "select x.name from pragma_index_list(?) l, pragma_index_xinfo(l.name) x "
            "where l.origin = 'pk' and x.key and x.coll <> 'BINARY'",
            [table],
        )
        for column in {name for name, declared, at in rows if at and not declared} | {name for (name,) in collations}:
            raise SetupError(
                f"{table}.{column}: keys that are equal here may be different texts",
                hint="declare a type for every column of the key, and no collation",
            )
        return Table(table, {column: kinds[column] for column in chosen}, tuple(key))

    def _migrate_events(self, table: str) -> None:
        """An events table of an older program: numbers first, by time, then the unique index. What its events say is
        in the rows already; their payloads are not images, so nobody is sent them, and peers take a snapshot."""
        has = {name for (name,) in self._all("select name from pragma_table_info(?)", [f"{table}_Events"])}
        if "hlc" in has:
            return
        origin = "origin_node_id" if "origin_node_id" in has else "source_node_id"
        if origin == "source_node_id":
            self._run(f"alter table \"{table}_Events\" add column origin_node_id text not null default ''")
            self._run(f'update "{table}_Events" set origin_node_id = source_node_id')
        if "origin_seq" not in has:
            self._run(f'alter table "{table}_Events" add column origin_seq integer not null default 0')
        self._run(f'alter table "{table}_Events" add column hlc integer not null default 0')
        self._run(
            f'update "{table}_Events" set processed = true, origin_seq = numbered.n from (select id, row_number() over '
            f'(partition by origin_node_id order by timestamp, id) as n from "{table}_Events") numbered '
            f'where numbered.id = "{table}_Events".id'
        )
        rows = self._all(f'select origin_node_id, max(origin_seq) from "{table}_Events" group by 1')
        for node, last in rows:
            self._many(
                "insert into replication_checkpoints values (?, ?, ?, ?, '[]', ?)", [(table, node, last, last, last)]
            )

    def _version_rows(self, spec: Table, now_ms: int) -> None:
        """Rows from before: versions of this node's, with numbers below its floor, so that peers take a snapshot."""
        origin, name = self._meta("origin"), spec.name
        base = clock.at_ms(now_ms)
        key = ", ".join(f'"{column}"' for column in spec.key)
        made = self._run(
            f'insert into "{name}_Versions" select record, ? + n, ?, n, false from '
            f"(select {self._record_sql(spec, 'b')} as record, row_number() over (order by {key}) as n "
            f'from "{name}" b)',
            [base, origin],
        )
        self._set_meta(self._seq_key(name), made)
        self._set_meta(self._clock_key(name), base + made)
        if made:
            self._raise_floors(name, {origin: made})

    def _triggers(self, spec: Table) -> str:
        name, guard = spec.name, "(select value from replication_meta where key = 'applying') = '0'"
        moved = " or ".join(f'old."{column}" is not new."{column}"' for column in spec.key)
        made = [("insert", "insert", "", "create", "new"), ("update", "update", "", "update", "new")]
        made += [("delete", "delete", "", "delete", "old"), ("moved", "update", f" and ({moved})", "delete", "old")]
        parts = []
        for trigger, change, also, operation, row in made:
            parts.append(f'drop trigger if exists "{name}_replica_{trigger}"')
            parts.append(
                f'create trigger "{name}_replica_{trigger}" after {change} on "{name}" when {guard}{also}\n'
                f"begin {self._captured(spec, operation, row)} end"
            )
        return ";\n".join(parts)

    def _captured(self, spec: Table, operation: str, row: str) -> str:
        name = spec.name
        record = self._record_sql(spec, row)
        data = "''" if operation == "delete" else self._image_sql(spec, row)
        seq, reading = (
            f"(select cast(value as integer) from replication_meta where key = '{key}')"
            for key in (self._seq_key(name), self._clock_key(name))
        )
        origin = "(select value from replication_meta where key = 'origin')"
        # A conflict policy of the user's statement would be that of an upsert in here: hence delete, then insert.
        return (
            "update replication_meta set value = cast(value as integer) + 1 "
            f"where key = '{self._seq_key(name)}'; "
            f"update replication_meta set value = max(cast(value as integer) + 1, {_NOW} << {clock.COUNTER_BITS}) "
            f"where key = '{self._clock_key(name)}'; "
            f'insert into "{name}_Events" (id, table_name, operation_type, record_id, data, timestamp, '
            "origin_node_id, origin_seq, processed, hlc) "
            f"values ({_UUID}, '{name}', '{operation}', {record}, {data}, {_NOW}, {origin}, {seq}, true, {reading}); "
            f'delete from "{name}_Versions" where record_id = {record}; '
            f'insert into "{name}_Versions" (record_id, hlc, origin_node_id, origin_seq, is_deleted) '
            f"values ({record}, {reading}, {origin}, {seq}, {str(operation == 'delete').lower()});"
        )

    # Rows.

    def _record_sql(self, table: Table, row: str) -> str:
        parts = [f'cast({row}."{column}" as text)' for column in table.key]
        if len(parts) == 1:
            return parts[0]
        return " || '|' || ".join(f"replace(replace({part}, '\\', '\\\\'), '|', '\\|')" for part in parts)

    def _image_sql(self, table: Table, row: str) -> str:
        pairs = [f"{_quoted(column)}, {_text_sql(kind, row, column)}" for column, kind in table.columns.items()]
        # SQLite takes 127 arguments at most. Every value is a text or null, so no brace is trimmed but the outer ones.
        parts = [f"json_object({', '.join(pairs[at : at + 60])})" for at in range(0, len(pairs), 60)]
        for at in range(len(parts) - 1):
            parts[at], parts[at + 1] = f"rtrim({parts[at]}, '}}')", f"ltrim({parts[at + 1]}, '{{')"
        return " || ',' || ".join(parts)

    def _upsert(self, table: Table, events: Sequence[Event]) -> None:
        columns = table.columns
        values = [[_value(columns[column], (event.image or {})[column]) for column in columns] for event in events]
        self._many(f"{_insert_sql(table)} values ({', '.join('?' * len(columns))}) {_conflict_sql(table)}", values)

    def _delete(self, table: Table, records: Sequence[str]) -> None:
        where = " and ".join(f'"{column}" = ?' for column in table.key)
        self._many(f'delete from "{table.name}" where {where}', [self._key(table, record) for record in records])

    def _key(self, table: Table, record: str) -> list[Any]:
        texts = table.key_texts(record)
        return [_value(table.columns[column], text) for column, text in zip(table.key, texts, strict=True)]

    def _live(self, table: Table, rows_max: int) -> Iterator[pa.Table]:
        # By the order of the table itself: so its rows are read, and will be written, one page after the other.
        sql = (
            f'select {self._live_columns(table)} from "{table.name}" b cross join "{table.name}_Versions" v '
            f"on v.record_id = {self._record_sql(table, 'b')} where not v.is_deleted"
        )
        try:
            cursor = self.connection.execute(sql)
            for rows in fetched(cursor.fetchmany, rows_max):
                yield live_rows(table, rows, OURS)
        except sqlite3.Error as error:
            raise _failure(error) from error

    def _live_of(self, table: Table, records: Sequence[str]) -> pa.Table:
        joined = " and ".join(
            f"b.\"{column}\" = json_extract(j.value, '$[{at}]')" for at, column in enumerate(table.key)
        )
        rows = self._all(
            f'select {self._live_columns(table)} from json_each(?) j cross join "{table.name}" b on {joined} '
            f'cross join "{table.name}_Versions" v on v.record_id = {self._record_sql(table, "b")}',
            [json.dumps([self._key(table, record) for record in records])],
        )
        return live_rows(table, rows, OURS)

    def _live_columns(self, table: Table) -> str:
        columns = ", ".join(_read_sql(kind, column) for column, kind in table.columns.items())
        return f"v.hlc, v.origin_node_id, v.origin_seq, {columns}"

    def _insert_rows(self, table: Table, rows: pa.Table) -> None:
        self._write_columns(_insert_sql(table), _values_of(table, rows), "")

    def _upsert_rows(self, table: Table, rows: pa.Table) -> None:
        self._write_columns(_insert_sql(table), _values_of(table, rows), _conflict_sql(table))

    def _insert_columns(self, name: str, columns: pa.Table) -> None:
        names = ", ".join(f'"{column}"' for column in columns.column_names)
        self._write_columns(f'insert into "{name}" ({names})', [each.to_pylist() for each in columns.columns], "")

    def _write_columns(self, insert: str, columns: Sequence[Sequence[Any]], conflict: str) -> None:
        """Many rows with each statement: that is half the time."""
        width, flat = len(columns), list(itertools.chain.from_iterable(zip(*columns, strict=True)))
        marks = f"({', '.join('?' * width)})"
        together = max(1, _PARAMETERS // width)
        whole = len(flat) - len(flat) % (together * width)
        for count, start, end in ((together, 0, whole), (1, whole, len(flat))):
            self._many(
                f"{insert} values {', '.join([marks] * count)} {conflict}",
                (flat[at : at + count * width] for at in range(start, end, count * width)),
            )

    # Tables as files.

    def native_form(self, table: str) -> str | None:
        spec = self._table(table)
        columns = self._all("select name, hidden from pragma_table_xinfo(?)", [table])
        if self._path is None or not native.is_possible(spec, [(name, hidden) for name, hidden in columns]):
            return None
        return native.digest_of(native.form_of(self.connection, table))

    def dump(
        self, table: str, folder: Path, made: Callable[[Path], None] = lambda _: None
    ) -> tuple[Cut, Sequence[Path]]:
        if self._path is None:
            raise native.NotNative(f"{table} is in no file", hint="its snapshot is made as columns")
        with ExitStack() as stack:
            self._run("begin immediate")  # so that all connections see one moment
            try:
                cut = Cut(self.held(table), self.clocks()[table])
                form = native.form_of(self.connection, table)
                dumped = stack.enter_context(native.dumping(self._path, folder, table, form, made))
            finally:
                self.connection.execute("rollback")
            return cut, dumped()

    def take_dump(self, table: str, cut: Cut, files: Sequence[Path], now_ms: int) -> int:
        spec, form = self._table(table), native.form_of(self.connection, table)
        native.check_form(spec, files, form)
        with self._attached(files) as schemas, ThreadPoolExecutor(1) as threads, _Loading(self.connection) as loading:
            # Beside the load, which is broken off and undone if it finds anything; waited for before the commit.
            check = partial(native.check, spec, files, self._record_sql(spec, "b"), cut.clock)
            checking = threads.submit(loading.checked, check)

            def load(_: Table, is_empty: bool) -> int:
                if not is_empty:
                    raise native.NotNative(f"{table} has rows", hint="the snapshot is merged as columns")
                for trigger in _TRIGGERS:  # they would let SQLite go row by row; they are back before anybody sees it
                    self._run(f'drop trigger if exists "{table}_replica_{trigger}"')
                try:
                    with self._kept_in_memory(table):
                        loading.run(partial(native.load, self.connection, spec, schemas))
                except sqlite3.Error as error:
                    if loading.is_broken_off:
                        checking.result()
                    raise _failure(error) from error
                self._capture(spec)
                self._begin_to_sync()
                return checking.result()

            with self._checkpoint_beside():
                return self._merge(table, cut, load, now_ms)

    @contextmanager
    def _kept_in_memory(self, table: str) -> Iterator[None]:
        """Pages that a transaction has changed, and changes again when it ends, stay in memory while it writes many
        others. They would be the first to go to the WAL, as they are the oldest; and when a page is there already,
        the commit computes all checksums behind it anew, one by one, which are all of the table's. A page on which a
        statement stands stays."""
        ends = self._all("select rowid from sqlite_master order by rowid desc limit ?", [_SCHEMA_ROWS])
        keys = ("applying", f"capture::{table}", self._clock_key(table))
        kept = [("sqlite_master where rowid", rowid) for (rowid,) in ends]  # triggers come last
        kept += [("replication_meta where key", key) for key in keys]
        standing = [self.connection.execute(f"select 1 from {where} = ?", [each]) for where, each in kept]
        try:
            yield
        finally:
            for cursor in standing:
                cursor.close()

    def _begin_to_sync(self) -> None:
        """What was loaded is in the WAL, but not yet on the disk: the commit waits for what is not there until then,
        and checks go on meanwhile."""
        with suppress(OSError), open(f"{self._path}-wal", "rb") as wal:  # the commit tells
            os.fsync(wal.fileno())

    @contextmanager
    def _checkpoint_beside(self) -> Iterator[None]:
        """What is committed is durable in the WAL; to carry a whole table from there into the file takes as long as to
        write it, and need not be waited for."""
        self._run("pragma wal_autocheckpoint = 0")
        try:
            yield
        finally:
            self._run(f"pragma wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if self._checkpointing:
            self._checkpointing.join()
        self._checkpointing = threading.Thread(target=_checkpoint, args=[self._path], name="checkpoint of the WAL")
        self._checkpointing.start()

    @contextmanager
    def _attached(self, files: Sequence[Path]) -> Iterator[list[str]]:
        schemas = [f"taken_{number}" for number in range(len(files))]
        try:
            for schema, file in zip(schemas, files, strict=True):
                self._run(f"attach ? as {schema}", [str(file)])
            yield schemas
        finally:
            for (schema,) in self._all("select name from pragma_database_list where name like 'taken\\_%' escape '\\'"):
                self._run(f"detach {schema}")

    def _is_replaceable(self, table: Table) -> bool:
        # Foreign keys are off in a connection of SQLite's unless it turns them on, and this one does not.
        return not self.left_out(table.name)

    def left_out(self, table: str) -> list[str]:
        rows = self._all("select name from pragma_table_xinfo(?) where hidden = 0", [table])
        return [name for (name,) in rows if name not in self._table(table).columns]


class _Loading:
    """A load that is broken off when the check beside it refuses: a peer's pages may lead round in circles."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection, self._lock, self._ended = connection, threading.Lock(), threading.Event()
        self._runs = self.is_broken_off = False

    def checked(self, check: Callable[[], int]) -> int:
        try:
            return check()
        except BaseException:
            self.is_broken_off = True
            while not self._ended.wait(_BREAK_OFF_EVERY_S):  # it breaks off a statement, and there are several
                with self._lock:
                    if self._runs:
                        self._connection.interrupt()
            raise

    def run(self, load: Callable[[], None]) -> None:
        self._runs = True
        try:
            load()
        finally:
            with self._lock:
                self._runs = False
            self._ended.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()


def _checkpoint(path: Path) -> None:
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as connection:  # if it fails, the next commit does it
        connection.execute("pragma wal_checkpoint(passive)")


def _values_of(table: Table, rows: pa.Table) -> list[list[Any]]:
    found = []
    for column, kind in table.columns.items():
        values = rows[value_name(column)]
        if kind is Kind.BOOLEAN:
            values = pc.equal(values, "true")
        listed = values.to_pylist()
        found.append([_value(kind, text) for text in listed] if kind is Kind.BYTES else listed)
    return found


def _quoted(text: str) -> str:
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def _kind(declared: str) -> Kind:
    """By the words that SQLite itself goes by, and BOOL and DEC, which it takes for numbers."""
    words = declared.upper()
    for part, kind in (
        ("INT", Kind.INTEGER),
        ("CHAR", Kind.TEXT),
        ("CLOB", Kind.TEXT),
        ("TEXT", Kind.TEXT),
        ("BLOB", Kind.BYTES),
        ("REAL", Kind.REAL),
        ("FLOA", Kind.REAL),
        ("DOUB", Kind.REAL),
        ("BOOL", Kind.BOOLEAN),
        ("DEC", Kind.NUMERIC),
        ("NUMERIC", Kind.NUMERIC),
    ):
        if part in words:
            return kind
    return Kind.TEXT


def _text_sql(kind: Kind, row: str, column: str) -> str:
    value = f'{row}."{column}"'
    if kind is Kind.BYTES:
        return f"case when {value} is not null then lower(hex({value})) end"
    # 17 digits would do if SQLite rounded the last one right. What is no real is refused later, by its text.
    if kind is Kind.REAL:
        return f"case when typeof({value}) = 'real' then printf('%!.20g', {value}) else cast({value} as text) end"
    if kind in (Kind.TEXT, Kind.NUMERIC):
        # DATETIME and NUMERIC columns hold reals, too; a cast writes 15 digits of them: enough for 0.1, not for all.
        return (
            f"case when typeof({value}) = 'real' and cast(cast({value} as text) as real) <> {value} "
            f"then printf('%!.20g', {value}) else cast({value} as text) end"
        )
    return f"cast({value} as text)"


def _read_sql(kind: Kind, column: str) -> str:
    """As `_text_sql`, but for numbers, which are no texts in columns (`columns`)."""
    return f'b."{column}"' if kind in (Kind.INTEGER, Kind.REAL) else _text_sql(kind, "b", column)


def _value(kind: Kind, text: str | None) -> Any:
    if text is None:
        return None
    match kind:
        case Kind.INTEGER:
            return int(text)
        case Kind.REAL:
            return float(text)
        case Kind.BOOLEAN:
            return text == "true"
        case Kind.BYTES:
            return bytes.fromhex(text)
        case _:
            return text


def _insert_sql(table: Table) -> str:
    columns = ", ".join(f'"{column}"' for column in table.columns)
    return f'insert into "{table.name}" ({columns})'


def _conflict_sql(table: Table) -> str:
    key = ", ".join(f'"{column}"' for column in table.key)
    others = [f'"{column}" = excluded."{column}"' for column in table.columns if column not in table.key]
    return f"on conflict ({key}) do " + (f"update set {', '.join(others)}" if others else "nothing")


def _failure(error: sqlite3.Error) -> EvermarkError:
    text = str(error)
    if isinstance(error, sqlite3.OperationalError):
        if "locked" in text:
            return BusyError(f"the SQLite file is locked: {text}", hint="another writer holds it for long; try again")
        if "full" in text:
            return DiskFullError(f"SQLite: {text}", hint="free some space")
        if "unable to open" in text or "disk I/O" in text:
            return UnreachableError(f"SQLite: {text}", hint="look at the file, its folder and its disk")
    if isinstance(error, sqlite3.IntegrityError):
        hint = "a row of a peer breaks a rule of this table: make the tables alike, see docs/replicas.md"
        return SetupError(f"SQLite refuses a row: {text}", hint=hint)
    return EvermarkError(f"SQLite: {text}", hint="see docs/replicas.md")
