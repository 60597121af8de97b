"""State: the one Postgres that holds the small mutable facts, as a bounded set of connections.

Every connection is in autocommit, in UTC, and sees only the schema of its deployment. When a connection breaks, all
that were opened before are thrown away, because the same cause has most likely cut them, too, and the server's word of
that may be late: idle connections at once, others when they come back. The next call connects anew. Nothing here
retries by itself, because only the caller knows whether its work may be repeated.
"""

from __future__ import annotations

import re
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from evermark.errors import BusyError, ConfigError, UnreachableError
from evermark.state.driver_errors import from_driver

Connection = psycopg.Connection[tuple[Any, ...]]

SCHEMA_PREFIX = "evermark_"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_IDENTIFIER_MAX = 63  # Postgres cuts longer names without an error worth the name

_SETTINGS = """
select set_config('search_path', %(schema)s, false),
       set_config('statement_timeout', %(statement_ms)s, false),
       set_config('lock_timeout', %(lock_ms)s, false),
       set_config('idle_in_transaction_session_timeout', %(idle_ms)s, false),
       set_config('timezone', 'UTC', false),
       set_config('default_transaction_isolation', 'read committed', false),
       case current_setting('synchronous_commit')
            when 'off' then set_config('synchronous_commit', 'on', false) end
"""


def schema_for(deployment: str) -> str:
    """The schema of a deployment. Dashes become underscores, so underscores become dollars: no two names collide."""
    schema = SCHEMA_PREFIX + deployment.replace("_", "$").replace("-", "_")
    if not _NAME.fullmatch(deployment) or len(schema) > _IDENTIFIER_MAX:
        raise ConfigError(
            f"name: {deployment[:80]!r} cannot name a deployment",
            hint=f"use up to {_IDENTIFIER_MAX - len(SCHEMA_PREFIX)} lower-case letters, digits, dashes and underscores",
        )
    return schema


class State:
    """Connections to the state database. Safe to use from several threads.

    `open_dsn` is called for each new connection, so that a secret is read when it is needed and kept nowhere.
    A thread must not ask for a second connection while it holds one: `connections_max` threads doing so would
    wait for each other until the timeout. A transaction whose process sleeps, or is cut off, holds its locks for
    `idle_timeout_s`: others wait for them no longer than that.
    """

    def __init__(
        self,
        open_dsn: Callable[[], str],
        schema: str,
        *,
        connections_max: int = 8,
        connect_timeout_s: float = 10.0,
        statement_timeout_s: float = 30.0,
        lock_timeout_s: float = 15.0,
        idle_timeout_s: float = 5.0,
    ) -> None:
        self.schema = schema
        self._open_dsn = open_dsn
        self._connect_timeout_s = connect_timeout_s
        self._statement_ms = int(statement_timeout_s * 1000)
        self._lock_ms = int(lock_timeout_s * 1000)
        self._idle_ms = int(idle_timeout_s * 1000)
        self._wait_s = statement_timeout_s
        self._idle: list[Connection] = []
        self._breaks = 0  # how often connections were found broken: connections opened before that are not kept
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(connections_max)
        self._closed = False

    def __repr__(self) -> str:
        return f"State(schema={self.schema!r})"

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection in autocommit: each statement is its own transaction."""
        if not self._free.acquire(timeout=self._wait_s):
            raise BusyError(
                f"state: no connection became free within {self._wait_s:g} s",
                hint="the state database is slow, or too much works on it at once",
            )
        try:
            conn, breaks = self._take()
            try:
                yield conn
            except psycopg.Error as error:
                if conn.closed or conn.broken:
                    self._drop_idle()
                raise from_driver(error, "state") from error
            finally:
                self._give_back(conn, breaks)
        finally:
            self._free.release()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One transaction: committed at the end of the block, rolled back when it raises."""
        with self.connection() as conn, conn.transaction():
            yield conn

    def close(self) -> None:
        """Close the idle connections; connections in use are closed when they come back."""
        self._closed = True
        self._drop_idle()

    def rest(self) -> None:
        """Close the idle connections; the next one who needs one opens it."""
        self._drop_idle()

    def _take(self) -> tuple[Connection, int]:
        """A connection, and how often connections had broken when it was taken."""
        if self._closed:  # who works on after that has been given up, and must not keep its leases
            raise UnreachableError("state: it was closed here", hint="the work was given up; another goes on with it")
        while True:
            with self._lock:
                breaks = self._breaks
                if not self._idle:
                    break
                conn = self._idle.pop()
            if _is_quiet(conn):
                return conn, breaks
            conn.close()
        return self._connect(), breaks

    def _give_back(self, conn: Connection, breaks: int) -> None:
        idle = conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
        with self._lock:
            keep = idle and not conn.closed and not self._closed and breaks == self._breaks
            if keep:
                self._idle.append(conn)
        if not keep:
            conn.close()

    def _drop_idle(self) -> None:
        with self._lock:
            self._breaks += 1
            dropped, self._idle = self._idle, []
        for conn in dropped:
            conn.close()

    def _connect(self) -> Connection:
        times = {"statement_ms": self._statement_ms, "lock_ms": self._lock_ms, "idle_ms": self._idle_ms}
        settings = {"schema": self.schema} | {name: str(ms) for name, ms in times.items()}
        conninfo, conn = self._conninfo(), None
        try:
            conn = psycopg.connect(conninfo, autocommit=True)
            conn.execute(_SETTINGS, settings)
        except psycopg.Error as error:
            if conn is not None:
                conn.close()
            raise from_driver(error, "state") from error
        return conn

    def _conninfo(self) -> str:
        try:
            given = conninfo_to_dict(self._open_dsn())
        except psycopg.Error:
            # The driver's message quotes the piece it could not read, which may be the password.
            raise ConfigError(
                "state.dsn is not a Postgres connection string",
                hint="use postgresql://user:password@host:5432/database",
            ) from None
        defaults: dict[str, Any] = {
            "connect_timeout": max(2, round(self._connect_timeout_s)),
            "application_name": self.schema,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            "tcp_user_timeout": self._statement_ms,
            "client_encoding": "UTF8",
        }
        return make_conninfo("", **(defaults | given))


def _is_quiet(conn: Connection) -> bool:
    """Whether an idle connection is still good: a server that hung up has left something to read."""
    if conn.closed:
        return False
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN)
    return not poll.poll(0)
