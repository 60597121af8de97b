"""A slot of tables that was lost, or whose publication was changed: the tables as they are where the new slot begins.

Their rows are compared with what the log implies of them (`Gap.is_state`). The new slot shows its moment as a snapshot,
which lasts as long as the connection that made it; tasks read the tables as that snapshot has them, by ranges of keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import psycopg
import pyarrow as pa

from evermark.errors import BusyError, EvermarkError, SetupError
from evermark.sources.base import Gap, Slice
from evermark.sources.postgres.connect import Link
from evermark.sources.postgres.failures import translated, where
from evermark.sources.postgres.lsn import Incarnation, Position, positions
from evermark.sources.postgres.outbox import filled
from evermark.sources.postgres.repair.gap import seeing
from evermark.sources.postgres.repair.server import PostgresRepairServer
from evermark.sources.postgres.repair.steps import NewSlot, OutboxRepair
from evermark.sources.postgres.survey import Survey
from evermark.sources.postgres.tables.publication import look, publish
from evermark.sources.postgres.tables.scan import KeyRange, TableScan
from evermark.sources.postgres.tables.versions import TableVersion, TableVersions
from evermark.sources.postgres.target import PostgresTarget, TableChoice

WAIT_S = 3600.0
_AGAIN = "the repair begins again by itself"
# A table with more rows than this is read in pieces of so many.
PIECE_ROWS = 500_000
# A guess is enough; of a table that was never analyzed, by its size.
# What the snapshot says of the files of a table and its partitions, and what is so now.
_REWRITTEN = """
select coalesce(bool_or(c.relfilenode <> pg_catalog.pg_relation_filenode(c.oid)), false)
from pg_catalog.pg_class c
where c.relfilenode <> 0 and (c.oid = pg_catalog.to_regclass(%s)
      or c.oid in (select relid from pg_catalog.pg_partition_tree(pg_catalog.to_regclass(%s))))
"""
_ROWS_ABOUT = """
select coalesce(sum(greatest(c.reltuples, pg_catalog.pg_relation_size(c.oid) / 200)), 0)::bigint
from pg_catalog.pg_class c where c.relkind = 'r' and (c.oid = %s::text::regclass
    or c.oid in (select relid from pg_catalog.pg_partition_tree(%s::text::regclass)))
"""
_MAY_READ = """
select pg_catalog.has_table_privilege(%s::text::regclass, 'select') or (
    select pg_catalog.bool_and(pg_catalog.has_column_privilege(%s::text::regclass, name, 'select'))
    from unnest(%s::text[]) name), current_user::text
"""


def repair_of(
    target: PostgresTarget, versions: Callable[[], TableVersions], on_finished: Callable[[], None] = lambda: None
) -> OutboxRepair:
    return OutboxRepair(target, TablesRepairServer(target, WAIT_S, versions), on_finished)


@dataclass
class TablesGap(Gap):
    """What is found stands one byte below the LSN reading goes on from: no record begins there."""

    target: PostgresTarget
    snapshot: str
    incarnation: Incarnation
    lsn: int
    latest: Mapping[str, TableVersion]  # what is remembered of the tables, by stream
    found: Sequence[Slice] = ()
    trouble: EvermarkError | None = None  # why no pieces were found
    is_state: ClassVar[bool] = True  # type: ignore[misc]
    since = None

    @property
    def pieces(self) -> Sequence[Slice]:  # type: ignore[override]
        """Raises the trouble only here: a person may skip a gap that cannot be looked through."""
        if self.trouble is not None:
            raise self.trouble
        return self.found

    @property
    def position(self) -> str:
        return self.incarnation.at(self.lsn)

    def covers(self, stream: str) -> bool:
        return any(table.stream == stream for table in self.target.tables)

    def positions(self, first: int, count: int) -> pa.Array:
        lsns = np.full(count, self.lsn - 1, dtype=np.uint64)
        return positions(self.incarnation, lsns, np.arange(first, first + count, dtype=np.uint32))

    def survey(self) -> None:
        """Find the pieces."""
        found: list[Slice] = []
        with _telling_of_changes(self.target), seeing(self.snapshot, self.target) as link:
            for choice in self.target.tables:
                scan = self._scan(link, choice)
                if not (scan.key and scan.table.keys):
                    raise _without_key(link, choice)
                _require_right(link, choice, scan.relation.columns)
                (rows,) = link.one(_ROWS_ABOUT, (choice.name, choice.name), doing=f"looking at {choice.name}")
                bounds = list(scan.bounds(PIECE_ROWS)) if rows > PIECE_ROWS else []
                for after, upto in pairwise([None, *bounds, None]):
                    detail = {"stream": choice.stream, "after": json.dumps(after), "upto": json.dumps(upto)}
                    found.append(Slice(0, "", self.position, detail))
        self.found = tuple(found)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        (choice,) = (table for table in self.target.tables if table.stream == piece.detail["stream"])
        keys = KeyRange(_key(piece.detail["after"]), _key(piece.detail["upto"]))
        with _telling_of_changes(self.target), seeing(self.snapshot, self.target) as link:
            yield from self._scan(link, choice).rows(keys)
            _require_as_it_was(link, choice)

    def _scan(self, link: Link, choice: TableChoice) -> TableScan:
        return TableScan(link, self.target, choice, self.latest.get(choice.stream))


@contextmanager
def _telling_of_changes(target: PostgresTarget) -> Iterator[None]:
    """The snapshot says which columns there were; the server finds the columns of now. What passes costs no try."""
    try:
        yield
    except EvermarkError as error:
        if not isinstance(error.__cause__, psycopg.errors.UndefinedColumn):
            raise
        raise BusyError(
            f"a table at {where(target.dsn.open())} was altered while it was read for the repair of its slot:"
            f" {error.message}",
            hint=_AGAIN,
        ) from error


def _require_as_it_was(link: Link, choice: TableChoice) -> None:
    """A table that was rewritten or emptied since looks empty to the snapshot. From here on nobody can do that: reading
    the table has locked it.
    """
    (rewritten,) = link.one(_REWRITTEN, (choice.name, choice.name), doing=f"looking at {choice.name}")
    if rewritten:
        raise BusyError(
            f"table {choice.name} at {where(link.dsn)} was rewritten or truncated while it was read for the repair of"
            " its slot",
            hint=_AGAIN,
        )


def _key(text: str) -> tuple[str, ...] | None:
    found: Any = json.loads(text)
    return tuple(found) if found is not None else None


def _without_key(link: Link, choice: TableChoice) -> SetupError:
    return SetupError(
        f"table {choice.name} at {where(link.dsn)} has no key: its changes while the slot was lost cannot be found",
        hint="give it a primary key and say `evermark source recover --choice repair`; or take it out of the file; or,"
        " to go on from now and accept the gap: `evermark source recover --choice skip`",
    )


def _require_right(link: Link, choice: TableChoice, columns: Sequence[str]) -> None:
    """Of all tables before the first is read: reading may take hours."""
    given = (choice.name, choice.name, list(columns))
    may, role = link.one(_MAY_READ, given, doing=f"asking for the right to read {choice.name}")
    if not may:
        raise SetupError(
            f"role {role} at {where(link.dsn)} may not read table {choice.name}: its changes while the slot was lost"
            " cannot be found",
            hint=f'grant select on {choice.name} to "{role}"; then `evermark source recover --choice repair`',
        )


class TablesRepairServer(PostgresRepairServer):
    def __init__(self, target: PostgresTarget, wait_s: float, versions: Callable[[], TableVersions]) -> None:
        super().__init__(target, wait_s)
        self._versions = versions

    def look(self) -> Survey:
        return look(self._link, self._target)

    def repair_publication(self) -> None:
        """As the file has it. Without the comment of the changed one, which install respects."""
        link = self._link
        with translated(link.dsn, "repairing the publication"), link.connection.transaction():
            if self.look().fingerprint_now is not None:
                link.connection.execute(filled("comment on publication @publication@ is null", self._target).encode())
            publish(link, self._target)

    def floor(self) -> str | None:
        return None

    def gap(self, new: NewSlot, incarnation: Incarnation, floor: str | None) -> Gap:
        latest = self._versions().before(Position.parse(incarnation.at(new.lsn)))
        gap = TablesGap(self._target, new.snapshot, incarnation, new.lsn, latest)
        try:
            gap.survey()
        except SetupError as error:
            gap.trouble = error
        return gap
