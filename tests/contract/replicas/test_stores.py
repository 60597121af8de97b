"""The contract of replica stores on SQLite and Postgres, and the two with each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from evermark.testing.contracts.replica_scene import Make
from evermark.testing.contracts.replicas import ReplicaStoreContract
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.replicas.replica_nodes import closed_at_the_end, postgres_node, sqlite_node


@pytest.fixture(scope="module")
def database(pg_server: PostgresServer) -> Iterator[str]:
    with fresh_database(pg_server) as dsn:
        yield dsn


class TestSqliteStore(ReplicaStoreContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Make]:
        numbers = itertools.count()
        with closed_at_the_end(lambda name: sqlite_node(name, tmp_path / f"{name}{next(numbers)}.db")) as made:
            yield made


class TestPostgresStore(ReplicaStoreContract):
    @pytest.fixture
    def make(self, database: str) -> Iterator[Make]:
        with closed_at_the_end(lambda name: postgres_node(name, database)) as made:
            yield made
