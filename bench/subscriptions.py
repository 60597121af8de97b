"""How matching grows with the number of subscriptions: 100 000 events against 10 and against 1 000 predicates.

Both sets match equally many events in all: a predicate of the small set matches a hundred times as many as one of the
large set. Of each set 60 % ask for a stream, an operation and the value of a path; 30 % for the value of a path and a
range; 10 % for something no index knows. What is measured is what a delivery does before it posts: each event is
matched, and the rows of each subscription are read, in the task that would post them.

Then a batch of 200 events as a lane matches it, in memory and without Spark; and 10 000 subscriptions (`many.py`).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.many import ten_thousand
from bench.report import Report, say
from evermark.delivery.model import Cursor, SourcePartition, SubscriptionSpec
from evermark.delivery.run.post import Posting
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.embedded.java import ensure_java
from evermark.event import taken_batch
from evermark.log.write import BatchWriter
from evermark.secrets import KeyRef, SecretBox

if TYPE_CHECKING:
    from pyspark import SparkContext

_BOX = SecretBox(KeyRef("env", "BENCH_KEY"))
_EVENTS = 100_000
_FEW, _MANY = 10, 1_000
_RUNS = 5
_BATCH, _BATCH_RUNS = 200, 50


def _write(folder: Path, events: int) -> str:
    """A log file whose payloads say which of 10 and which of 1 000 predicates they are for."""
    folder.mkdir()
    began = datetime.now(UTC)
    columns = {
        "event_id": [str(uuid.UUID(int=n)) for n in range(events)],
        "position": [f"{n:016}" for n in range(events)],
        "stream": ["public.orders"] * events,
        "op": ["insert"] * events,
        "key": [str(n) for n in range(events)],
        "event_time": [began + timedelta(milliseconds=n) for n in range(events)],
        "payload": [_payload(n) for n in range(events)],
    }
    file = BatchWriter(folder, "shop", 0, 1).write_all([taken_batch(columns, events)])
    assert file is not None
    return str(folder / file.path)


def _payload(n: int) -> str:
    values = f'"of_10": "v{n % 10}", "of_1000": "v{n % 1000}", "total": {n // 1000 % 100}'
    return f'{{"id": {n}, {values}, "note": "{"x" * 40}"}}'


def _specs(count: int) -> list[SubscriptionSpec]:
    return [_spec(count, n) for n in range(count)]


def _spec(count: int, n: int) -> SubscriptionSpec:
    path = f"data.of_{count}"
    where, named = f"upper({path}) = 'V{n}'", False
    if n % 10 < 6:
        where, named = f"{path} = 'v{n}'", True
    elif n % 10 < 9:
        where = f"{path} = 'v{n}' and data.total >= 50"
    streams, ops = (("public.orders",), ("insert",)) if named else ((), ())
    return SubscriptionSpec(f"s{n}", "http://127.0.0.1:1/", streams=streams, ops=ops, where=where)


@dataclass(frozen=True)
class _Count:
    posting: Posting

    def __call__(self, _number: int) -> Iterator[dict[str, Any]]:
        from evermark.delivery.run.post import by_subscription

        in_doubt: set[str] = set()
        found = self.posting.wanted([], in_doubt)
        rows = sum(mine.num_rows for wanted in found for _, _, mine in by_subscription(*wanted))
        yield {"rows": rows, "in_doubt": len(in_doubt)}


def _match(context: SparkContext, span: Span, specs: list[SubscriptionSpec]) -> tuple[float, int]:
    from evermark.spark.job import run_tasks

    posting = Posting(tuple(Assignment(span, spec) for spec in specs), _BOX, DeliveryOptions(historical=True))
    began = time.perf_counter()
    found = run_tasks(context, 1, _Count(posting), "matching failed")[0]
    assert not found["in_doubt"], found
    return time.perf_counter() - began, found["rows"]


def _match_here(rows: pa.Table, count: int, report: Report) -> list[float]:
    """Milliseconds that a lane takes to match a batch; the first time, which makes all ready, is left out."""
    from evermark.predicate import vetted
    from evermark.predicate.index import Filter
    from evermark.predicate.matcher import matcher_of

    matcher = matcher_of([Filter(spec.streams, spec.ops, vetted(spec.where)) for spec in _specs(count)])
    taken = []
    for _ in range(_BATCH_RUNS + 1):
        began = time.perf_counter()
        found = matcher.wanted(rows)
        taken.append((time.perf_counter() - began) * 1_000)
        report.lost += len(found.unsure)
    return taken[1:]


def run(scale: float, folder: Path) -> Report:
    from evermark.spark.session import make_session

    report = Report()
    events = max(1_000, int(_EVENTS * scale) // 1_000 * 1_000)
    path = _write(folder / "log", events)
    os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
    spark = make_session("bench", "local[16,4]", folder / "scratch", {}, noise=folder / "spark.log")
    span = Span(SourcePartition("shop", 0), Cursor(0), 1, (path,), events, exact=True)
    taken: dict[int, list[float]] = {_FEW: [], _MANY: []}
    wanted = sum(1 for n in range(events) for k in (n % _FEW,) if k < 6 or (k < 9 and n // 1000 % 100 >= 50) or k == 9)
    try:
        for turn in range(_RUNS + 1):
            for count in (_FEW, _MANY):
                seconds, rows = _match(spark.sparkContext, span, _specs(count))
                report.lost += abs(wanted - rows)
                if turn:
                    taken[count].append(seconds)
                say(f"{count} predicates: {seconds:.2f} s, {rows} matches")
    finally:
        spark.stop()
    few, many = (report.spread(f"s_{count}", taken[count]) for count in (_FEW, _MANY))
    report.ratios["growth"] = many / few
    batch = pq.read_table(path).slice(0, _BATCH)
    few, many = (report.spread(f"ms_batch_{count}", _match_here(batch, count, report)) for count in (_FEW, _MANY))
    report.ratios["growth_batch"] = many / few
    ten_thousand(report, scale, folder / "many")
    return report
