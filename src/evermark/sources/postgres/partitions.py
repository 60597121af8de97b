"""Partitions of captured tables that lack a trigger of their own for `truncate`: Postgres clones only row triggers."""

from __future__ import annotations

from collections.abc import Collection

from evermark.sources.base import Warned
from evermark.sources.postgres.outbox import filled
from evermark.sources.postgres.target import PostgresTarget

NAMED_MAX = 5

# As unwatched_partitions() in sql/03_watch.sql, for a role that may not call it. Reads catalogs only, takes no lock.
_UNWATCHED = """
with recursive tree as (
    select c.oid, true as top from pg_trigger t join pg_class c on c.oid = t.tgrelid and c.relkind = 'p'
    where t.tgname = '@schema_name@_capture' and t.tgparentid = 0
    union all
    select i.inhrelid, false from tree join pg_inherits i on i.inhparent = tree.oid where not i.inhdetachpending
)
select coalesce(array_agg(format('%%I.%%I', n.nspname, c.relname) order by n.nspname, c.relname), '{}')
from tree join pg_class c on c.oid = tree.oid join pg_namespace n on n.oid = c.relnamespace
where (c.relkind = 'r' or tree.top) and not exists (
    select from pg_trigger t where t.tgrelid = c.oid and t.tgenabled = 'A' and t.tgname = '@schema_name@_partition')
"""


def unwatched_query(target: PostgresTarget) -> str:
    """Gives one row: their names, as SQL writes them."""
    return filled(_UNWATCHED, target)


def unwatched_said(names: Collection[str]) -> str:
    """What their lack means."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"a truncate of only this partition would not be captured: {', '.join(sorted(names)[:NAMED_MAX])}{more}"


def unwatched_mend(target: PostgresTarget) -> str:
    """Upkeep does it, unless the partition is busy, or belongs to another role than the outbox."""
    return (
        "`evermark up` sees to it within a minute, `evermark source maintain` now; if it stays, as a superuser:"
        f" select {target.schema}.watch_partitions(); (docs/playbook.md, `Partitioned tables`)"
    )


def lasting(names: Collection[str], target: PostgresTarget) -> Warned:
    """Upkeep ran, and could not help."""
    return Warned(unwatched_said(names), unwatched_mend(target))
