"""A published table, with what has to be known to write its rows down: as a slot or the catalog describes it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pyarrow as pa

from evermark.sources.postgres.read.pgoutput import Relation
from evermark.sources.postgres.tables.catalog import TableFacts
from evermark.sources.postgres.tables.values import Column, ValueType, objects
from evermark.sources.postgres.tables.versions import TableVersion

_FULL = "f"  # of replica identities


@dataclass(frozen=True)
class Table:
    """A table as the slot describes it, with what has to be known to write its rows down."""

    relation: Relation
    types: tuple[ValueType, ...]
    keys: tuple[int, ...]  # the columns that make the key, in the order of a composite key's JSON
    hashed: frozenset[str]
    version: int

    @property
    def identity(self) -> tuple[int, ...]:
        """The columns that an old row without the others has."""
        return tuple(number for number, key in enumerate(self.relation.keys) if key)


def known_table(
    relation: Relation, facts: TableFacts, hashed: frozenset[str], version: int, former_key: Collection[str] = ()
) -> Table:
    """`former_key`: the columns that made the key of the version before."""
    key = _key(relation, facts, frozenset(former_key))
    names = [n for n, c in enumerate(relation.columns) if c in key]
    # As jsonb orders the keys of an object.
    ordered = sorted(names, key=lambda n: (len(relation.columns[n].encode()), relation.columns[n].encode()))
    return Table(relation, facts.types, tuple(ordered), hashed, version)


def _key(relation: Relation, facts: TableFacts, former: frozenset[str]) -> frozenset[str]:
    """The replica identity; where that is the whole row, the primary key.

    A table without an identity takes inserts alone. Their key is the one that the table had: rows that were inserted
    while a constraint was made anew are updated and deleted under it later.
    """
    identity = frozenset(name for name, key in zip(relation.columns, relation.keys, strict=True) if key)
    if relation.identity != _FULL and identity:
        return identity
    there = frozenset(relation.columns)
    if relation.identity != _FULL and former and former <= there:
        return former
    return facts.primary_key if facts.primary_key <= there else frozenset()


def columns_to_hash(columns: tuple[str, ...], wanted: Collection[str], latest: TableVersion | None) -> frozenset[str]:
    """The columns to be hashed: what the file says, and all that may be one of them under another name.

    A server appends columns and never moves one. Where a hashed one is gone, or one stands elsewhere than it did, names
    may have been given to other columns: what is new or moved is hashed, too, until the file has another list.
    """
    if not wanted:
        return frozenset()
    if latest is None:
        return frozenset(wanted if set(wanted) <= set(columns) else [*wanted, *columns])
    old = latest.columns
    reconsidered = latest.wanted is not None and set(latest.wanted) != set(wanted)
    if _is_plain(old, columns, {*wanted} if reconsidered else {*wanted, *latest.hashed}):
        return frozenset(wanted if reconsidered else [*wanted, *latest.hashed])
    moved = [name for place, name in enumerate(columns) if old[place : place + 1] != (name,)]
    return frozenset([*wanted, *latest.hashed, *moved])


def _is_plain(old: tuple[str, ...], new: tuple[str, ...], hidden: set[str]) -> bool:
    """Whether columns were merely appended or dropped, as far as names can tell, and none that was to be hidden."""
    kept = tuple(name for name in new if name in old)
    if not hidden <= set(new) or kept != new[: len(kept)] or kept != tuple(name for name in old if name in new):
        return False
    # One gone from the middle and a new one at the end may be two renames: (city, email) to (email, mail).
    return kept == new or kept == old[: len(kept)]


def payload_of(table: Table, columns: Mapping[int, Column], rows: int) -> pa.Array:
    names = [table.relation.columns[number] for number in columns]
    return objects(names, list(columns.values()), rows)


def key_of(table: Table, columns: Mapping[int, Column], rows: int) -> pa.Array:
    """As the outbox writes it: the text of one column, or an object of several as jsonb would write it."""
    if not table.keys or any(number not in columns for number in table.keys):
        return pa.nulls(rows, pa.string())
    if len(table.keys) == 1:
        return columns[table.keys[0]].text
    names = [table.relation.columns[number] for number in table.keys]
    return objects(names, [columns[number] for number in table.keys], rows, colon=": ", comma=", ")
