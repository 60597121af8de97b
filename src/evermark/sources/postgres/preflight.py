"""What `evermark source install` looks at first: what can fail is to fail while nothing has been made yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import sql

from evermark.errors import DeniedError, FormatError, SetupError
from evermark.sources.postgres.connect import Link
from evermark.sources.postgres.failures import GRANT_HINT, translated, where
from evermark.sources.postgres.place import PostgresPlace, TableChoice

VERSION_MIN = 140000
SEVERAL_SLOTS_VERSION_MIN = 150000  # row filters in publications
WAL_LEVEL_HINT = "alter system set wal_level = 'logical'; then restart the server"
_COLUMNS_MAX = 20

_SERVER = """
select current_setting('server_version_num')::int, pg_is_in_recovery(), current_user::text, current_database()::text,
       (select rolsuper or rolreplication from pg_roles where rolname = current_user),
       has_database_privilege(current_database(), 'CREATE'),
       current_setting('max_replication_slots')::int - (select count(*) from pg_replication_slots)::int
"""
_SLOT = "select database::text, plugin::text from pg_replication_slots where slot_name = %s"
# `cloned`: a partition of a table that is captured. `own_parts`: it has a partition that is captured for itself.
_TABLE = """
select c.relkind::text, n.nspname::text, pg_has_role(c.relowner, 'USAGE'),
       array(select a.attname::text from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
             order by a.attnum),
       exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgname = {capture} and t.tgparentid <> 0),
       (select min(format('%I.%I', pn.nspname, p.relname)) from pg_trigger t
        join pg_class p on p.oid = t.tgrelid join pg_namespace pn on pn.oid = p.relnamespace
        where t.tgname = {capture} and t.tgparentid = 0 and c.oid in (select a from pg_partition_ancestors(p.oid) a)
          and p.oid <> c.oid)
from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = to_regclass({table})
"""
# As watch() in sql/03_watch.sql would refuse it. A trigger's arguments begin with the number of its stream.
_NAMESAKE = r"""
select format('%I.%I', n.nspname, c.relname) from pg_trigger t join {streams} s on s.name = {stream}
join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
where t.tgname = {capture} and t.tgparentid = 0 and t.tgrelid <> to_regclass({table})
  and position(convert_to(s.id::text, getdatabaseencoding()) || '\x00'::bytea in t.tgargs) = 1
"""


def require_installable(link: Link, place: PostgresPlace, tables: Sequence[TableChoice], schema_version: int) -> None:
    """Raise if the outbox cannot be installed, or one of these tables cannot be captured. Changes nothing."""
    require_logical(link)
    _require_version(link, place, schema_version)
    _require_room(link, place)
    _require_same_slots(link, place)
    _require_one_stream_each(tables)
    installed = schema_there(link, place)
    for table in tables:
        _require_capturable(link, place, table)
        if installed:
            _require_no_namesake(link, place, table)


def require_logical(link: Link) -> None:
    level = link.row("select current_setting('wal_level')", doing="reading wal_level")
    if level != ("logical",):
        raise SetupError(f"wal_level at {where(link.dsn)} is {level and level[0]!r}", hint=WAL_LEVEL_HINT)


def schema_there(link: Link, place: PostgresPlace) -> bool:
    found = link.row("select 1 from pg_namespace where nspname = %s", (place.schema,), doing="looking for the schema")
    return found is not None


def _require_version(link: Link, place: PostgresPlace, schema_version: int) -> None:
    if link.row("select to_regclass(%s)", (f"{place.schema}.meta",), doing="looking for the schema") == (None,):
        return
    query = sql.SQL("select version from {}").format(sql.Identifier(place.schema, "meta"))
    found = link.row(query.as_string(), doing="reading the installed version")
    if found is not None and found[0] > schema_version:
        raise FormatError(
            f"schema {place.schema} at {where(link.dsn)} is of version {found[0]}; this program knows {schema_version}",
            hint="upgrade Evermark",
        )


def _require_room(link: Link, place: PostgresPlace) -> None:
    """The server can have our slots, and our role may make them, the schema and the publication."""
    version, standby, role, database, replicates, creates, free = link.one(_SERVER, doing="looking at the server")
    at = where(link.dsn)
    if version < VERSION_MIN:
        raise SetupError(f"Postgres at {at} is version {version // 10000}", hint="14 is the least")
    if standby:
        raise SetupError(f"Postgres at {at} is a standby", hint="point the dsn at the primary")
    missing = 0
    for part in place.parts():
        found = link.row(_SLOT, (part.slot,), doing="looking for the slot")
        missing += found is None
        if found is not None and found != (database, "pgoutput"):
            raise SetupError(
                f"slot {part.slot} at {at} belongs to database {found[0]} and plugin {found[1]}",
                hint="choose another `name` for this deployment: it names slot and publication",
            )
    if missing and not (replicates or link.may_use_slots()):
        raise DeniedError(f"role {role} at {at} may not make replication slots", hint=GRANT_HINT)
    if missing > free:
        raise SetupError(
            f"{missing} replication slots are needed at {at} and {free} are free",
            hint="drop one that nobody reads, or raise max_replication_slots and restart the server",
        )
    if not creates and (missing or not schema_there(link, place)):
        raise DeniedError(
            f"role {role} at {at} may not make a schema and a publication in database {database}",
            hint=f'as the owner of the database: grant create on database "{database}" to "{role}";'
            " or let a DBA run `evermark source install --print`",
        )
    if place.slots > 1 and version < SEVERAL_SLOTS_VERSION_MIN:
        raise SetupError(
            f"several slots at {at} need Postgres 15 or newer; it is {version // 10000}", hint="leave `slots` at 1"
        )


def _require_same_slots(link: Link, place: PostgresPlace) -> None:
    """Another number of slots would share the events otherwise, and those not taken yet would belong to nobody."""
    if link.row("select to_regclass(%s)", (f"{place.schema}.readers",), doing="looking for readers") == (None,):
        return
    names = [part.slot for part in place.parts()]
    readers = sql.Identifier(place.schema, "readers")
    query = sql.SQL("select slot::text from {} where slot = %s or slot ~ %s").format(readers).as_string()
    ours = link.rows(query, (place.slot, f"^{place.slot}_p[0-9]+$"), doing="looking for readers")
    others = sorted({name for (name,) in ours} - set(names))
    if others:
        raise SetupError(
            f"the outbox at {where(link.dsn)} is read through other slots of this deployment: {', '.join(others)}",
            hint="`slots` cannot change while events wait in them: let `evermark up` drain them,"
            " `evermark source uninstall` with the old number, then install with the new one",
        )


def _require_one_stream_each(tables: Sequence[TableChoice]) -> None:
    by_stream: dict[str, str] = {}
    for table in tables:
        other = by_stream.setdefault(table.stream, table.name)
        if other != table.name:
            raise SetupError(
                f"tables {other} and {table.name} would both be stream {table.stream}",
                hint="a stream is one table: capture only one of them, or rename one",
            )


def _require_no_namesake(link: Link, place: PostgresPlace, table: TableChoice) -> None:
    query = sql.SQL(_NAMESAKE).format(
        streams=sql.Identifier(place.schema, "streams"),
        stream=sql.Literal(table.stream),
        capture=sql.Literal(f"{place.schema}_capture"),
        table=sql.Literal(table.name),
    )
    found = _one(link, query, f"looking at {table.name}")
    if found is not None:
        raise SetupError(
            f"stream {table.stream} is that of table {found[0]} already, and would be that of {table.name}, too",
            hint=f"a stream is one table: evermark source uninstall --table '{found[0]}', or rename one of the two",
        )


def _require_capturable(link: Link, place: PostgresPlace, table: TableChoice) -> None:
    query = sql.SQL(_TABLE).format(capture=sql.Literal(f"{place.schema}_capture"), table=sql.Literal(table.name))
    found = _one(link, query, f"looking at {table.name}")
    if found is None:
        raise SetupError(
            f"table {table.name} does not exist at {where(link.dsn)}",
            hint='write it as SQL does: schema.table, with double quotes where it has capitals: public."Orders"',
        )
    kind, schema, ours, columns, cloned, own_part = found
    if kind not in ("r", "p") or schema == place.schema:
        raise SetupError(
            f"{table.name} is not a table that can be captured", hint="views and foreign tables have no WAL"
        )
    if not ours:
        raise DeniedError(
            f"our role at {where(link.dsn)} does not own table {table.name}: it cannot put triggers on it",
            hint="install as the table's owner, or let a DBA run `evermark source install --print`",
        )
    if cloned:
        raise SetupError(
            f"{table.name} is a partition of a table that is captured, and is captured with it",
            hint="leave it out: its rows are in the stream of the whole table",
        )
    if own_part is not None:
        raise SetupError(
            f"{own_part}, a partition of {table.name}, is captured for itself",
            hint=f"release it first: evermark source uninstall --table '{own_part}'",
        )
    for name in (*table.exclude, *table.hash):
        if name not in columns:
            there = ", ".join(columns[:_COLUMNS_MAX]) + (", …" if len(columns) > _COLUMNS_MAX else "")
            raise SetupError(
                f'table {table.name} has no column "{name}" to exclude or hash',
                hint=f"its columns are {there}; write them as they are here, without quotes",
            )


def _one(link: Link, query: sql.Composed, doing: str) -> tuple[Any, ...] | None:
    """With the names in the query: what a percent sign in one of them means is not asked of the driver."""
    with translated(link.dsn, doing):
        found: tuple[Any, ...] | None = link.connection.execute(query).fetchone()
        return found
