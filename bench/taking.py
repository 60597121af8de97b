"""A source read into a log of its own, as a running instance does, until so many events are durable there."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from evermark.checkpoints.stores import PostgresCheckpoints
from evermark.cluster.fence import source_lease
from evermark.cluster.liveness import this_process
from evermark.cluster.postgres import PostgresLeases
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.pieces import ReadFrom
from evermark.ingest.reading import ReadPlan, SourceReading
from evermark.log.append import DeltaLog
from evermark.log.head import PostgresHeads
from evermark.log.read import LogReader
from evermark.runtime import Threads
from evermark.sources.base import Limit, Source
from evermark.state.connection import State

if TYPE_CHECKING:
    from pyspark import SparkContext

_WATCHDOG_S = 600.0


def drain(
    context: SparkContext,
    state: State,
    source: Source,
    name: str,
    folder: Path,
    events: int,
    start: str | None = None,
) -> tuple[float, list[str]]:
    """Seconds from the start of the query to the last event durable in the log; and the ids in the log. With `start`,
    which is a position of its only partition, from there on.
    """
    from evermark.spark.job import written_by_tasks

    lease = PostgresLeases(state).acquire(source_lease(name), this_process("bench"), _WATCHDOG_S)
    assert lease is not None
    log = folder / "log" / name
    heads, checkpoints = PostgresHeads(state), PostgresCheckpoints(state)
    taker = BatchTaker(name, lease.epoch, source, DeltaLog(log), LogReader(log), heads, checkpoints)
    began = time.perf_counter()
    begun = {partition: taker.begin(partition) for partition in source.partitions()}
    if start is not None:
        checkpoints.delete(name, 0)  # of now: reading begins before it
    starts = {p: start or found.position or source.earliest(p) for p, found in begun.items()}
    source.check(starts)
    for partition, position in starts.items():
        source.begin(partition, position)
    taken, ended = 0, 0.0
    runtime = Threads()
    over = runtime.wake()
    too_late = threading.Timer(_WATCHDOG_S, over.set)

    def on_taken(batch: WrittenBatch) -> None:
        nonlocal taken, ended
        taken += batch.rows
        if taken >= events and not ended:
            ended = time.perf_counter()
            over.set()

    of = ReadFrom(name, source, str(log))
    reading = SourceReading(of, Limit(), runtime, partial(written_by_tasks, context, of))
    plan = ReadPlan(starts, {p: found.batch for p, found in begun.items()}, dict.fromkeys(starts))
    too_late.start()
    failed = reading.run(plan, taker, on_taken, [over])
    too_late.cancel()
    if failed:
        raise next(iter(failed.values()))
    return ended - began, logged(log)


def logged(folder: Path) -> list[str]:
    files = LogReader(folder).files()
    return [i for f in files for i in pq.read_table(f.path, columns=["event_id"])["event_id"].to_pylist()]
