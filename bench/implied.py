"""The table that a log implies: of 1 000 000 keys out of 20 000 000 events, from nothing; again after 10 000 changes.

Ours is `Log.table` in a Spark session as a person makes it: every record (key and payload, which is what repairs and
comparisons read), made and thrown away. `first` begins without anything kept, and keeps whole rows; so it is measured
with their writing. `s_again_whole` is the same with every column. Theirs is the newest record of each key that
was not deleted, by DuckDB over the same files into a table of its own. The events are those of mode `tables`: inserts,
then updates with 1 % deletes among them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
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
from evermark.log.kept_shelf import FOLDER
from evermark.log.maintenance import Maintenance
from evermark.log.write import BatchWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EVENTS = 20_000_000
_KEYS = 1_000_000
_CHANGES = 10_000
_BATCH = 100_000
_RUNS = 5
_STREAM = "public.orders"
_DUCKDB = """
create or replace temp table implied as
select key, newest.payload from (
    select key, arg_max(struct_pack(op, payload), row(batch, position)) as newest
    from read_parquet({files})
    where stream = 'public.orders' and op in ('insert', 'update', 'delete', 'read', 'truncate') group by key
) where newest.op <> 'delete'
"""


class _Orders:
    """A log of one stream, and which event is the last of each key."""

    def __init__(self, folder: Path, keys: int) -> None:
        self.folder = folder / "shop"
        self._log = DeltaLog(self.folder)
        self._care = Maintenance(self.folder)
        self._rng = np.random.default_rng(7)
        self._batch = self.events = 0
        self.last = np.full(keys, -1, np.int64)  # by key; -1: not there

    def add(self, rows: int) -> None:
        first, keys = self.events, len(self.last)
        numbers = np.arange(first, first + rows)
        inserts = numbers < keys
        key = np.where(inserts, numbers, self._rng.integers(0, keys, rows))
        deletes = ~inserts & (self._rng.random(rows) < 0.01)
        self._batch += 1
        self.events += rows
        self.last[key] = np.where(deletes, -1, numbers)
        payloads = [
            f'{{"id": {k}, "n": {n}, "total": "{n * 7919 % 100_000 / 100:.2f}", "status": "paid", "note": "order {n}"}}'
            for k, n in zip(key.tolist(), numbers.tolist(), strict=True)
        ]
        columns: dict[str, object] = {
            "event_id": [f"{n:040x}" for n in numbers.tolist()],
            "position": [
                f"0123456789abcdef00000001:{n // 1000:016x}:{2 * (n % 1000) + 1:08x}" for n in numbers.tolist()
            ],
            "stream": pa.repeat(_STREAM, rows),
            "op": pa.array(np.where(deletes, "delete", np.where(inserts, "insert", "update"))),
            "key": pa.array(key).cast(pa.string()),
            "tx": pa.array(numbers // 1000).cast(pa.string()),
            "event_time": pa.array(1_700_000_000_000_000 + numbers).cast(pa.timestamp("us", "UTC")),
            "payload": pa.array(
                [None if gone else text for gone, text in zip(deletes.tolist(), payloads, strict=True)]
            ),
            "schema_version": pa.repeat(pa.scalar(1, pa.int32()), rows),
        }
        file = BatchWriter(self.folder, "shop", 0, self._batch).write_all([taken_batch(columns, rows)])
        assert file is not None
        self._log.commit(Append(0, self._batch, 1, "", "", (file,)))

    def care(self) -> None:
        while self._care.run().compacted:
            pass

    def amiss(self, spark: SparkSession) -> int:
        """How many rows of the table are not what they should be."""
        found = Log(self.folder.parent).table(spark, "shop", _STREAM)
        told = found.selectExpr("cast(key as bigint) as key", "cast(get_json_object(payload, '$.n') as bigint) as n")
        rows = told.toArrow()
        is_last = self.last[rows["key"].to_numpy()] == rows["n"].to_numpy()
        wanted = int((self.last >= 0).sum())
        return int((~is_last).sum()) + abs(wanted - int(rows.num_rows))


def _ours(spark: SparkSession, folder: Path, columns: Sequence[str] = ("key", "payload")) -> float:
    began = time.perf_counter()
    Log(folder.parent).table(spark, "shop", _STREAM).select(*columns).write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def _theirs(duckdb: Any, folder: Path) -> float:
    files = [file.path for file in Log(folder.parent).files("shop")]
    with duckdb.connect() as connection:
        began = time.perf_counter()
        connection.execute(_DUCKDB.format(files=files))
        return time.perf_counter() - began


def run(scale: float, folder: Path) -> Report:
    report = Report()
    os.environ |= {"JAVA_HOME": str(ensure_java(folder / "java")), "PYSPARK_PYTHON": sys.executable}
    from pyspark.sql import SparkSession

    duckdb = importlib.import_module("duckdb") if importlib.util.find_spec("duckdb") is not None else None
    if duckdb is None:
        say("no duckdb: its ratio is left out. It is in the extra `bench`")
    orders = _Orders(folder / "log", max(100, int(_KEYS * scale)))
    while orders.events < _EVENTS * scale:
        orders.add(min(_BATCH, max(1_000, int(_EVENTS * scale) - orders.events)))
        if orders.events % (20 * _BATCH) == 0:
            orders.care()
            say(f"{orders.events} events written")
    orders.care()
    spark = SparkSession.builder.master("local[*]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    try:
        _measured(report, spark, duckdb, orders, max(100, int(_CHANGES * scale)))
        report.lost = orders.amiss(spark)
    finally:
        spark.stop()
    return report


def _measured(report: Report, spark: SparkSession, duckdb: Any, orders: _Orders, changes: int) -> None:
    first: list[float] = []
    again: list[float] = []
    whole: list[float] = []
    theirs: list[float] = []
    for turn in range(_RUNS + 1):
        shutil.rmtree(orders.folder / FOLDER, ignore_errors=True)
        seconds = _ours(spark, orders.folder)
        if duckdb is not None:
            theirs.append(_theirs(duckdb, orders.folder))
        orders.add(changes)
        seconds_again = _ours(spark, orders.folder)
        orders.add(changes)
        seconds_whole = _ours(spark, orders.folder, ["*"])
        say(
            f"turn {turn}: first {seconds:.2f} s, again {seconds_again:.2f} s"
            + "".join(f", {t:.2f}" for t in theirs[-1:])
        )
        if turn:  # the first warms a JVM, and the disk's cache, for all
            first.append(seconds)
            again.append(seconds_again)
            whole.append(seconds_whole)
    report.spread("s_first", first)
    report.spread("s_again", again)
    report.spread("s_again_whole", whole)
    report.ratios["again"] = statistics.median(again) / statistics.median(first)
    if theirs:
        report.ratios["duckdb"] = statistics.median(first) / report.spread("duckdb_s", theirs[1:])
