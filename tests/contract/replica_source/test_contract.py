"""The contract of sources over a replica on SQLite and one on Postgres, with the plan in a real Postgres."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

import evermark as em
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.replica_source.replica_source_scene import TABLE, SourceScene, source_scene


def _fill(scene: SourceScene) -> None:
    """Events of two origins, and of the first again: they do not stand in the order of their origins."""
    scene.insert("north", 1, 3)
    scene.insert("south", 100, 5)
    scene.meet()
    scene.write("north", "update orders set amount = 2 where id = 101", "delete from orders where id = 1")


@pytest.fixture(scope="module")
def on_sqlite(pg_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SourceScene]:
    with source_scene(tmp_path_factory.mktemp("sqlite"), pg_server) as scene:
        _fill(scene)
        yield scene


@pytest.fixture(scope="module")
def on_postgres(pg_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SourceScene]:
    with fresh_database(pg_server) as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(TABLE)
        with source_scene(tmp_path_factory.mktemp("postgres"), pg_server, dsn) as scene:
            _fill(scene)
            yield scene


class TestReplicaOnSqlite(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def planned_anew(self, on_sqlite: SourceScene) -> None:
        on_sqlite.forget_plan()
        self.source = on_sqlite.source()


class TestReplicaThatIsCopied(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def planned_anew(self, on_sqlite: SourceScene) -> None:
        on_sqlite.forget_plan()
        self.source = on_sqlite.source()
        self.source.target = replace(self.source.target, copies=True)


class TestReplicaOnPostgres(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def planned_anew(self, on_postgres: SourceScene) -> None:
        on_postgres.forget_plan()
        self.source = on_postgres.source()
