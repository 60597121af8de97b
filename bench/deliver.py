"""Delivery: 100 000 events of the log to two receivers, one by one and in bundles of 100.

Ours is a batch of the live group from beginning to end: found, read, rendered, signed, posted by the task, results
folded, settled in State. Theirs: a bare aiohttp client that posts ready-made, unsigned bodies over as many connections
to the same receivers; and PgQueuer, a job queue in Postgres: a job for each event and receiver, enqueued before the
clock starts, its handler posting a ready-made body. `wire_*` is told beside it: the same bodies over our own
connections, which is as fast as Python gets here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from bench.bare import by_aiohttp, by_wire, wire_post
from bench.receiver_child import ReceiverProcess
from bench.replay import _box as box_in
from bench.report import Report, say
from bench.shop import shop
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.liveness import this_process
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.model import Cursor, MadeBy, SourcePartition, SubscriptionSpec
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.webhook.bundles import BUNDLE_LANES_MAX
from evermark.delivery.webhook.signing import new_secret
from evermark.delivery.work import Span
from evermark.embedded.java import ensure_java
from evermark.errors import EvermarkError
from evermark.event import taken_batch
from evermark.log.write import BatchWriter
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate

_EVENTS = 100_000
_RUNS = 5
_LONG_S = 20.0
_RECEIVERS = 2
_BUNDLE = 100
_CONCURRENCY = SubscriptionSpec("any", "").concurrency
_PLACE = SourcePartition("shop", 0)
_IDENT = re.compile(rb'"evermark":\{"v":1,"id":"([^"]+)"')


class _Ours:
    """A warm session and a state, as a running instance has."""

    def __init__(self, folder: Path, dsn: str, events: int) -> None:
        from evermark.spark.deliver import SparkDeliverer
        from evermark.spark.session import make_session

        os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
        self._folder, self._events, self._batch = folder / "log", events, 0
        self._folder.mkdir()
        self._box = box_in(folder)
        self._state = State(lambda: dsn, schema_for("bench"))
        migrate(self._state)
        self._store = PostgresDelivery(self._state)
        lease = PostgresLeases(self._state).acquire(DELIVER_LEASE, this_process("bench"), 3600.0)
        assert lease is not None
        self._epoch = lease.epoch
        self._spark = make_session("bench", "local[16,4]", folder / "scratch", {}, noise=folder / "spark.log")
        self._group = LiveGroup(
            self._store, SparkDeliverer(self._spark.sparkContext, self._box), self._epoch, lambda: datetime.now(UTC)
        )
        self._store.open_partition(_PLACE, 0, self._epoch)

    def close(self) -> None:
        self._spark.stop()
        self._state.close()

    def deliver(self, ports: Sequence[int], bundle: int) -> float:
        """Seconds for one batch, to everybody."""
        specs = [
            SubscriptionSpec(
                f"r{n}",
                f"http://127.0.0.1:{port}/",
                (self._box.seal(new_secret()),),
                bundle=bundle,
                allow_networks=("127.0.0.0/8",),
            )
            for n, port in enumerate(ports)
        ]
        self._store.register([], MadeBy.FILE, {}, self._epoch)
        self._store.register(specs, MadeBy.FILE, {}, self._epoch)
        span = self._next_batch()
        began = time.perf_counter()
        with self._group.lock:
            done = self._group.work(span, self._store.group(), budget_s=None)
        seconds = time.perf_counter() - began
        if not done or len(self._store.group().members) != len(ports):
            raise EvermarkError("a receiver left the group", hint="see spark.log")
        return seconds

    def _next_batch(self) -> Span:
        self._batch += 1
        rows, began = self._events, datetime.now(UTC)
        columns = {
            "event_id": [str(uuid.uuid4()) for _ in range(rows)],
            "position": [f"{self._batch:08}:{n:016}" for n in range(rows)],
            "stream": ["public.orders"] * rows,
            "op": ["insert"] * rows,
            "key": [str(n) for n in range(rows)],
            "event_time": [began + timedelta(microseconds=n) for n in range(rows)],
            "payload": [f'{{"id": {n}, "customer": "customer {n % 1000}", "note": "{"x" * 40}"}}' for n in range(rows)],
        }
        file = BatchWriter(self._folder, "shop", 0, self._batch).write_all([taken_batch(columns, rows)])
        assert file is not None
        path = str(self._folder / file.path)
        return Span(_PLACE, Cursor(self._batch - 1), self._batch, (path,), rows, exact=True)


def _pgqueuer(dsn: str, bodies: Sequence[bytes], ports: Sequence[int]) -> float:
    """Seconds until every job is done."""
    import asyncpg
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.models import Job
    from pgqueuer.qm import QueueManager
    from pgqueuer.queries import Queries
    from pgqueuer.types import QueueExecutionMode

    async def drained() -> float:
        given = psycopg.conninfo.conninfo_to_dict(dsn)
        names = {"host": "host", "port": "port", "user": "user", "dbname": "database", "passfile": "passfile"}
        connection = await asyncpg.connect(**{ours: given[key] for key, ours in names.items() if key in given})
        try:
            queries = Queries(AsyncpgDriver(connection))
            if not await queries.has_table("pgqueuer"):
                await queries.install()
            receivers = [f"r{n}" for n in range(len(ports))]
            for at in range(0, len(bodies), 5_000):
                for name in receivers:
                    some: list[bytes | None] = [*bodies[at : at + 5_000]]
                    await queries.enqueue([name] * len(some), some, [0] * len(some))
            manager: Any = QueueManager(queries)
            post, pool = wire_post()

            def handler(port: int) -> Callable[[Job], object]:
                async def handle(job: Job) -> None:
                    await post(port, job.payload or b"")

                return handle

            for name, port in zip(receivers, ports, strict=True):
                manager.entrypoint(name)(handler(port))
            began = time.perf_counter()
            await manager.run(batch_size=100, mode=QueueExecutionMode.drain)
            seconds = time.perf_counter() - began
            pool.close()
            return seconds
        finally:
            await connection.close()

    return asyncio.run(drained())


class _Bench:
    def __init__(self, report: Report, ours: _Ours, folder: Path, events: int) -> None:
        self._report, self._ours, self._folder, self._events = report, ours, folder, events

    def measure(self, name: str, bundle: int, lanes: int) -> list[bytes]:
        """In turns; the bodies of the last run of ours."""
        rates: list[float] = []
        theirs: dict[str, list[float]] = {"bare": [], "wire": []}
        bodies: list[bytes] = []
        taken = 0.0
        for turn in range(_RUNS + 1):
            seconds, bodies = self._turn(bundle)
            bare = self._received(partial(by_aiohttp, bodies, lanes=lanes))[0]
            wire = self._received(partial(by_wire, bodies, lanes=lanes))[0]
            say(f"{name}: ours {seconds:.2f} s, bare {bare:.2f} s, wire {wire:.2f} s, lost {self._report.lost}")
            taken += seconds
            if turn:
                rates.append(self._events * _RECEIVERS / seconds)
                theirs["bare"].append(self._events * _RECEIVERS / bare)
                theirs["wire"].append(self._events * _RECEIVERS / wire)
            if turn and taken > 3 * _LONG_S:
                break
        unit = "single_per_s" if bundle == 1 else "bundled_events_per_s"
        middle = self._report.spread(unit, rates)
        for who, found in theirs.items():
            self._report.spread(f"{who}_{unit}", found)
            self._report.ratios[f"{who}_{name}"] = middle / statistics.median(found)
        return bodies

    def _turn(self, bundle: int) -> tuple[float, list[bytes]]:
        seconds, spools = self._received(lambda ports: self._ours.deliver(ports, bundle))
        for spool in spools:
            seen = {ident for body in spool for ident in _IDENT.findall(body)}
            self._report.lost += self._events - len(seen)
        return seconds, spools[0]

    def _received(self, work: Callable[[list[int]], float]) -> tuple[float, list[list[bytes]]]:
        """What some work took, and what each receiver got meanwhile."""
        paths = [self._folder / f"received-{n}" for n in range(_RECEIVERS)]
        with ReceiverProcess(paths[0]) as one, ReceiverProcess(paths[1]) as other:
            seconds = work([one.port, other.port])
        found = [path.read_bytes().splitlines() for path in paths]
        for path in paths:
            path.unlink()
        return seconds, found

    def pgqueuer(self, dsn: str, bodies: list[bytes]) -> None:
        if importlib.util.find_spec("pgqueuer") is None:
            say("no PgQueuer here (it is in the extra `bench`): its ratio is left out")
            return
        some = bodies[: max(500, len(bodies) // 10)]  # a tenth: it would take minutes
        rates = []
        for _ in range(3):
            seconds, spools = self._received(lambda ports: _pgqueuer(dsn, some, ports))
            self._report.lost += sum(len(some) - len(spool) for spool in spools)
            rates.append(len(some) * _RECEIVERS / seconds)
            say(f"pgqueuer: {rates[-1]:,.0f}/s")
        self._report.spread("pgqueuer_per_s", rates)
        self._report.ratios["pgqueuer"] = self._report.figures["single_per_s"] / statistics.median(rates)


def run(scale: float, folder: Path) -> Report:
    report = Report()
    events = max(2_000, int(_EVENTS * scale))
    with shop(folder) as server:
        ours = _Ours(folder, server.dsn(), events)
        try:
            bench = _Bench(report, ours, folder, events)
            bench.measure("bundled", _BUNDLE, BUNDLE_LANES_MAX)
            bodies = bench.measure("single", 1, _CONCURRENCY)
            bench.pgqueuer(server.dsn(), bodies)
        finally:
            ours.close()
    return report
