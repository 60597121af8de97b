"""Rows that only the owner of a source changes, one for each of its partitions: in State, or in memory.

A save is fenced by the lease of the partition, with the row's own epoch, and judged by a rule of the caller's, which is
given the stored row, or None, and raises to refuse. It returns once the row is durable. A row of another kind may be
saved with it, in one transaction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from evermark.cluster.fence import FENCE, fence, source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.errors import ConflictError, StaleError
from evermark.state.connection import Connection, State


class OwnedRow(Protocol):
    """A dataclass whose fields are the columns."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def epoch(self) -> int: ...


R = TypeVar("R", bound=OwnedRow)
Rule = Callable[[R | None], None]


@dataclass(frozen=True)
class AlsoSaved(Generic[R]):
    """A row of the same partition to be saved with another, where both are kept in one place."""

    rows: OwnedRows[R]
    row: R
    require: Rule[R]


class OwnedRows(Protocol[R]):
    def load(self, source: str) -> dict[int, R]: ...

    def load_all(self) -> dict[tuple[str, int], R]:
        """Of all sources, by source and partition."""

    def save(self, source: str, partition: int, row: R, require: Rule[R], also: AlsoSaved[Any] | None = None) -> bool:
        """Whether `also` was saved, too. If not, it is up to the caller."""

    def delete(self, source: str, partition: int) -> None: ...


@dataclass(frozen=True)
class _Move:
    update: str
    where: str
    given: dict[str, Any]


class PostgresRows(Generic[R]):
    """In a table of State. A save is one round trip: the rule is applied to our last save, and the row changes only if
    it still holds that save and our epoch still holds the lease. If not, the rule is applied again, to the locked row.
    """

    def __init__(self, state: State, table: str, kind: type[R]) -> None:
        self._state = state
        self._table = table
        self._kind = kind
        self._last: dict[tuple[str, int], R] = {}
        names = [field.name for field in fields(kind)]
        self._columns = ", ".join(names)
        self._values = ", ".join(f"%({table}_{name})s" for name in names)
        self._update = f"update {table} set ({self._columns}, updated_at) = row ({self._values}, clock_timestamp())"
        self._mine = " and ".join(f"{table}.{name} = %({name})s" for name in ("source", "partition"))
        self._same = " and ".join([self._mine, *(f"{table}.{name} = %({table}_old_{name})s" for name in names)])

    def load(self, source: str) -> dict[int, R]:
        listed = f"select partition, {self._columns} from {self._table} where source = %s order by partition"
        with self._state.connection() as conn:
            return {partition: self._kind(*rest) for partition, *rest in conn.execute(listed, (source,))}

    def load_all(self) -> dict[tuple[str, int], R]:
        listed = f"select source, partition, {self._columns} from {self._table} order by source, partition"
        with self._state.connection() as conn:
            return {(source, partition): self._kind(*rest) for source, partition, *rest in conn.execute(listed)}

    def save(self, source: str, partition: int, row: R, require: Rule[R], also: AlsoSaved[Any] | None = None) -> bool:
        place = source, partition
        given = {
            "source": source,
            "partition": partition,
            "lease": source_lease(source),
            "own_lease": source_lease(source, partition),
            "lease_epoch": row.epoch,
        }
        other = also.rows if also is not None and isinstance(also.rows, PostgresRows) else None
        mine = self.move(place, row, require)
        its = other.move(place, also.row, also.require) if also is not None and other is not None else None
        with self._state.connection() as conn:
            saved, also_saved = _moved(conn, given, mine, its)
            if not saved:
                with conn.transaction():
                    self._save_locked(conn, given | self._named(row), require)
        self.remember(place, row)
        if also is not None and other is not None and also_saved:
            other.remember(place, also.row)
        return also_saved

    def move(self, place: tuple[str, int], row: R, require: Rule[R]) -> _Move | None:
        """The change of a row that still holds our last save; None where the locked row has to decide."""
        last = self._last.get(place)
        if last is None:
            return None
        try:
            require(last)
        except (StaleError, ConflictError):
            return None  # our last save may be out of date
        old = {f"{self._table}_old_{name}": value for name, value in vars(last).items()}
        return _Move(self._update, self._same, self._named(row) | old)

    def remember(self, place: tuple[str, int], row: R) -> None:
        self._last[place] = row

    def delete(self, source: str, partition: int) -> None:
        with self._state.connection() as conn:
            conn.execute(f"delete from {self._table} where source = %s and partition = %s", (source, partition))

    def _named(self, row: R) -> dict[str, Any]:
        return {f"{self._table}_{name}": value for name, value in vars(row).items()}

    def _save_locked(self, conn: Connection, given: dict[str, Any], require: Rule[R]) -> None:
        fence(conn, given["lease"], given["lease_epoch"], given["own_lease"])
        select = f"select {self._columns} from {self._table} where {self._mine} for update"
        row = conn.execute(select, given).fetchone()
        require(self._kind(*row) if row else None)
        if row:
            conn.execute(f"{self._update} where {self._mine}", given)
            return
        begin = f"""
        insert into {self._table} (source, partition, {self._columns})
        values (%(source)s, %(partition)s, {self._values}) on conflict (source, partition) do nothing
        """
        if conn.execute(begin, given).rowcount != 1:
            raise ConflictError(
                f"{self._table.replace('_', ' ')} of {given['source']}/{given['partition']} was begun by another"
                " instance just now",
                hint="restart the source, which finds in the log where it stands",
            )


def _moved(conn: Connection, given: dict[str, Any], ours: _Move | None, theirs: _Move | None) -> tuple[bool, bool]:
    """Whether each row was changed. Both in one transaction, which is one flush of the disk; theirs only with ours."""
    if ours is None:
        return False, False
    if theirs is None:
        move = f"with fence as ({FENCE}) {ours.update} from fence where {ours.where}"
        return conn.execute(move, given | ours.given).rowcount == 1, False
    both = f"""
    with fence as ({FENCE}),
         ours as ({ours.update} from fence where {ours.where} returning 1),
         theirs as ({theirs.update} from ours where {theirs.where} returning 1)
    select (select count(*) from ours), (select count(*) from theirs)
    """
    row = conn.execute(both, given | ours.given | theirs.given).fetchone()
    return row is not None and row[0] == 1, row is not None and row[1] == 1


class MemoryRows(Generic[R]):
    """In this process, for tests and simulations; fenced when `leases` are given."""

    def __init__(self, leases: MemoryLeases | None = None) -> None:
        self._leases = leases
        self._rows: dict[tuple[str, int], R] = {}
        self._lock = threading.Lock()

    def load(self, source: str) -> dict[int, R]:
        with self._lock:
            return {partition: row for (name, partition), row in sorted(self._rows.items()) if name == source}

    def load_all(self) -> dict[tuple[str, int], R]:
        with self._lock:
            return dict(sorted(self._rows.items()))

    def save(self, source: str, partition: int, row: R, require: Rule[R], also: AlsoSaved[Any] | None = None) -> bool:
        """One row at a time: so simulations meet a crash between the two."""
        with self._lock:
            if self._leases is not None:
                self._leases.fence(source_lease(source), row.epoch, source_lease(source, partition))
            require(self._rows.get((source, partition)))
            self._rows[source, partition] = row
        return False

    def delete(self, source: str, partition: int) -> None:
        with self._lock:
            self._rows.pop((source, partition), None)
