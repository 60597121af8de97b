"""What decoding has to ask the server's catalog: of which types the columns of a table are, and what its key is.

A slot gives changes as the table was then; the catalog answers as it is now. What was dropped since is not found there:
then a value stays text. Every answer is asked for once a reader and table.
"""

from __future__ import annotations

from dataclasses import dataclass

from evermark.sources.postgres.read.capture import RunQuery
from evermark.sources.postgres.read.pgoutput import Relation
from evermark.sources.postgres.tables.values import BUILT_IN, Form, ValueType

_DEPTH_MAX = 32
# Types, with all that they are made of: domains, elements of arrays, fields of composites. One row holds everything.
_TYPES = """
with recursive needed(oid) as (
    select unnest(%s::oid[])
    union
    select part.oid from needed n join pg_catalog.pg_type t on t.oid = n.oid cross join lateral (
        select t.typelem as oid where t.typelem <> 0
        union all select t.typbasetype where t.typbasetype <> 0
        union all select a.atttypid from pg_catalog.pg_attribute a
                  where t.typtype = 'c' and a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped) part
)
select coalesce(jsonb_agg(jsonb_build_array(
    t.oid::bigint, pg_catalog.format_type(t.oid, null), t.typbasetype::bigint,
    case when t.typcategory = 'A' and t.typlen = -1 and t.oid not in (22, 30) then t.typelem::bigint else 0 end,
    (select e.typdelim from pg_catalog.pg_type e where e.oid = t.typelem),
    (select jsonb_agg(jsonb_build_array(a.attname, a.atttypid::bigint) order by a.attnum)
     from pg_catalog.pg_attribute a
     where t.typtype = 'c' and a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped))), '[]')
from needed join pg_catalog.pg_type t on t.oid = needed.oid
"""
_NAMES = """
select coalesce(jsonb_agg(pg_catalog.format_type(x.oid, x.modifier) order by x.place), '[]')
from unnest(%s::oid[], %s::int[]) with ordinality as x(oid, modifier, place)
"""
# `published`: whether our publication has the table now, itself or as part of one.
_TABLE = """
select array(select a.attname::text from pg_catalog.pg_index i
             join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = any (i.indkey::int2[])
             where i.indrelid = %s and i.indisprimary and i.indislive),
       exists (select from pg_catalog.pg_publication_rel r join pg_catalog.pg_publication p on p.oid = r.prpubid
               where p.pubname = %s and r.prrelid = %s)
"""


@dataclass(frozen=True)
class TableFacts:
    """A table as the catalog has it now, for one description of it in the slot."""

    types: tuple[ValueType, ...]  # of the columns, in their order
    primary_key: frozenset[str]
    published: bool


class Catalog:
    def __init__(self, run_query: RunQuery, publication: str) -> None:
        self._run_query, self._publication = run_query, publication
        self._types: dict[int, ValueType] = {}

    def table(self, relation: Relation) -> TableFacts:
        self._learn(sorted({oid for oid, _ in relation.types} - set(self._types)))
        args = (relation.oid, self._publication, relation.oid)
        found = self._run_query(_TABLE, args, doing=f"looking at {relation.stream}") or ([], False)
        types = tuple(self._types[oid] for oid, _ in relation.types)
        return TableFacts(types, frozenset(found[0]), bool(found[1]))

    def type_names(self, relation: Relation) -> list[str]:
        """The columns' types as SQL writes them, with their modifiers: `numeric(10,2)`."""
        args = ([oid for oid, _ in relation.types], [modifier for _, modifier in relation.types])
        found = self._run_query(_NAMES, args, doing=f"looking at types of {relation.stream}")
        return [str(name) for name in found[0]] if found else []

    def _learn(self, oids: list[int]) -> None:
        if not oids:
            return
        found = self._run_query(_TYPES, (oids,), doing="looking at types")
        rows = {int(row[0]): row for row in (found[0] if found else [])}

        def known(oid: int, depth: int) -> ValueType:
            row = rows.get(oid)
            if row is None or depth > _DEPTH_MAX:
                return ValueType(f"unknown type {oid}", BUILT_IN.get(oid, Form.TEXT))
            _, name, base, element, delimiter, fields = row
            if base:
                of = known(base, depth + 1)
                return ValueType(name, of.form, of.element, of.delimiter, of.fields)
            if element:
                return ValueType(name, Form.ARRAY, known(element, depth + 1), delimiter or ",")
            if fields is not None:
                inner = tuple((str(field), known(int(of), depth + 1)) for field, of in fields)
                return ValueType(name, Form.COMPOSITE, fields=inner)
            return ValueType(name, BUILT_IN.get(oid, Form.TEXT))

        self._types.update((oid, known(oid, 0)) for oid in oids)
