"""The contract of sources over the change stream of a real MongoDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import evermark as em
from evermark.testing.mongods import MongoReplicaSet
from tests.contract.mongo.mongo_scene import IMAGES, source_of


@pytest.fixture
def filled(mongo_server: MongoReplicaSet, mongo_database: str) -> str:
    """Inserts, updates, deletes, transactions, a rename and a drop."""
    with mongo_server.client() as client:
        database = client[mongo_database]
        orders = database.create_collection("orders", **IMAGES)
        orders.insert_many([{"_id": number, "total": number} for number in range(7)])
        orders.update_one({"_id": 3}, {"$set": {"total": 30}})
        orders.replace_one({"_id": 4}, {"total": 40})
        orders.delete_one({"_id": 5})
        for first in (100, 200):
            with client.start_session() as session, session.start_transaction():
                for number in range(first, first + 6):
                    orders.insert_one({"_id": number}, session=session)
        orders.rename("sales")
        database["sales"].drop()
        database["sales"].insert_one({"_id": "again"})
    return mongo_database


class TestOnePartition(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def made(self, mongo_server: MongoReplicaSet, filled: str) -> Iterator[None]:
        with source_of(mongo_server, filled, after="stored", before="stored", oldest=True) as self.source:
            yield


class TestThreePartitions(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def made(self, mongo_server: MongoReplicaSet, filled: str) -> Iterator[None]:
        with source_of(mongo_server, filled, partitions=3, after="stored", oldest=True) as self.source:
            yield
