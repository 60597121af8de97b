"""MongoDB through the real process: readers killed, primaries killed, history lost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow.parquet as pq

from evermark.log.read import LogReader
from evermark.storage import readable
from evermark.testing.chaos_mongo import primaries_killed
from evermark.testing.commands import REAL
from evermark.testing.mongo_shop import MongoScene, MongoWriter
from evermark.testing.mongods import FORGETFUL, MongoReplicaSet, forget, mongo_replica_set
from evermark.testing.pipeline import died_by_itself, some_of
from evermark.testing.until import until

REPAIR_POINTS = ("repair.opened", "repair.found", "log.committed", "head.moved", "repair.closed", "repair.done")
KILLS_A_RUN = 2


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


def test_history_lost_while_nobody_read_is_repaired_by_itself_with_a_death_on_the_way_or_skipped_by_a_person(
    mongod: Path, tmp_path: Path
) -> None:
    """GIVEN a reader that is down WHEN orders come, change and go, the oplog forgets it, and its next ones die at steps
    of the repair THEN the last finds all of it, deletes too, nothing twice, and goes on. WHEN history is lost once more
    and a person skips THEN what lies between is in no event, and what comes later is."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    with (
        mongo_replica_set(tmp_path / "mongo", oplog_mb=1, arguments=FORGETFUL) as servers,
        MongoScene(tmp_path, servers, {"one": None}, partitions=2) as scene,
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
        _forget_all(servers)

        kills = some_of(REPAIR_POINTS, KILLS_A_RUN, seed)
        for number, point in enumerate(kills):
            died_by_itself(scene.up(point))
            orders.update_one({"_id": number}, {"$inc": {"n": 1}})  # of a partition that is repaired already, or not
        last = scene.up()
        until(lambda: scene.implied() == scene.documents(), f"the log implies the orders there are (seed {seed})")
        logged = scene.logged()
        assert len(set(logged)) == len(logged), f"the log has an event twice (seed {seed})"
        assert {"new", *map(str, range(20))} == scene.implied().keys()
        assert 30 + 10 + 10 + 1 <= len(logged) <= 30 + 10 + 10 + 1 + len(kills), f"seed {seed}"
        until(lambda: set(scene.handled["one"]) == set(scene.logged()), "all of it is delivered")
        orders.update_one({"_id": "new"}, {"$set": {"n": 1}})
        until(lambda: scene.implied() == scene.documents(), "it goes on")
        assert _past(scene) == [("repair", "done", "itself")] * 2
        counted = sum(each["taken"] for each in json.loads(scene.run("source", "recover", "--json").stdout)["past"])
        assert counted == _repaired(scene), f"what tries took that died is counted, too (seed {seed})"
        assert last.terminate() == 0

        orders.update_many({}, {"$set": {"n": 100}})
        orders.delete_one({"_id": 3})
        _forget_all(servers)
        before = scene.implied()
        scene.run("source", "recover", "--choice", "skip", "--yes")
        last = scene.up()
        until(lambda: last.text().count("the gap is closed") == 2, "both gaps were accepted")
        orders.insert_one({"_id": "later", "n": 0})
        until(lambda: "later" in scene.implied(), "what comes later is taken")
        assert scene.implied() == {**before, "later": {"_id": "later", "n": 0}}
        assert sorted(_past(scene)) == [("repair", "done", "itself")] * 2 + [("skip", "done", "person")] * 2
        assert last.terminate() == 0


class FromNow(MongoScene):
    """Reads what comes from its first start on."""

    def settings(self) -> str:
        return super().settings().replace("start: oldest", "start: now")


def test_s10_a_partition_without_an_event_whose_checkpoint_is_lost_goes_on_where_it_began(
    mongod: Path, tmp_path: Path
) -> None:
    """GIVEN a source that reads from now on, and had no event yet WHEN it is stopped, its checkpoints are forgotten,
    and orders are written THEN they come with the next start."""
    with (
        mongo_replica_set(tmp_path / "mongo") as servers,
        FromNow(tmp_path, servers, {"one": None}, partitions=2) as scene,
        servers.client() as client,
    ):
        first = scene.up()
        until(lambda: all(first.health(f"shop/{p}").get("status") == "healthy" for p in (0, 1)), "both are read")
        assert first.terminate() == 0
        assert {each["batch"] for each in json.loads(scene.run("checkpoint", "list", "--json").stdout)} == {0}
        scene.run("checkpoint", "reset", "shop")
        assert json.loads(scene.run("checkpoint", "list", "--json").stdout) == []
        client["shop"]["orders"].insert_many([{"_id": number, "n": 0} for number in range(20)])
        second = scene.up()
        scene.wait_delivered(19)
        assert scene.implied() == scene.documents()
        assert not second.said("a gap was found")
        assert second.terminate() == 0


def _forget_all(servers: MongoReplicaSet) -> None:
    """The oplog does not reach back to anything that was there until now."""
    with servers.client() as client:
        now = client.admin.command("hello")["operationTime"]
    forget(servers, now.time << 32 | now.inc)


def _repaired(scene: MongoScene) -> int:
    """How many events of the log were found missing."""
    files = LogReader(scene.log_root / scene.source).files()
    rows = [row for file in files for row in pq.read_table(readable(file.path), columns=["flags"]).to_pylist()]
    return sum("repaired" in (row["flags"] or ()) for row in rows)


def _past(scene: MongoScene) -> list[tuple[str, str, str]]:
    found = json.loads(scene.run("source", "recover", "--json").stdout)["past"]
    return [(each["choice"], each["step"], each["asked_by"]) for each in found]


def test_a_primary_killed_under_load_loses_and_doubles_nothing(mongod: Path, tmp_path: Path) -> None:
    """GIVEN three members WHEN the primary is killed while orders change THEN every change comes once, in order."""
    ledger = primaries_killed(tmp_path, changes=2000, kills=1)
    assert ledger.lost == ledger.doubled == 0
