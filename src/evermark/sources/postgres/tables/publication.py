"""The publication of the user's tables: its SQL, and one look at it.

It is all that `evermark source install` makes in mode `tables`, besides the slot. Its comment keeps a fingerprint of
it: so a change by somebody else is noticed, without a table of ours in the user's database.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import psycopg

from evermark.errors import EvermarkError, SetupError
from evermark.sources.postgres.connect import Link
from evermark.sources.postgres.failures import translate, unwritable, where
from evermark.sources.postgres.lsn import Incarnation
from evermark.sources.postgres.names import TableName, table_name
from evermark.sources.postgres.outbox import filled, script
from evermark.sources.postgres.read.capture import RunQuery
from evermark.sources.postgres.slots import SLOT_COLUMNS, Slot
from evermark.sources.postgres.survey import Survey
from evermark.sources.postgres.target import PostgresTarget, TableChoice

REFUSED = "EV001"  # raised by sql/tables_publication.sql, with a hint
MARK = "evermark:"  # in front of the fingerprint in the publication's comment
LISTS_VERSION_MIN = 150000  # column lists and row filters in publications
_SCHEMAS = """(select coalesce(jsonb_agg(to_jsonb(n) order by n.oid), '[]') from pg_catalog.pg_publication_namespace n
     where n.pnpubid = p.oid)"""
_LOOK = f"""
select (select system_identifier from pg_control_system()),
       case when pg_is_in_recovery() then null else pg_walfile_name(pg_current_wal_lsn()) end,
       (select rolsuper or rolreplication from pg_roles where rolname = current_user),
       current_setting('server_version_num')::int, current_setting('wal_level'), pg_is_in_recovery(),
       case when pg_is_in_recovery() then 0 else (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint end,
       current_database()::text,
       (select substr(obj_description(p.oid, 'pg_publication'), {len(MARK) + 1}) from pg_publication p
        where p.pubname = @publication_literal@ and obj_description(p.oid, 'pg_publication') like '{MARK}%%'),
       (@fingerprint@), current_user::text,
       (select coalesce(jsonb_agg(t.name order by t.place), '[]')
        from unnest(%s::text[], %s::text[], %s::text[]) with ordinality t(name, schema, relation, place)
        where not exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
                          where n.nspname = t.schema and c.relname = t.relation)),
       {SLOT_COLUMNS}
from (select) one left join pg_replication_slots s on s.slot_name = @slot_literal@
"""
# Columns that came after the publication was made, where it lists columns because some are excluded.
_MEMBERS = """
select n.nspname::text, c.relname::text,
       case when jsonb_typeof(to_jsonb(r) -> 'prattrs') = 'array' then array(
           select a.attname::text from pg_attribute a
           where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
             and (a.attgenerated = '' or a.attgenerated = 's' and current_setting('server_version_num')::int >= 180000)
             and not exists (select from jsonb_array_elements_text(to_jsonb(r) -> 'prattrs') x where x::int = a.attnum)
           order by a.attnum) else '{}' end,
       c.relkind = 'p'
from pg_publication p join pg_publication_rel r on r.prpubid = p.oid
join pg_class c on c.oid = r.prrelid join pg_namespace n on n.oid = c.relnamespace
where p.pubname = %s order by 1, 2
"""
_KEYLESS = """
select coalesce(jsonb_agg(jsonb_build_array(format('%%I.%%I', n.nspname, c.relname), c.relreplident = 'f')
                          order by n.nspname, c.relname), '[]')
from pg_catalog.pg_publication p join pg_catalog.pg_publication_rel r on r.prpubid = p.oid
join pg_catalog.pg_class c on c.oid = r.prrelid join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where p.pubname = %s and not exists (
    select from pg_catalog.pg_index i where i.indrelid = c.oid and i.indislive
    and (i.indisprimary or c.relreplident = 'i' and i.indisreplident))
"""


@dataclass(frozen=True)
class Member:
    """A published table."""

    name: str  # as the file's is written: the server quotes keywords, too, and all that is not ASCII
    unpublished: tuple[str, ...]  # its columns that the publication leaves out
    partitioned: bool


@dataclass(frozen=True)
class Unusable:
    """A table whose users cannot update or delete any more, because of what the publication asks of it."""

    table: str
    trouble: str
    mend: str


@dataclass(frozen=True)
class Keyless:
    """A table without a primary key or another one that events could have."""

    table: str
    trouble: str
    mend: str


def publication_sql(target: PostgresTarget, tables: Sequence[TableChoice]) -> str:
    """Makes the publication, or brings it up to date; refuses a table whose updates it would break."""
    chosen = [
        {
            "name": table.name,
            "columns": table.columns,
            "exclude": table.exclude,
            "where": f" where ({table.where})" if table.where else "",
        }
        for table in tables
    ]
    literal = "'" + json.dumps(chosen, ensure_ascii=False).replace("'", "''") + "'"
    text = resources.files("evermark.sources.postgres.sql").joinpath("tables_publication.sql").read_text("utf-8")
    for token, value in (
        ("@fingerprint@", _fingerprint(LISTS_VERSION_MIN)),
        ("@fingerprint_14@", _fingerprint(LISTS_VERSION_MIN - 1)),
        ("@identity@", script("tables_identity.sql", target)),
        ("@mark@", MARK),
        ("@publication_name@", target.publication),
    ):
        text = text.replace(token, value)
    # Last: a person's own words could hold one of the tokens.
    return filled(text, target).replace("@tables@", literal)


def publish(link: Link, target: PostgresTarget) -> None:
    """Make the publication, or bring it up to date."""
    try:
        with link.connection.transaction():
            _run(link, publication_sql(target, target.tables))
    except psycopg.Error as error:
        if error.sqlstate != REFUSED and _is_of_words(error):
            # The server names no table. One by one, the one that it means is refused again.
            told = (refusal(link, target, table) for table in target.tables if table.where)
            raise next((each for each in told if each), None) or _told(error, link, None) from error
        raise _told(error, link, None) from error


def refusal(link: Link, target: PostgresTarget, table: TableChoice) -> EvermarkError | None:
    """Why this table cannot be published. It is tried, in a transaction that is rolled back."""
    try:
        with link.connection.transaction(force_rollback=True):
            _run(link, publication_sql(target, [table]))
    except psycopg.Error as error:
        return _told(error, link, table)
    return None


def _run(link: Link, text: str) -> None:
    """In the encoding of the database, as the server takes it: names and conditions are a person's own."""
    try:
        link.connection.execute(text.encode(link.connection.info.encoding))
    except UnicodeEncodeError as error:
        raise unwritable(error, link.dsn, "publishing the tables") from error


def _told(error: psycopg.Error, link: Link, table: TableChoice | None) -> EvermarkError:
    if error.sqlstate == REFUSED:
        return SetupError(error.diag.message_primary or "", hint=error.diag.message_hint or "")
    if table is not None and table.where and _is_of_words(error):
        why = error.diag.message_primary or error
        return SetupError(
            f"`where` of table {table.name} cannot be used: {why} (it is: {table.where})",
            hint="a condition on the table's own columns, as SQL writes it, without queries and functions of your own",
        )
    return translate(error, link.dsn, "publishing the tables" if table is None else f"publishing {table.name}")


def _is_of_words(error: psycopg.Error) -> bool:
    """Whether the server did not like what was written: its syntax, its names, its types, or what it makes use of."""
    state = error.sqlstate or ""
    return state.startswith(("42", "22", "0A")) and not isinstance(error, psycopg.errors.InsufficientPrivilege)


def unusable(run_query: RunQuery, target: PostgresTarget) -> list[Unusable]:
    query = script("tables_identity.sql", target).replace("%", "%%")
    found = run_query(
        f"select coalesce(jsonb_agg(jsonb_build_array(b.name, b.trouble, b.mend)), '[]') from ({query}) b",
        doing="looking at replica identities",
    )
    return [Unusable(*row) for row in (found[0] if found else [])]


def keyless(run_query: RunQuery, target: PostgresTarget) -> list[Keyless]:
    found = run_query(_KEYLESS, (target.publication,), doing="looking for tables without a key")
    return [
        Keyless(
            table,
            "has no primary key: its events have no key, and no table of the log tells its rows apart"
            if whole
            else "has no key: rows that are inserted have the key it had before, or none if that is not known",
            f"alter table {table} add primary key (…);",
        )
        for table, whole in (found[0] if found else [])
    ]


def members(link: Link, target: PostgresTarget) -> list[Member]:
    rows = link.rows(_MEMBERS, (target.publication,), doing="looking at the publication")
    return [Member(TableName(schema, table).sql, tuple(left_out), parts) for schema, table, left_out, parts in rows]


def look(link: Link, target: PostgresTarget) -> Survey:
    """Needs no right but to connect."""
    query = _LOOK.replace("@fingerprint@", _fingerprint(link.connection.info.server_version))
    names = [table_name(table.name) for table in target.tables]
    given = ([name.sql for name in names], [name.schema for name in names], [name.table for name in names])
    found = link.one(filled(query, target), given, doing="looking at the slot")
    system_id, walfile, replicates, *server = found[:12]
    # The timeline of the WAL file being written; the control file's would lag behind a promotion.
    incarnation = Incarnation(system_id & 0xFFFFFFFFFFFFFFFF, int(walfile[:8], 16) if walfile else 0)
    version, wal_level, standby, flush, database, installed, now, role, missing = server
    return Survey(
        version, wal_level, standby, flush, database, installed, now, None, role,
        where=where(link.dsn), slot=Slot(*found[12:]) if found[12] is not None else None, incarnation=incarnation,
        may_use_slots=replicates or link.may_use_slots(), outbox=False, missing=tuple(missing),
    )  # fmt: skip


def _fingerprint(version: int) -> str:
    text = resources.files("evermark.sources.postgres.sql").joinpath("tables_fingerprint.sql").read_text("utf-8")
    return text.replace("@schemas@", _SCHEMAS if version >= LISTS_VERSION_MIN else "'[]'::jsonb")
