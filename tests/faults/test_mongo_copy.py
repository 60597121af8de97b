"""Documents from before the stream are copied by a process that is killed on the way, again and again (X6)."""

from __future__ import annotations

import json
import random
from pathlib import Path

from evermark import failpoint
from evermark.testing.mongo_shop import CopiedMongoScene, RandomOrders
from evermark.testing.mongods import FORGETFUL, forget, mongo_replica_set
from evermark.testing.pipeline import PATIENCE_S, died_by_itself, some_of
from evermark.testing.until import until

KILLS_A_RUN = 2


def test_x6_a_copy_of_documents_that_is_killed_on_the_way_goes_on_and_is_exact(mongod: Path, tmp_path: Path) -> None:
    """GIVEN a full collection that is written to WHEN the process dies at steps of copying it THEN it goes on
    without starting over, the log implies exactly the collection, and no event is there twice; a backfill copies what a
    person asks for."""
    seed = random.randrange(10**9)
    with (
        mongo_replica_set(tmp_path / "mongo") as servers,
        CopiedMongoScene(tmp_path, servers, {}, partitions=2) as shop,
    ):
        writer = RandomOrders(servers.url, shop.orders, seed)
        writer.start()
        try:
            for point in some_of(failpoint.COPY, KILLS_A_RUN, seed):
                died_by_itself(shop.up(point))
            running = shop.up()
            until(lambda: _are_copied(shop, 1), "the copy is done", timeout_s=PATIENCE_S)
        finally:
            writer.finish()
        _requires_exact(shop, seed)
        reads = [row for row in shop.events() if row["op"] == "read"]
        assert len({row["key"] for row in reads}) == len(reads) > shop.orders * 0.9, seed
        assert {row["partition"] for row in reads} == {0, 1}
        assert shop.files() == []

        where = '{"_id": {"$mod": [1000, 7]}, "n": {"$exists": true}}'
        shop.run("source", "backfill", "shop", "--collection", "orders", "--where", where)
        until(lambda: _are_copied(shop, 2), "the backfill is done", timeout_s=PATIENCE_S)
        _requires_exact(shop, seed)
        copies = json.loads(shop.run("status", "--json").stdout)["copies"]
        wanted = sum(int(key) % 1000 == 7 for key in shop.documents())
        assert [(copy["state"], copy["chunks_left"]) for copy in copies] == [("done", 0)] * 2
        assert copies[0]["rows"] == wanted
        assert running.terminate() == 0


def test_x6_history_lost_in_the_middle_of_a_copy_costs_no_document(mongod: Path, tmp_path: Path) -> None:
    """GIVEN chunks that are ready, and a reader that is down WHEN orders change and the oplog forgets where it was THEN
    the gap is closed, chunks that stood in it are written again, and the copy ends: exact, each document once."""
    with (
        mongo_replica_set(tmp_path / "mongo", oplog_mb=1, arguments=FORGETFUL) as servers,
        CopiedMongoScene(tmp_path, servers, {}, partitions=2) as shop,
        servers.client() as client,
    ):
        died_by_itself(shop.up("copy.ready"))
        orders = client["shop"]["orders"]
        orders.update_many({"_id": {"$lt": 100}}, {"$inc": {"n": 1}})
        orders.delete_many({"_id": {"$gte": shop.orders - 100}})
        now = client.admin.command("hello")["operationTime"]
        forget(servers, now.time << 32 | now.inc)
        running = shop.up()
        until(lambda: running.said("a copy is done"), "the copy is done", timeout_s=PATIENCE_S)
        assert running.said("the gap is closed")
        _requires_exact(shop, 0)
        reads = [row["key"] for row in shop.events() if row["op"] == "read"]
        assert len(set(reads)) == len(reads) == shop.orders - 100
        assert shop.files() == []
        assert running.terminate() == 0


def _requires_exact(shop: CopiedMongoScene, seed: int) -> None:
    wanted = shop.documents()
    until(lambda: shop.implied() == wanted, f"the log implies the orders (seed {seed})", timeout_s=60)
    ids = [row["event_id"] for row in shop.events()]
    assert len(set(ids)) == len(ids), seed


def _are_copied(shop: CopiedMongoScene, copies: int) -> bool:
    """Asked of State: a process that is killed right after the last chunk was done does not come to say it."""
    if shop.files():
        return False  # chunks that nobody has read yet
    found = json.loads(shop.run("status", "--json").stdout)["copies"]
    return [copy["state"] for copy in found] == ["done"] * copies
