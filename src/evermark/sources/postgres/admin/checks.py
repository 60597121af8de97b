"""Why `evermark source install` would fail. Asked by install before it makes anything, and by `config check --connect`
where nothing is installed yet. Only looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evermark.errors import DeniedError, EvermarkError, FormatError, SetupError
from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import GRANT_HINT, INSTALL_HINT, where
from evermark.sources.postgres.outbox import SCHEMA_VERSION, filled, installed_version, schema_there
from evermark.sources.postgres.survey import VERSION_MIN, not_logical
from evermark.sources.postgres.target import PostgresTarget, TableChoice

SEVERAL_SLOTS_VERSION_MIN = 150000  # row filters in publications
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
select c.relkind::text, n.nspname::text, pg_has_role(c.relowner, 'USAGE'), pg_get_userbyid(c.relowner)::text,
       array(select a.attname::text from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
             order by a.attnum),
       exists (select from pg_trigger t
               where t.tgrelid = c.oid and t.tgname in (@captures@) and t.tgparentid <> 0),
       (select min(format('%%I.%%I', pn.nspname, p.relname)) from pg_trigger t
        join pg_class p on p.oid = t.tgrelid join pg_namespace pn on pn.oid = p.relnamespace
        where t.tgname in (@captures@) and t.tgparentid = 0
          and c.oid in (select a from pg_partition_ancestors(p.oid) a) and p.oid <> c.oid)
from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = to_regclass(%s)
"""
# As watch() in sql/03_watch.sql would refuse it. A trigger's arguments begin with the number of its stream.
_NAMESAKE = r"""
select format('%%I.%%I', n.nspname, c.relname) from pg_trigger t join @schema@.streams s on s.name = %s
join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
where t.tgname in (@captures@) and t.tgparentid = 0 and t.tgrelid <> to_regclass(%s)
  and position(convert_to(s.id::text, getdatabaseencoding()) || '\x00'::bytea in t.tgargs) = 1
"""


@dataclass(frozen=True)
class Obstacle:
    """A reason why install would fail."""

    check: str  # as `config check` names it; empty: `doctor` examines that part of the server, and says it
    error: EvermarkError
    missing_table: str = ""

    @property
    def finding(self) -> Finding:
        return wrong(self.check, self.error.message, self.error.hint)


def require_installable(link: Link, target: PostgresTarget, tables: Sequence[TableChoice]) -> None:
    """Raise if the outbox cannot be installed, or one of these tables cannot be captured. Changes nothing."""
    for obstacle in _obstacles(link, target, tables):
        raise obstacle.error


def foreseen(target: PostgresTarget, found: Sequence[Finding]) -> list[Finding]:
    """`found` by `doctor`; where nothing is installed yet, whether install will work instead of all that is missing.

    Where the outbox is there, `doctor` has judged it: only tables that do not exist are added.
    """
    try:
        link = connect(target.dsn)
    except EvermarkError:
        return list(found)  # `doctor` has said so
    try:
        installed = schema_there(link, target)
        obstacles = [each for each in _obstacles(link, target, target.tables) if each.check]
        missing = [each for each in obstacles if each.missing_table]
        if installed:
            names = tuple(f"{each.missing_table} " for each in missing)
            others = [each for each in found if each.check != "tables" or not each.found.startswith(names)]
            return others + [each.finding for each in missing]
        role, database = link.one("select current_user::text, current_database()::text", doing="asking for our role")
    except EvermarkError as error:
        return [*found, wrong("may_install", error.message, error.hint)]
    finally:
        link.close()
    judged = [each for each in found if each.mend != INSTALL_HINT]
    if not any(each.check == "may_install" for each in obstacles):
        judged.append(ok("may_install", f"role {role} may make a schema in database {database}"))
    judged += [each.finding for each in obstacles]
    if target.tables and not any(each.check == "tables" for each in obstacles):
        judged.append(ok("tables", f"{', '.join(table.name for table in target.tables)} can be captured"))
    return [*judged, warning("outbox", "nothing is installed in this database yet", "evermark source install")]


def _obstacles(link: Link, target: PostgresTarget, tables: Sequence[TableChoice]) -> Iterator[Obstacle]:
    yield from _newer_outbox(link, target)
    yield from server_obstacles(link, target, made=schema_there(link, target), what="a schema and a publication")
    yield from _other_slots(link, target)
    yield from _shared_streams(tables)
    streams = link.row("select to_regclass(%s)", (f"{target.schema}.streams",), doing="looking for streams") != (None,)
    for table in tables:
        obstacle = _uncapturable(link, target, table) or (_namesake(link, target, table) if streams else None)
        if obstacle is not None:
            yield obstacle


def _newer_outbox(link: Link, target: PostgresTarget) -> Iterator[Obstacle]:
    if link.row("select to_regclass(%s)", (f"{target.schema}.meta",), doing="looking for the schema") == (None,):
        return
    version = installed_version(link, target)
    if version is not None and version > SCHEMA_VERSION:
        text = f"schema {target.schema} at {where(link.dsn)} is of version {version}"
        yield Obstacle("", FormatError(f"{text}; this program knows {SCHEMA_VERSION}", hint="upgrade Evermark"))


def server_obstacles(link: Link, target: PostgresTarget, *, made: bool, what: str) -> Iterator[Obstacle]:
    """The server can have our slots, and our role may make them, and `what`, unless that is `made` already."""
    if (unfit := not_logical(link)) is not None:
        yield Obstacle("", unfit)
    version, standby, role, database, replicates, creates, free = link.one(_SERVER, doing="looking at the server")
    at = where(link.dsn)
    if version < VERSION_MIN:
        yield Obstacle("", SetupError(f"Postgres at {at} is version {version // 10000}", hint="14 is the least"))
    if standby:
        yield Obstacle("", SetupError(f"Postgres at {at} is a standby", hint="point the dsn at the primary"))
    missing = 0
    for part in target.parts():
        found = link.row(_SLOT, (part.slot,), doing="looking for the slot")
        missing += found is None
        if found is not None and found != (database, "pgoutput"):
            text = f"slot {part.slot} at {at} belongs to database {found[0]} and plugin {found[1]}"
            hint = "choose another `name` for this deployment: it names slot and publication"
            yield Obstacle("", SetupError(text, hint=hint))
    if missing and not (replicates or link.may_use_slots()):
        yield Obstacle("", DeniedError(f"role {role} at {at} may not make replication slots", hint=GRANT_HINT))
    if missing > free:
        text = f"{missing} replication slots are needed at {at} and {free} are free"
        hint = "drop a slot that no program reads, or raise max_replication_slots and restart the server"
        yield Obstacle("", SetupError(text, hint=hint))
    if not creates and (missing or not made):
        text = f"role {role} at {at} may not make {what} in database {database}"
        grant = f'as the owner of the database: grant create on database "{database}" to "{role}";'
        hint = f"{grant} or let a DBA run `evermark source install --print`"
        yield Obstacle("may_install", DeniedError(text, hint=hint))
    if target.slots > 1 and version < SEVERAL_SLOTS_VERSION_MIN:
        text = f"several slots at {at} need Postgres 15 or newer; it is {version // 10000}"
        yield Obstacle("slots", SetupError(text, hint="leave `slots` at 1"))


def _other_slots(link: Link, target: PostgresTarget) -> Iterator[Obstacle]:
    """Another number of slots would share the events otherwise, and events not taken yet would belong to no slot."""
    if link.row("select to_regclass(%s)", (f"{target.schema}.readers",), doing="looking for readers") == (None,):
        return
    query = filled("select slot::text from @schema@.readers where slot = %s or slot ~ %s", target)
    ours = link.rows(query, (target.slot, f"^{target.slot}_p[0-9]+$"), doing="looking for readers")
    others = sorted({name for (name,) in ours} - {part.slot for part in target.parts()})
    if others:
        error = SetupError(
            f"the outbox at {where(link.dsn)} is read through other slots of this deployment: {', '.join(others)}",
            hint="`slots` cannot change while events wait in them: let `evermark up` drain them,"
            " `evermark source uninstall` with the old number, then install with the new one",
        )
        yield Obstacle("slots", error)


def _shared_streams(tables: Sequence[TableChoice]) -> Iterator[Obstacle]:
    by_stream: dict[str, str] = {}
    for table in tables:
        other = by_stream.setdefault(table.stream, table.name)
        if other != table.name:
            text = f"tables {other} and {table.name} would both be stream {table.stream}"
            hint = "a stream is one table: capture only one of them, or rename one"
            yield Obstacle("tables", SetupError(text, hint=hint))


def _namesake(link: Link, target: PostgresTarget, table: TableChoice) -> Obstacle | None:
    args = (table.stream, table.name)
    found = link.row(filled(_NAMESAKE, target), args, doing=f"looking at {table.name}")
    if found is None:
        return None
    error = SetupError(
        f"stream {table.stream} is that of table {found[0]} already, and would be that of {table.name}, too",
        hint=f"a stream is one table: evermark source uninstall --table '{found[0]}', or rename one of the two",
    )
    return Obstacle("tables", error)


def _uncapturable(link: Link, target: PostgresTarget, table: TableChoice) -> Obstacle | None:
    found = link.row(filled(_TABLE, target), (table.name,), doing=f"looking at {table.name}")
    if found is None:
        error: EvermarkError = SetupError(
            f"table {table.name} does not exist at {where(link.dsn)}",
            hint="create it first, or correct its name; written as SQL does: schema.table, with double quotes where"
            ' it has capitals: public."Orders"',
        )
        return Obstacle("tables", error, missing_table=table.name)
    kind, schema, ours, owner, columns, cloned, own_part = found
    unknown = [name for name in (*table.exclude, *table.hash) if name not in columns]
    if kind not in ("r", "p") or schema == target.schema:
        error = SetupError(
            f"{table.name} is not a table that can be captured", hint="views and foreign tables have no WAL"
        )
    elif not ours:
        error = DeniedError(
            f"our role at {where(link.dsn)} does not own table {table.name}, which belongs to {owner}:"
            " it cannot put triggers on it",
            hint=f"install as {owner}, or let a DBA run `evermark source install --print`",
        )
    elif cloned:
        error = SetupError(
            f"{table.name} is a partition of a table that is captured, and is captured with it",
            hint="leave it out: its rows are in the stream of the whole table",
        )
    elif own_part is not None:
        error = SetupError(
            f"{own_part}, a partition of {table.name}, is captured for itself",
            hint=f"release it first: evermark source uninstall --table '{own_part}'",
        )
    elif unknown:
        there = ", ".join(columns[:_COLUMNS_MAX]) + (", …" if len(columns) > _COLUMNS_MAX else "")
        error = SetupError(
            f'table {table.name} has no column "{unknown[0]}" to exclude or hash',
            hint=f"its columns are {there}; write them as they are here, without quotes",
        )
    else:
        return None
    return Obstacle("tables", error)
