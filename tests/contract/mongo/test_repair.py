"""The documents that a gap is closed with: all of them, as they were at one time."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from evermark.errors import IdentityError
from evermark.event import TAKEN
from evermark.sources.base import Whereabouts
from evermark.sources.mongo.positions import Position
from evermark.testing.mongods import MongoReplicaSet
from tests.contract.mongo.mongo_scene import Row, read_all, source_of, told


def test_a_gap_shows_every_document_at_one_time_and_reading_goes_on_behind_it(
    mongo_server: MongoReplicaSet, mongo_database: str
) -> None:
    """GIVEN two collections in two partitions WHEN documents change after the look THEN the stream tells it, once."""
    with source_of(mongo_server, mongo_database, partitions=2) as source, mongo_server.client() as client:
        database = client[mongo_database]
        database["orders"].insert_many([{"_id": number, "n": 0} for number in range(20)])
        database["users"].insert_one({"_id": "ann"})
        found: list[Row] = []
        later: list[Row] = []
        for partition in source.partitions():
            gap = pickle.loads(pickle.dumps(source.repair(partition).begin(lambda: False)))
            assert gap.is_state
            database["orders"].update_many({}, {"$inc": {"n": 1}})
            database["users"].delete_many({})
            rows = [row for piece in gap.pieces for row in pa.Table.from_batches(gap.read(piece), TAKEN).to_pylist()]
            found += rows
            assert gap.positions(0, 2).to_pylist() < [gap.position] * 2
            later += read_all(source, partition, gap.position)[0]
            database["orders"].update_many({}, {"$set": {"n": 0}})
            database["users"].insert_one({"_id": "ann"})
    assert sorted(map(told, found)) == sorted(
        [*(("read", str(number), {"_id": number, "n": 0}) for number in range(20)), ("read", "ann", {"_id": "ann"})]
    )
    assert [row["op"] for row in later].count("update") == 20
    assert [row["op"] for row in later].count("delete") == 1


def test_the_end_of_a_collection_is_told_by_one_partition_and_known_to_all(
    mongo_server: MongoReplicaSet, mongo_database: str
) -> None:
    """GIVEN partitions that stand before a rename, the last write WHEN each is repaired THEN each truncate is told by
    the partition that reading would tell it in, the other one tells the documents anew, and all stands behind it."""
    with source_of(mongo_server, mongo_database, partitions=2) as source, mongo_server.client() as client:
        stands = {partition: source.earliest(partition) for partition in source.partitions()}
        client[mongo_database]["orders"].insert_one({"_id": 1})
        client[mongo_database]["orders"].rename("sales")
        gaps = [source.repair(p).begin(lambda: False, None, lambda: Whereabouts(stands)) for p in stands]
        for partition, gap in enumerate(gaps):
            ends = [row for row in read_all(source, partition, stands[partition])[0] if row["op"] == "truncate"]
            assert [row["event_id"] for row in gap.truncates.to_pylist()] == [row["event_id"] for row in ends]
            assert gaps[1 - partition].told_anew == sorted(row["stream"] for row in ends)
            assert all(row["position"] < each.positions(0, 1)[0].as_py() for row in ends for each in gaps)
            assert all(each.position > row["position"] for row in ends for each in gaps)


def test_a_deployment_that_was_restored_is_not_compared_unasked(
    mongo_server: MongoReplicaSet, mongo_database: str
) -> None:
    """GIVEN a place ahead of the deployment WHEN it is to be repaired by itself THEN a person is asked."""
    with source_of(mongo_server, mongo_database) as source:
        ahead = Position(Position.parse(source.earliest(0)).time + (3600 << 32)).text(1)
        with pytest.raises(IdentityError):
            source.repair(0).begin(lambda: False, ahead)
        source.repair(0).begin(lambda: False)
