"""What a batch costs as the log grows: with more commits before it, and with more events in it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from bench.report import Report, say
from evermark.checkpoints.stores import PostgresCheckpoints
from evermark.cluster.fence import source_lease
from evermark.cluster.liveness import this_process
from evermark.cluster.postgres import PostgresLeases
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.event import taken_batch
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.log.append import DeltaLog
from evermark.log.head import PostgresHeads
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.sources.base import Limit, Slice, Source
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate

_BATCH = 100
_SAMPLE = 60
MAINTENANCE_EVERY_S = 1.0


class _Numbers(Source):
    """Positions are the numbers themselves; only its beginning is ever asked for."""

    def partitions(self) -> list[int]:
        return [0]

    def earliest(self, partition: int) -> str:
        return f"{0:020d}"

    def latest(self, after: object, limit: Limit) -> dict[int, str]:
        return {}

    def slices(self, partition: int, start: str, end: str) -> list[Slice]:
        return [Slice(partition, start, end)]

    def read(self, piece: Slice) -> object:  # type: ignore[override]
        raise NotImplementedError(piece)


class _Log:
    """A log with its owner: real Delta table, real state, care on the clock it has in production."""

    def __init__(self, name: str, folder: Path, state: State) -> None:
        self.name = name
        self.folder = folder / name
        lease = PostgresLeases(state).acquire(source_lease(name), this_process("bench"), 3600.0)
        assert lease is not None
        self.epoch = lease.epoch
        self._log = DeltaLog(self.folder)
        self.taker = BatchTaker(
            name,
            lease.epoch,
            _Numbers(),
            self._log,
            LogReader(self.folder),
            PostgresHeads(state),
            PostgresCheckpoints(state),
        )
        self.taker.begin(0)
        self.batch = 0
        self.events = 0
        self._care = Maintenance(self.folder)
        self._cared = time.monotonic()

    def add(self, rows: int) -> float:
        """One batch of `rows`; the seconds it took, files included, care not."""
        began = time.perf_counter()
        self.taker.take(self._batch(rows))
        seconds = time.perf_counter() - began
        self.care()
        return seconds

    def fill(self, rows: int) -> None:
        """One commit more that is not measured, and so need not be durable; `settle` before the next `add`."""
        self._log.commit(self._batch(rows))
        self.care()

    def settle(self) -> None:
        self.taker.begin(0)

    def _batch(self, rows: int) -> WrittenBatch:
        first = self.events
        names = [f"{n:020d}" for n in range(first, first + rows)]
        columns = {
            "event_id": names,
            "position": names,
            "stream": ["public.orders"] * rows,
            "op": ["insert"] * rows,
            "key": names,
            "event_time": [1_700_000_000_000_000 + n for n in range(first, first + rows)],
            "payload": ['{"id": 1, "note": "' + "x" * 60 + '"}'] * rows,
        }
        self.batch += 1
        self.events += rows
        file = BatchWriter(self.folder, self.name, 0, self.batch).write_all([taken_batch(columns, rows)])
        assert file is not None
        start, end = f"{first:020d}", f"{self.events:020d}"
        return WrittenBatch(0, self.batch, self.epoch, start, end, (file,), controls=0)

    def care(self) -> None:
        if time.monotonic() - self._cared >= MAINTENANCE_EVERY_S:
            self._care.run()
            self._cared = time.monotonic()

    def grow_to(self, batches: int) -> None:
        while self.batch < batches:
            self.fill(_BATCH)
        self.settle()


def sampled(logs: dict[int, _Log]) -> dict[int, float]:
    """Median seconds of a batch in each log, taken in turns: what else the machine does hits all of them alike."""
    times: dict[int, list[float]] = {size: [] for size in logs}
    for _ in range(_SAMPLE):
        for size, log in logs.items():
            times[size].append(log.add(_BATCH))
    return {size: statistics.median(found) for size, found in times.items()}


def run(scale: float, folder: Path) -> Report:
    report = Report()
    server = EmbeddedPostgres(folder / "state")
    dsn = server.start()
    state = State(lambda: dsn, schema_for("bench"))
    migrate(state)
    try:
        _by_commits(report, folder, state, scale)
        _by_size(report, folder, state, scale)
    finally:
        state.close()
        server.stop()
    return report


def _by_commits(report: Report, folder: Path, state: State, scale: float) -> None:
    logs: dict[int, _Log] = {}
    for commits in (100, 4_000, 50_000):
        logs[commits] = _Log(f"commits_{commits}", folder, state)
        logs[commits].grow_to(max(20, int(commits * (1 if commits == 100 else scale))))
        say(f"{logs[commits].batch} commits written")
    for commits, seconds in sampled(logs).items():
        report.figures[f"ms_per_batch_{commits}"] = seconds * 1000
        say(f"after {logs[commits].batch} commits: {seconds * 1000:.1f} ms a batch")
    report.ratios["commits"] = report.figures["ms_per_batch_50000"] / report.figures["ms_per_batch_100"]
    for log in logs.values():
        report.lost += abs(log.events - sum(f.rows for f in LogReader(log.folder).files()))


def _by_size(report: Report, folder: Path, state: State, scale: float) -> None:
    logs: dict[int, _Log] = {}
    for events in (1_000_000, 20_000_000):
        log = logs[events] = _Log(f"size_{events}", folder, state)
        while log.events < events * scale:
            log.fill(100_000)
        log.settle()
        say(f"{log.events} events written")
    for events, seconds in sampled(logs).items():
        report.figures[f"us_per_event_{events}"] = seconds / _BATCH * 1e6
        say(f"with {logs[events].events} events: {seconds / _BATCH * 1e6:.1f} µs an event")
    report.ratios["log_size"] = report.figures["us_per_event_20000000"] / report.figures["us_per_event_1000000"]
