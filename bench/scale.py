"""The same work on one and on two executors of one core each: a replay and a catching up of several subscriptions.

A real standalone cluster; receivers that answer after 20 ms, with the concurrency of one subscription for each task: a
receiver that computes on the same cores would hide what an executor adds. Each subscription is a job of its own, as
replays and subscriptions that are behind are served. `cores_max` decides how many executors there are.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.receiver_child import ReceiverProcess
from bench.replay import _box as box_in
from bench.report import Report, say
from evermark.delivery.base import Cursor, Fate, SourcePartition, SubscriptionSpec
from evermark.delivery.replay.plan import ReplayWork
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.delivery.webhook.signing import new_secret
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.embedded.java import ensure_java
from evermark.errors import EvermarkError
from evermark.event import taken_batch
from evermark.log.write import BatchWriter
from evermark.testing.spark_clusters import SparkCluster, spark_cluster
from evermark.testing.until import until

if TYPE_CHECKING:
    from pyspark import SparkContext

_EVENTS = 4_000  # for each subscription
_SUBSCRIPTIONS = 4
_LATE_S = 0.02
_JOBS, _JOBS_AT_ONCE = 200, 8
_SECOND = timedelta(seconds=1)
_IDENT = re.compile(rb'"evermark":\{"v":1,"id":"([^"]+)"')


class _Log:
    """One file of events."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.began, self.rows = datetime.now(UTC), rows
        columns = {
            "event_id": [f"event-{n:08}" for n in range(rows)],
            "position": [f"{n:016}" for n in range(rows)],
            "stream": ["public.orders"] * rows,
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


class _Bench:
    def __init__(self, report: Report, folder: Path, cluster: SparkCluster, log: _Log) -> None:
        self._report, self._folder, self._cluster, self._log = report, folder, cluster, log
        self._box = box_in(folder)

    def on(self, executors: int) -> tuple[float, float]:
        """Events a second, replayed and caught up with, on a context of its own."""
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

            def replay(spec: SubscriptionSpec) -> bool:
                return deliverer.replay(self._log.replay(spec)).outcome.fate is Fate.DONE

            def catch_up(spec: SubscriptionSpec) -> bool:
                found = deliverer.deliver([self._log.assignment(spec)], DeliveryOptions(historical=True))
                return found[0].fate is Fate.DONE

            self._rate(replay)  # each executor starts its Python
            rates = self._rate(replay), self._rate(catch_up)
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
            list(pool.map(lambda _: run_tasks(context, 1, nothing, "an empty job failed"), range(_JOBS)))
        self._report.figures["jobs_per_s"] = _JOBS / (time.perf_counter() - began)

    def _rate(self, work: Callable[[SubscriptionSpec], bool]) -> float:
        paths = [self._folder / f"received-{n}" for n in range(_SUBSCRIPTIONS)]
        with ExitStack() as stack:
            receivers = [stack.enter_context(ReceiverProcess(path, _LATE_S)) for path in paths]
            specs = [self._spec(number, receiver) for number, receiver in enumerate(receivers)]
            began = time.perf_counter()
            with ThreadPoolExecutor(_SUBSCRIPTIONS) as pool:
                if not all(pool.map(work, specs)):
                    raise EvermarkError("a delivery was not done", hint="see spark.log")
            seconds = time.perf_counter() - began
        for path in paths:
            seen: Sequence[bytes] = _IDENT.findall(path.read_bytes())
            self._report.lost += self._log.rows - len(set(seen)) + len(seen) - len(set(seen))
            path.unlink()
        return _SUBSCRIPTIONS * self._log.rows / seconds

    def _spec(self, number: int, receiver: ReceiverProcess) -> SubscriptionSpec:
        return SubscriptionSpec(
            f"r{number}", receiver.url, (self._box.seal(new_secret()),), allow_networks=("127.0.0.0/8",)
        )


def run(scale: float, folder: Path) -> Report:
    report = Report()
    os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
    log = _Log(folder / "log", max(500, int(_EVENTS * scale)))
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    (folder / "cluster").mkdir()
    rates: dict[str, list[float]] = {}
    with spark_cluster(folder / "cluster", cores=1, env=env) as cluster:
        for worker in cluster.workers:
            worker.start()
        bench = _Bench(report, folder, cluster, log)
        for _ in range(2 if scale >= 1 else 1):
            for executors in (1, 2):
                replayed, caught_up = bench.on(executors)
                say(f"{executors} executors: replay {replayed:,.0f}/s, catching up {caught_up:,.0f}/s")
                rates.setdefault(f"replay_{executors}", []).append(replayed)
                rates.setdefault(f"deliver_{executors}", []).append(caught_up)
    middle = {name: report.spread(f"{name}_per_s", found) for name, found in rates.items()}
    report.ratios["two_cores_replay"] = middle["replay_2"] / middle["replay_1"]
    report.ratios["two_cores_deliver"] = middle["deliver_2"] / middle["deliver_1"]
    return report
