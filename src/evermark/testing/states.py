"""A State of the test's own in a real Postgres, and owners that take over from each other."""

from __future__ import annotations

import itertools
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from evermark.cluster.base import Holder, LeaseStore
from evermark.state.connection import State
from evermark.state.migrate import migrate

_LOCK_WAIT = "5s"
_BYTES_MAX = 4 * 2**20  # of a schema that is used again: dead rows of the test before it are in the way
_TABLES = "select tablename from pg_tables where schemaname = %s and tablename <> 'migrations'"
_SEQUENCES = """
select setval(format('%%I.%%I', schemaname, sequencename)::regclass, start_value, false)
from pg_sequences where schemaname = %s
"""
# What a test may have changed of a schema, beside its rows; and how large it is.
_FORM = """
select md5(string_agg(part::text, ' ' order by part::text)), sum(pg_relation_size(part.oid)) filter (where attnum = 1)
from (select c.oid, relname, relkind, relhastriggers, attname, attnum, atttypid, attnotnull, atthasdef
      from pg_class c join pg_attribute a on a.attrelid = c.oid where relnamespace = %s::regnamespace) part
"""


@contextmanager
def empty_state(dsn: str) -> Iterator[State]:
    """A State whose schema does not exist yet; it is dropped afterwards."""
    state = _state(dsn, _new_name())
    try:
        yield state
        with state.connection() as conn:
            conn.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(state.schema)))
    finally:
        state.close()


@contextmanager
def fresh_state(dsn: str) -> Iterator[State]:
    """A State that is ready to use."""
    state, used = _state(dsn, _new_name()), _ready[dsn].pop() if _ready[dsn] else None
    try:
        if used is None:
            migrate(state)
            with _direct(dsn) as conn:
                used = _Used.of(conn, state.schema)
        else:
            with _direct(dsn) as conn:
                used.call(conn, state.schema)
        yield state
    finally:
        state.close()
    with _direct(dsn) as conn:
        if used.is_as_before(conn):
            _ready[dsn].append(used)
        else:
            conn.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(used.schema)))


def _state(dsn: str, schema: str) -> State:
    return State(lambda: dsn, schema, statement_timeout_s=20, lock_timeout_s=10)


def _direct(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    return psycopg.connect(dsn, autocommit=True, options=f"-c lock_timeout={_LOCK_WAIT}")


def _new_name() -> str:
    return f"evermark_test_{secrets.token_hex(6)}"


@dataclass
class _Used:
    """The schema of a State. To give it its first rows again costs a tenth of what migrating another one does."""

    schema: str
    form: str
    rows: dict[str, bytes]  # by table, after the migrations

    @classmethod
    def of(cls, conn: psycopg.Connection[tuple[Any, ...]], schema: str) -> _Used:
        rows = {}
        for (table,) in conn.execute(_TABLES, (schema,)).fetchall():
            with conn.cursor().copy(_copy(schema, table, "to stdout")) as copy:
                rows[table] = b"".join(map(bytes, copy))
        return cls(schema, _form_and_size(conn, schema)[0], rows)

    def call(self, conn: psycopg.Connection[tuple[Any, ...]], name: str) -> None:
        """A thread that an earlier test has left behind does not find it under a new name."""
        conn.execute(sql.SQL("alter schema {} rename to {}").format(*map(sql.Identifier, (self.schema, name))))
        self.schema = name

    def is_as_before(self, conn: psycopg.Connection[tuple[Any, ...]]) -> bool:
        """Give it the rows that it had; False where more than rows was changed, or there were very many."""
        try:
            self.call(conn, _new_name())
            form, size = _form_and_size(conn, self.schema)
            if form != self.form or size > _BYTES_MAX:
                return False
            with conn.transaction():
                conn.execute("set local session_replication_role = replica")  # whatever order they refer in
                emptying = (sql.SQL("delete from {}").format(sql.Identifier(self.schema, name)) for name in self.rows)
                conn.execute(sql.SQL(";").join(emptying))
                for table, rows in self.rows.items():
                    if not rows:
                        continue
                    with conn.cursor().copy(_copy(self.schema, table, "from stdin")) as copy:
                        copy.write(rows)
                conn.execute(_SEQUENCES, (self.schema,))
        except (psycopg.errors.InvalidSchemaName, psycopg.errors.LockNotAvailable):
            return False
        return True


_ready: defaultdict[str, list[_Used]] = defaultdict(list)  # schemas that nobody uses, by the server


def _form_and_size(conn: psycopg.Connection[tuple[Any, ...]], schema: str) -> tuple[str, int]:
    found = conn.execute(_FORM, (schema,)).fetchone()
    assert found is not None
    return str(found[0]), int(found[1])


def _copy(schema: str, table: str, where: str) -> sql.Composed:
    return sql.SQL("copy {} {}").format(sql.Identifier(schema, table), sql.SQL(where))


def owners(leases: LeaseStore) -> Callable[[str], int]:
    """Each call gives the lease of that name to a new holder and returns its epoch.

    The leases must hold every former holder for gone: `is_gone=lambda holder: True`.
    """
    pids = itertools.count(1)

    def take_over(name: str) -> int:
        lease = leases.acquire(name, Holder("owner", "host", "boot", next(pids), "1"), 60.0)
        assert lease is not None, "give the leases `is_gone=lambda holder: True`"
        return lease.epoch

    return take_over
