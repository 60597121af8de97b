"""The outbox in the user's database: which versions of it this program knows, and its SQL with the names filled in."""

from __future__ import annotations

from collections.abc import Collection
from importlib import resources

from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import translated
from evermark.sources.postgres.target import PostgresTarget

SCHEMA_VERSION = 4
SCHEMA_VERSION_READ = 2  # the oldest installed version that is read on as it is, with a warning
# What an event is made of. The rest of its row is for us, in the database.
_PUBLISHED = (
    *("id", "created_at", "stream_id", "stream", "op", "key", "payload", "before", "schema_version", "previous_key"),
)
_NAMED_MAX = 5
# Asked of the catalogs: for a role that may not use the schema, too.
_LACKING = """
select name from unnest(array['meta', 'streams', 'readers', 'events', 'publication_fingerprint()']) name
where not exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
                  where n.nspname = %s and c.relname = name)
and not exists (select from pg_proc p join pg_namespace n on n.oid = p.pronamespace
                where n.nspname = %s and p.proname || '()' = name)
"""
# Partitions of captured tables that lack a trigger of their own for `truncate`: Postgres clones only row triggers.
# As unwatched_partitions() in sql/03_watch.sql, for a role that may not call it. Reads catalogs only, takes no lock.
UNWATCHED = """
with recursive tree as (
    select c.oid, true as top from pg_trigger t join pg_class c on c.oid = t.tgrelid and c.relkind = 'p'
    where t.tgname in (@captures@) and t.tgparentid = 0
    union all
    select i.inhrelid, false from tree join pg_inherits i on i.inhparent = tree.oid where not i.inhdetachpending
)
select coalesce(array_agg(format('%%I.%%I', n.nspname, c.relname) order by n.nspname, c.relname), '{}')
from tree join pg_class c on c.oid = tree.oid join pg_namespace n on n.oid = c.relnamespace
where (c.relkind = 'r' or tree.top) and not exists (
    select from pg_trigger t where t.tgrelid = c.oid and t.tgenabled = 'A' and t.tgname = '@schema_name@_partition')
"""


def script(name: str, target: PostgresTarget, *, role: str = "evermark") -> str:
    text = resources.files("evermark.sources.postgres.sql").joinpath(name).read_text(encoding="utf-8")
    return filled(text, target, role=role)


def capture_trigger(target: PostgresTarget) -> str:
    """The name of the trigger on rows. It sorts before those of others: see watch() in sql/03_watch.sql."""
    return f"!{target.schema}_capture"


def filled(text: str, target: PostgresTarget, *, role: str = "evermark") -> str:
    # Names were checked by PostgresTarget: letters, digits and underscores only.
    quoted_role = '"' + role.replace('"', '""') + '"'
    for token, value in (
        ("@schema@", f'"{target.schema}"'),
        ("@schema_name@", target.schema),
        ("@captures@", f"'{capture_trigger(target)}', '{target.schema}_capture'"),  # the second: to version 3
        ("@capture@", capture_trigger(target)),
        ("@publication@", f'"{target.publication}"'),
        ("@publication_literal@", f"'{target.publication}'"),
        ("@slot_literal@", f"'{target.slot}'"),
        ("@version@", str(SCHEMA_VERSION)),
        ("@published@", ", ".join(f"'{name}'" for name in _PUBLISHED)),
        ("@role@", quoted_role),
        ("@row_filter_text@", target.row_filter.replace("'", "''")),
    ):
        text = text.replace(token, value)
    return text


def schema_there(link: Link, target: PostgresTarget) -> bool:
    found = link.row("select 1 from pg_namespace where nspname = %s", (target.schema,), doing="looking for the schema")
    return found is not None


def lacking(link: Link, target: PostgresTarget) -> tuple[str, ...]:
    """What every outbox has, and the schema that is to be one has not."""
    rows = link.rows(_LACKING, (target.schema, target.schema), doing="looking for the outbox")
    return tuple(f"{target.schema}.{name}" for (name,) in rows)


def installed_version(link: Link, target: PostgresTarget) -> int | None:
    found = link.row(filled("select version from @schema@.meta", target), doing="reading the installed version")
    return int(found[0]) if found else None


def create_publication(link: Link, target: PostgresTarget, *, again: bool = False) -> None:
    """Made if there is none. `again`: what others made of it is undone; only a new slot may read it then."""
    with translated(link.dsn, "creating the publication"):
        link.connection.execute(script("04_publication.sql", target).encode())
        if again:
            link.connection.execute(script("publication_again.sql", target).encode())


def maintain(target: PostgresTarget) -> tuple[int, int, int]:
    """Partitions made for the days ahead, dropped for days past retention, and partitions that have to wait."""
    query = filled("select * from @schema@.maintain(make_interval(secs => %s))", target)
    with connect(target.dsn) as link:
        created, dropped, waiting = link.one(query, (target.events_retention_s,), doing="maintaining partitions")
    return created, dropped, waiting


def unwatched_said(names: Collection[str]) -> str:
    """What the lack of triggers on these partitions means."""
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return f"a truncate of only this partition would not be captured: {', '.join(sorted(names)[:_NAMED_MAX])}{more}"


def unwatched_mend(target: PostgresTarget) -> str:
    """Upkeep does it, unless the partition is busy, or belongs to another role than the outbox."""
    return (
        "`evermark up` sees to it within a minute, `evermark source maintain` now; if it stays, as a superuser:"
        f" select {target.schema}.watch_partitions(); (docs/playbook.md, `Partitioned tables`)"
    )
