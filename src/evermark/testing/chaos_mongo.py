"""`make chaos ARGS=--mongo`: a MongoDB replica set of three whose primary is killed, again and again, under load.

Orders are counted up one by one, several times a second each. Every change must come once, in the order of its order.
"""

from __future__ import annotations

import sys
from pathlib import Path

from evermark.testing.pipeline import Ledger
from evermark.testing.until import until

_ORDERS = 200
_PATIENCE_S = 1800.0


def primaries_killed(folder: Path, changes: int, kills: int) -> Ledger:
    """What was counted. Raises when anything was lost, doubled, or out of order."""
    from evermark.testing.mongo_shop import MongoScene, MongoWriter  # here: they need the extra for MongoDB
    from evermark.testing.mongods import mongo_replica_set

    with (
        mongo_replica_set(folder / "mongo", members=3, oplog_mb=512) as servers,
        MongoScene(folder, servers, {"one": None}, partitions=4, one="bundle: 100") as scene,
    ):
        running = scene.up()
        writer = MongoWriter(servers.url, _ORDERS, changes)
        writer.start()

        def wait(count: int) -> None:
            until(lambda: writer.written >= count or writer.error, f"{count} changes", timeout_s=_PATIENCE_S)

        try:
            for number in range(kills):
                wait(changes * (number + 1) // (kills + 1))
                primary = servers.primary()
                primary.kill()
                servers.primary()
                primary.start()
                sys.stderr.write(f"killed the primary after {writer.written} changes\n")
            wait(changes)
        finally:
            writer.finish()
        ledger = scene.check_complete(_PATIENCE_S)
        scene.check_order()
        assert running.terminate() == 0
        return ledger
