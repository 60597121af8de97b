"""`make chaos ARGS="--copy ROWS"`: a full table is copied beside writes by a process that is killed three times.

At the end the table that the log implies is compared with the table, row by row.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evermark.log.read import LogReader
from evermark.testing.copied_shop import CopiedShop, ItemWriter
from evermark.testing.pipeline import Ledger
from evermark.testing.until import until

_KILLS = 3
_PATIENCE_S = 3600.0
_SAMPLE_S = 0.5
_COLUMNS = ["event_id", "batch", "position", "key", "previous_key", "op", "payload"]
_PIECE = 100_000
_RECORD_OPS = {"insert", "update", "delete", "read"}


class PeakMemory(threading.Thread):
    """The most that all processes of the instances took together; pages they share are counted for each."""

    def __init__(self) -> None:
        super().__init__(name="memory", daemon=True)
        self._done, self._pid, self.mb = threading.Event(), 0, 0.0

    def watch(self, pid: int) -> None:
        self._pid = pid

    def run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            with suppress(psutil.Error):
                main = psutil.Process(self._pid)
                self.mb = max(self.mb, sum(_rss(each) for each in (main, *main.children(recursive=True))) / 2**20)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def _rss(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def copy_killed(folder: Path, dsn: str, rows: int) -> tuple[Ledger, dict[str, float]]:
    """What was counted. Raises when the log does not imply the table, or has an event twice."""
    seed = random.randrange(10**9)
    sys.stderr.write(f"seed {seed}\n")
    began = time.monotonic()
    with CopiedShop(folder, dsn, rows) as shop, PeakMemory() as memory:
        writer = ItemWriter(dsn, rows, seed)
        writer.start()
        try:
            for number in range(1, _KILLS + 1):
                before = _logged(shop)
                running = shop.up()
                memory.watch(running.process.pid)
                _wait_logged(shop, max(before, rows * number // (_KILLS + 1)))
                running.kill()
                sys.stderr.write(f"killed when {_logged(shop)} of {rows} rows were in the log\n")
            running = shop.up()
            memory.watch(running.process.pid)
            until(lambda: running.said("a copy is done"), "the copy is done", timeout_s=_PATIENCE_S)
        finally:
            writer.finish()
        seconds = time.monotonic() - began
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("insert into items values (0, 0, 'the last')")  # behind everything that was written
        until(lambda: _has_last(shop), "the log has all", timeout_s=_PATIENCE_S)
        assert running.terminate() == 0
        ledger = _compared(shop, dsn)
    assert ledger.lost == ledger.doubled == 0, f"seed {seed}: {ledger}"
    return ledger, {"kills": _KILLS, "memory_gb": memory.mb / 1024, "seconds": round(seconds)}


def _files(shop: CopiedShop) -> list[str]:
    return [file.path for file in LogReader(shop.folder / "data" / "log" / shop.source).files_if_any()]


def _logged(shop: CopiedShop) -> int:
    return sum(pq.read_metadata(path).num_rows for path in _files(shop))


def _wait_logged(shop: CopiedShop, rows: int) -> None:
    until(lambda: _logged(shop) > rows, f"more than {rows} rows are in the log", timeout_s=_PATIENCE_S)


def _has_last(shop: CopiedShop) -> bool:
    return any(pc.index(pq.read_table(path, columns=["key"])["key"], "0").as_py() >= 0 for path in _files(shop))


def _compared(shop: CopiedShop, dsn: str) -> Ledger:
    """A row is lost if the log implies none, or another one; or if it implies one that is not there."""
    events = pa.concat_tables([pq.read_table(path, columns=_COLUMNS) for path in _files(shop)])
    ids = Counter(events["event_id"].to_pylist())
    implied: dict[int, int] = {}
    order = pc.sort_indices(events, [("batch", "ascending"), ("position", "ascending")])
    for first in range(0, len(order), _PIECE):
        for row in events.take(order.slice(first, _PIECE)).to_pylist():
            if row["op"] in _RECORD_OPS:
                implied.pop(int(row["previous_key"] or row["key"]), None)
                if row["op"] != "delete":
                    implied[int(row["key"])] = hash(tuple(json.loads(row["payload"]).values()))
    there = same = 0
    with psycopg.connect(dsn) as conn, conn.cursor(name="rows") as cursor:
        for row in cursor.execute("select id, n, v from items"):
            there += 1
            same += implied.pop(row[0], None) == hash(tuple(row))
    return Ledger(there, events.num_rows, same, sum(ids.values()) - len(ids), there - same + len(implied))
