"""Rows that only the owner of a source changes, one for each of its partitions: in State, or in memory.

A save is fenced by the lease of the source, with the row's own epoch, and judged by a rule of the caller's, which is
given the stored row, or None, and raises to refuse. It returns once the row is durable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
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

_MINE = "source = %(source)s and partition = %(partition)s"


class OwnedRows(Protocol[R]):
    def load(self, source: str) -> dict[int, R]: ...

    def save(self, source: str, partition: int, row: R, require: Rule[R]) -> None: ...

    def delete(self, source: str, partition: int) -> None: ...


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
        self._values = ", ".join(f"%({name})s" for name in names)
        self._update = f"update {table} set ({self._columns}, updated_at) = row ({self._values}, clock_timestamp())"
        self._unchanged = " and ".join(f"{name} = %(old_{name})s" for name in names)

    def load(self, source: str) -> dict[int, R]:
        listed = f"select partition, {self._columns} from {self._table} where source = %s order by partition"
        with self._state.connection() as conn:
            return {partition: self._kind(*rest) for partition, *rest in conn.execute(listed, (source,))}

    def save(self, source: str, partition: int, row: R, require: Rule[R]) -> None:
        fenced = {"lease": source_lease(source), "lease_epoch": row.epoch}
        given = {"source": source, "partition": partition, **fenced, **vars(row)}
        last = self._last.get((source, partition))
        with self._state.connection() as conn:
            if last is None or not self._move(conn, given, last, require):
                with conn.transaction():
                    self._save_locked(conn, given, require)
        self._last[source, partition] = row

    def delete(self, source: str, partition: int) -> None:
        with self._state.connection() as conn:
            conn.execute(f"delete from {self._table} where source = %s and partition = %s", (source, partition))

    def _move(self, conn: Connection, given: dict[str, Any], last: R, require: Rule[R]) -> bool:
        try:
            require(last)
        except (StaleError, ConflictError):
            return False  # our last save may be out of date; the locked row decides
        given = given | {f"old_{name}": value for name, value in vars(last).items()}
        move = f"with fence as ({FENCE}) {self._update} from fence where {_MINE} and {self._unchanged}"
        return conn.execute(move, given).rowcount == 1

    def _save_locked(self, conn: Connection, given: dict[str, Any], require: Rule[R]) -> None:
        fence(conn, given["lease"], given["lease_epoch"])
        row = conn.execute(f"select {self._columns} from {self._table} where {_MINE} for update", given).fetchone()
        require(self._kind(*row) if row else None)
        if row:
            conn.execute(f"{self._update} where {_MINE}", given)
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


class MemoryRows(Generic[R]):
    """In this process, for tests and simulations; fenced when `leases` are given."""

    def __init__(self, leases: MemoryLeases | None = None) -> None:
        self._leases = leases
        self._rows: dict[tuple[str, int], R] = {}
        self._lock = threading.Lock()

    def load(self, source: str) -> dict[int, R]:
        with self._lock:
            return {partition: row for (name, partition), row in sorted(self._rows.items()) if name == source}

    def save(self, source: str, partition: int, row: R, require: Rule[R]) -> None:
        with self._lock:
            if self._leases is not None:
                self._leases.fence(source_lease(source), row.epoch)
            require(self._rows.get((source, partition)))
            self._rows[source, partition] = row

    def delete(self, source: str, partition: int) -> None:
        with self._lock:
            self._rows.pop((source, partition), None)
