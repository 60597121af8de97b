"""Whether the tables of the file can be copied by this role. Only looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.postgres.connect import Link
from evermark.sources.postgres.target import PostgresTarget

_LOOK = """
select current_user::text,
       current_setting('max_replication_slots')::int - (select count(*) from pg_replication_slots)::int,
       (select coalesce(jsonb_agg(jsonb_build_array(t.name, has_table_privilege(c.oid, 'SELECT'),
            exists (select from pg_index i where i.indrelid = c.oid and i.indislive
                    and case c.relreplident when 'i' then i.indisreplident else i.indisprimary end),
            not row_security_active(c.oid)) order by t.place), '[]')
        from unnest(%s::text[]) with ordinality t(name, place) join pg_class c on c.oid = to_regclass(t.name))
"""


@dataclass(frozen=True)
class Copyable:
    """What a table has of what a copy of it needs."""

    table: str
    readable: bool
    keyed: bool
    whole: bool  # no policy hides rows from us


@dataclass(frozen=True)
class CopyFacts:
    role: str
    free_slots: int
    tables: Sequence[Copyable]


def look_for_copy(link: Link, target: PostgresTarget) -> CopyFacts:
    names = [table.name for table in target.tables]
    role, free, rows = link.one(_LOOK, (names,), doing="looking whether tables can be copied")
    return CopyFacts(role, free, [Copyable(*row) for row in rows])


def key_hint(table: str) -> str:
    return f"alter table {table} add primary key (…); or leave `start: copy` out"


def judged_copies(facts: CopyFacts, *, wanted: bool) -> Iterator[Finding]:
    """Pure. What the file does not ask for is no trouble, unless a person asks for it."""
    if not wanted:
        return
    ill = False
    for each in facts.tables:
        if not each.readable:
            ill = True
            said = f"role {facts.role} may not read {each.table}, which is to be copied"
            yield wrong("copy", said, f"grant select on {each.table} to {facts.role};")
        elif not each.whole:
            ill = True
            said = f"a policy hides rows of {each.table} from role {facts.role}: it is not copied in part"
            yield wrong("copy", said, f"alter role {facts.role} bypassrls;")
        if not each.keyed:
            ill = True
            yield wrong("copy", f"{each.table} has no key: its rows cannot be told apart", key_hint(each.table))
    if facts.free_slots < 1:
        ill = True
        said = "no replication slot is free, and a copy needs one for each of its tasks"
        yield warning("copy", said, "raise max_replication_slots and restart the server")
    if not ill:
        yield ok("copy", f"{len(facts.tables)} tables can be copied; {facts.free_slots} slots are free")
