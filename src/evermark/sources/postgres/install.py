"""`evermark source install`: the outbox in the user's database.

Order matters and is fixed: tables and functions, publication, reader, slot, triggers. Each step may be run again;
nothing is ever dropped and made again, because a publication or slot made twice has lost what came in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources

from psycopg import sql

from evermark.errors import BusyError, FormatError, SetupError
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import translated, where
from evermark.sources.postgres.place import PostgresPlace, TableChoice
from evermark.sources.postgres.slots import drop_slot, spare_name

SCHEMA_VERSION = 3
SCHEMA_VERSION_READ = 2  # the oldest installed version that is read on as it is, with a warning
WAL_LEVEL_HINT = "alter system set wal_level = 'logical'; then restart the server"
_UPGRADES = ("upgrade_3.sql",)
_TABLES = ("01_schema.sql", *_UPGRADES, "02_functions.sql", "03_watch.sql")
_PER_SLOT = ("04_publication.sql", "05_reader.sql", "06_slot.sql", "07_registered.sql")
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
    parts += [_script(name, place) for name in _TABLES]
    for part in place.parts():
        parts += [_script(name, part) for name in _PER_SLOT]
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
        _require_same_slots(link, place)
        for part in place.parts():
            create_publication(link, part)
            _register(link, part, "05_reader.sql")
            _create_slot(link, part, slot_wait_s)
            _register(link, part, "07_registered.sql")
        return [_patiently(partial(_capture, link, table, place)) for table in tables]
    finally:
        link.close()


def uninstall(place: PostgresPlace) -> None:
    """Remove our slot and publication; and, when no other reader is left, triggers, tables and schema."""
    link = connect(place.dsn)
    try:
        with translated(link.dsn, "uninstalling the outbox"):
            execute = link.connection.execute
            for part in place.parts():
                drop_slot(link, spare_name(part.slot))
                drop_slot(link, part.slot)
                execute(_script("uninstall_publication.sql", part).encode())
            if execute("select to_regnamespace(%s)", (place.schema,)).fetchone() == (None,):
                return
            with link.connection.transaction():
                for part in place.parts():
                    execute(_script("uninstall_reader.sql", part).encode())
                others = execute(_filled("select count(*) from @schema@.readers", place).encode()).fetchone()
                if others == (0,):
                    execute(_script("uninstall_schema.sql", place).encode())
    finally:
        link.close()


def unwatch(place: PostgresPlace, tables: Sequence[str]) -> list[str]:
    """Stop capturing these tables; what they wrote stays, and is read. Says what was done to each."""
    link = connect(place.dsn, lock_timeout="1s")
    try:
        return [_patiently(partial(_release, link, table, place)) for table in tables]
    finally:
        link.close()


def maintain(place: PostgresPlace) -> tuple[int, int, int]:
    """Partitions made for the days ahead, dropped for days past retention, and those that have to wait."""
    query = _filled("select * from @schema@.maintain(make_interval(secs => %s))", place)
    link = connect(place.dsn)
    try:
        created, dropped, waiting = link.one(query, (place.events_retention_s,), doing="maintaining partitions")
    finally:
        link.close()
    return created, dropped, waiting


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


def create_publication(link: Link, place: PostgresPlace, *, again: bool = False) -> None:
    """Made if there is none. `again`: what others made of it is undone; only a new slot may read it then."""
    with translated(link.dsn, "creating the publication"):
        link.connection.execute(_script("04_publication.sql", place).encode())
        if again:
            link.connection.execute(_script("publication_again.sql", place).encode())


def _register(link: Link, place: PostgresPlace, script: str) -> None:
    with translated(link.dsn, "registering the reader"):
        link.connection.execute(_script(script, place).encode())


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
            link.connection.execute(_script("06_slot.sql", place).encode())
    except BusyError as error:
        raise BusyError(f"creating slot {place.slot} took more than {wait_s:g} s", hint=_SLOT_WAIT) from error


def _capture(link: Link, table: TableChoice, place: PostgresPlace) -> str:
    if link.row("select to_regclass(%s)", (table.name,), doing="looking for a table") == (None,):
        raise SetupError(f"table {table.name} does not exist at {where(link.dsn)}", hint="write it as schema.table")
    return str(link.one(_watch(table, place).as_string(), doing=f"capturing {table.name}")[0])


def _release(link: Link, table: str, place: PostgresPlace) -> str:
    captured = link.row(
        "select exists (select from pg_trigger where tgrelid = to_regclass(%s) and tgname = %s)",
        (table, f"{place.schema}_capture"),
        doing=f"looking at {table}",
    )
    if captured != (True,):
        return f"{table} was not captured"
    query = _filled("select @schema@.unwatch(%s::text::regclass)", place)
    link.row(query, (table,), doing=f"releasing {table}")
    return f"{table} is not captured any more"


def _patiently(step: Callable[[], str]) -> str:
    """A table's lock is asked for briefly and again: a long queue behind us would be the user's outage."""
    for pause_s in _LOCK_PAUSES_S:
        try:
            return step()
        except BusyError:
            time.sleep(pause_s)
    return step()


def require_logical(link: Link) -> None:
    level = link.row("select current_setting('wal_level')", doing="reading wal_level")
    if level != ("logical",):
        raise SetupError(f"wal_level at {where(link.dsn)} is {level and level[0]!r}", hint=WAL_LEVEL_HINT)


def _require_same_slots(link: Link, place: PostgresPlace) -> None:
    """Another number of slots would share the events otherwise, and those not taken yet would belong to nobody."""
    names = [part.slot for part in place.parts()]
    query = "select slot::text from @schema@.readers where slot = %s or slot ~ %s"
    ours = link.rows(_filled(query, place), (place.slot, f"^{place.slot}_p[0-9]+$"), doing="looking for readers")
    others = sorted({name for (name,) in ours} - set(names))
    if others:
        raise SetupError(
            f"the outbox at {where(link.dsn)} is read through other slots of this deployment: {', '.join(others)}",
            hint="`slots` cannot change while events wait in them: let `evermark up` drain them,"
            " `evermark source uninstall` with the old number, then install with the new one",
        )
    if place.slots == 1:
        return
    version = int(link.one("show server_version_num", doing="asking for the version")[0])
    if version < 150000:
        raise SetupError(
            f"several slots at {where(link.dsn)} need Postgres 15 or newer; it is {version // 10000}",
            hint="leave `slots` at 1",
        )


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
        ("@row_filter_text@", place.row_filter.replace("'", "''")),
    ):
        text = text.replace(token, value)
    return text
