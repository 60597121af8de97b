"""The public format: 300 000 events in 60 files, read by `spark.read.format("evermark")` in a person's own Spark.

Theirs is `spark.read.parquet` of the same folder, in the same session, in turns. `where` asks for one stream and one
batch, and brings keys and payloads; `count` counts all, `count_named` with the option `columns`, `count_log` is that of
`evermark.Log.read`. The session is one as a person makes it, told to push conditions
(`spark.sql.python.filterPushdown.enabled`). The first turns, which start Python and warm the JVM, do not count.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bench.report import Report, say
from evermark import Log
from evermark.embedded.java import ensure_java
from evermark.event import taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.write import BatchWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EVENTS, _FILES, _STREAMS = 300_000, 60, 10
_TURNS, _WARM = 5, 2


def run(scale: float, folder: Path) -> Report:
    report = Report()
    os.environ |= {"JAVA_HOME": str(ensure_java(folder / "java")), "PYSPARK_PYTHON": sys.executable}
    from pyspark.sql import SparkSession

    rows = max(1_000, int(_EVENTS * scale) // _FILES)
    _fill(folder / "log" / "shop", rows)
    quiet: dict[str, Any] = {"spark.ui.showConsoleProgress": "false", "spark.sql.python.filterPushdown.enabled": "true"}
    spark = SparkSession.builder.master("local[*]").config(map=quiet).getOrCreate()
    try:
        _measure(report, spark, folder / "log", rows)
    finally:
        spark.stop()
    return report


def _fill(folder: Path, rows: int) -> None:
    log = DeltaLog(folder)
    for batch in range(1, _FILES + 1):
        numbers = np.arange((batch - 1) * rows, batch * rows).tolist()
        columns: dict[str, object] = {
            "event_id": [f"{n:040x}" for n in numbers],
            "position": [f"0123456789abcdef00000001:{n // 1000:016x}:{2 * (n % 1000) + 1:08x}" for n in numbers],
            "stream": [f"public.table_{n % _STREAMS}" for n in numbers],
            "op": ["insert"] * rows,
            "key": list(map(str, numbers)),
            "tx": [str(n // 1000) for n in numbers],
            "event_time": pa.array([1_700_000_000_000_000 + n for n in numbers]).cast(pa.timestamp("us", "UTC")),
            "payload": [
                f'{{"id": {n}, "total": "{n * 7919 % 100_000 / 100:.2f}", "note": "order {n}"}}' for n in numbers
            ],
            "schema_version": pa.array([1] * rows, pa.int32()),
        }
        file = BatchWriter(folder, "shop", 0, batch).write_all([taken_batch(columns, rows)])
        assert file is not None
        log.commit(Append(0, batch, 1, "", "", (file,)))


def _measure(report: Report, spark: SparkSession, log: Path, rows: int) -> None:
    batch = _FILES // 2

    def ours(**options: str) -> Any:
        return spark.read.format("evermark").option("log", str(log)).options(**options).load()

    def theirs() -> Any:
        return spark.read.parquet(str(log / "shop"))

    def one(frame: Any) -> Any:
        return frame.where(f"stream = 'public.table_3' and batch = {batch}").select("key", "payload")

    report.figures["tasks"] = one(ours()).rdd.getNumPartitions()
    report.figures["files"] = len(Log(log).files("shop"))
    found, every = len(range(3, rows, _STREAMS)), rows * _FILES
    asked: dict[str, tuple[Callable[[], int], Callable[[], int], int]] = {
        "where": (lambda: len(one(ours()).collect()), lambda: len(one(theirs()).collect()), found),
        "count": (lambda: ours().count(), lambda: theirs().count(), every),
        "count_named": (lambda: ours(columns="batch").count(), lambda: theirs().count(), every),
        "count_log": (lambda: Log(log).read(spark).count(), lambda: theirs().count(), every),
    }
    for name, (mine, plain, right) in asked.items():
        taken, taken_plain = _in_turns(mine, plain, right, report)
        report.ratios[name] = report.spread(f"{name}_s", taken) / report.spread(f"parquet_{name}_s", taken_plain)
        say(f"{name}: {report.figures[f'{name}_s']:.2f} s, {report.ratios[name]:.2f} of plain Parquet")


def _in_turns(
    ours: Callable[[], int], theirs: Callable[[], int], right: int, report: Report
) -> tuple[list[float], list[float]]:
    mine: list[float] = []
    plain: list[float] = []
    for turn in range(_WARM + _TURNS):
        for ask, taken in ((ours, mine), (theirs, plain)):
            began = time.perf_counter()
            report.lost += abs(right - ask())
            if turn >= _WARM:
                taken.append(time.perf_counter() - began)
    return mine, plain
