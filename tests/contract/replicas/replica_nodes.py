"""Nodes on SQLite files and Postgres databases, with the table of the contract."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from evermark.replicas.postgres import PostgresStore
from evermark.replicas.sqlite import SqliteStore
from evermark.testing.contracts.replica_scene import Make, ReplicaNode

COLUMNS = "(id bigint primary key, what text, amount double precision, ok boolean, raw {bytes})"


def sqlite_node(name: str, path: Path) -> ReplicaNode:
    with sqlite3.connect(path) as connection:
        connection.execute(f"create table orders {COLUMNS.format(bytes='blob')}")
    store = SqliteStore(path)
    store.connection.execute("pragma synchronous = off")  # no power cut here, and many small transactions

    def execute(sql: str, *params: Any) -> list[tuple[Any, ...]]:
        if sql == "begin":
            for each in (sql, *params):
                store.connection.execute(each)
            return []
        return store.connection.execute(sql, params).fetchall()

    return ReplicaNode(name, store, execute)


def postgres_node(name: str, dsn: str) -> ReplicaNode:
    """In a schema of its own: a database for each would take longer than most tests."""
    schema = f"{name}_{secrets.token_hex(4)}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"create schema {schema}")
        connection.execute(f"create table {schema}.orders {COLUMNS.format(bytes='bytea')}")
    store = PostgresStore(dsn, schema=schema)
    store.connection.execute("set synchronous_commit = off")

    def execute(sql: str, *params: Any) -> list[tuple[Any, ...]]:
        if sql == "begin":
            for each in (sql, *params):
                store.connection.execute(each)
            return []
        cursor = store.connection.execute(sql.replace("%", "%%").replace("?", "%s"), params)
        return cursor.fetchall() if cursor.description else []

    return ReplicaNode(name, store, execute)


@contextmanager
def closed_at_the_end(make: Make) -> Iterator[Make]:
    """`make`, whose nodes are closed when the test is over."""
    with ExitStack() as stack:

        def made(name: str) -> ReplicaNode:
            node = make(name)
            stack.callback(node.close)
            return node

        yield made
