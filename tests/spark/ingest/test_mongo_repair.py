"""Documents of a real MongoDB compared with the log: after a gap the log implies exactly the documents there are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from evermark import Log
from evermark.ingest.repair.steps import RepairTarget, batches_of
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.secrets import Plain
from evermark.sources.base import Limit, Slice
from evermark.sources.mongo.source import MongoChanges
from evermark.sources.mongo.target import MongoTarget
from evermark.spark.repair import found_missing
from evermark.testing.mongods import MongoReplicaSet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2
COLLECTIONS = ("orders", "users")


class Taken:
    """The log of a database, taken batch by batch; or not taken, for a gap."""

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

    def repair(self, spark: SparkSession) -> list[dict[str, Any]]:
        """Close the gap in every partition; the rows that were added."""
        added = []
        for partition, start in self.at.items():
            gap = self.source.repair(partition).begin(lambda: False)
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


def test_a_gap_is_closed_exactly_with_deletes_and_dropped_collections(
    spark: SparkSession, mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path
) -> None:
    """GIVEN random changes, some of them never read WHEN documents and log are compared THEN they are equal, and a
    second look finds nothing more."""
    seed = random.randrange(1_000_000)
    rng = random.Random(seed)
    source = MongoChanges(MongoTarget(Plain(mongo_server.url), mongo_database, partitions=PARTITIONS, after="lookup"))
    with mongo_server.client() as client:
        db = client[mongo_database]
        taken = Taken(source, tmp_path)
        db["users"].insert_many([{"_id": f"k{number}"} for number in range(8)])
        change(db, rng)
        taken.take()
        change(db, rng)  # nobody reads these
        db["users"].drop()
        added = taken.repair(spark)
        assert {row["op"] for row in added} <= {"insert", "update", "delete"}, f"seed {seed}"
        assert all(row["flags"] == ["repaired"] for row in added)
        assert implied(spark, tmp_path, mongo_database) == there(db), f"seed {seed}"
        assert taken.repair(spark) == [], f"seed {seed}"
        change(db, rng)
        taken.take()
        assert implied(spark, tmp_path, mongo_database) == there(db), f"seed {seed}"
    source.close()


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
