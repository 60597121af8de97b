"""Delivery as a Spark job: one task posts the rows that its subscriptions want (`delivery/run/post.py`).

On a cluster several tasks share the work (`parts.py`). A predicate that only Spark can match, or about some event of
which a task is in doubt, is matched by Spark in one pass, which hands the task the address (file, row number) and the
subscription of each matched row. Rows are read by the task: through the JVM they would cost ten times as much. Only
results travel back, as JSON rows: one for each (subscription, batch), with the parked events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

from evermark.delivery.decide.key_parts import cut_by_key
from evermark.delivery.decide.matching import needs_spark
from evermark.delivery.model import Outcome, SubscriptionSpec
from evermark.delivery.run.matched_here import is_small
from evermark.delivery.run.post import Posting, addresses_of, by_span, timed
from evermark.delivery.work import Assignment, DeliveryOptions, Span, fold
from evermark.errors import EngineError, EvermarkError
from evermark.log.frames import addressed_frame
from evermark.log.opened import require_readable
from evermark.log.row_reader import ROW_ADDRESS, require_codes
from evermark.spark.job import engine_error, run_tasks
from evermark.spark.match import SUBSCRIPTION, matched
from evermark.spark.parts import IN_DOUBT, PostApart, PostHere, outcomes_of, results_of, row_of, shared_out
from evermark.spark.posting import ROW_DDL, rows_batch
from evermark.spark.replay import SparkReplays
from evermark.spark.session import sql_session
from evermark.storage import is_url

# Spark reads a smaller file from the first row to the last, and cuts larger ones: half of its limit.
_CUT_BYTES = 64 * 1024 * 1024
_AFTERWARDS_S = 10.0


@dataclass(frozen=True)
class PostFound:
    """The task that posts the rows at addresses that Spark has found."""

    posting: Posting

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for results in self.posting.results(map(addresses_of, batches)):
            yield rows_batch(map(row_of, results))


class SparkDeliverer(SparkReplays):
    """`Deliverer` and `ReplayDeliverer` on Spark. One task for all spans of a call: it mostly waits for receivers. On a
    cluster, whose executors have processors of their own, subscriptions, and parts of a hot one, are spread over tasks.
    """

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        mine = [
            assignment
            for assignment in assignments
            if assignment.span.paths and (assignment.bot is None or assignment.bot.streams)
        ]
        if not mine:
            return fold(assignments, [])
        try:
            return self._delivered(assignments, mine, options)
        except (EngineError, FileNotFoundError):
            require_readable({path: None for one in mine for path in one.span.paths})  # Spark's words name no remedy
            raise

    def _delivered(
        self, assignments: Sequence[Assignment], mine: Sequence[Assignment], options: DeliveryOptions
    ) -> list[Outcome]:
        # A lane has tried the few: what it leaves to Spark it was in doubt about.
        if any(one.spec.where for one in mine) and (is_small(mine) or any(needs_spark(one.spec) for one in mine)):
            return self._matched_by_spark(assignments, mine, options)
        outcomes, in_doubt = self._matched_by_tasks(assignments, mine, options)
        if not in_doubt:
            return outcomes
        theirs = [one for one in mine if one.spec.name in in_doubt]
        try:
            found = self._matched_by_spark(theirs, theirs, _afterwards(options))
        except EvermarkError:
            if len(theirs) == len(mine):
                raise
            return outcomes  # the others were sent theirs, and must not be sent them again
        by_name = {one.subscription: one for one in found}
        return [by_name.get(one.subscription, one) for one in outcomes]

    def _matched_by_tasks(
        self, assignments: Sequence[Assignment], mine: Sequence[Assignment], options: DeliveryOptions
    ) -> tuple[list[Outcome], set[str]]:
        """Also the names of the subscriptions that Spark has to match, which were sent nothing."""
        with self._slots.tasks() as most:
            turn = self._paces.rows_max(mine, most, options) if most > 1 else {}
            parts = shared_out(cut_by_key(mine, most if options.sends else 1, turn), most)
            apart = PostApart(tuple(PostHere(self._posting(part, options)) for part in parts))
            told = run_tasks(self._context, len(parts), apart, _failed(mine))
        rows = [row for row in told if IN_DOUBT not in row]
        outcomes = timed(outcomes_of(assignments, parts, rows))
        if turn:
            self._paces.learn(parts, outcomes, rows)
        return outcomes, {row[IN_DOUBT] for row in told if IN_DOUBT in row}

    def _matched_by_spark(
        self, assignments: Sequence[Assignment], mine: Sequence[Assignment], options: DeliveryOptions
    ) -> list[Outcome]:
        try:
            found = self._wanted(mine).mapInArrow(PostFound(self._posting(mine, options)), ROW_DDL).collect()
        except Exception as error:
            raise engine_error(_failed(mine), error) from error
        return timed(fold(assignments, results_of(mine, (json.loads(row[0]) for row in found))))

    def _posting(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> Posting:
        return Posting(tuple(assignments), self._box, options, self._share_rates)

    def _wanted(self, assignments: Sequence[Assignment]) -> DataFrame:
        """The addresses of all assignments, one span after another, and the number of the assignment."""
        found = [
            self.places(span, [assignments[n].spec for n in numbers], numbers) for span, numbers in by_span(assignments)
        ]
        return reduce(DataFrame.union, found).coalesce(1) if len(found) > 1 else found[0]

    def places(self, span: Span, specs: Sequence[SubscriptionSpec], numbers: Sequence[int] | None = None) -> DataFrame:
        """The addresses of the wanted events, in log order, each with the number (or index) of the subscription."""
        require_codes(span.paths)
        frame = addressed_frame(sql_session(), span.paths)
        if not span.exact:
            # Only where it is needed: each new number in a condition is new code for the JVM to compile.
            frame = frame.where(f"partition = {span.place.partition} and batch > {span.after} and batch <= {span.to}")
        if span.begun.through:
            frame = frame.where((frame.batch > span.after + 1) | (frame.position > span.begun.through))
        if span.exact and len(span.paths) == 1 and _is_read_in_order(span.paths[0]):
            return _numbered(matched(frame.coalesce(1), specs, ROW_ADDRESS), numbers)
        # After the match: Spark drops a sort that comes before a join.
        found = matched(frame.coalesce(1), specs, ("batch", "position", *ROW_ADDRESS))
        return _numbered(found.sortWithinPartitions("batch", "position").select(*ROW_ADDRESS, SUBSCRIPTION), numbers)


def _afterwards(options: DeliveryOptions) -> DeliveryOptions:
    """For a few of the live group, while the others wait: who needs longer is served outside it."""
    if options.slack_s is None or options.budget_s is None:
        return options
    return replace(options, budget_s=min(options.budget_s, _AFTERWARDS_S))


def _failed(assignments: Sequence[Assignment]) -> str:
    spans = ", ".join(f"{span.after + 1} to {span.to}" for span, _ in by_span(assignments)[:3])
    return f"delivery of batches {spans} failed"


def _is_read_in_order(path: str) -> bool:
    return is_url(path) or Path(path).stat().st_size < _CUT_BYTES


def _numbered(found: DataFrame, numbers: Sequence[int] | None) -> DataFrame:
    """With the numbers given instead of the indexes 0, 1, 2 …; most often they are the same."""
    if numbers is None or list(numbers) == list(range(len(numbers))):
        return found
    given = ", ".join(f"{number}L" for number in numbers)
    return found.selectExpr(
        *ROW_ADDRESS, f"element_at(array({given}), cast({SUBSCRIPTION} as int) + 1) as {SUBSCRIPTION}"
    )
