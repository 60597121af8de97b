"""A shop whose orders are documents of a MongoDB replica set, and the deployment that reads them."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pymongo
from bson import Timestamp

from evermark.log.read import LogReader
from evermark.sources.mongo.events import event_id
from evermark.sources.mongo.values import key_text
from evermark.testing.listener import Failing, Record
from evermark.testing.mongods import MongoReplicaSet
from evermark.testing.pipeline import Stage

_DATABASE = "shop"
_COLUMNS = ["partition", "batch", "position", "key", "op", "payload"]
_IMAGES: dict[str, Any] = {"changeStreamPreAndPostImages": {"enabled": True}}


class MongoScene(Stage):
    """`of_key` has, by receiver and key, the numbers that the order had when it changed, as they arrived."""

    source = "shop"

    def __init__(
        self,
        folder: Path,
        servers: MongoReplicaSet,
        receivers: Mapping[str, Failing | None],
        partitions: int = 1,
        **options: str,
    ) -> None:
        self.of_key: dict[str, dict[str, list[int]]] = {name: {} for name in receivers}
        super().__init__(folder, receivers, **options)
        self.servers, self._partitions = servers, partitions
        self.env["SHOP_URL"] = servers.url
        self.began = Timestamp(0, 1)

    def settings(self) -> str:
        return (
            f'{{type: mongo, url: "${{SHOP_URL}}", database: {_DATABASE}, partitions: {self._partitions},'
            " full_documents: stored, start: oldest}"
        )

    def prepare(self) -> None:
        with self.servers.client() as client:
            self.began = client.admin.command("hello")["operationTime"]
            client[_DATABASE].create_collection("orders", **_IMAGES)

    def committed(self) -> list[str]:
        """Ids of all changes, as a stream of the driver's own gives them from the first on."""
        found = []
        with (
            self.servers.client() as client,
            client[_DATABASE].watch(start_at_operation_time=self.began, max_await_time_ms=1000) as stream,
        ):
            while (change := stream.try_next()) is not None:
                time = change["clusterTime"]
                found.append(event_id(time.time << 32 | time.inc, change["_id"]["_data"]))
        return found

    def _recorder(self, name: str) -> Callable[[Record], None]:
        note = super()._recorder(name)

        def record(record: Record) -> None:
            note(record)
            data = record.event.data
            if not record.duplicate and record.event.key is not None and isinstance(data, dict) and "n" in data:
                self.of_key[name].setdefault(record.event.key, []).append(data["n"])

        return record

    def documents(self) -> dict[str, Any]:
        """The orders as the deployment has them, by key."""
        with self.servers.client() as client:
            return {key_text(each["_id"]): each for each in client[_DATABASE]["orders"].find()}

    def implied(self) -> dict[str, Any]:
        """The orders as the log has them: its events, one after the other."""
        files = LogReader(self.folder / "data" / "log" / self.source).files()
        rows = [row for file in files for row in pq.read_table(file.path, columns=_COLUMNS).to_pylist()]
        found: dict[str, Any] = {}
        for row in sorted(rows, key=lambda row: (row["partition"], row["batch"], row["position"])):
            found.pop(row["key"], None)
            if row["op"] in {"insert", "update", "read"}:
                found[row["key"]] = json.loads(row["payload"])
        return found

    def check_order(self) -> None:
        """Every receiver saw the changes of an order one by one, in their order."""
        for name, keys in self.of_key.items():
            for key, numbers in keys.items():
                assert numbers == list(range(len(numbers))), f"{name}: order {key} came as {numbers[:50]}"


class CopiedMongoScene(MongoScene):
    """Orders that were there before the deployment which copies them."""

    orders = 60_000

    def settings(self) -> str:
        return (
            f'{{type: mongo, url: "${{SHOP_URL}}", database: {_DATABASE}, partitions: {self._partitions},'
            " full_documents: changes, collections: [orders], start: copy}"
        )

    def prepare(self) -> None:
        with self.servers.client() as client:
            orders = client[_DATABASE]["orders"]
            orders.insert_many([{"_id": number, "n": 0, "v": f"from before {number}"} for number in range(self.orders)])

    def events(self) -> list[dict[str, Any]]:
        """In the order of the log, partition by partition."""
        files = LogReader(self.folder / "data" / "log" / self.source).files_if_any()
        columns = ["event_id", "flags", *_COLUMNS]
        rows = [row for file in files for row in pq.read_table(file.path, columns=columns).to_pylist()]
        return sorted(rows, key=lambda row: (row["partition"], row["batch"], row["position"]))

    def implied(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for row in self.events():
            old = found.pop(row["key"], None)
            if row["op"] in {"insert", "update", "read"}:
                payload = json.loads(row["payload"])
                # A document that changed before it was copied is known in part, until its copy comes.
                is_part = "partial" in (row["flags"] or ())
                found[row["key"]] = {**(old or {}), **payload["updatedFields"]} if is_part else payload
        return found

    def files(self) -> list[str]:
        """Of chunks, that are there just now."""
        folder = self.folder / "data" / "log" / "_copies" / self.source
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class RandomOrders(threading.Thread):
    """Changes orders at random: new ones, other values, none."""

    def __init__(self, url: str, orders: int, seed: int, pause_s: float = 0.02) -> None:
        super().__init__(name="orders", daemon=True)
        self._url, self._orders, self._rng, self._pause_s = url, orders, random.Random(seed), pause_s
        self._done = threading.Event()

    def run(self) -> None:
        rng = self._rng
        with pymongo.MongoClient[dict[str, Any]](self._url, w="majority", retryWrites=True) as client:
            orders = client[_DATABASE]["orders"]
            while not self._done.wait(self._pause_s):
                one, other = rng.randrange(self._orders), rng.randrange(2 * self._orders)
                match rng.randrange(3):
                    case 0:
                        orders.update_one({"_id": other}, {"$setOnInsert": {"n": 1, "new": True}}, upsert=True)
                    case 1:
                        orders.update_many({"_id": {"$gte": one, "$lt": one + 10}}, {"$inc": {"n": 1}})
                    case _:
                        orders.delete_one({"_id": one})

    def finish(self) -> None:
        self._done.set()
        self.join()


class MongoWriter(threading.Thread):
    """Counts the orders up, each by one, again and again, until it was told to stop or has written enough.

    A write that the driver may have sent twice is one write to the server: retried writes are numbered.
    """

    def __init__(self, url: str, orders: int, changes: int | None = None, pause_s: float = 0.01) -> None:
        super().__init__(name="mongo writer", daemon=True)
        self._url, self._orders, self._changes, self._pause_s = url, orders, changes, pause_s
        self._done = threading.Event()
        self.written = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with pymongo.MongoClient[dict[str, Any]](self._url, w="majority", retryWrites=True) as client:
                orders = client[_DATABASE]["orders"]
                orders.insert_many([{"_id": number, "n": 0} for number in range(self._orders)])
                self.written += self._orders
                while not self._done.is_set() and (self._changes is None or self.written < self._changes):
                    for some in range(0, self._orders, 100):
                        wanted = range(some, min(some + 100, self._orders))
                        made = [pymongo.UpdateOne({"_id": number}, {"$inc": {"n": 1}}) for number in wanted]
                        self.written += orders.bulk_write(made).modified_count
                    self._done.wait(self._pause_s)
        except Exception as error:  # noqa: BLE001 - told by `finish`
            self.error = error

    def finish(self) -> None:
        self._done.set()
        self.join()
        if self.error is not None:
            raise self.error
