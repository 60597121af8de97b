"""Block streams of a real node through Spark into a real log: whole, once, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from evermark.checkpoints.stores import PostgresCheckpoints
from evermark.cluster.base import Holder
from evermark.cluster.fence import source_lease
from evermark.cluster.postgres import PostgresLeases
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.pieces import ReadFrom
from evermark.ingest.reading import ReadPlan, SourceReading
from evermark.ingest.resume import Resume
from evermark.log.append import DeltaLog
from evermark.log.head import PostgresHeads
from evermark.log.read import LogReader
from evermark.runtime import Threads
from evermark.sources.base import Limit
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.target import BlocksTarget
from evermark.testing.blocknodes import Client, Node
from evermark.testing.servers import PostgresServer
from tests.contract.blocks.blocks_scene import EACH, PACE, Scene, new_stream, scene

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPTIONS = (*EACH, "--snapshot-every", "300", "--page-blocks", "40", "--resume-blocks", "10")


class Unconfirmed(BlockStreams):
    """Its confirmations are lost, as if the process ended before each of them."""

    def confirm(self, partition: int, end: str) -> None:
        pass


class Owner:
    """What the app does with a source, without its threads."""

    def __init__(self, spark: SparkSession, here: Scene, folder: Path) -> None:
        self._spark, self._here, self._folder = spark, here, folder
        self._starts = 0
        self.taken: list[WrittenBatch] = []

    def read(self, target: BlocksTarget, enough: Callable[[], bool], kind: type[BlockStreams] = BlockStreams) -> None:
        from evermark.spark.job import written_by_tasks

        self._starts += 1
        state, source = self._here.state, kind(target)
        holder = Holder("tests", "here", "boot", self._starts, str(self._starts))
        leases = PostgresLeases(state)
        lease = leases.acquire(source_lease("chat"), holder, 60)
        assert lease is not None
        log, reader = DeltaLog(self._folder / "log"), LogReader(self._folder / "log")
        taker = BatchTaker("chat", lease.epoch, source, log, reader, PostgresHeads(state), PostgresCheckpoints(state))
        found: Resume = taker.begin(0)
        assert found.position is not None
        source.check({0: found.position})
        source.begin(0, found.position)
        plan = ReadPlan({0: found.position}, {0: found.batch}, {0: found.repeats_to})
        of = ReadFrom("chat", source, str(self._folder / "log"))
        runtime = Threads()
        reading = SourceReading(of, Limit(wait_s=0.5), runtime, partial(written_by_tasks, self._spark.sparkContext, of))
        give_up_at, over = time.monotonic() + 60, runtime.wake()

        def end() -> None:
            while not (self.taken and enough()) and time.monotonic() < give_up_at:
                runtime.wait(0.05, over)
            over.set()

        ending = runtime.spawn("end", end)
        failed = reading.run(plan, taker, self.taken.append, [over])
        over.set()
        ending.join()
        leases.release(lease)
        source.close()
        assert not failed, failed

    def logged(self) -> list[str]:
        files = sorted(LogReader(self._folder / "log").files(), key=lambda file: file.path)
        rows = [row for f in files for row in pq.read_table(f.path, columns=["position", "event_id", "op"]).to_pylist()]
        return [row["event_id"] for row in sorted(rows, key=lambda row: row["position"]) if row["op"] == "message"]


@pytest.fixture
def here(pg_server: PostgresServer) -> Iterator[Scene]:
    with scene(pg_server) as made:
        yield made


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Node(tmp_path / "node", *OPTIONS) as node:
        made = node.client()
        yield made
        made.close()


def test_a_gap_of_many_pages_is_read_as_slices_and_logged_once(
    spark: SparkSession, here: Scene, client: Client, tmp_path: Path
) -> None:
    """GIVEN a known stream WHEN it grew by 700 blocks THEN several tasks fetch them, and each event is logged once."""
    stream = new_stream(client, 3)
    target = here.target([f"http://127.0.0.1:{client.port}"], pace=replace(PACE, slice_s=0.01))
    owner = Owner(spark, here, tmp_path)
    owner.read(target, lambda: len(owner.logged()) >= 3)
    for _ in range(2):
        client.say(stream, 350)
    before = len(owner.taken)
    owner.read(target, lambda: len(owner.logged()) >= 703)
    assert owner.logged() == client.hashes(stream)
    gap = owner.taken[before]
    assert len(gap.files) > 1
    assert gap.rows == 700


def test_what_was_logged_and_never_confirmed_is_not_logged_again(
    spark: SparkSession, here: Scene, client: Client, tmp_path: Path
) -> None:
    """GIVEN every confirmation lost, minipool events too WHEN begun anew, State lost at last THEN nothing is twice."""
    stream = new_stream(client, 5)
    pooled = new_stream(client)
    target = here.target([f"http://127.0.0.1:{client.port}"])
    owner = Owner(spark, here, tmp_path)

    def complete() -> bool:
        return sorted(owner.logged()) == sorted([*client.hashes(stream), *client.hashes(pooled)])

    owner.read(target, complete, Unconfirmed)
    client.say(stream, 4)
    client.say(pooled, 2)
    owner.read(target, complete, Unconfirmed)
    for table in ("stream_sync_state", "block_streams", "block_ticks", "block_partitions"):
        here.rows(f"delete from {table} returning 1")
    client.say(pooled, 1)
    owner.read(target, complete)
    assert complete()
    assert sum(taken.duplicates for taken in owner.taken) == 11 + 2  # and how both streams were made
