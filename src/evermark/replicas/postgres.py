"""Replicated tables in Postgres. Changes are noted as they are made, and numbered when their transaction commits.

Triggers put each change into `replication_pending`; a deferred trigger numbers a transaction's changes at its commit,
table by table in the order of their names, and holds each table's number until the commit is done. So numbers become
visible in their order, none is missing, and two transactions never wait for each other's numbers crosswise.

Ingest locks rows first and numbers last, as users' transactions do. Where the two could still wait for each other it is
the ingest that gives way: it waits for a lock for a third of a second, which is less than Postgres takes to look for
deadlocks, and is tried again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict
from pyarrow import csv

from evermark.errors import BusyError, ConfigError, EvermarkError, NotFoundError, SetupError, UnreachableError
from evermark.replicas import clock
from evermark.replicas.columns import live_rows, value_name
from evermark.replicas.event import Event
from evermark.replicas.sql_base import FORMAT
from evermark.replicas.sql_snapshots import fetched
from evermark.replicas.sql_store import SqlStore
from evermark.replicas.values import OURS, Kind, Table
from evermark.settings.fields import ESCAPE_HINT, is_cut_wrongly

_CONNECT_S = 10
_LOCK_WAIT = "300ms"
_SCHEMA = (Path(__file__).parent / "postgres.sql").read_text()
_TABLE_SCHEMA = """
create table if not exists "{t}_Events" (
  id uuid primary key, table_name text not null, operation_type text not null, record_id text not null,
  data text, timestamp bigint not null, origin_node_id text collate "C" not null, origin_seq bigint not null,
  processed boolean default false, hlc bigint not null);
create table if not exists "{t}_Versions" (
  record_id text collate "C" primary key, hlc bigint not null, origin_node_id text collate "C" not null,
  origin_seq bigint not null, is_deleted boolean not null);
drop table if exists "{t}_Staged"; -- of older programs
"""
_INDEXES = """
create unique index if not exists "{t}_Events_origin" on "{t}_Events" (origin_node_id, origin_seq);
create index if not exists "{t}_Events_time" on "{t}_Events" (timestamp, id);
create index if not exists "{t}_Versions_deleted" on "{t}_Versions" (hlc) where is_deleted;
"""
_KINDS = {
    "int2": Kind.INTEGER,
    "int4": Kind.INTEGER,
    "int8": Kind.INTEGER,
    "float8": Kind.REAL,
    "bool": Kind.BOOLEAN,
    "bytea": Kind.BYTES,
    "numeric": Kind.NUMERIC,
}
_MARK = re.compile(r"\?")


class PostgresStore(SqlStore):
    _uuid_sql, _table_schema, _indexes = "gen_random_uuid()", _TABLE_SCHEMA, _INDEXES

    def __init__(self, dsn: str, service: str = "replica", schema: str | None = None) -> None:
        super().__init__(service)
        if is_cut_wrongly(dsn):
            raise ConfigError("store: this Postgres address names no host or port that can be one", hint=ESCAPE_HINT)
        try:
            conninfo_to_dict(dsn)
        except psycopg.Error:
            # libpq repeats the piece that it could not read, which may be of the password: its words are not passed on.
            raise ConfigError("store: this Postgres address cannot be read", hint=ESCAPE_HINT) from None
        self._types: dict[str, dict[str, str]] = {}
        try:
            self.connection: psycopg.Connection[tuple[Any, ...]] = psycopg.connect(
                dsn, autocommit=True, connect_timeout=_CONNECT_S, application_name="evermark replica"
            )
            if schema is not None:
                self.connection.execute("select set_config('search_path', quote_ident(%s), false)", [schema])
            for setting, value in (
                ("datestyle", "ISO, YMD"),
                ("intervalstyle", "postgres"),
                ("timezone", "UTC"),
                ("extra_float_digits", "1"),
                ("bytea_output", "hex"),
                ("synchronous_commit", "on"),
                ("client_encoding", "UTF8"),
            ):
                self.connection.execute("select set_config(%s, %s, false)", [setting, value])
            # Functions that run as their owner must not find tables that others put in their way.
            found = self.connection.execute("select quote_ident(current_schema())").fetchone()
            self._schema = str(found[0]) if found and found[0] else "public"
            if self.connection.execute("select to_regclass('replication_meta')").fetchone() == (None,):
                self._create()
        except psycopg.Error as error:
            raise _failure(error) from error
        self._check_format()

    def _create(self) -> None:
        with self.connection.transaction():
            self.connection.execute("select pg_advisory_xact_lock(hashtext('evermark replica'))")
            if self.connection.execute("select to_regclass('replication_meta')").fetchone() == (None,):
                self.connection.execute(
                    _SCHEMA.replace("{bits}", str(clock.COUNTER_BITS)).replace("{schema}", self._schema)
                )
                self._set_meta("format", FORMAT)

    def close(self) -> None:
        self.connection.close()

    def _all(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self.connection.execute(_marked(sql), params).fetchall()
        except psycopg.Error as error:
            raise _failure(error) from error

    def _many(self, sql: str, params: Iterable[Sequence[Any]]) -> None:
        rows = list(params)
        if not rows:
            return
        try:
            with self.connection.cursor() as cursor:
                cursor.executemany(_marked(sql), rows)
        except psycopg.Error as error:
            raise _failure(error) from error

    def _run(self, sql: str, params: Sequence[Any] = ()) -> int:
        try:
            return self.connection.execute(_marked(sql), params).rowcount
        except psycopg.Error as error:
            raise _failure(error) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self.connection.transaction():
                self._run("select set_config('lock_timeout', ?, true)", [_LOCK_WAIT])
                self._run("select set_config('evermark.applying', '1', true)")
                yield
        except psycopg.Error as error:
            raise _failure(error) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with self.connection.transaction():
                self._run("set transaction isolation level repeatable read, read only")
                yield
        except psycopg.Error as error:
            raise _failure(error) from error

    def _lock_rows(self, table: Table, events: Mapping[str, Event]) -> set[str]:
        """Rows that are there are locked; one that is not is inserted, which locks its key."""
        if not events:
            return set()
        records = sorted(events)
        found = self._all(
            f'select {self._record_sql(table, "b")} from "{table.name}" b join {self._keys_sql(table)} '
            f"order by {self._key_columns(table, 'b.')} for update of b",
            self._keys(table, records),
        )
        there = {record for (record,) in found}
        new = [events[record] for record in records if record not in there and events[record].image is not None]
        before = {event.record_id for event in new}
        self._insert(table, new, "on conflict do nothing")
        if not before:
            return set()
        mine = self._all(
            f'select {self._record_sql(table, "b")} from "{table.name}" b join {self._keys_sql(table)} '
            "where b.xmin = pg_current_xact_id()::xid",
            self._keys(table, sorted(before)),
        )
        return {record for (record,) in mine}

    def _lock_numbers(self, table: str) -> None:
        self._all("select value from replication_meta where key = ? for update", [self._seq_key(table)])

    def _lock_table(self, table: str) -> None:
        self._run(f'lock table "{table}" in share row exclusive mode')

    # Installing.

    def _script(self, text: str) -> None:
        try:
            self.connection.execute(text)
        except psycopg.Error as error:
            raise _failure(error) from error

    def _described(self, table: str, columns: Sequence[str] | None) -> Table:
        rows = self._column_rows(table)
        if not rows:
            raise NotFoundError(f"there is no table {table} in this database", hint="create it first")
        types = {name: (base, declared) for name, base, declared, generated, _ in rows if not generated}
        chosen = list(types) if columns is None else list(columns)
        for column in chosen:
            if column not in types:
                raise SetupError(f"{table} has no column {column}", hint=f"it has {', '.join(types)}")
            if types[column][0] == "float4":
                raise SetupError(f"{table}.{column} is a float4", hint="make it double precision: digits would be lost")
        key = [row[0] for row in sorted(rows, key=lambda row: row[4] or 0) if row[4]]
        odd = self._all(
            "select a.attname from pg_attribute a join pg_collation c on c.oid = a.attcollation "
            "where a.attrelid = to_regclass(quote_ident(?)) and not c.collisdeterministic",
            [table],
        )
        for column in key:
            if column in {name for (name,) in odd} or types.get(column, ("",))[0] in ("citext", "bpchar"):
                raise SetupError(
                    f"{table}.{column}: keys that are equal here may be different texts",
                    hint="make it text with a deterministic collation",
                )
        kinds = {column: _KINDS.get(types[column][0], Kind.TEXT) for column in chosen}
        return Table(table, kinds, tuple(key))

    def _column_rows(self, table: str) -> list[tuple[Any, ...]]:
        # Types without their lengths: a cast to varchar(3) cuts in silence, an assignment refuses what is longer.
        return self._all(
            "select a.attname, t.typname, format_type(a.atttypid, -1), a.attgenerated <> '', "
            "array_position(i.indkey::int2[], a.attnum) + 1 from pg_attribute a "
            "join pg_type t on t.oid = a.atttypid "
            "left join pg_index i on i.indrelid = a.attrelid and i.indisprimary "
            "where a.attrelid = to_regclass(quote_ident(?)) and a.attnum > 0 and not a.attisdropped "
            "order by a.attnum",
            [table],
        )

    def _forget_types(self) -> None:
        self._types = {}

    def _type(self, table: Table, column: str) -> str:
        if table.name not in self._types:
            self._types[table.name] = {row[0]: row[2] for row in self._column_rows(table.name)}
        return self._types[table.name][column]

    def _migrate_events(self, table: str) -> None:
        """See `SqliteStore._migrate_events`."""
        sql = "select attname from pg_attribute where attrelid = to_regclass(quote_ident(?)) and attnum > 0"
        has = {name for (name,) in self._all(sql, [f"{table}_Events"])}
        if "hlc" in has:
            return
        if "origin_node_id" not in has:
            self._run(f'alter table "{table}_Events" add column origin_node_id text collate "C" not null default \'\'')
            self._run(f'update "{table}_Events" set origin_node_id = source_node_id')
        if "origin_seq" not in has:
            self._run(f'alter table "{table}_Events" add column origin_seq bigint not null default 0')
        self._run(f'alter table "{table}_Events" add column hlc bigint not null default 0')
        self._run(
            f'update "{table}_Events" e set processed = true, origin_seq = numbered.n from '
            f"(select id, row_number() over (partition by origin_node_id order by timestamp, id) as n "
            f'from "{table}_Events") numbered where numbered.id = e.id'
        )
        self._run(
            "insert into replication_checkpoints "
            "(table_name, origin_node_id, origin_seq, seen_seq, missing, floor_seq) "
            "select ?, origin_node_id, max(origin_seq), max(origin_seq), '[]', max(origin_seq) "
            f'from "{table}_Events" group by origin_node_id',
            [table],
        )

    def _version_rows(self, spec: Table, now_ms: int) -> None:
        """See `SqliteStore._version_rows`."""
        origin, name = self._meta("origin"), spec.name
        base = clock.at_ms(now_ms)
        made = self._run(
            f'insert into "{name}_Versions" select record, ?::bigint + n, ?, n, false from '
            f"(select {self._record_sql(spec, 'b')} as record, "
            f'row_number() over (order by {self._key_columns(spec, "b.")}) as n from "{name}" b) numbered',
            [base, origin],
        )
        self._set_meta(self._seq_key(name), made)
        self._set_meta(self._clock_key(name), base + made)
        if made:
            self._raise_floors(name, {origin: made})

    def _triggers(self, spec: Table) -> str:
        name = spec.name
        old, new = self._record_sql(spec, "old"), self._record_sql(spec, "new")
        return f"""
create or replace function "{name}_replica_capture"() returns trigger language plpgsql security definer
set search_path = {self._schema}, pg_temp set datestyle = 'ISO, YMD' set intervalstyle = 'postgres' set timezone = 'UTC'
set extra_float_digits = '1' as $capture$
begin
  if tg_op = 'DELETE' or (tg_op = 'UPDATE' and {old} is distinct from {new}) then
    insert into replication_pending (table_name, service, operation_type, record_id, data)
    values ('{name}', '{self._service}', 'delete', {old}, '');
  end if;
  if tg_op <> 'DELETE' then
    insert into replication_pending (table_name, service, operation_type, record_id, data)
    values ('{name}', '{self._service}', case tg_op when 'INSERT' then 'create' else 'update' end, {new},
            {self._image_sql(spec, "new")});
  end if;
  return null;
end $capture$;
drop trigger if exists "{name}_replica_capture" on "{name}";
create trigger "{name}_replica_capture" after insert or update or delete on "{name}" for each row
when (current_setting('evermark.applying', true) is distinct from '1') execute function "{name}_replica_capture"();
create or replace function "{name}_replica_truncate"() returns trigger language plpgsql security definer
set search_path = {self._schema}, pg_temp as $truncate$
begin
  insert into replication_pending (table_name, service, operation_type, record_id, data)
  select '{name}', '{self._service}', 'delete', {self._record_sql(spec, "b")}, '' from "{name}" b;
  return null;
end $truncate$;
drop trigger if exists "{name}_replica_truncate" on "{name}";
create trigger "{name}_replica_truncate" before truncate on "{name}" for each statement
when (current_setting('evermark.applying', true) is distinct from '1') execute function "{name}_replica_truncate"();
"""

    # Rows.

    def _record_sql(self, table: Table, row: str) -> str:
        parts = [f'{row}."{column}"::text' for column in table.key]
        if len(parts) == 1:
            return f"({parts[0]})"
        return "(" + " || '|' || ".join(rf"replace(replace({part}, '\', '\\'), '|', '\|')" for part in parts) + ")"

    def _image_sql(self, table: Table, row: str) -> str:
        names = ", ".join("'" + column.replace("'", "''") + "'" for column in table.columns)
        texts = ", ".join(_text_sql(kind, row, column) for column, kind in table.columns.items())
        return f"jsonb_object(array[{names}]::text[], array[{texts}]::text[])::text"

    def _key_columns(self, table: Table, prefix: str = "") -> str:
        return ", ".join(f'{prefix}"{column}"' for column in table.key)

    def _keys_sql(self, table: Table) -> str:
        arrays = ", ".join("?::text[]" for _ in table.key)
        names = ", ".join(f"k{at}" for at in range(len(table.key)))
        joined = " and ".join(
            f'b."{column}" = k.k{at}::{self._type(table, column)}' for at, column in enumerate(table.key)
        )
        return f"unnest({arrays}) as k({names}) on {joined}"

    def _keys(self, table: Table, records: Sequence[str]) -> list[list[str]]:
        texts = [table.key_texts(record) for record in records]
        return [[each[at] for each in texts] for at in range(len(table.key))]

    def _insert(self, table: Table, events: Sequence[Event], conflict: str) -> None:
        columns = list(table.columns)
        names = ", ".join(f'"{column}"' for column in columns)
        values = ", ".join(self._value_sql(table, column, "?::text") for column in columns)
        self._many(
            f'insert into "{table.name}" ({names}) overriding system value values ({values}) {conflict}',
            [[(event.image or {})[column] for column in columns] for event in events],
        )

    def _value_sql(self, table: Table, column: str, text: str) -> str:
        if table.columns[column] is Kind.BYTES:
            return f"decode({text}, 'hex')"
        return f"({text})::{self._type(table, column)}"

    def _upsert(self, table: Table, events: Sequence[Event]) -> None:
        self._insert(table, events, self._conflict_sql(table))

    def _conflict_sql(self, table: Table) -> str:
        others = [f'"{column}" = excluded."{column}"' for column in table.columns if column not in table.key]
        return f"on conflict ({self._key_columns(table)}) do " + (
            f"update set {', '.join(others)}" if others else "nothing"
        )

    def _delete(self, table: Table, records: Sequence[str]) -> None:
        where = " and ".join(f'"{column}" = ?::text::{self._type(table, column)}' for column in table.key)
        self._many(f'delete from "{table.name}" where {where}', [table.key_texts(record) for record in records])

    def _live(self, table: Table, rows_max: int) -> Iterator[pa.Table]:
        # Not by COPY: psycopg asks for each of its rows by a generator, which costs more than the row.
        sql = (
            f'select {self._live_columns(table)} from "{table.name}" b join "{table.name}_Versions" v '
            f"on v.record_id = {self._record_sql(table, 'b')} where not v.is_deleted"
        )
        try:
            with self.connection.cursor("replication_live", binary=True) as cursor:
                cursor.execute(_marked(sql))
                for rows in fetched(cursor.fetchmany, rows_max):
                    yield live_rows(table, rows, OURS)
        except psycopg.Error as error:
            raise _failure(error) from error

    def _live_of(self, table: Table, records: Sequence[str]) -> pa.Table:
        rows = self._all(
            f'select {self._live_columns(table)} from "{table.name}" b join {self._keys_sql(table)} '
            f'join "{table.name}_Versions" v on v.record_id = {self._record_sql(table, "b")}',
            self._keys(table, records),
        )
        return live_rows(table, rows, OURS)

    def _live_columns(self, table: Table) -> str:
        columns = [_read_sql(kind, column) for column, kind in table.columns.items()]
        return ", ".join(["v.hlc", "v.origin_node_id", "v.origin_seq", *columns])

    def _insert_rows(self, table: Table, rows: pa.Table) -> None:
        self._copy_in(f'"{table.name}" ({_names(table)})', _values_of(table, rows))

    def _upsert_rows(self, table: Table, rows: pa.Table) -> None:
        names = _names(table)
        self._run(f'create temporary table replication_rows as select {names} from "{table.name}" with no data')
        self._copy_in(f"replication_rows ({names})", _values_of(table, rows))
        self._run(
            f'insert into "{table.name}" ({names}) overriding system value select {names} from replication_rows '
            f"{self._conflict_sql(table)}"
        )
        self._run("drop table replication_rows")

    def _insert_columns(self, name: str, columns: pa.Table) -> None:
        names = ", ".join(f'"{column}"' for column in columns.column_names)
        self._copy_in(f'"{name}" ({names})', columns)

    def _copy_in(self, into: str, columns: pa.Table) -> None:
        out = pa.BufferOutputStream()
        csv.write_csv(columns, out, csv.WriteOptions(include_header=False, quoting_style="all_valid"))
        try:
            with self.connection.cursor() as cursor, cursor.copy(f"copy {into} from stdin (format csv)") as copy:
                copy.write(out.getvalue().to_pybytes())
        except psycopg.Error as error:
            raise _failure(error) from error

    def _is_replaceable(self, table: Table) -> bool:
        rows = self._all(
            "select 1 from pg_constraint where confrelid = to_regclass(quote_ident(?)) "
            "and confdeltype in ('c', 'n', 'd')",
            [table.name],
        )
        return not rows and not self.left_out(table.name)

    def left_out(self, table: str) -> list[str]:
        columns = self._table(table).columns
        return [row[0] for row in self._column_rows(table) if not row[3] and row[0] not in columns]


def _names(table: Table) -> str:
    return ", ".join(f'"{column}"' for column in table.columns)


def _values_of(table: Table, rows: pa.Table) -> pa.Table:
    found = rows.select([value_name(column) for column in table.columns])
    for at, kind in enumerate(table.columns.values()):
        if kind is Kind.BYTES:
            written = pc.binary_join_element_wise("\\x", found.column(at), "")
            found = found.set_column(at, found.schema.field(at), written)
    return found


def _marked(sql: str) -> str:
    return _MARK.sub("%s", sql.replace("%", "%%"))


def _text_sql(kind: Kind, row: str, column: str) -> str:
    value = f'{row}."{column}"'
    return f"encode({value}, 'hex')" if kind is Kind.BYTES else f"{value}::text"


def _read_sql(kind: Kind, column: str) -> str:
    """As `_text_sql`, but for numbers, which are no texts in columns (`columns`)."""
    return f'b."{column}"' if kind in (Kind.INTEGER, Kind.REAL) else _text_sql(kind, "b", column)


def _failure(error: psycopg.Error) -> EvermarkError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, pg.LockNotAvailable | pg.DeadlockDetected | pg.SerializationFailure):
        return BusyError(f"Postgres: a user's transaction is in the way: {text}", hint="it is tried again")
    if isinstance(error, pg.IntegrityError | pg.DataError):
        hint = "a row of a peer breaks a rule of this table: make the tables alike, see docs/replicas.md"
        return SetupError(f"Postgres refuses a row: {text}", hint=hint)
    if isinstance(error, psycopg.OperationalError):
        return UnreachableError(f"Postgres: {text}", hint="look at the server and its log")
    return EvermarkError(f"Postgres: {text}", hint="see docs/replicas.md")
