"""The same work on one and on two executors of one core each: one replay and one hot subscription, which tasks share by
key; four of each; a thousand subscriptions; and the taking of block streams with 1, 4 and 16 partitions.

A real standalone cluster; receivers that answer after 20 ms, with 20 connections for each task: one that computes
on the same cores would hide what an executor adds. Of four each subscription is a job of its own, as replays and
subscriptions that are behind are served; a thousand share four jobs, as those that are behind share turns. The node of
the block streams answers after 20 ms, too. `cores_max` decides how many executors there are.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.nodes import Kept, create, fill
from bench.receiver_child import ReceiverProcess
from bench.replay import _box as box_in
from bench.report import Report, say
from bench.taking import drain
from evermark.delivery.model import Cursor, Fate, SourcePartition, SubscriptionSpec
from evermark.delivery.replay.plan import ReplayWork
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.delivery.webhook.signing import new_secret
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.embedded.java import ensure_java
from evermark.errors import EvermarkError
from evermark.event import taken_batch
from evermark.log.write import BatchWriter
from evermark.sources.blocks.source import BlockStreams
from evermark.testing.blocknodes import Node
from evermark.testing.spark_clusters import SparkCluster, spark_cluster
from evermark.testing.until import until

if TYPE_CHECKING:
    from pyspark import SparkContext

    from evermark.spark.deliver import SparkDeliverer

_EVENTS = 4_000  # for each subscription
_SUBSCRIPTIONS = 4
_MANY_SUBSCRIPTIONS = 1_000
_STREAMS, _BLOCK_EVENTS = 64, 40_000
_PARTITIONS = (1, 4, 16)
_LATE_S, _CONNECTIONS = 0.02, 20
_JOBS, _JOBS_AT_ONCE = 200, 8
_SECOND = timedelta(seconds=1)
_IDENT = re.compile(rb'"evermark":\{"v":1,"id":"([^"]+)"')


class _Log:
    """One file of events, of so many streams in turn."""

    def __init__(self, folder: Path, rows: int, streams: int = 1) -> None:
        self.began, self.rows, self.streams = datetime.now(UTC), rows, streams
        columns = {
            "event_id": [f"event-{n:08}" for n in range(rows)],
            "position": [f"{n:016}" for n in range(rows)],
            "stream": [f"orders_{n % streams}" for n in range(rows)],
            "op": ["insert"] * rows,
            "key": [str(n) for n in range(rows)],
            "event_time": [self.began + timedelta(microseconds=n) for n in range(rows)],
            "payload": [f'{{"id": {n}, "note": "{"x" * 60}"}}' for n in range(rows)],
        }
        folder.mkdir()
        file = BatchWriter(folder, "shop", 0, 1).write_all([taken_batch(columns, rows)])
        assert file is not None
        self._paths = (str(folder / file.path),)

    def assignment(self, spec: SubscriptionSpec) -> Assignment:
        return Assignment(Span(SourcePartition("shop", 0), Cursor(0), 1, self._paths, self.rows, exact=True), spec)

    def replay(self, spec: SubscriptionSpec) -> ReplayWork:
        whole = TimeSlice(Mark(self.began - _SECOND), self.began + 60 * _SECOND, self._paths, self.rows)
        return ReplayWork("bench", whole, spec, (), None, None, self.rows, 3600.0, False, 0)


class _Streams:
    """Block streams with events in a node that answers late; each reading is a source of its own."""

    def __init__(self, folder: Path, node: Node, events: int) -> None:
        folder.mkdir()
        self._folder, self._node, self._kept, self._runs = folder, node, Kept(folder), 0
        self._names = [f"stream-{n}" for n in range(_STREAMS)]
        create(node, self._names)
        client = node.client()
        self._ids = {each for name in self._names for each in fill(client, name, events // _STREAMS)}
        client.close()

    def rate(self, report: Report, context: SparkContext, partitions: int) -> float:
        self._runs += 1
        name = f"run_{self._runs}"
        source = BlockStreams(self._kept.target(name, self._node, self._names, partitions))
        try:
            # The node itself writes an event at the beginning of each stream.
            count = len(self._ids) + _STREAMS
            seconds, ids = drain(context, self._kept.state, source, name, self._folder, count)
        finally:
            source.close()
        report.lost += len(self._ids - set(ids)) + len(ids) - len(set(ids))
        return len(ids) / seconds

    def close(self) -> None:
        self._kept.close()


class _Bench:
    def __init__(
        self,
        report: Report,
        folder: Path,
        cluster: SparkCluster,
        logs: tuple[_Log, _Log, _Log],
        streams: _Streams,
        jobs: int,
    ) -> None:
        self._report, self._folder, self._cluster = report, folder, cluster
        self._log, self._hot, self._wide = logs
        self._streams, self._jobs = streams, jobs
        self._box = box_in(folder)

    def on(self, executors: int) -> dict[str, float]:
        """Events a second of each kind of work, on a context of its own."""
        from evermark.spark.deliver import SparkDeliverer
        from evermark.spark.engine import Engine
        from evermark.spark.session import make_context

        conf = {"spark.cores.max": str(executors), "spark.executor.cores": "1", "spark.executor.memory": "512m"}
        noise = self._folder / "spark.log"
        context = make_context(
            "bench", self._cluster.url, self._folder / "scratch", conf, noise, daemon="evermark.app.daemon"
        )
        engine = Engine(context, on_cluster=True)
        try:
            spark: Any = context._jsc.sc()  # PySpark does not know its executors
            until(lambda: len(spark.statusTracker().getExecutorInfos()) == executors + 1, "the executors have come")
            deliverer = SparkDeliverer(context, self._box)

            def replay(log: _Log, spec: SubscriptionSpec) -> bool:
                return deliverer.replay(log.replay(spec)).outcome.fate is Fate.DONE

            def catch_up(log: _Log, spec: SubscriptionSpec) -> bool:
                found = deliverer.deliver([log.assignment(spec)], DeliveryOptions(historical=True))
                return found[0].fate is Fate.DONE

            self._rate(replay)  # each executor starts its Python
            rates = {"four_replays": self._rate(replay), "four_subscriptions": self._rate(catch_up)}
            for name, work in (("replay", replay), ("deliver", catch_up)):
                rates[name] = self._rate(work, self._hot, 1, _CONNECTIONS * executors)
            rates["subscriptions"] = self._subscriptions_rate(deliverer)
            for partitions in _PARTITIONS:
                rates[f"ingest_{partitions}_partitions"] = self._streams.rate(self._report, context, partitions)
            self._jobs_a_second(context)
            return rates
        finally:
            engine.stop()

    def _jobs_a_second(self, context: SparkContext) -> None:
        """How many jobs with nothing to do the driver gets done: what it costs to plan, send and hear of one."""
        from evermark.spark.job import run_tasks
        from evermark.spark.session import nothing  # executors do not have this program

        began = time.perf_counter()
        with ThreadPoolExecutor(_JOBS_AT_ONCE) as pool:
            list(pool.map(lambda _: run_tasks(context, 1, nothing, "an empty job failed"), range(self._jobs)))
        self._report.figures["jobs_per_s"] = self._jobs / (time.perf_counter() - began)

    def _rate(
        self,
        work: Callable[[_Log, SubscriptionSpec], bool],
        log: _Log | None = None,
        subscriptions: int = _SUBSCRIPTIONS,
        connections: int = _CONNECTIONS,
    ) -> float:
        given = log or self._log
        paths = [self._folder / f"received-{n}" for n in range(subscriptions)]
        with ExitStack() as stack:
            receivers = [stack.enter_context(ReceiverProcess(path, _LATE_S)) for path in paths]
            specs = [replace(self._spec(n, receiver), concurrency=connections) for n, receiver in enumerate(receivers)]
            began = time.perf_counter()
            with ThreadPoolExecutor(subscriptions) as pool:
                if not all(pool.map(lambda spec: work(given, spec), specs)):
                    raise EvermarkError("a delivery was not done", hint="see spark.log")
            seconds = time.perf_counter() - began
        for path in paths:
            seen: Sequence[bytes] = _IDENT.findall(path.read_bytes())
            self._report.lost += given.rows - len(set(seen)) + len(seen) - len(set(seen))
            path.unlink()
        return subscriptions * given.rows / seconds

    def _subscriptions_rate(self, deliverer: SparkDeliverer) -> float:
        """A stream for each of the subscriptions, which share as many jobs as there are receivers."""
        paths, count = [self._folder / f"received-{n}" for n in range(_SUBSCRIPTIONS)], self._wide.streams
        with ExitStack() as stack:
            receivers = [stack.enter_context(ReceiverProcess(path, _LATE_S)) for path in paths]
            secret = self._box.seal(new_secret())
            specs = [self._spec(n, receivers[n % len(receivers)], secret, f"orders_{n}") for n in range(count)]

            def deliver(job: int) -> bool:
                mine = [self._wide.assignment(spec) for spec in specs[job :: len(receivers)]]
                return all(o.fate is Fate.DONE for o in deliverer.deliver(mine, DeliveryOptions(historical=True)))

            began = time.perf_counter()
            with ThreadPoolExecutor(len(receivers)) as pool:
                if not all(pool.map(deliver, range(len(receivers)))):
                    raise EvermarkError("a delivery was not done", hint="see spark.log")
            seconds = time.perf_counter() - began
        seen = [ident for path in paths for ident in _IDENT.findall(path.read_bytes())]
        self._report.lost += self._wide.rows - len(set(seen)) + len(seen) - len(set(seen))
        for path in paths:
            path.unlink()
        return self._wide.rows / seconds

    def _spec(
        self, number: int, receiver: ReceiverProcess, secret: str | None = None, stream: str | None = None
    ) -> SubscriptionSpec:
        return SubscriptionSpec(
            f"r{number}",
            receiver.url,
            (secret or self._box.seal(new_secret()),),
            streams=() if stream is None else (stream,),
            allow_networks=("127.0.0.0/8",),
        )


def run(scale: float, folder: Path) -> Report:
    report = Report()
    os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
    log = _Log(folder / "log", max(500, int(_EVENTS * scale)))
    hot = _Log(folder / "hot", _SUBSCRIPTIONS * log.rows)
    wide = _Log(folder / "wide", max(_MANY_SUBSCRIPTIONS, int(4 * _MANY_SUBSCRIPTIONS * scale)), _MANY_SUBSCRIPTIONS)
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    (folder / "cluster").mkdir()
    rates: dict[str, list[float]] = {}
    late = [{"fault": "late", "op": op, "seconds": _LATE_S} for op in ("miniblocks", "stream")]
    with ExitStack() as stack:
        node = stack.enter_context(Node(folder / "node", "--seal-events", "10", "--page-blocks", "5", faults=late))
        streams = _Streams(folder / "streams", node, max(4_000, int(_BLOCK_EVENTS * scale)))
        stack.callback(streams.close)
        cluster = stack.enter_context(spark_cluster(folder / "cluster", cores=1, env=env))
        for worker in cluster.workers:
            worker.start()
        bench = _Bench(report, folder, cluster, (log, hot, wide), streams, max(_JOBS // 5, int(_JOBS * scale)))
        for _ in range(2 if scale >= 1 else 1):
            for executors in (1, 2):
                for what, rate in bench.on(executors).items():
                    say(f"{executors} executors: {what} {rate:,.0f}/s")
                    rates.setdefault(f"{what}_{executors}", []).append(rate)
    middle = {name: report.spread(f"{name}_per_s", found) for name, found in rates.items()}
    for what in ("replay", "deliver", "subscriptions", "four_replays", "four_subscriptions"):
        report.ratios[f"two_cores_{what}"] = middle[f"{what}_2"] / middle[f"{what}_1"]
    most, one = f"ingest_{max(_PARTITIONS)}_partitions", f"ingest_{min(_PARTITIONS)}_partitions"
    report.ratios["two_cores_ingest"] = middle[f"{most}_2"] / middle[f"{most}_1"]
    report.ratios["partitions_16"] = middle[f"{most}_2"] / middle[f"{one}_2"]
    return report
