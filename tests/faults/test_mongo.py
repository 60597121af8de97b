"""MongoDB through the real process: killed while it reads, and started again."""

from __future__ import annotations

from pathlib import Path

from evermark.testing.mongo_shop import MongoScene, MongoWriter
from evermark.testing.mongods import MongoReplicaSet
from evermark.testing.pipeline import died_by_itself


def test_a_killed_reader_goes_on_where_the_log_ends(mongo_server: MongoReplicaSet, tmp_path: Path) -> None:
    """GIVEN orders that change WHEN readers die before and after a commit THEN log and webhook have each change once,
    and the changes of an order in their order."""
    with MongoScene(tmp_path, mongo_server, {"one": None}, partitions=2) as scene:
        writer = MongoWriter(mongo_server.url, 20, pause_s=0.2)
        writer.start()
        try:
            died_by_itself(scene.up("file.written@3"))
            died_by_itself(scene.up("log.committed@2"))
            last = scene.up()
            scene.wait_delivered(scene.delivered("one") + 100)
        finally:
            writer.finish()
        scene.check_complete()
        scene.check_order()
        assert last.terminate() == 0
