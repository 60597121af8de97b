"""Delivery as a Spark job: files of the log read natively, matched in one pass, posted by the task that holds the rows.

Only results travel back, as JSON rows: one for each (subscription, batch) and the events to be parked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from evermark.delivery.base import Fate, Outcome, Place, SubscriptionSpec
from evermark.delivery.sinks.base import Job, Result
from evermark.delivery.sinks.webhook import WebhookSink
from evermark.delivery.work import BatchResult, Delivered, Manner, Span, fold
from evermark.event import EVENT
from evermark.log.frames import files_frame
from evermark.secrets import SecretBox
from evermark.spark.ingest import engine_error
from evermark.spark.match import SUBSCRIPTION, matched
from evermark.spark.posting import ROW_DDL, both, held_lanes, now_held, outcome_fields, outcome_of, rows_batch
from evermark.spark.replay import SparkReplays

# A span without a budget still ends: whatever is not sent by then is left for the next round.
_NO_BUDGET_S = 3600.0
# What is under way when a budget ends may still finish in this time; then a slow receiver leaves the group.
_GRACE_S = 1.0
# What is sent at a time.
_CHUNK_ROWS = 20_000
_CHUNK_BYTES = 64 * 1024 * 1024
# Half of what Spark reads in one piece.
_CUT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class _Post:
    """What a task needs to post; pickled into the job, secrets sealed."""

    specs: tuple[SubscriptionSpec, ...]
    box: SecretBox
    manner: Manner
    deadline: float | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stopped: set[int] = set()
        held = {name: set(keys) for name, keys in self.manner.held.items()}
        for chunk in gathered(batches):
            rows = list(self._chunk(chunk, stopped, held))
            if rows:
                yield rows_batch(rows)

    def _chunk(
        self, batch: pa.RecordBatch, stopped: set[int], held: dict[str, set[tuple[Place, str]]]
    ) -> Iterator[dict[str, Any]]:
        """Rows arrive in log order; each chunk is finished before the next, so a subscription's order holds."""
        jobs: list[Job] = []
        for index, mine in by_subscription(batch):
            if index in stopped:
                continue
            spec = self.specs[index]
            jobs.append(self._job(spec, mine, held.setdefault(spec.name, set())))
        if not jobs:
            return
        left = _NO_BUDGET_S if self.deadline is None else max(0.0, self.deadline - time.time())
        grace_s = None if self.deadline is None else _GRACE_S
        numbers = {spec.name: index for index, spec in enumerate(self.specs)}
        for result in WebhookSink().deliver(jobs, left, grace_s):
            index = numbers[result.subscription]
            if result.outcome.fate is not Fate.DONE:
                stopped.add(index)
            held[result.subscription] |= now_held(self.specs[index], result.outcome.parked)
            yield _fields(result)

    def _job(self, spec: SubscriptionSpec, rows: pa.RecordBatch, waiting: set[tuple[Place, str]]) -> Job:
        held = held_lanes(rows, waiting)
        return Job(spec, rows, self.box.open, historical=self.manner.historical, probe=self.manner.probe, held=held)


def gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fewer and larger ones: each is sent to its last event before the next one begins."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield pa.concat_batches(waiting)
            waiting, rows, size = [], 0, 0
    if rows:
        yield pa.concat_batches(waiting)


def by_subscription(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each subscription, in their order; one pass, however many subscriptions there are."""
    of = batch.column(SUBSCRIPTION).to_numpy()
    rows = batch.select(EVENT.names)
    if (of == of[0]).all():
        yield int(of[0]), rows
        return
    order = np.argsort(of, kind="stable")
    rows, of = rows.take(pa.array(order)), of[order]
    starts = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(of)], strict=True):
        yield int(of[start]), rows.slice(start, stop - start)


class SparkDeliverer(SparkReplays):
    """`Deliverer` and `ReplayDeliverer` on Spark. One task per span: what it does is wait for receivers."""

    def __init__(self, spark: SparkSession, box: SecretBox) -> None:
        super().__init__(spark, box)

    def deliver(self, span: Span, specs: Sequence[SubscriptionSpec], manner: Manner) -> list[Delivered]:
        if not specs or not span.paths:
            return fold(span, specs, [])
        frame = files_frame(self._spark, span.paths)
        if not span.exact:
            # Only where it is needed: each new number in a condition is new code for the JVM to compile.
            frame = frame.where(f"partition = {span.place.partition} and batch > {span.after} and batch <= {span.to}")
        deadline = None if manner.budget_s is None else time.time() + manner.budget_s
        post = _Post(tuple(specs), self._box, manner, deadline)
        wanted = matched(frame.coalesce(1), specs)
        if not span.exact or not _in_one_piece(span.paths):
            # After the match: Spark drops a sort that comes before a join.
            wanted = wanted.sortWithinPartitions("batch", "position")
        try:
            rows = wanted.mapInArrow(post, ROW_DDL).collect()
        except Exception as error:
            raise engine_error(f"delivery of batches {span.after + 1} to {span.to} failed", error) from error
        return fold(span, specs, _joined([_from_row(json.loads(row[0])) for row in rows]))


def _in_one_piece(paths: Sequence[str]) -> bool:
    """Whether Spark reads these files as one, from the first row to the last: it cuts large ones."""
    return len(paths) == 1 and Path(paths[0]).stat().st_size < _CUT_BYTES


def _joined(results: Sequence[BatchResult]) -> list[BatchResult]:
    """A batch that came in several chunks is done when all of them are."""
    by_key: dict[tuple[str, int], Outcome] = {}
    for result in results:
        key = (result.subscription, result.batch)
        by_key[key] = both(by_key[key], result.outcome) if key in by_key else result.outcome
    return [BatchResult(name, batch, outcome) for (name, batch), outcome in by_key.items()]


def _fields(result: Result) -> dict[str, Any]:
    return {**outcome_fields(result.outcome), "batch": result.batch}


def _from_row(row: Mapping[str, Any]) -> BatchResult:
    return BatchResult(row["subscription"], row["batch"], outcome_of(row))
