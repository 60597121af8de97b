"""Rows of a COPY, taken from libpq's buffer: all of them, or an error, and a connection that can be used after it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

from evermark.sources.postgres.read.copy_out import copied_rows
from evermark.testing.servers import PostgresServer, fresh_database


def _query(select: str) -> sql.Composed:
    return sql.SQL("copy ({}) to stdout").format(sql.SQL(select))  # type: ignore[arg-type]


def _all(connection: psycopg.Connection[Any], select: str) -> list[bytes]:
    return [bytes(row) for rows in copied_rows(connection, _query(select)) for row in rows]


@pytest.mark.parametrize("rows", [0, 1, 100_000])
def test_every_row_comes_once_and_in_order(pg_server: PostgresServer, rows: int) -> None:
    """GIVEN a query WHEN it is copied THEN each row is one message; in a transaction, too."""
    with fresh_database(pg_server) as dsn, psycopg.connect(dsn) as connection:
        wanted = [f"{n}\n".encode() for n in range(1, rows + 1)]
        assert _all(connection, f"select n from generate_series(1, {rows}) n") == wanted
        large = _all(connection, "select repeat('x', 3000000) from generate_series(1, 3)")
        assert [len(row) for row in large] == [3_000_001] * 3
        assert connection.execute("select 1").fetchone() == (1,)


def test_an_error_of_the_server_is_raised_wherever_it_comes(pg_server: PostgresServer) -> None:
    """GIVEN a query that fails at its first, a middle or its last row WHEN it is copied THEN its error is raised."""
    with fresh_database(pg_server) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        for last in (1, 500, 100_000):
            with pytest.raises(psycopg.errors.DivisionByZero):
                _all(connection, f"select 1 / ({last} - n) from generate_series(1, {last}) n")
            assert connection.execute("select 1").fetchone() == (1,)


def test_what_is_left_early_is_cancelled(pg_server: PostgresServer) -> None:
    """GIVEN a COPY without an end WHEN its reader leaves, or fails, THEN the connection is free again."""
    with fresh_database(pg_server) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        endless = _query("select generate_series(1, 1000000000)")
        rows = copied_rows(connection, endless)
        next(rows)
        rows.close()  # type: ignore[attr-defined]
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_connection_that_breaks_is_an_error_not_an_end(pg_server: PostgresServer) -> None:
    """GIVEN a COPY WHEN its backend is ended in the middle THEN that is raised: rows are never silently fewer."""
    with fresh_database(pg_server) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        rows = copied_rows(connection, _query("select generate_series(1, 1000000000)"))
        next(rows)
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("select pg_terminate_backend(%s)", (connection.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            for _ in rows:
                pass
