"""Delivery spread over the tasks of a cluster: subscriptions by name, and a hot one, which would keep one task busy
while the others have nothing to do, by key (`delivery/decide/key_parts.py`).

Each task reads the span for itself and posts its part. If a task fails, Spark runs that part again, under the same ids;
nothing is settled before all parts have said how far they came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext

from evermark.delivery.decide.key_parts import joined, pace_after, rows_in
from evermark.delivery.model import Fate, Outcome
from evermark.delivery.run.post import Posting
from evermark.delivery.work import Assignment, DeliveryOptions, Result, fold
from evermark.spark.job import Report
from evermark.spark.posting import outcome_fields, outcome_of

IN_DOUBT = "in_doubt"  # in a report, instead of a result: a subscription that was sent nothing


class Slots:
    """How many tasks a call of a deliverer may be spread over: the tasks that the lanes and other calls leave.

    Two for each lane are the lanes': one is its successor's. On a single machine one task does all of a call: it mostly
    waits for receivers, and tasks would only share the processors.
    """

    def __init__(self, context: SparkContext, lanes: int = 0) -> None:
        self._context, self._lanes = context, lanes
        self._lock = threading.Lock()
        self._calls = 0

    @contextmanager
    def tasks(self) -> Iterator[int]:
        if (self._context.master or "local").startswith("local"):
            yield 1
            return
        with self._lock:
            self._calls += 1
            calls = self._calls
        try:
            yield max(1, (slots_of(self._context) - 2 * self._lanes) // calls)
        finally:
            with self._lock:
                self._calls -= 1


class Paces:
    """How many events of a subscription in parts a turn takes: as many as all parts can post in its time. What the
    quicker ones post beyond the slowest is posted again, each turn, if one of them never ends.
    """

    def __init__(self) -> None:
        self._per_s: dict[str, float] = {}

    def rows_max(self, assignments: Sequence[Assignment], tasks: int, options: DeliveryOptions) -> dict[str, int]:
        """By name. The live group has no turns: what it is sent ends with the span."""
        if not options.historical or options.budget_s is None:
            return {}
        return {one.spec.name: rows_in(self._per_s.get(one.spec.name), tasks, options.budget_s) for one in assignments}

    def learn(self, tasks: Sequence[Sequence[Assignment]], outcomes: Sequence[Outcome], rows: Iterable[Report]) -> None:
        cut = {one.spec.name for mine in tasks for one in mine if one.part is not None}
        late = {row["subscription"] for row in rows if row["fate"] != Fate.DONE and row["took_s"] is not None}
        for one in outcomes:
            name, known = one.subscription, self._per_s.get(one.subscription)
            pace = pace_after(known, one, cut=name in cut, ended=name not in late)
            if pace is not None:
                self._per_s[name] = pace


def slots_of(context: SparkContext) -> int:
    """How many tasks the executors that are there can run at a time. `defaultParallelism` is never less than two."""
    spark: Any = context._jsc.sc()  # noqa: SLF001 - PySpark does not know its executors
    return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))


@dataclass(frozen=True)
class PostHere:
    """The task that finds the rows itself. It also tells which subscriptions it could not match."""

    posting: Posting

    def __call__(self, _number: int) -> Iterator[Report]:
        in_doubt: set[str] = set()
        for results in self.posting.results(in_doubt=in_doubt):
            yield from map(row_of, results)
        yield from ({IN_DOUBT: name} for name in sorted(in_doubt))


@dataclass(frozen=True)
class PostApart:
    """Several tasks, each with its own subscriptions, or parts of one."""

    posts: tuple[Callable[[int], Iterable[Report]], ...]

    def __call__(self, number: int) -> Iterator[Report]:
        for row in self.posts[number](number):
            yield {**row, "task": number}


def by_task(rows: Iterable[Report], tasks: int) -> list[list[Report]]:
    """What each of them told, also where that is nothing."""
    found: list[list[Report]] = [[] for _ in range(tasks)]
    for row in rows:
        found[row["task"]].append(row)
    return found


def shared_out(assignments: Sequence[Assignment], tasks_max: int) -> list[tuple[Assignment, ...]]:
    """The assignments of so many tasks at most, about equally large. A subscription that is not cut is in one task
    alone: its order and limits are. Parts of one that is cut (`cut_by_key`) are in different tasks. Pure.
    """
    rows: dict[Any, int] = {}
    for one in assignments:
        rows[_whose(one)] = rows.get(_whose(one), 0) + one.span.rows
    tasks = max(1, min(tasks_max, len(rows)))
    load, home = [0] * tasks, dict[Any, int]()
    for whose in sorted(rows, key=lambda whose: -rows[whose]):
        home[whose] = load.index(min(load))
        load[home[whose]] += rows[whose] or 1
    return [tuple(one for one in assignments if home[_whose(one)] == task) for task in range(tasks)]


def _whose(one: Assignment) -> Any:
    return one.spec.name, one.part


def outcomes_of(
    assignments: Sequence[Assignment], tasks: Sequence[Sequence[Assignment]], rows: Iterable[Report]
) -> list[Outcome]:
    """One outcome for each assignment, from the reports of the tasks it was shared out to."""
    whole: list[Result] = []
    # Of a subscription that was cut, by name: the results of each part. A part without any wanted nothing.
    cut: dict[str, list[list[Result]]] = {}
    for mine, told in zip(tasks, by_task(rows, len(tasks)), strict=True):
        parts = {one.spec.name: list[Result]() for one in mine if one.part is not None}
        for result in results_of(mine, told):
            parts.get(result.subscription, whole).append(result)
        for name, results in parts.items():
            cut.setdefault(name, []).append(results)
    outcomes = fold(assignments, whole)
    return [
        joined(one, cut[one.spec.name]) if one.spec.name in cut else outcome
        for one, outcome in zip(assignments, outcomes, strict=True)
    ]


def row_of(result: Result) -> Report:
    return {**outcome_fields(result.outcome), "batch": result.batch, "through": result.through}


def results_of(assignments: Sequence[Assignment], rows: Iterable[Mapping[str, Any]]) -> Iterator[Result]:
    places = {assignment.spec.name: assignment.span.place for assignment in assignments}
    for row in rows:
        yield Result(places[row["subscription"]], row["batch"], outcome_of(row), row["through"])
