"""Rows of a real node, brought into the log by Spark's tasks: copied at first, and compared with it after a gap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from evermark import Log
from evermark.errors import GapError
from evermark.ingest.pieces import ReadFrom, pieces_of
from evermark.ingest.repair.steps import RepairTarget, batches_of
from evermark.ingest.task_reports import gather
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.read import LogReader
from evermark.replicas import node as replica_node
from evermark.replicas.ranges import Ranges
from evermark.replicas.snapshots import Snapshots
from evermark.sources.base import Limit
from evermark.spark.job import written_by_tasks
from evermark.spark.repair import found_missing
from evermark.testing.servers import PostgresServer
from tests.contract.replica_source.replica_source_scene import SourceScene, source_scene

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BEFORE = tuple(f"insert into orders values ({number}, 'from before', 0.5)" for number in range(1, 41))


@pytest.fixture
def scene(pg_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceScene]:
    monkeypatch.setattr(replica_node, "Snapshots", partial(Snapshots, chunk_rows=10))
    with source_scene(tmp_path, pg_server, before=BEFORE) as made:
        yield made


class Owner:
    """What a source's owner does, without its loop: all slices are read and written by Spark's tasks."""

    def __init__(self, spark: SparkSession, scene: SourceScene, root: Path) -> None:
        self._spark, self._scene, self._root, self.folder = spark, scene, root, root / "shop"
        self.log, self.batch, self.epoch = DeltaLog(self.folder), 0, 0
        self.at = scene.source().earliest(0)
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.source = self._scene.source()
        self.source.owned(self.epoch)
        self.source.check({0: self.at})
        self.source.begin(0, self.at)

    def take(self) -> int:
        """A batch; how many tasks wrote it."""
        end = self.source.latest({0: self.at}, Limit(wait_s=0.0))[0]
        if end == self.at:
            return 0
        pieces = pieces_of(self.source, 0, self.at, end, self.batch + 1, None)
        of = ReadFrom("shop", self.source, str(self.folder))
        gathered = gather(written_by_tasks(self._spark.sparkContext, of, pieces), self.epoch)
        assert not gathered.failed, gathered.failed
        for written in gathered.written:
            self.append(written)
        self.at = end
        self.source.confirm(0, end)
        return len(pieces)

    def drain(self) -> None:
        while self.take():
            pass

    def append(self, append: Append) -> None:
        if append.files:
            self.log.commit(append)
            self.batch = append.batch

    def repair(self) -> list[dict[str, Any]]:
        """Close a gap; the rows that were added."""
        repair = self.source.repair(0)
        gap = repair.begin(lambda: False, self.at)
        wanted = RepairTarget("shop", 0, self.batch, self.epoch, self.at)
        found = found_missing(self._spark, gap, LogReader(self.folder).files(), wanted, self.folder, rows_max=15)
        added = []
        for taken in batches_of(found, gap, wanted):
            for file in taken.files:
                added += pq.read_table(self.folder / file.path).to_pylist()
            self.append(taken)
        self.at = gap.position
        repair.finish(gap.position)
        self.start()
        return added

    def implied(self) -> dict[str, Any]:
        table = Log(self._root).table(self._spark, "shop", "orders")
        return {row["key"]: json.loads(row["payload"]) for row in table.select("key", "payload").collect()}


def rows_without_events(scene: SourceScene) -> None:
    """As if the node had taken them with a snapshot."""
    with scene.nodes["north"].replica() as north:
        north.store._raise_floors("orders", {"west.00000000000100000000": 5})  # type: ignore[attr-defined]
        north.store._save_held("orders", {"west.00000000000100000000": Ranges.through(5)})  # type: ignore[attr-defined]


def test_rows_are_copied_by_tasks_and_the_log_implies_the_table(
    spark: SparkSession, scene: SourceScene, tmp_path: Path
) -> None:
    """GIVEN a table from before it was replicated WHEN it is copied while it changes THEN a task writes each chunk, the
    log implies the table, and each row was read once."""
    scene.target = replace(scene.target, copies=True)
    owner = Owner(spark, scene, tmp_path / "log")
    assert owner.source.latest({0: owner.at}, Limit(wait_s=0.0))[0] > owner.at
    scene.insert("north", 100, 3)
    scene.write("north", "delete from orders where id = 7", "update orders set what = 'ü\"' where id = 8")
    assert owner.take() == 4
    owner.drain()
    assert owner.implied() == scene.table()
    rows = [row for f in LogReader(owner.folder).files() for row in pq.read_table(f.path).to_pylist()]
    assert sorted(int(row["key"]) for row in rows if row["op"] == "read") == list(range(1, 41))
    assert sorted(row["op"] for row in rows if row["op"] != "read") == [
        "delete",
        "insert",
        "insert",
        "insert",
        "update",
    ]


def test_r10_a_gap_is_closed_exactly_by_comparing_a_snapshot_with_the_log(
    spark: SparkSession, scene: SourceScene, tmp_path: Path
) -> None:
    """GIVEN a log of a node's events, and rows that have none WHEN the gap is repaired THEN the log implies the table,
    rows that it had are not told again, and a second look finds nothing; reading goes on behind it."""
    owner = Owner(spark, scene, tmp_path / "log")
    scene.insert("north", 100, 20)
    scene.write("north", "update orders set amount = 1.25 where id >= 100")
    owner.drain()
    assert len(owner.implied()) == 20
    scene.write("north", "delete from orders where id = 100", "update orders set what = null where id = 101")
    rows_without_events(scene)
    with pytest.raises(GapError):
        owner.take()
    added = owner.repair()
    assert owner.implied() == scene.table()
    assert {row["op"] for row in added} == {"insert", "update", "delete"}
    assert sorted(int(row["key"]) for row in added) == [*range(1, 41), 100, 101]
    assert all(row["flags"] == ["repaired"] for row in added)
    assert owner.repair() == []
    scene.insert("north", 200, 2)
    owner.drain()
    assert owner.implied() == scene.table()


def test_r10_a_gap_in_the_middle_of_a_copy_brings_the_rest(
    spark: SparkSession, scene: SourceScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a copy that was read in part WHEN State has lost its plan THEN the repair brings the rows that are missing,
    and no other; nothing is copied again."""
    scene.target = replace(scene.target, copies=True)
    owner = Owner(spark, scene, tmp_path / "log")
    monkeypatch.setattr("evermark.sources.replica.source._BATCH_EVENTS", 20)
    assert owner.take() == 2
    scene.forget_plan()
    with pytest.raises(GapError):
        owner.start()
    added = owner.repair()
    assert sorted(int(row["key"]) for row in added) == list(range(21, 41))
    scene.insert("north", 200, 2)
    owner.drain()
    assert owner.implied() == scene.table()
    rows = sum(pq.read_metadata(file.path).num_rows for file in LogReader(owner.folder).files())
    assert rows == 42
