"""MongoDB through the real process: readers killed, primaries killed, history lost."""

from __future__ import annotations

import json
from pathlib import Path

from evermark.testing.chaos_mongo import primaries_killed
from evermark.testing.commands import REAL
from evermark.testing.mongo_shop import MongoScene, MongoWriter
from evermark.testing.mongods import FORGETFUL, MongoReplicaSet, forget, mongo_replica_set
from evermark.testing.pipeline import died_by_itself
from evermark.testing.until import until


def test_a_killed_reader_goes_on_where_the_log_ends(mongo_server: MongoReplicaSet, tmp_path: Path) -> None:
    """GIVEN orders that change WHEN a reader dies before its batch is checkpointed THEN log and webhook have each
    change once, and the changes of an order in their order."""
    with MongoScene(tmp_path, mongo_server, {"one": None}, partitions=2) as scene:
        writer = MongoWriter(mongo_server.url, 20, pause_s=0.2)
        writer.start()
        try:
            died_by_itself(scene.up("log.committed@3"))
            last = scene.up()
            scene.wait_delivered(scene.delivered("one") + 100)
        finally:
            writer.finish()
        scene.check_complete()
        scene.check_order()
        assert last.terminate() == 0


def test_history_lost_while_nobody_read_is_repaired_by_itself_with_deletes(mongod: Path, tmp_path: Path) -> None:
    """GIVEN a reader that is down WHEN orders come, change and go, and the oplog forgets it THEN the next reader finds
    all of it, and goes on."""
    with (
        mongo_replica_set(tmp_path / "mongo", oplog_mb=1, arguments=FORGETFUL) as servers,
        MongoScene(tmp_path, servers, {"one": None}) as scene,
        servers.client() as client,
    ):
        orders = client["shop"]["orders"]
        orders.insert_many([{"_id": number, "n": 0} for number in range(30)])
        first = scene.up(commands=REAL)
        scene.wait_delivered(29)
        assert first.terminate() == 0
        orders.update_many({"_id": {"$lt": 10}}, {"$inc": {"n": 5}})
        orders.delete_many({"_id": {"$gte": 20}})
        orders.insert_one({"_id": "new"})
        now = client.admin.command("hello")["operationTime"]
        forget(servers, now.time << 32 | now.inc)

        last = scene.up()
        until(lambda: scene.implied() == scene.documents(), "the log implies the orders there are")
        scene.wait_delivered(30 + 10 + 10)
        orders.update_one({"_id": "new"}, {"$set": {"n": 1}})
        until(lambda: scene.implied() == scene.documents(), "it goes on")

        found = json.loads(scene.run("source", "recover", "--json").stdout)
        assert [(each["choice"], each["step"], each["asked_by"]) for each in found["past"]] == [
            ("repair", "done", "itself")
        ]
        assert sum(each["taken"] for each in found["past"]) == 10 + 10 + 1
        assert last.terminate() == 0


def test_a_primary_killed_under_load_loses_and_doubles_nothing(mongod: Path, tmp_path: Path) -> None:
    """GIVEN three members WHEN the primary is killed while orders change THEN every change comes once, in order."""
    ledger = primaries_killed(tmp_path, changes=2000, kills=1)
    assert ledger.lost == ledger.doubled == 0
