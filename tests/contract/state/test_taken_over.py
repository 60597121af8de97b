"""A State of a test may take over the schema of a test that is over: it is as one that was migrated just now."""

from __future__ import annotations

from datetime import UTC, datetime

from psycopg import sql

from evermark.state.connection import State
from evermark.state.identity import identity_of
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state

_TABLES = "select tablename from pg_tables where schemaname = %s order by 1"
_OID = "select oid from pg_namespace where nspname = %s"


def content(state: State) -> dict[str, list[str]]:
    with state.connection() as conn:
        tables = [row[0] for row in conn.execute(_TABLES, (state.schema,)).fetchall()]
        query = "select t::text from {} t order by 1"
        return {
            name: [row[0] for row in conn.execute(sql.SQL(query).format(sql.Identifier(name))).fetchall()]
            for name in tables
        }


def oid(state: State, schema: str) -> object:
    with state.connection() as conn:
        found = conn.execute(_OID, (schema,)).fetchone()
        return found and found[0]


def test_who_takes_over_finds_what_the_migrations_left_and_is_not_found_by_its_former_name(
    pg_server: PostgresServer,
) -> None:
    """GIVEN a State whose rows were changed, removed and added WHEN another takes over THEN nothing of that is left."""
    with fresh_state(pg_server.socket_dsn()) as first:
        before, former, place = content(first), first.schema, oid(first, first.schema)
        assert identity_of(first)
        with first.connection() as conn:
            conn.execute("delete from state_identity")
            conn.execute("update delivery_group set version = 7")
            conn.execute(
                "insert into instances (instance, host, boot, pid, started, version, leases, seen_at)"
                " values ('left over', 'h', 'b', 1, '1', '1', '{}', %s)",
                (datetime.now(UTC),),
            )
    with fresh_state(pg_server.socket_dsn()) as second:
        assert oid(second, second.schema) == place, "it has the schema of the first"
        assert content(second) == before
        assert second.schema != former and oid(second, former) is None


def test_a_schema_that_was_changed_is_not_taken_over(pg_server: PostgresServer) -> None:
    """GIVEN a State whose table was given a column WHEN another begins THEN it is migrated anew."""
    with fresh_state(pg_server.socket_dsn()) as first:
        place = oid(first, first.schema)
        with first.connection() as conn:
            conn.execute("alter table instances add column surprise int")
    with fresh_state(pg_server.socket_dsn()) as second:
        assert oid(second, second.schema) != place
