"""A backlog of changes that a database has committed, into the log, durable: ours and theirs in turns.

Against `pg_recvlogical` to /dev/null on the same WAL, and against Debezium's embedded engine up to its handler.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from bench.debezium import Debezium, Handled, debezium, postgres_connector
from bench.report import PeakMemory, Report, say
from bench.shop import flush_lsn, shop
from bench.taking import drain
from evermark.embedded.java import ensure_java
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.sources.base import Source
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate

_RUNS = 5
_RUNS_OF_SLOW = 2
_SLOW_S = 20.0
_WARM = 12_000
_DEBEZIUM_WARM = 100_000  # it takes Java about as many to compile what runs hot


class Backlog(ABC):
    """What is written, and how it is read."""

    tables: str  # for Debezium, with commas

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    @abstractmethod
    def subscribe(self, name: str) -> None:
        """A slot and a publication of this name, from here on."""

    @abstractmethod
    def source(self, name: str, state_dsn: str, schema: str) -> Source:
        """Ours, of that slot and publication."""

    @abstractmethod
    def write(self, events: int) -> None: ...

    @abstractmethod
    def rows_of(self, events: int) -> int:
        """How many rows the log has when it has so many events."""

    @abstractmethod
    def lost(self, ids: Sequence[str], events: int) -> int:
        """Of the events written last: those that are not among the ids in the log, or are there twice."""

    @abstractmethod
    def lost_by(self, handled: Handled, events: int) -> int:
        """The same of Debezium."""


class Ours:
    """One warm Spark session and one state, as a running instance has; each run drains a slot of its own."""

    def __init__(self, folder: Path) -> None:
        os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
        from evermark.spark.session import make_session

        self._folder = folder
        self._server = EmbeddedPostgres(folder / "state")
        self.dsn, self.schema = self._server.start(), schema_for("bench")
        self._state = State(lambda: self.dsn, self.schema)
        migrate(self._state)
        self._spark = make_session("bench", "local[16,4]", folder / "scratch", {}, noise=folder / "spark.log")

    def close(self) -> None:
        self._spark.stop()
        self._state.close()
        self._server.stop()

    def drain(self, source: Source, name: str, rows: int, start: str | None = None) -> tuple[float, list[str]]:
        return drain(self._spark.sparkContext, self._state, source, name, self._folder, rows, start)


def _theirs(server: EmbeddedPostgres, dsn: str, name: str, end: str) -> float:
    command = [
        str(server.binaries.tool("pg_recvlogical")),
        *("--dbname", dsn, "--slot", name, "--start", "--endpos", end, "--file", "/dev/null", "--no-loop"),
        *("--option", "proto_version=1", "--option", f"publication_names={name}"),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return time.perf_counter() - began


class _Rival:
    """Debezium's turns: five where one takes under 20 s, else two. Its slots are made before the backlog is written."""

    def __init__(self, engine: Debezium, backlog: Backlog) -> None:
        self._engine, self._backlog = engine, backlog
        self._slots = [f"bench_debezium_{i}" for i in range(_RUNS + 1)]
        for name in self._slots:
            backlog.subscribe(name)
        self._rates: list[float] = []
        self._seconds: list[float] = []
        self._rss_mb_peak = 0.0
        self._lost = 0

    def warm_up(self, events: int) -> None:
        say("warming up Debezium")
        self._handled(min(events, _DEBEZIUM_WARM))

    def turn(self, events: int) -> None:
        if len(self._seconds) >= _RUNS_OF_SLOW and max(self._seconds) >= _SLOW_S:
            return
        handled = self._handled(events)
        self._seconds.append(handled.seconds)
        self._rates.append(events / handled.seconds)
        self._lost += self._backlog.lost_by(handled, events)
        self._rss_mb_peak = handled.rss_mb_peak
        say(f"debezium {self._rates[-1]:,.0f}/s, lost {self._lost}")

    def _handled(self, events: int) -> Handled:
        self._engine.begin(self._slots.pop(), self._backlog.tables, events)
        return self._engine.end()

    def idle_mb(self) -> float:
        return self._engine.rss_mb()

    def tell(self, report: Report, ours: float) -> None:
        report.ratios["debezium"] = ours / report.spread("debezium_events_per_s", self._rates)
        report.figures["debezium_runs"] = len(self._rates)
        report.figures["debezium_rss_mb_peak"] = self._rss_mb_peak
        report.figures["debezium_lost"] = self._lost


def measured(kind: type[Backlog], events: int, folder: Path) -> Report:
    report = Report()
    with shop(folder, tcp=True) as server, debezium(postgres_connector(server), folder / "debezium") as engine:
        backlog = kind(server.dsn())
        say("warming up: session, workers, first batch")
        backlog.subscribe("bench_warm")
        ours = Ours(folder)
        try:
            backlog.write(_WARM)
            ours.drain(backlog.source("bench_warm", ours.dsn, ours.schema), "bench_warm", backlog.rows_of(_WARM))
            for i in range(_RUNS):
                backlog.subscribe(f"bench_ours_{i}")
                backlog.subscribe(f"bench_theirs_{i}")
            rival = _Rival(engine, backlog) if engine is not None else None
            say(f"writing {events} events")
            backlog.write(events)
            end = flush_lsn(backlog.dsn)
            if rival is not None:
                rival.warm_up(events)
            _in_turns(report, server, backlog, ours, rival, events, end)
        finally:
            ours.close()
    return report


def _in_turns(
    report: Report,
    server: EmbeddedPostgres,
    backlog: Backlog,
    ours: Ours,
    rival: _Rival | None,
    events: int,
    end: str,
) -> None:
    rates: list[float] = []
    their_rates: list[float] = []
    peaks_mb: list[float] = []
    for i in range(_RUNS):
        their_rates.append(events / _theirs(server, backlog.dsn, f"bench_theirs_{i}", end))
        if rival is not None:
            rival.turn(events)
        idle_mb = rival.idle_mb() if rival is not None else 0.0
        name = f"bench_ours_{i}"
        with PeakMemory() as memory:
            source = backlog.source(name, ours.dsn, ours.schema)
            seconds, ids = ours.drain(source, name, backlog.rows_of(events))
        peaks_mb.append(memory.mb - idle_mb)
        rates.append(events / seconds)
        report.lost += backlog.lost(ids, events)
        say(f"ours {rates[-1]:,.0f}/s, pg_recvlogical {their_rates[-1]:,.0f}/s, lost {report.lost}")
    middle = report.spread("events_per_s", rates)
    report.figures["rss_mb_peak"] = max(peaks_mb)
    report.spread("pg_recvlogical_events_per_s", their_rates)
    report.ratios["pg_recvlogical"] = middle / statistics.median(their_rates)
    if rival is not None:
        rival.tell(report, middle)
