"""Who writes to a SQLite file waits for a node as little as can be: a transaction of the node's stops all others."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from evermark.testing.contracts.replica_scene import ReplicaNode
from tests.contract.replicas.replica_nodes import sqlite_node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ReplicaNode]:
    with closing(sqlite_node("a", tmp_path / "a.db")) as made:
        made.install()
        made.store.join({})
        yield made


def test_r9_a_turn_of_collection_that_finds_nothing_waits_for_no_writer(node: ReplicaNode, tmp_path: Path) -> None:
    """GIVEN a deleted row whose tombstone must stay, and a transaction that somebody has open WHEN it is looked for
    what can be collected THEN that ends at once; and when the tombstone may go it goes."""
    node.put(1, "one")
    node.sql("delete from orders where id = 1")
    ends, reading = {node.store.identity()[0]: 2}, node.store.clocks()["orders"]
    assert node.store.collect("orders", ends, 0, node.now_ms() + 1000, 10).events == 2
    node.sql("pragma busy_timeout = 100")
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("begin immediate")
        assert node.store.collect("orders", {}, reading - 1, 0, 10).tombstones == 0
        other.execute("rollback")
    assert node.store.collect("orders", {}, reading, 0, 10).tombstones == 1
