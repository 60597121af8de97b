"""Delivery as a Spark job: one task reads and posts the rows that its subscriptions want.

Where a predicate has to hold Spark matches, in one pass, and hands the task the address (file, row number) and the
subscription of each matched row. Without a predicate the task matches by stream and operation itself. Rows are read by
the task: through the JVM they would cost ten times as much. Only results travel back, as JSON rows: one for each
(subscription, batch), with the parked events.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from evermark.delivery.base import Fate, HeldKey, Outcome, SourcePartition, SubscriptionSpec
from evermark.delivery.bots.forward import forwarded, waiting
from evermark.delivery.decide.expiry import with_expired, without_expired
from evermark.delivery.decide.matching import expanded
from evermark.delivery.sinks import Sinks
from evermark.delivery.webhook.base import Job
from evermark.delivery.webhook.bundles import prepared
from evermark.delivery.work import Assignment, DeliveryOptions, Result, Span, fold
from evermark.log.frames import files_frame
from evermark.log.row_reader import I64, ROW_ADDRESS, ROW_ADDRESS_SQL, RowReader
from evermark.log.span import row_addresses
from evermark.secrets import SecretBox
from evermark.spark.ahead import ahead
from evermark.spark.ingest import engine_error
from evermark.spark.match import SUBSCRIPTION, matched
from evermark.spark.posting import ROW_DDL, held_lanes, now_held, outcome_fields, outcome_of, rows_batch
from evermark.spark.replay import SparkReplays, require_codes

# A span without a budget still ends: events not sent by then are left for the next round.
_NO_BUDGET_S = 3600.0
# How much is sent at a time.
_CHUNK_ROWS = 20_000
_CHUNK_BYTES = 64 * 1024 * 1024
_CHUNK_MATCHES = 1_000_000
# Spark reads a smaller file from the first row to the last, and cuts larger ones: half of its limit.
_CUT_BYTES = 64 * 1024 * 1024


# File code, row number and number of the assignment, for each row that an assignment wants.
Addresses = tuple[I64, I64, I64]
# A piece of work of a task: rows of the log, and per (row, subscription that wants it) the row's index and the
# subscription's number, by row.
MatchedRows = tuple[pa.RecordBatch, I64, I64]
# Per subscription and batch: positions of rows that are too old to be sent.
Late = dict[str, dict[int, pa.Array]]


@dataclass
class _SoFar:
    """The state of a task's subscriptions after the pieces it has sent."""

    held: dict[str, Counter[HeldKey]]
    room: dict[str, int]  # how many more may be parked, where that is known
    stopped: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Post:
    """The task that posts; pickled into the job, secrets sealed."""

    assignments: tuple[Assignment, ...]
    box: SecretBox
    options: DeliveryOptions
    matches_here: bool  # else addresses come with the rows of the job

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        budget_s = _NO_BUDGET_S if self.options.budget_s is None else self.options.budget_s
        deadline = time.monotonic() + budget_s
        held = {name: Counter(keys) for name, keys in self.options.held.items()}
        room = {one.spec.name: one.parked_room for one in self.assignments if one.parked_room is not None}
        so_far = _SoFar(held, room)
        places = gathered(self._found_here(batches) if self.matches_here else map(arrays, batches))
        pieces = map(self._jobs, read(paths_of(self.assignments), places))
        for jobs, late in ahead(pieces, depth=1, low_priority=self.options.historical):
            rows = list(self._send(jobs, late, so_far, max(0.0, deadline - time.monotonic())))
            if rows:
                yield rows_batch(rows)
            if len(so_far.stopped) == len(self.assignments):
                return

    def _found_here(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Addresses]:
        for _ in batches:
            pass  # a worker that leaves something unread is not used again, and its successor imports everything anew
        require_codes(paths_of(self.assignments))
        for span, numbers in by_span(self.assignments):
            where = (span.paths, span.place.partition, span.after, span.to)
            found = row_addresses(*where, exact=span.exact, through=span.begun.through)
            mine = [self.assignments[number] for number in numbers]
            specs = [assignment.spec for assignment in mine]
            among = {n: assignment.bot.streams for n, assignment in enumerate(mine) if assignment.bot is not None}
            # Piece by piece: a batch may have millions of rows, and thousands of subscriptions may want each row.
            size = max(1, min(_CHUNK_ROWS, _CHUNK_MATCHES // len(specs)))
            for start in range(0, len(found.codes), size):
                rows, of = expanded(found.streams.slice(start, size), found.ops.slice(start, size), specs, among)
                yield found.codes[start + rows], found.numbers[start + rows], np.asarray(numbers)[of]

    def _jobs(self, wanted: MatchedRows) -> tuple[list[Job], Late]:
        """The jobs of one piece, rendered while the piece before is sent; and rows that are too old to be sent."""
        jobs: list[Job] = []
        expired: Late = {}
        for index, rows in by_subscription(*wanted):
            assignment = self.assignments[index]
            wanted_rows = rows if assignment.bot is None else forwarded(rows, assignment.bot)
            mine, late = without_expired(wanted_rows, assignment.expires_before)
            if late:
                expired[assignment.spec.name] = late
            if mine.num_rows:
                historical = self.options.historical
                waits = {} if assignment.bot is None else waiting(mine, assignment.bot)
                job = Job(
                    assignment.spec, mine, self.box.open, historical=historical, probe=assignment.probe, waits=waits
                )
                jobs.append(job)
        return prepared(jobs), expired

    def _send(self, jobs: Sequence[Job], late: Late, so_far: _SoFar, left_s: float) -> Iterator[dict[str, Any]]:
        """Rows arrive in log order; each chunk is finished before the next, so a subscription's order holds."""
        going = [
            replace(
                job,
                held=held_lanes(job.events, so_far.held.setdefault(job.spec.name, Counter())),
                parked_room=so_far.room.get(job.spec.name),
            )
            for job in jobs
            if job.spec.name not in so_far.stopped
        ]
        places = {assignment.spec.name: assignment.span.place for assignment in self.assignments}
        if not self.options.sends:
            yield from map(_row, _unsent(going, places, late, so_far.stopped))
            going = []
        specs = {job.spec.name: job.spec for job in going}
        for name in late.keys() - specs.keys() - so_far.stopped:
            yield from map(_row, with_expired(name, places[name], [], late[name]))
        began = time.monotonic()
        for results in Sinks().deliver_each(going, left_s, self.options.grace_s, self.options.slack_s):
            took_s = time.monotonic() - began
            name = results[0].subscription
            for result in with_expired(name, places[name], results, late.get(name, {})):
                if result.outcome.fate is not Fate.DONE:
                    so_far.stopped.add(name)
                so_far.held[name] += now_held(specs[name], result.outcome.parked)
                if name in so_far.room:
                    so_far.room[name] -= sum(not event.session for event in result.outcome.parked)
                yield _row(result, took_s)
                took_s = 0.0  # told once: the times of several results are added up


def _unsent(
    jobs: Sequence[Job], places: Mapping[str, SourcePartition], late: Late, stopped: set[str]
) -> Iterator[Result]:
    """Nothing is sent: each of these subscriptions gets as far as its first batch with something to send."""
    for job in jobs:
        name, batch = job.spec.name, pc.min(job.events.column("batch")).as_py()
        before = {number: rows for number, rows in late.get(name, {}).items() if number < batch}
        yield from with_expired(name, places[name], [], before)
        yield Result(places[name], batch, Outcome(name, Fate.UNFINISHED, reason="nothing is sent to it now"))
        stopped.add(name)


def _row(result: Result, took_s: float = 0.0) -> dict[str, Any]:
    fields = outcome_fields(result.outcome)
    return {**fields, "took_s": took_s, "batch": result.batch, "through": result.through}


def _results(assignments: Sequence[Assignment], rows: Iterable[Mapping[str, Any]]) -> Iterator[Result]:
    places = {assignment.spec.name: assignment.span.place for assignment in assignments}
    for row in rows:
        yield Result(places[row["subscription"]], row["batch"], outcome_of(row), row["through"])


def paths_of(assignments: Sequence[Assignment]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for assignment in assignments for path in assignment.span.paths))


def by_span(assignments: Sequence[Assignment]) -> list[tuple[Span, list[int]]]:
    """Each span once, with the numbers of the assignments that have it."""
    numbers: dict[Span, list[int]] = {}
    for number, assignment in enumerate(assignments):
        numbers.setdefault(assignment.span, []).append(number)
    return list(numbers.items())


def gathered(pieces: Iterable[Addresses]) -> Iterator[Addresses]:
    """The same addresses, more of them at a time: rows that are sent together are served side by side."""
    waiting: list[Addresses] = []
    rows = 0
    for piece in pieces:
        waiting.append(piece)
        rows += len(piece[0])
        if rows >= _CHUNK_ROWS:
            yield _together(waiting)
            waiting, rows = [], 0
    if rows:
        yield _together(waiting)


def _together(pieces: Sequence[Addresses]) -> Addresses:
    codes, numbers, of = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return codes, numbers, of


def arrays(batch: pa.RecordBatch) -> Addresses:
    codes, numbers, of = (column.to_numpy() for column in batch.columns)
    return codes, numbers, of


def read(paths: Sequence[str], places: Iterable[Addresses]) -> Iterator[MatchedRows]:
    """The rows at some addresses, each read once however many want it; fewer at a time if they are large."""
    picker = RowReader(paths)
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
    """`Deliverer` and `ReplayDeliverer` on Spark. One task for all spans of a call: it mostly waits for receivers."""

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        mine = [
            assignment
            for assignment in assignments
            if assignment.span.paths and (assignment.bot is None or assignment.bot.streams)
        ]
        if not mine:
            return fold(assignments, [])
        here = not any(assignment.spec.where for assignment in mine)
        post = _Post(tuple(mine), self._box, options, matches_here=here)
        try:
            places = self._spark.range(0, 1, 1, 1) if here else self._wanted(mine)
            rows = [json.loads(row[0]) for row in places.mapInArrow(post, ROW_DDL).collect()]
        except Exception as error:
            spans = ", ".join(f"{span.after + 1} to {span.to}" for span, _ in by_span(mine)[:3])
            raise engine_error(f"delivery of batches {spans} failed", error) from error
        found = fold(assignments, _results(mine, rows))
        # A subscription without a row wanted nothing, and took no time.
        return [one if one.took_s is not None else replace(one, took_s=0.0) for one in found]

    def _wanted(self, assignments: Sequence[Assignment]) -> DataFrame:
        """The addresses of all assignments, one span after another, and the number of the assignment."""
        found = [
            self.places(span, [assignments[n].spec for n in numbers], numbers) for span, numbers in by_span(assignments)
        ]
        return reduce(DataFrame.union, found).coalesce(1) if len(found) > 1 else found[0]

    def places(self, span: Span, specs: Sequence[SubscriptionSpec], numbers: Sequence[int] | None = None) -> DataFrame:
        """The addresses of the wanted events, in log order, each with the number (or index) of the subscription."""
        require_codes(span.paths)
        frame = files_frame(self._spark, span.paths).selectExpr("*", *ROW_ADDRESS_SQL)
        if not span.exact:
            # Only where it is needed: each new number in a condition is new code for the JVM to compile.
            frame = frame.where(f"partition = {span.place.partition} and batch > {span.after} and batch <= {span.to}")
        if span.begun.through:
            frame = frame.where((frame.batch > span.after + 1) | (frame.position > span.begun.through))
        if span.exact and len(span.paths) == 1 and Path(span.paths[0]).stat().st_size < _CUT_BYTES:
            return _numbered(matched(frame.coalesce(1), specs, ROW_ADDRESS), numbers)
        # After the match: Spark drops a sort that comes before a join.
        found = matched(frame.coalesce(1), specs, ("batch", "position", *ROW_ADDRESS))
        return _numbered(found.sortWithinPartitions("batch", "position").select(*ROW_ADDRESS, SUBSCRIPTION), numbers)


def _numbered(found: DataFrame, numbers: Sequence[int] | None) -> DataFrame:
    """With the numbers given instead of the indexes 0, 1, 2 …; most often they are the same."""
    if numbers is None or list(numbers) == list(range(len(numbers))):
        return found
    given = ", ".join(f"{number}L" for number in numbers)
    return found.selectExpr(
        *ROW_ADDRESS, f"element_at(array({given}), cast({SUBSCRIPTION} as int) + 1) as {SUBSCRIPTION}"
    )
