"""Delivery as a Spark job: files of the log read natively, matched in one pass, posted by the task that holds the rows.

Only results travel back, as JSON rows: one for each (subscription, batch) and the events to be parked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from evermark.delivery.base import Fate, Outcome, ParkedEvent, Place, SubscriptionSpec
from evermark.delivery.sinks.base import Job, Lane, Result
from evermark.delivery.sinks.webhook import WebhookSink
from evermark.delivery.work import BatchResult, Delivered, Manner, Span, fold
from evermark.event import EVENT
from evermark.log.frames import files_frame
from evermark.secrets import SecretBox
from evermark.spark.ingest import engine_error
from evermark.spark.match import SUBSCRIPTION, matched

_ROW = pa.schema([pa.field("row", pa.string())])
# A span without a budget still ends: whatever is not sent by then is left for the next round.
_NO_BUDGET_S = 3600.0
# What is under way when a budget ends may still finish in this time; then a slow receiver leaves the group.
_GRACE_S = 1.0


@dataclass(frozen=True)
class _Post:
    """What a task needs to post; pickled into the job, secrets sealed."""

    specs: tuple[SubscriptionSpec, ...]
    box: SecretBox
    manner: Manner
    deadline: float | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stopped: set[int] = set()
        for batch in batches:
            rows = list(self._chunk(batch, stopped))
            if rows:
                yield pa.RecordBatch.from_arrays([pa.array(rows, pa.string())], schema=_ROW)

    def _chunk(self, batch: pa.RecordBatch, stopped: set[int]) -> Iterator[str]:
        """Rows arrive in log order; each chunk is finished before the next, so a subscription's order holds."""
        jobs: list[Job] = []
        of = batch.column(batch.schema.get_field_index(SUBSCRIPTION))
        for index in sorted(set(of.to_pylist())):
            if index in stopped:
                continue
            jobs.append(self._job(self.specs[index], batch.filter(pc.equal(of, index)).select(EVENT.names)))
        if not jobs:
            return
        left = _NO_BUDGET_S if self.deadline is None else max(0.0, self.deadline - time.time())
        grace_s = None if self.deadline is None else _GRACE_S
        for result in WebhookSink().deliver(jobs, left, grace_s):
            if result.outcome.fate is not Fate.DONE:
                stopped.add(next(i for i, s in enumerate(self.specs) if s.name == result.subscription))
            yield _as_row(result)

    def _job(self, spec: SubscriptionSpec, rows: pa.RecordBatch) -> Job:
        waiting = self.manner.held.get(spec.name, frozenset())
        held: dict[Lane, str] = {}
        if waiting:
            names = ("source", "partition", "stream", "key")
            for source, partition, stream, key in zip(*(rows.column(n).to_pylist() for n in names), strict=True):
                if key is not None and (Place(source, partition), key) in waiting:
                    held[source, stream, key] = "an earlier one of its key"
        return Job(spec, rows, self.box.open, historical=self.manner.historical, probe=self.manner.probe, held=held)


class SparkDeliverer:
    """`Deliverer` on Spark. One task per span: what it does is wait for receivers."""

    def __init__(self, spark: SparkSession, box: SecretBox) -> None:
        self._spark = spark
        self._box = box

    def deliver(self, span: Span, specs: Sequence[SubscriptionSpec], manner: Manner) -> list[Delivered]:
        if not specs or not span.paths:
            return fold(span, specs, [])
        frame = files_frame(self._spark, span.paths)
        if not span.exact:
            # Only where it is needed: each new number in a condition is new code for the JVM to compile.
            frame = frame.where(f"partition = {span.place.partition} and batch > {span.after} and batch <= {span.to}")
        if not span.exact or len(span.paths) > 1:
            frame = frame.coalesce(1).sortWithinPartitions("batch", "position")
        deadline = None if manner.budget_s is None else time.time() + manner.budget_s
        post = _Post(tuple(specs), self._box, manner, deadline)
        try:
            rows = matched(frame, specs).mapInArrow(post, "row string").collect()
        except Exception as error:
            raise engine_error(f"delivery of batches {span.after + 1} to {span.to} failed", error) from error
        return fold(span, specs, _joined([_from_row(json.loads(row[0])) for row in rows]))


def _joined(results: Sequence[BatchResult]) -> list[BatchResult]:
    """A batch that came in several chunks is done when all of them are."""
    by_key: dict[tuple[str, int], Outcome] = {}
    for result in results:
        key = (result.subscription, result.batch)
        by_key[key] = _both(by_key[key], result.outcome) if key in by_key else result.outcome
    return [BatchResult(name, batch, outcome) for (name, batch), outcome in by_key.items()]


def _both(one: Outcome, other: Outcome) -> Outcome:
    worse = other if one.fate is Fate.DONE else one
    return Outcome(
        one.subscription,
        worse.fate,
        one.accepted + other.accepted,
        one.parked + other.parked,
        worse.reason,
        worse.retry_after_s,
    )


def _as_row(result: Result) -> str:
    outcome = result.outcome
    body: dict[str, Any] = {
        "subscription": outcome.subscription,
        "batch": result.batch,
        "fate": outcome.fate,
        "accepted": outcome.accepted,
        "reason": outcome.reason,
        "retry_after_s": outcome.retry_after_s,
        "parked": [asdict(p) for p in outcome.parked],
    }
    return json.dumps(body)


def _from_row(row: Mapping[str, Any]) -> BatchResult:
    parked = tuple(ParkedEvent(**{**p, "place": Place(**p["place"])}) for p in row["parked"])
    outcome = Outcome(
        row["subscription"], Fate(row["fate"]), row["accepted"], parked, row["reason"], row["retry_after_s"]
    )
    return BatchResult(row["subscription"], row["batch"], outcome)
