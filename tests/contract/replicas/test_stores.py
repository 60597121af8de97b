"""The contract of replica stores on SQLite and Postgres, and the two with each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from evermark.testing.contracts.replica_scene import Make, ReplicaNode
from evermark.testing.contracts.replicas import ReplicaStoreContract
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.replicas.replica_nodes import postgres_node, sqlite_node


@pytest.fixture(scope="module")
def database(pg_server: PostgresServer) -> Iterator[str]:
    with fresh_database(pg_server) as dsn:
        yield dsn


class TestSqliteStore(ReplicaStoreContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Make]:
        numbers = itertools.count()
        with ExitStack() as stack:

            def made(name: str) -> ReplicaNode:
                node = sqlite_node(name, tmp_path / f"{name}{next(numbers)}.db")
                stack.callback(node.close)
                return node

            yield made


class TestPostgresStore(ReplicaStoreContract):
    @pytest.fixture
    def make(self, database: str) -> Iterator[Make]:
        with ExitStack() as stack:

            def made(name: str) -> ReplicaNode:
                node = postgres_node(name, database)
                stack.callback(node.close)
                return node

            yield made
