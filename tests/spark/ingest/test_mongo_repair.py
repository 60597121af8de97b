"""Documents of a real MongoDB compared with the log: after a gap the log implies exactly the documents there are."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bson.raw_bson import RawBSONDocument

from evermark import Log
from evermark.event import TAKEN
from evermark.ingest.repair.steps import RepairTarget, batches_of
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.secrets import Plain
from evermark.sources.base import Limit, Slice, Whereabouts
from evermark.sources.mongo.events import partition_for
from evermark.sources.mongo.source import MongoChanges
from evermark.sources.mongo.target import MongoTarget
from evermark.spark.repair import found_missing
from evermark.testing.mongods import MongoReplicaSet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2
COLLECTIONS = ("orders", "users")


class Taken:
    """The log of a database, taken batch by batch; or not taken, for a gap. `reaches_back`: the oplog does, to where a
    partition stands."""

    reaches_back = True

    def __init__(self, source: MongoChanges, root: Path) -> None:
        self.source, self.folder = source, root / "shop"
        self.at = {p: source.earliest(p) for p in source.partitions()}
        self.batches = dict.fromkeys(self.at, 0)
        self.log = DeltaLog(self.folder)

    def take(self) -> None:
        for partition, start in self.at.items():
            end = self.source.latest({partition: start}, Limit(wait_s=0.5))[partition]
            rows = self.source.read(Slice(partition, start, end)) if end != start else iter(())
            batch = self.batches[partition] + 1
            file = BatchWriter(self.folder, "shop", partition, batch).write_all(rows)
            if file is not None:
                self.append(Append(partition, batch, 1, start, end, (file,)))
            self.at[partition] = end

    def append(self, append: Append) -> None:
        self.log.commit(append)
        if append.files:
            self.batches[append.partition] = append.batch

    def repair(self, spark: SparkSession, *partitions: int) -> list[dict[str, Any]]:
        """Close the gap in these partitions, or in every one; the rows that were added."""
        added = []
        for partition, start in self.at.items():
            if partitions and partition not in partitions:
                continue
            known = Whereabouts(dict(self.at) if self.reaches_back else {})
            gap = self.source.repair(partition).begin(lambda: False, None, lambda known=known: known)
            wanted = RepairTarget("shop", partition, self.batches[partition], 1, start)
            found = found_missing(spark, gap, LogReader(self.folder).files(), wanted, self.folder)
            for taken in batches_of(found, gap, wanted):
                for file in taken.files:
                    added += pq.read_table(self.folder / file.path).to_pylist()
                if taken.files:
                    self.append(taken)
            self.at[partition] = gap.position
        return added


def change(db: Any, rng: random.Random) -> None:
    """Some inserts, updates, replacements and deletes; now and then a collection goes."""
    for _ in range(40):
        orders, key = db[rng.choice(COLLECTIONS)], rng.choice([rng.randrange(12), f"k{rng.randrange(8)}"])
        match rng.randrange(5):
            case 0 | 1:
                orders.update_one({"_id": key}, {"$set": {"n": rng.random(), "s": "ü'\n"}}, upsert=True)
            case 2:
                orders.replace_one({"_id": key}, {"r": [rng.randrange(2**62), None]}, upsert=True)
            case 3:
                orders.delete_one({"_id": key})
            case _ if rng.random() < 0.1:
                orders.drop()


@pytest.mark.parametrize("reaches_back", [True, False])
def test_a_gap_is_closed_exactly_with_deletes_and_dropped_collections(
    spark: SparkSession, mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, *, reaches_back: bool
) -> None:
    """GIVEN random changes, some of them never read WHEN documents and log are compared THEN they are equal, and a
    second look finds nothing more."""
    seed = random.randrange(1_000_000)
    rng = random.Random(seed)
    source = MongoChanges(MongoTarget(Plain(mongo_server.url), mongo_database, partitions=PARTITIONS, after="lookup"))
    with mongo_server.client() as client:
        db = client[mongo_database]
        taken = Taken(source, tmp_path)
        taken.reaches_back = reaches_back
        db["users"].insert_many([{"_id": f"k{number}"} for number in range(8)])
        change(db, rng)
        taken.take()
        change(db, rng)  # nobody reads these
        db["users"].drop()
        added = taken.repair(spark)
        ends = [row for row in added if row["op"] == "truncate"]
        assert {row["op"] for row in added if row not in ends} <= {"insert", "update", "delete"}, f"seed {seed}"
        assert all(row["flags"] == ["dropped" if row in ends else "repaired"] for row in added)
        assert bool(ends) == reaches_back, f"seed {seed}"
        assert implied(spark, tmp_path, mongo_database) == there(db), f"seed {seed}"
        assert taken.repair(spark) == [], f"seed {seed}"
        change(db, rng)
        taken.take()
        assert implied(spark, tmp_path, mongo_database) == there(db), f"seed {seed}"
    source.close()


@pytest.mark.parametrize("goes", ["dropped", "renamed"])
def test_a_collection_that_goes_between_the_repairs_of_two_partitions_goes_in_both(
    spark: SparkSession, mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, goes: str
) -> None:
    """GIVEN a gap in two partitions WHEN a collection goes after one was repaired and read on, and the other one, which
    tells that, is repaired behind it THEN it is told, once, and the log implies the documents there are."""
    target = MongoTarget(Plain(mongo_server.url), mongo_database, partitions=PARTITIONS)
    teller = partition_for(f"{mongo_database}.orders", None, PARTITIONS)
    with mongo_server.client() as client, closing(MongoChanges(target)) as source:
        orders = client[mongo_database]["orders"]
        taken = Taken(source, tmp_path)
        orders.insert_many([{"_id": number, "n": 0} for number in range(10)])
        taken.take()
        start = taken.at[teller]
        orders.update_many({"_id": {"$lt": 4}}, {"$inc": {"n": 1}})  # nobody reads these
        taken.repair(spark, 1 - teller)
        if goes == "dropped":
            orders.drop()
        else:
            orders.rename("sales")
        orders.insert_many([{"_id": number, "n": 2} for number in range(8, 14)])
        added = taken.repair(spark, teller)
        taken.take()
        assert implied(spark, tmp_path, mongo_database) == there(client[mongo_database])
        (told,) = [row for row in added if row["op"] == "truncate" and row["stream"].endswith(".orders")]
        assert told["flags"] == [goes] and start <= told["position"] < taken.at[teller]
        written = {str(number) for number in range(8, 14)}
        of_teller = {key for key in written if partition_for(f"{mongo_database}.orders", key, PARTITIONS) == teller}
        inserted = [row["key"] for row in added if row["stream"].endswith(".orders") and row["op"] == "insert"]
        assert sorted(inserted) == sorted(of_teller)
        ends = source.latest({teller: start}, Limit(wait_s=0.5))
        read = pa.Table.from_batches(source.read(Slice(teller, start, ends[teller])), TAKEN).to_pylist()
        assert told["event_id"] in {row["event_id"] for row in read}, "as reading would have told it"
        # What a renamed collection holds is in no event, until it is compared.
        assert not [row for row in taken.repair(spark) if row["stream"].endswith(".orders")]


@pytest.mark.parametrize("goes", ["dropped", "replaced"])
def test_documents_that_are_as_they_were_stay_when_another_partition_tells_the_end_of_their_collection_later(
    spark: SparkSession, mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, goes: str
) -> None:
    """GIVEN a collection that went, and came again with the same documents WHEN a partition is repaired by comparing,
    and the one that tells the end reads it only then THEN the log implies the documents there are."""
    target = MongoTarget(Plain(mongo_server.url), mongo_database, partitions=PARTITIONS)
    stream = f"{mongo_database}.orders"
    teller = partition_for(stream, None, PARTITIONS)
    with mongo_server.client() as client, closing(MongoChanges(target)) as source:
        orders, users = client[mongo_database]["orders"], client[mongo_database]["users"]
        taken = Taken(source, tmp_path)
        orders.insert_many([{"_id": number} for number in range(30)])
        users.insert_many([{"_id": number} for number in range(30)])
        taken.take()
        if goes == "dropped":
            orders.drop()
            orders.insert_many([{"_id": number} for number in range(20)])
        else:
            orders.aggregate([{"$match": {"_id": {"$lt": 20}}}, {"$out": "orders"}])
        added = [row for row in taken.repair(spark, 1 - teller) if ".tmp." not in row["stream"]]  # `$out` makes one
        told = [(row["stream"], row["op"], row["key"]) for row in added]
        mine = [str(number) for number in range(30) if partition_for(stream, str(number), PARTITIONS) != teller]
        assert sorted(told) == sorted((stream, "update" if int(key) < 20 else "delete", key) for key in mine)
        if goes == "dropped":
            taken.take()
        else:
            taken.repair(spark, teller)  # what the new collection holds is in no event
        assert implied(spark, tmp_path, mongo_database) == there(client[mongo_database])
        assert taken.repair(spark) == [], "every end is told by now"


def implied(spark: SparkSession, root: Path, database: str) -> dict[str, dict[str, Any]]:
    return {
        name: {
            row["key"]: json.loads(row["payload"])
            for row in Log(root).table(spark, "shop", f"{database}.{name}").select("key", "payload").collect()
        }
        for name in COLLECTIONS
    }


def there(db: Any) -> dict[str, dict[str, Any]]:
    return {name: {str(each["_id"]): _plain(each) for each in db[name].find()} for name in COLLECTIONS}


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: numbers beyond 2**53 are texts."""

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [shown(each) for each in value]
        return {"$numberLong": str(value)} if isinstance(value, int) and value >= 2**53 else value

    return {name: shown(value) for name, value in document.items()}


def test_collections_that_are_not_chosen_any_more_are_left_alone(
    spark: SparkSession, mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path
) -> None:
    """GIVEN a collection taken out of the file WHEN a gap is closed THEN its documents are not told as deleted; those
    of a dropped collection that is still chosen are.
    """

    def source(*collections: str) -> MongoChanges:
        named = tuple(f"{mongo_database}.{name}" for name in collections)
        return MongoChanges(MongoTarget(Plain(mongo_server.url), mongo_database, collections=named))

    with mongo_server.client() as client:
        database = client[mongo_database]
        taken = Taken(source(), tmp_path)
        for name in ("orders", "users", "gone"):
            database[name].insert_many([{"_id": number} for number in range(3)])
        taken.take()
        database["orders"].delete_one({"_id": 0})
        database["gone"].drop()
        taken.source = source("orders", "gone")
        added = taken.repair(spark)
    told = sorted((row["stream"].split(".")[1], row["op"], row["key"]) for row in added)
    assert told == [*(("gone", "delete", key) for key in "012"), ("orders", "delete", "0")]


def test_a_document_that_cannot_be_decoded_is_told_as_poison_with_its_bytes(
    spark: SparkSession, mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path
) -> None:
    """GIVEN a document with bytes that are no text, changed in a gap WHEN the gap is closed THEN it is logged raw, as
    poison; its table shows what could be read of it last, and nothing that it never held."""
    broken = bson.encode({"_id": 1, "s": "AAAA"}).replace(b"AAAA", b"\xff\xfe\xfd\xfc")
    source = MongoChanges(MongoTarget(Plain(mongo_server.url), mongo_database))
    with mongo_server.client() as client, closing(source):
        database = client[mongo_database]
        taken = Taken(source, tmp_path)
        database["orders"].insert_many([{"_id": 1, "s": "well"}, {"_id": 2}])
        taken.take()
        database["orders"].delete_many({})
        database.get_collection("orders").insert_one(RawBSONDocument(broken))
        added = taken.repair(spark)
        assert implied(spark, tmp_path, mongo_database)["orders"] == {"1": {"_id": 1, "s": "well"}}
        assert taken.repair(spark) == [], "the log says it already"
        changed = broken.replace(b"\xff", b"\xfa")
        database["orders"].delete_many({})
        database.get_collection("orders").insert_one(RawBSONDocument(changed))
        assert [row["bytes"] for row in taken.repair(spark)] == [changed]
        database["orders"].drop()
        taken.take()
        database.get_collection("orders").insert_one(RawBSONDocument(changed))
        assert [row["op"] for row in taken.repair(spark)] == ["poison"], "it came again after its collection went"
    assert [(row["op"], row["key"], row["flags"]) for row in added] == [
        ("delete", "2", ["repaired"]), ("poison", "1", ["repaired"])
    ]  # fmt: skip
    assert added[1]["bytes"] == broken and added[1]["before"] is None
    assert "cannot be decoded" in json.loads(added[1]["payload"])["reason"]
    assert implied(spark, tmp_path, mongo_database) == {"orders": {}, "users": {}}
