"""How the tables of a source looked, version by version: kept in State, so that a change of a table is one event.

A slot describes a table anew in every session, so a description is no news by itself: it is compared with the last one
before the range that is read. What is read again is compared with the same one again, and numbered the same: keeping
a version twice changes nothing, and it may be kept before its event is logged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from evermark.sources.postgres.lsn import Position
from evermark.state.connection import State

_INCARNATION = 24  # the first characters of a position


@dataclass(frozen=True)
class TableVersion:
    stream: str
    version: int
    position: str  # of the event that told it
    shape: str  # a digest of the table's description: equal for equal tables
    columns: tuple[str, ...] = ()
    hashed: tuple[str, ...] = ()  # columns of which only a hash leaves
    wanted: tuple[str, ...] | None = None  # what the file said of it, sorted; None: it was not kept
    key: tuple[str, ...] = ()  # the columns that make the key; none, too, where an earlier version of Evermark kept it


class TableVersions(Protocol):
    def before(self, position: Position) -> dict[str, TableVersion]:
        """Of every stream the last version whose event stands before `position`."""

    def keep(self, versions: Iterable[TableVersion]) -> None: ...

    def close(self) -> None: ...


class StateVersions:
    """`TableVersions` in State.

    Positions of another incarnation cannot be compared with one of this: the server was restored or promoted since,
    and what it said before is before.
    """

    def __init__(self, state: State, source: str) -> None:
        self._state, self._source = state, source

    def before(self, position: Position) -> dict[str, TableVersion]:
        query = """select distinct on (stream) stream, version, position, shape, columns, hashed from table_versions
            where source = %s and (left(position, %s) <> %s or position < %s) order by stream, version desc"""
        text = str(position)
        with self._state.connection() as conn:
            rows = conn.execute(query, (self._source, _INCARNATION, text[:_INCARNATION], text)).fetchall()
        return {
            stream: TableVersion(stream, version, at, shape, tuple(json.loads(columns)), *_known(known))
            for stream, version, at, shape, columns, known in rows
        }

    def keep(self, versions: Iterable[TableVersion]) -> None:
        statement = """insert into table_versions (source, stream, version, position, shape, columns, hashed)
            values (%s, %s, %s, %s, %s, %s, %s)
            on conflict (source, stream, version) do update
            set position = excluded.position, shape = excluded.shape, columns = excluded.columns,
                hashed = excluded.hashed"""
        with self._state.transaction() as conn:
            for each in versions:
                known = {"hashed": each.hashed, "wanted": each.wanted, "key": each.key}
                lists = (json.dumps(each.columns), json.dumps(each.hashed if each.wanted is None else known))
                conn.execute(statement, (self._source, each.stream, each.version, each.position, each.shape, *lists))

    def close(self) -> None:
        self._state.close()


def _known(text: str) -> tuple[tuple[str, ...], tuple[str, ...] | None, tuple[str, ...]]:
    """What was hashed, what the file wanted, and the key. Earlier versions of Evermark kept only the first, or two."""
    found = json.loads(text)
    if isinstance(found, list):
        return tuple(found), None, ()
    return tuple(found["hashed"]), tuple(found["wanted"]), tuple(found.get("key", ()))
