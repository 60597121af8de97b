"""A shop whose orders are documents of a MongoDB replica set, and the deployment that reads them."""

from __future__ import annotations

import json
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
