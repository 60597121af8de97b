"""`evermark source install`: the outbox in the user's database.

Order matters and is fixed: tables and functions, publication, slot, reader, triggers. Each step may be run again;
nothing is ever dropped and made again, because a publication or slot made twice has lost what came in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from psycopg import sql

from evermark.errors import BusyError, FormatError, SetupError
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import translated, where
from evermark.sources.postgres.place import PostgresPlace, TableChoice

SCHEMA_VERSION = 1
WAL_LEVEL_HINT = "alter system set wal_level = 'logical'; then restart the server"
_TABLES = ("01_schema.sql", "02_functions.sql", "03_watch.sql")
_LOCK_PAUSES_S = (0.5, 1.0)
_SLOT_WAIT = "the slot waits for transactions that were open before it; end them, or wait"


@dataclass(frozen=True)
class CapturedTable:
    """A table with our trigger on it. `stale`: its columns changed since; run install again."""

    name: str
    stream_id: int
    schema_version: int
    stale: bool


def install_sql(place: PostgresPlace, tables: Sequence[TableChoice] = (), *, role: str | None = "evermark") -> str:
    """The whole of it for a DBA to read and run with psql, with the rights of a least-privilege role, if any."""
    parts = ["-- Run with psql, outside a transaction: the slot needs a transaction of its own.\n"]
    parts += [_script(name, place) for name in (*_TABLES, "04_publication.sql", "05_slot.sql", "06_reader.sql")]
    parts.append("-- Triggers, last: from here on changes are captured.\n")
    parts += [_watch(table, place).as_string() + ";\n" for table in tables]
    if role is not None:
        parts.append(_script("role.sql", place, role=role))
    return "\n".join(parts)


def install(place: PostgresPlace, tables: Sequence[TableChoice] = (), *, slot_wait_s: float = 60.0) -> list[str]:
    """Install or bring up to date; says what was done to each table."""
    link = connect(place.dsn, lock_timeout="1s")
    try:
        require_logical(link)
        _require_version(link, place)
        with translated(link.dsn, "installing the outbox"), link.connection.transaction():
            for name in _TABLES:
                link.connection.execute(_script(name, place).encode())
        with translated(link.dsn, "creating the publication"):
            link.connection.execute(_script("04_publication.sql", place).encode())
        _create_slot(link, place, slot_wait_s)
        with translated(link.dsn, "registering the reader"):
            link.connection.execute(_script("06_reader.sql", place).encode())
        return [_capture_patiently(link, table, place) for table in tables]
    finally:
        link.close()


def uninstall(place: PostgresPlace) -> None:
    """Remove our slot and publication; and, when no other reader is left, triggers, tables and schema."""
    link = connect(place.dsn)
    try:
        with translated(link.dsn, "uninstalling the outbox"):
            execute = link.connection.execute
            if execute("select 1 from pg_replication_slots where slot_name = %s", (place.slot,)).fetchone():
                execute("select pg_drop_replication_slot(%s)", (place.slot,))
            execute(_script("uninstall_publication.sql", place).encode())
            if execute("select to_regnamespace(%s)", (place.schema,)).fetchone() == (None,):
                return
            with link.connection.transaction():
                execute(_script("uninstall_reader.sql", place).encode())
                others = execute(_filled("select count(*) from @schema@.readers", place).encode()).fetchone()
                if others == (0,):
                    execute(_script("uninstall_schema.sql", place).encode())
    finally:
        link.close()


def list_tables(place: PostgresPlace) -> list[CapturedTable]:
    """The tables captured now."""
    query = """
        select s.name, s.id, s.schema_version, s.columns is distinct from (
            select jsonb_agg(jsonb_build_array(a.attname, format_type(a.atttypid, a.atttypmod)) order by a.attnum)
            from pg_attribute a where a.attrelid = t.tgrelid and a.attnum > 0 and not a.attisdropped)
        from pg_trigger t join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
        join @schema@.streams s on s.name = n.nspname || '.' || c.relname
        where t.tgname = '@schema_name@_capture' and t.tgparentid = 0 and t.tgenabled <> 'D' order by 1"""
    link = connect(place.dsn)
    try:
        return [CapturedTable(*found) for found in link.rows(_filled(query, place), doing="listing captured tables")]
    finally:
        link.close()


def _create_slot(link: Link, place: PostgresPlace, wait_s: float) -> None:
    found = link.row(
        "select database, plugin, current_database() from pg_replication_slots where slot_name = %s",
        (place.slot,),
        doing="looking for the slot",
    )
    if found is not None:
        database, plugin, here = found
        if database != here or plugin != "pgoutput":
            raise SetupError(
                f"slot {place.slot} at {where(link.dsn)} belongs to database {database} and plugin {plugin}",
                hint="choose another `name` for this deployment: it names slot and publication",
            )
        return
    try:
        with translated(link.dsn, "creating the slot"), link.connection.transaction():
            link.connection.execute(sql.SQL("set local statement_timeout = {}").format(int(wait_s * 1000)))
            link.connection.execute(_script("05_slot.sql", place).encode())
    except BusyError as error:
        raise BusyError(f"creating slot {place.slot} took more than {wait_s:g} s", hint=_SLOT_WAIT) from error


def _capture(link: Link, table: TableChoice, place: PostgresPlace) -> str:
    if link.row("select to_regclass(%s)", (table.name,), doing="looking for a table") == (None,):
        raise SetupError(f"table {table.name} does not exist at {where(link.dsn)}", hint="write it as schema.table")
    return str(link.one(_watch(table, place).as_string(), doing=f"capturing {table.name}")[0])


def _capture_patiently(link: Link, table: TableChoice, place: PostgresPlace) -> str:
    """A table's lock is asked for briefly and again: a long queue behind us would be the user's outage."""
    for pause_s in _LOCK_PAUSES_S:
        try:
            return _capture(link, table, place)
        except BusyError:
            time.sleep(pause_s)
    return _capture(link, table, place)


def require_logical(link: Link) -> None:
    level = link.row("select current_setting('wal_level')", doing="reading wal_level")
    if level != ("logical",):
        raise SetupError(f"wal_level at {where(link.dsn)} is {level and level[0]!r}", hint=WAL_LEVEL_HINT)


def _require_version(link: Link, place: PostgresPlace) -> None:
    if link.row("select to_regclass(%s)", (f"{place.schema}.meta",), doing="looking for the schema") == (None,):
        return
    found = link.row(_filled("select version from @schema@.meta", place), doing="reading the installed version")
    if found is not None and found[0] > SCHEMA_VERSION:
        raise FormatError(
            f"schema {place.schema} at {where(link.dsn)} is of version {found[0]}; this program knows {SCHEMA_VERSION}",
            hint="upgrade Evermark",
        )


def _watch(table: TableChoice, place: PostgresPlace) -> sql.Composed:
    return sql.SQL("select {}.watch({}::regclass, {}::text[], {}::text[])").format(
        sql.Identifier(place.schema),
        sql.Literal(table.name),
        sql.Literal(_array(table.exclude)),
        sql.Literal(_array(table.hash)),
    )


def _array(names: Sequence[str]) -> str:
    return "{" + ",".join(json.dumps(name, ensure_ascii=False) for name in names) + "}"


def _script(name: str, place: PostgresPlace, *, role: str = "evermark") -> str:
    text = resources.files("evermark.sources.postgres.sql").joinpath(name).read_text(encoding="utf-8")
    return _filled(text, place, role=role)


def _filled(text: str, place: PostgresPlace, *, role: str = "evermark") -> str:
    # Names were checked by PostgresPlace: letters, digits and underscores only.
    quoted_role = '"' + role.replace('"', '""') + '"'
    for token, value in (
        ("@schema@", f'"{place.schema}"'),
        ("@schema_name@", place.schema),
        ("@publication@", f'"{place.publication}"'),
        ("@publication_literal@", f"'{place.publication}'"),
        ("@slot_literal@", f"'{place.slot}'"),
        ("@version@", str(SCHEMA_VERSION)),
        ("@role@", quoted_role),
    ):
        text = text.replace(token, value)
    return text
