"""Whether `evermark source install` will work where it has not been run yet: tables, columns, rights. Only looks."""

from __future__ import annotations

from collections.abc import Iterator

from evermark.errors import EvermarkError
from evermark.observe.finding import Finding, ok, wrong
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.place import PostgresPlace, TableChoice

_RIGHTS = """
select current_user::text, current_database()::text, has_database_privilege(current_database(), 'CREATE'),
       exists (select from pg_namespace where nspname = %s)
"""
_TABLE = """
select c.relkind::text, pg_has_role(c.relowner, 'USAGE'), pg_get_userbyid(c.relowner)::text,
       array(select a.attname::text from pg_attribute a
             where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped order by a.attnum)
from pg_class c where c.oid = to_regclass(%s)
"""
_PRINT = "or give a DBA the SQL that `evermark source install --print` prints"


def installable(place: PostgresPlace) -> list[Finding]:
    """Where the outbox is there already only what install would miss is said: `doctor` judges the rest, and a server
    that does not answer."""
    try:
        link = connect(place.dsn)
    except EvermarkError:
        return []
    try:
        role, database, may_create, there = link.one(_RIGHTS, (place.schema,), doing="asking what our role may do")
        if there:
            return [finding for table in place.tables for finding in _absent(link, table)]
        found = []
        if may_create:
            found.append(ok("may_install", f"role {role} may make a schema in database {database}"))
        else:
            grant = f'grant create on database "{database}" to "{role}"; {_PRINT}'
            found.append(wrong("may_install", f"role {role} may not make a schema in database {database}", grant))
        return found + [finding for table in place.tables for finding in _table(link, table, role)]
    except EvermarkError as error:
        return [wrong("may_install", error.message, error.hint)]
    finally:
        link.close()


def _absent(link: Link, table: TableChoice) -> Iterator[Finding]:
    if link.one("select to_regclass(%s) is null", (table.name,), doing=f"looking for table {table.name}")[0]:
        yield wrong("tables", f"there is no table {table.name}", "create it first, or correct its name in the file")


def _table(link: Link, table: TableChoice, role: str) -> Iterator[Finding]:
    row = link.row(_TABLE, (table.name,), doing=f"looking at table {table.name}")
    if row is None:
        yield wrong("tables", f"there is no table {table.name}", "create it first, or correct its name in the file")
        return
    kind, ours, owner, columns = row
    if kind not in ("r", "p"):
        yield wrong("tables", f"{table.name} is not a table", "take it out of the file: only tables can be captured")
    elif not ours:
        found = f"table {table.name} belongs to {owner}: role {role} may not put triggers on it"
        yield wrong("tables", found, f"run `evermark source install` as {owner}, {_PRINT}")
    elif missing := [name for name in (*table.exclude, *table.hash) if name not in columns]:
        found = f"table {table.name} has no column {', '.join(missing)} to exclude or hash"
        yield wrong("tables", found, f"its columns are {', '.join(columns)}")
    else:
        yield ok("tables", f"{table.name} can be captured")
