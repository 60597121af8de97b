"""Rows of one table copied beside its stream by a running instance, until they are durable in the log.

Against psql's `\\copy` of the same table to a file, fsynced, and Debezium's initial snapshot, up to its handler. A copy
by `start: copy` and one by `source backfill` are one mechanism; the second can be asked for again, of an instance that
is warm.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from pathlib import Path

import psycopg
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.debezium import Connector, Debezium, Handled, debezium, postgres_connector, subscribe
from bench.instance import Instance
from bench.report import PeakMemory, Report, say
from bench.shop import shop
from evermark.embedded.address import EmbeddedDsn
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.ingest.copying.postgres import StateCopies
from evermark.log.read import LogReader
from evermark.sources.copies import CopyState
from evermark.state.connection import State, schema_for

_ROWS, _ROWS_MIN = 5_000_000, 50_000
_RUNS = 3
_SLOW_S, _RUNS_OF_SLOW = 20.0, 2  # as in other benches: who takes longer has fewer turns
_WARM_ROWS = 100_000
_COPY_S_MAX = 900.0
_STREAM = "public.orders"
_TABLE = """
create table orders (id bigint primary key, customer text, total numeric(10, 2), made timestamptz, note text);
create table warm_java (like orders including all);
create table warm (id bigint primary key);
insert into warm select n from generate_series(1, 1000) n;
"""
_FILL = """
insert into {} select n, 'customer ' || n %% 1000, n %% 100000 / 100.0, now(), repeat('x', 40)
from generate_series(1, %s) n
"""
_CONFIG = """\
version: 1
name: bench
data: {data}
server: {{listen: "127.0.0.1:0"}}
sources:
  shop: {{type: postgres, dsn: "${{SHOP_DSN}}", mode: tables, tables: [public.orders, public.warm]}}
"""


def run(scale: float, folder: Path) -> Report:
    report = Report()
    rows = max(_ROWS_MIN, int(_ROWS * scale))
    with shop(folder, tcp=True) as server, debezium(_snapshots(server), folder / "debezium") as engine:
        say(f"writing {rows} rows")
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute(_TABLE)
            conn.execute(_FILL.format("orders").encode(), (rows,))
            if engine is not None:
                conn.execute(_FILL.format("warm_java").encode(), (_WARM_ROWS,))
            conn.execute("analyze")
        place = folder / "ours"
        place.mkdir()
        rival = _Rival(engine, server.dsn(), rows) if engine is not None else None
        with Instance(place, _CONFIG.format(data=place / "data"), {"SHOP_DSN": server.dsn()}) as instance:
            _measure(report, server, instance, place, rows, rival)
    return report


def _snapshots(server: EmbeddedPostgres) -> Connector:
    return postgres_connector(server, snapshot_mode="initial")


class _Rival:
    """Debezium's turns: each by an engine that never was there before, and has the table to copy."""

    def __init__(self, engine: Debezium, dsn: str, rows: int) -> None:
        self._engine, self._dsn, self._rows = engine, dsn, rows
        self._seconds: list[float] = []
        self.lost = 0
        say("warming up Debezium")
        self._snapshot("bench_warm", "public.warm_java", _WARM_ROWS)

    def turn(self) -> None:
        if len(self._seconds) >= _RUNS_OF_SLOW and max(self._seconds) >= _SLOW_S:
            return
        handled = self._snapshot(f"bench_{len(self._seconds)}", _STREAM, self._rows)
        self._seconds.append(handled.seconds)
        self.lost += abs(self._rows - handled.events)
        say(f"debezium {self._rows / handled.seconds:,.0f}/s, lost {self.lost}")

    def idle_mb(self) -> float:
        return self._engine.rss_mb()

    def tell(self, report: Report, ours: float) -> None:
        rates = [self._rows / seconds for seconds in self._seconds]
        report.ratios["debezium"] = ours / report.spread("debezium_rows_per_s", rates)
        report.figures["debezium_lost"] = self.lost

    def _snapshot(self, name: str, table: str, rows: int) -> Handled:
        subscribe(self._dsn, name, table)
        self._engine.begin(name, table, rows)
        handled = self._engine.end()
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            conn.execute("select pg_drop_replication_slot(%s)", (name,))
        return handled


def _measure(
    report: Report, server: EmbeddedPostgres, instance: Instance, place: Path, rows: int, rival: _Rival | None
) -> None:
    dsn = EmbeddedDsn(place / "data" / "state")
    instance.wait_for(lambda: "reading" in (place / "up.log").read_text(), "it does not read", _COPY_S_MAX)
    state = State(dsn.open, schema_for("bench"))
    copies = StateCopies(state)
    try:
        say("warming up: tasks, a small copy")
        _copied(instance, copies, "public.warm")
        rates: list[float] = []
        theirs: list[float] = []
        peaks: list[float] = []
        for _ in range(_RUNS):
            theirs.append(rows / _psql(server, place / "copied.txt"))
            if rival is not None:
                rival.turn()
            idle_mb = rival.idle_mb() if rival is not None else 0.0
            with PeakMemory() as memory:
                seconds, told = _copied(instance, copies, _STREAM)
            rates.append(rows / seconds)
            peaks.append(memory.mb - idle_mb)
            report.lost += abs(rows - told)
            say(f"ours {rates[-1]:,.0f}/s, psql {theirs[-1]:,.0f}/s, lost {report.lost}")
        report.lost += abs(len(rates) * rows - _read_ids(place / "data" / "log" / "shop"))
        middle = report.spread("rows_per_s", rates)
        report.figures["rss_mb_peak"] = max(peaks)
        report.spread("psql_copy_rows_per_s", theirs)
        report.ratios["psql_copy"] = middle / statistics.median(theirs)
        if rival is not None:
            rival.tell(report, middle)
    finally:
        state.close()


def _copied(instance: Instance, copies: StateCopies, stream: str) -> tuple[float, int]:
    """Seconds from the request until all is in the log and checkpointed; and how many rows."""
    began = time.perf_counter()
    asked = copies.request("shop", stream, "")

    def is_done() -> bool:
        return any(copy.id == asked.id and copy.state is CopyState.DONE for copy in copies.listed("shop"))

    instance.wait_for(is_done, f"{stream} is not copied", _COPY_S_MAX)
    seconds = time.perf_counter() - began
    return seconds, next(copy.rows for copy in copies.listed("shop") if copy.id == asked.id)


def _read_ids(folder: Path) -> int:
    """How many different rows of copies the log holds."""
    found: set[str] = set()
    for file in LogReader(folder).files():
        table = pq.read_table(file.path, columns=["event_id", "op", "stream"])
        mine = pc.and_(pc.equal(table["op"], "read"), pc.equal(table["stream"], _STREAM))
        found.update(table["event_id"].filter(mine).to_pylist())
    return len(found)


def _psql(server: EmbeddedPostgres, out: Path) -> float:
    began = time.perf_counter()
    command = [str(server.binaries.tool("psql")), "--dbname", server.dsn(), "--command", f"\\copy orders to '{out}'"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    with out.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    out.unlink()
    return seconds
