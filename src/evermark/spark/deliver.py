"""Delivery as a Spark job: which subscription wants which row is found, and the task reads and posts these rows.

Where a predicate has to hold Spark matches, in one pass, and hands the task places: file, row number, subscription.
Without one the task matches by stream and operation itself. Rows are read by the task: through the JVM they would cost
ten times as much. Only results travel back, as JSON rows: one for each (subscription, batch), with what is parked.
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
from pyspark.sql import DataFrame, SparkSession

from evermark.delivery.base import Fate, Outcome, Place, SubscriptionSpec
from evermark.delivery.sinks.base import Job, Result
from evermark.delivery.sinks.webhook import WebhookSink
from evermark.delivery.wanted import expanded
from evermark.delivery.work import BatchResult, Delivered, Manner, Span, fold
from evermark.log.frames import files_frame
from evermark.log.pick import I64, PLACE, PLACE_SQL, RowPicker
from evermark.log.span import places_of
from evermark.secrets import SecretBox
from evermark.spark.ahead import ahead
from evermark.spark.ingest import engine_error
from evermark.spark.match import SUBSCRIPTION, matched
from evermark.spark.posting import ROW_DDL, both, held_lanes, now_held, outcome_fields, outcome_of, rows_batch
from evermark.spark.replay import SparkReplays, require_codes

# A span without a budget still ends: whatever is not sent by then is left for the next round.
_NO_BUDGET_S = 3600.0
# What is sent at a time.
_CHUNK_ROWS = 20_000
_CHUNK_BYTES = 64 * 1024 * 1024
_CHUNK_MATCHES = 1_000_000
# Half of what Spark reads in one piece.
_CUT_BYTES = 64 * 1024 * 1024


# A piece of work of a task: rows of the log, and per (row, subscription that wants it) the row's index and the
# subscription's number, by row.
Wanted = tuple[pa.RecordBatch, I64, I64]


@dataclass(frozen=True)
class _Post:
    """What a task needs to post; pickled into the job, secrets sealed."""

    span: Span
    specs: tuple[SubscriptionSpec, ...]
    box: SecretBox
    manner: Manner
    deadline: float | None
    matches_here: bool  # else places come with the rows of the job

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stopped: set[int] = set()
        held = {name: set(keys) for name, keys in self.manner.held.items()}
        places = self._found_here(batches) if self.matches_here else given(batches)
        for wanted in ahead(read(self.span.paths, places), depth=1):
            rows = list(self._chunk(wanted, stopped, held))
            if rows:
                yield rows_batch(rows)
            if len(stopped) == len(self.specs):
                return

    def _found_here(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[I64, I64, I64]]:
        for _ in batches:
            pass  # a worker that leaves something unread is not used again, and its successor imports everything anew
        span = self.span
        require_codes(span.paths)
        found = places_of(span.paths, span.place.partition, span.after, span.to, exact=span.exact)
        # Piece by piece: a batch may have millions of rows, and there may be thousands that want each of them.
        size = max(1, min(_CHUNK_ROWS, _CHUNK_MATCHES // len(self.specs)))
        for start in range(0, len(found.codes), size):
            rows, of = expanded(found.streams.slice(start, size), found.ops.slice(start, size), self.specs)
            yield found.codes[start + rows], found.numbers[start + rows], of

    def _chunk(
        self, wanted: Wanted, stopped: set[int], held: dict[str, set[tuple[Place, str]]]
    ) -> Iterator[dict[str, Any]]:
        """Rows arrive in log order; each chunk is finished before the next, so a subscription's order holds."""
        jobs: list[Job] = []
        for index, mine in by_subscription(*wanted):
            if index in stopped:
                continue
            spec = self.specs[index]
            jobs.append(self._job(spec, mine, held.setdefault(spec.name, set())))
        if not jobs:
            return
        left = _NO_BUDGET_S if self.deadline is None else max(0.0, self.deadline - time.time())
        numbers = {spec.name: index for index, spec in enumerate(self.specs)}
        for result in WebhookSink().deliver(jobs, left, self.manner.grace_s, self.manner.slack_s):
            index = numbers[result.subscription]
            if result.outcome.fate is not Fate.DONE:
                stopped.add(index)
            held[result.subscription] |= now_held(self.specs[index], result.outcome.parked)
            yield _fields(result)

    def _job(self, spec: SubscriptionSpec, rows: pa.RecordBatch, waiting: set[tuple[Place, str]]) -> Job:
        held = held_lanes(rows, waiting)
        return Job(spec, rows, self.box.open, historical=self.manner.historical, probe=self.manner.probe, held=held)


def given(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[I64, I64, I64]]:
    """Places as Spark sends them, more of them at a time."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= _CHUNK_ROWS:
            yield _arrays(waiting)
            waiting, rows = [], 0
    if rows:
        yield _arrays(waiting)


def _arrays(batches: list[pa.RecordBatch]) -> tuple[I64, I64, I64]:
    codes, numbers, of = (column.to_numpy() for column in pa.Table.from_batches(batches).columns)
    return codes, numbers, of


def read(paths: Sequence[str], places: Iterable[tuple[I64, I64, I64]]) -> Iterator[Wanted]:
    """The rows at some places, each read once however many want it; fewer at a time if they are large."""
    picker = RowPicker(paths)
    size = min(_CHUNK_ROWS, picker.rows_within(_CHUNK_BYTES))
    for codes, numbers, of in places:
        new = np.ones(len(of), np.bool_)
        new[1:] = (codes[1:] != codes[:-1]) | (numbers[1:] != numbers[:-1])
        firsts = np.flatnonzero(new)
        for start in range(0, len(firsts), size):
            mine = firsts[start : start + size]
            stop = firsts[start + size] if start + size < len(firsts) else len(of)
            rows = picker.pick(codes[mine], numbers[mine])
            yield rows, np.cumsum(new[mine[0] : stop]) - 1, of[mine[0] : stop]


def by_subscription(rows: pa.RecordBatch, of_row: I64, of: I64) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each subscription, in their order; one pass, however many subscriptions there are."""
    order = np.argsort(of, kind="stable")
    of, of_row = of[order], of_row[order]
    starts = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(of)], strict=True):
        mine = of_row[start:stop]
        yield int(of[start]), rows if len(mine) == rows.num_rows else rows.take(pa.array(mine))


class SparkDeliverer(SparkReplays):
    """`Deliverer` and `ReplayDeliverer` on Spark. One task per span: what it does is wait for receivers."""

    def __init__(self, spark: SparkSession, box: SecretBox) -> None:
        super().__init__(spark, box)

    def deliver(self, span: Span, specs: Sequence[SubscriptionSpec], manner: Manner) -> list[Delivered]:
        if not specs or not span.paths:
            return fold(span, specs, [])
        deadline = None if manner.budget_s is None else time.time() + manner.budget_s
        here = not any(spec.where for spec in specs)
        post = _Post(span, tuple(specs), self._box, manner, deadline, matches_here=here)
        try:
            places = self._spark.range(0, 1, 1, 1) if here else self.places(span, specs)
            rows = places.mapInArrow(post, ROW_DDL).collect()
        except Exception as error:
            raise engine_error(f"delivery of batches {span.after + 1} to {span.to} failed", error) from error
        return fold(span, specs, _joined([_from_row(json.loads(row[0])) for row in rows]))

    def places(self, span: Span, specs: Sequence[SubscriptionSpec]) -> DataFrame:
        """Where the events are that somebody wants, in log order, and who wants them."""
        require_codes(span.paths)
        frame = files_frame(self._spark, span.paths).selectExpr("*", *PLACE_SQL)
        if not span.exact:
            # Only where it is needed: each new number in a condition is new code for the JVM to compile.
            frame = frame.where(f"partition = {span.place.partition} and batch > {span.after} and batch <= {span.to}")
        if span.exact and _in_one_piece(span.paths):
            return matched(frame.coalesce(1), specs, PLACE)
        # After the match: Spark drops a sort that comes before a join.
        found = matched(frame.coalesce(1), specs, ("batch", "position", *PLACE))
        return found.sortWithinPartitions("batch", "position").select(*PLACE, SUBSCRIPTION)


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
