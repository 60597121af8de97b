"""A backlog of committed outbox events into the log, durable.

Against `pg_recvlogical` to /dev/null on the same WAL, and against Debezium's embedded engine up to its handler.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from pathlib import Path

from bench.debezium import Debezium, debezium
from bench.report import PeakMemory, Report, say
from bench.shop import event_ids, flush_lsn, prepare, shop, write
from bench.taking import drain
from evermark.embedded.java import ensure_java
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.target import PostgresTarget
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate

_EVENTS = 1_000_000
_RUNS = 5
_RUNS_OF_SLOW = 2
_SLOW_S = 20.0
_DEBEZIUM_WARM = 100_000  # it takes Java about as many to compile what runs hot


class Ours:
    """One warm Spark session and one state, as a running instance has; each run drains a slot of its own."""

    def __init__(self, folder: Path) -> None:
        os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
        from evermark.spark.session import make_session

        self._folder = folder
        self._server = EmbeddedPostgres(folder / "state")
        dsn = self._server.start()
        self._state = State(lambda: dsn, schema_for("bench"))
        migrate(self._state)
        self._spark = make_session("bench", "local[16,4]", folder / "scratch", {}, noise=folder / "spark.log")

    def close(self) -> None:
        self._spark.stop()
        self._state.close()
        self._server.stop()

    def drain(self, place: PostgresTarget, events: int) -> tuple[float, list[str]]:
        return drain(self._spark, self._state, PostgresOutbox(place), place.slot, self._folder, events)


def _theirs(server: EmbeddedPostgres, dsn: str, name: str, end: str) -> float:
    command = [
        str(server.binaries.tool("pg_recvlogical")),
        *("--dbname", dsn, "--slot", name, "--start", "--endpos", end, "--file", "/dev/null", "--no-loop"),
        *("--option", "proto_version=1", "--option", f"publication_names={name}"),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return time.perf_counter() - began


class _Debezium:
    """Its turns: five where one takes under 20 s, else two. Its slots are made before the backlog is written."""

    def __init__(self, engine: Debezium, dsn: str) -> None:
        self._engine = engine
        self._slots = [prepare(dsn, f"bench_debezium_{i}").slot for i in range(_RUNS + 1)]
        self._rates: list[float] = []
        self._seconds: list[float] = []
        self._rss_mb_peak = 0.0
        self._lost = 0

    def warm_up(self, events: int) -> None:
        self._engine.begin(self._slots.pop(), "pgstream.events", min(events, _DEBEZIUM_WARM))
        self._engine.end()

    def turn(self, expected: set[str]) -> None:
        if len(self._seconds) >= _RUNS_OF_SLOW and max(self._seconds) >= _SLOW_S:
            return
        self._engine.begin(self._slots.pop(), "pgstream.events", len(expected))
        handled = self._engine.end()
        self._seconds.append(handled.seconds)
        self._rates.append(len(expected) / handled.seconds)
        self._lost += len(expected - handled.at.keys()) + (handled.events - len(handled.at))
        self._rss_mb_peak = handled.rss_mb_peak
        say(f"debezium {self._rates[-1]:,.0f}/s, lost {self._lost}")

    def idle_mb(self) -> float:
        return self._engine.rss_mb()

    def tell(self, report: Report, ours: float) -> None:
        report.ratios["debezium"] = ours / report.spread("debezium_events_per_s", self._rates)
        report.figures["debezium_runs"] = len(self._rates)
        report.figures["debezium_rss_mb_peak"] = self._rss_mb_peak
        report.figures["debezium_lost"] = self._lost


def run(scale: float, folder: Path) -> Report:
    report = Report()
    events = max(4_000, int(_EVENTS * scale) // 4_000 * 4_000)
    with shop(folder, tcp=True) as server, debezium(server, folder / "debezium") as engine:
        dsn = server.dsn()
        say("warming up: session, workers, first batch")
        warm = prepare(dsn, "bench_warm")
        ours = Ours(folder)
        try:
            write(dsn, 4_000)
            ours.drain(warm, 4_000)
            already = event_ids(dsn)
            mine = [prepare(dsn, f"bench_ours_{i}") for i in range(_RUNS)]
            others = [prepare(dsn, f"bench_theirs_{i}") for i in range(_RUNS)]
            rival = _Debezium(engine, dsn) if engine is not None else None
            say(f"writing {events} events")
            write(dsn, events)
            end = flush_lsn(dsn)
            expected = event_ids(dsn) - already
            if rival is not None:
                say("warming up Debezium")
                rival.warm_up(events)
            rates: list[float] = []
            their_rates: list[float] = []
            peaks_mb: list[float] = []
            for place, other in zip(mine, others, strict=True):
                their_rates.append(events / _theirs(server, dsn, other.slot, end))
                if rival is not None:
                    rival.turn(expected)
                idle_mb = rival.idle_mb() if rival is not None else 0.0
                with PeakMemory() as memory:
                    seconds, ids = ours.drain(place, events)
                peaks_mb.append(memory.mb - idle_mb)
                rates.append(events / seconds)
                report.lost += len(expected - set(ids)) + (len(ids) - len(set(ids)))
                say(f"ours {rates[-1]:,.0f}/s, pg_recvlogical {their_rates[-1]:,.0f}/s, lost {report.lost}")
            middle = report.spread("events_per_s", rates)
            report.figures["rss_mb_peak"] = max(peaks_mb)
            report.spread("pg_recvlogical_events_per_s", their_rates)
            report.ratios["pg_recvlogical"] = middle / statistics.median(their_rates)
            if rival is not None:
                rival.tell(report, middle)
        finally:
            ours.close()
    return report
