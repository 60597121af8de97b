"""A window of the past out of five times as much: read in order, and delivered in bundles of 100.

Read: ours is the window's slices, read in order as a replay reads them and written to files by the tasks (Arrow, every
column); psql's is `\\copy (select … where created_at between … order by created_at, id) to` a file, from the same rows.
Delivered: ours is the whole replay, from its request to done, marks settled in State; theirs a bare aiohttp client that
posts ready-made, unsigned bodies of 100 events to the same receiver process over as many connections. `wire_bundled` is
told beside it: the same bodies over our own connections, which is as fast as Python gets here.
"""

from __future__ import annotations

import os
import re
import secrets
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa

from bench.bare import by_aiohttp, by_wire
from bench.receiver_child import ReceiverProcess
from bench.report import Report, say
from bench.shop import prepare, shop
from evermark.checkpoints.stores import PostgresCheckpoints
from evermark.cluster.base import Lease
from evermark.cluster.fence import DELIVER_LEASE, source_lease
from evermark.cluster.liveness import this_process
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.model import MadeBy, SourcePartition, SubscriptionSpec
from evermark.delivery.replay.plan import SLICES, AskedBy, ReplayWork, Request
from evermark.delivery.replay.postgres import PostgresReplays
from evermark.delivery.replay.replayer import Replayer
from evermark.delivery.replay.timeslice import Mark, TimeSlice, next_slice
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.webhook.bundles import BUNDLE_LANES_MAX
from evermark.delivery.webhook.signing import new_secret
from evermark.embedded.java import ensure_java
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.pieces import ReadFrom
from evermark.ingest.reading import ReadPlan, SourceReading
from evermark.log.append import DeltaLog
from evermark.log.head import PostgresHeads
from evermark.log.maintenance import Maintenance
from evermark.log.read import FileRange, LogReader
from evermark.log.row_reader import ROWS
from evermark.runtime import Threads
from evermark.secrets import KeyRef, SecretBox
from evermark.sources.base import Limit
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.target import PostgresTarget
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ALL = 5_000_000
_WINDOW = 1_000_000
_RUNS = 5
_BUNDLE = 100
_READERS = 2  # as many replay jobs as run at once
_CHUNK = 100_000
_COLUMNS = "id, stream, op, key, payload, before, schema_version, tx, created_at"
_INSERT = """
insert into pgstream.events (created_at, stream, op, key, payload)
select timestamptz '{begin}' + n * interval '1 millisecond', 'public.orders', 'insert', n::text,
       jsonb_build_object('id', n, 'customer', 'customer ' || n % 1000, 'note', repeat('x', 40))
from generate_series({first}::bigint, {last}::bigint) n
"""
_IDENT = re.compile(rb'"evermark":\{"v":1,"id":"([^"]+)"')


@dataclass(frozen=True)
class _Window:
    since: datetime
    until: datetime
    events: int


class _Rows:
    """The bench's events in Postgres, spread over time; the window is the middle of them."""

    def __init__(self, dsn: str, scale: float) -> None:
        self.dsn = dsn
        self.all = max(5_000, int(_ALL * scale))
        size = max(1_000, int(_WINDOW * scale))
        self.begin = datetime.now(UTC).replace(microsecond=0) - timedelta(milliseconds=self.all + 60_000)
        first = (self.all - size) // 2
        self.window = _Window(self._at(first), self._at(first + size - 1), size)

    def _at(self, n: int) -> datetime:
        return self.begin + timedelta(milliseconds=n)

    def write(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            for first in range(0, self.all, _CHUNK):
                last = min(first + _CHUNK, self.all) - 1
                conn.execute(_INSERT.format(begin=self.begin.isoformat(), first=first, last=last))
            conn.execute("vacuum analyze pgstream.events")

    def ids(self) -> set[str]:
        with psycopg.connect(self.dsn) as conn:
            rows = conn.execute(
                "select id from pgstream.events where created_at between %s and %s",
                (self.window.since, self.window.until),
            )
            return {str(row[0]) for row in rows}


class _Ours:
    """A warm session and a state, as a running instance has."""

    def __init__(self, folder: Path, place: PostgresTarget, events: int) -> None:
        os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
        from evermark.spark.session import make_session

        self.folder = folder
        self.source = place.slot
        self.log = folder / "log" / place.slot
        self._server = EmbeddedPostgres(folder / "state")
        dsn = self._server.start()
        self.state = State(lambda: dsn, schema_for("bench"))
        migrate(self.state)
        self.spark = make_session("bench", "local[16,4]", folder / "scratch", {}, noise=folder / "spark.log")
        self.reader = LogReader(self.log)
        self._drain(PostgresOutbox(place), events)
        Maintenance(self.log).run()
        say(f"the log has {sum(f.rows for f in self.reader.files())} events in {len(self.reader.files())} files")

    def close(self) -> None:
        self.spark.stop()
        self.state.close()
        self._server.stop()

    def lease(self, name: str) -> Lease:
        lease = PostgresLeases(self.state).acquire(name, this_process("bench"), 3600.0)
        assert lease is not None
        return lease

    def _drain(self, source: PostgresOutbox, events: int) -> None:
        heads, checkpoints = PostgresHeads(self.state), PostgresCheckpoints(self.state)
        epoch = self.lease(source_lease(self.source)).epoch
        taker = BatchTaker(self.source, epoch, source, DeltaLog(self.log), self.reader, heads, checkpoints)
        begun = taker.begin(0)
        assert begun.position is not None
        taken, runtime = 0, Threads()
        over = runtime.wake()
        too_late = threading.Timer(900, over.set)

        def on_taken(batch: WrittenBatch) -> None:
            nonlocal taken
            taken += batch.rows
            if taken >= events:
                over.set()

        reading = SourceReading(ReadFrom(self.source, source, str(self.log)), Limit(), runtime)
        plan = ReadPlan({0: begun.position}, {0: begun.batch}, {0: None})
        too_late.start()
        failed = reading.run(plan, taker, on_taken, [over])
        too_late.cancel()
        if failed:
            raise next(iter(failed.values()))

    def heads(self) -> dict[SourcePartition, tuple[int, datetime]]:
        long_ago = datetime(2000, 1, 1, tzinfo=UTC)
        return {SourcePartition(self.source, 0): (self.reader.tail_batch(0), long_ago)}

    def files(self, source: str) -> list[FileRange]:
        return self.reader.files()

    # read

    def read(self, window: _Window, out: Path) -> float:
        """Seconds to have the window, in order, in files."""
        out.mkdir(exist_ok=True)
        began = time.perf_counter()
        with ThreadPoolExecutor(_READERS) as pool:
            slices = enumerate(_slices(window, self.reader.files()))
            list(pool.map(lambda one: _land(self.spark, one[1], out / f"{one[0]:04}.arrow"), slices))
        return time.perf_counter() - began

    # deliver

    def deliver(self, window: _Window, receiver: ReceiverProcess) -> float:
        """Seconds from the request to the end of the replay."""
        from evermark.spark.deliver import SparkDeliverer

        store, replays = PostgresDelivery(self.state), PostgresReplays(self.state)
        box = _box(self.folder)
        lease = self.lease(DELIVER_LEASE)
        spec = SubscriptionSpec(
            "one", receiver.url, (box.seal(new_secret()),), bundle=_BUNDLE, allow_networks=("127.0.0.0/8",)
        )
        store.register([spec], MadeBy.FILE, {}, lease.epoch)
        replayer = Replayer(
            replays,
            store,
            self,
            SparkDeliverer(self.spark.sparkContext, box),
            lease.epoch,
            lambda: datetime.now(UTC),
            [self.source],
        )
        began = time.perf_counter()
        made = replays.request(Request(AskedBy.CLI, self.source, window.since, window.until), lease.epoch)
        while replays.one(made).state not in ("done", "failed"):
            for due in replayer.look()[1]:
                replayer.step(due, flowing=False)
        seconds = time.perf_counter() - began
        PostgresLeases(self.state).release(lease)
        return seconds


def _slices(window: _Window, files: list[FileRange]) -> Iterator[TimeSlice]:
    rows = min(SLICES.rows_max, -(-window.events // _READERS))
    piece = next_slice(Mark(window.since), window.until, files, rows)
    while piece is not None:
        yield piece
        piece = next_slice(piece.end, window.until, files, rows)


@dataclass(frozen=True)
class _ToFile:
    piece: TimeSlice
    out: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from evermark.spark.replay import places_here, rows_at

        rows = sum(0 for _ in batches)
        work = ReplayWork("", self.piece, SubscriptionSpec("bench", ""), (), None, None, 10**9, 0.0, False, 0)
        with pa.OSFile(self.out, "wb") as file, pa.ipc.new_stream(file, ROWS) as writer:
            for batch in rows_at(*places_here(work), self.piece.paths):
                writer.write_batch(batch)
                rows += batch.num_rows
        yield pa.RecordBatch.from_arrays([pa.array([rows])], names=["rows"])


def _land(spark: SparkSession, piece: TimeSlice, path: Path) -> int:
    land = _ToFile(piece, str(path))
    return sum(row[0] for row in spark.range(0, 1, 1, 1).mapInArrow(land, "rows bigint").collect())


def _landed(out: Path) -> list[str]:
    ids: list[str] = []
    for path in sorted(out.iterdir()):
        with pa.memory_map(str(path)) as file:
            ids += pa.ipc.open_stream(file).read_all()["event_id"].to_pylist()
        path.unlink()
    return ids


def _psql(server: EmbeddedPostgres, window: _Window, out: Path) -> float:
    query = (
        f"\\copy (select {_COLUMNS} from pgstream.events where created_at between '{window.since.isoformat()}'"
        f" and '{window.until.isoformat()}' order by created_at, id) to '{out}'"
    )
    began = time.perf_counter()
    command = [str(server.binaries.tool("psql")), "-qAt", "--dbname", server.dsn(), "-c", query]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return time.perf_counter() - began


def _box(folder: Path) -> SecretBox:
    path = folder / "key"
    if not path.exists():
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
    return SecretBox(KeyRef("file", str(path)))


def _received(path: Path) -> tuple[Counter[str], list[bytes]]:
    bodies = path.read_bytes().splitlines()
    seen = Counter(found.decode() for body in bodies for found in _IDENT.findall(body))
    path.unlink()
    return seen, bodies


def run(scale: float, folder: Path) -> Report:
    report = Report()
    with shop(folder) as server:
        rows = _Rows(server.dsn(), scale)
        place = prepare(rows.dsn, "bench_replay")
        say(f"writing {rows.all} events")
        rows.write()
        wanted = rows.ids()
        ours = _Ours(folder, place, rows.all)
        try:
            _measure_reads(report, server, ours, rows.window, wanted, folder)
            _measure_deliveries(report, ours, rows.window, wanted, folder)
        finally:
            ours.close()
    return report


def _measure_reads(
    report: Report, server: EmbeddedPostgres, ours: _Ours, window: _Window, wanted: set[str], folder: Path
) -> None:
    out = folder / "landed"
    copied = folder / "copied.txt"
    ours.read(window, out)
    _landed(out)
    rates, theirs = [], []
    for _ in range(_RUNS):
        theirs.append(window.events / _psql(server, window, copied))
        rates.append(window.events / ours.read(window, out))
        ids = _landed(out)
        report.lost += len(wanted - set(ids)) + len(ids) - len(set(ids))
        say(f"read: ours {rates[-1]:,.0f}/s, psql {theirs[-1]:,.0f}/s, lost {report.lost}")
    middle = report.spread("read_events_per_s", rates)
    report.spread("psql_copy_events_per_s", theirs)
    report.ratios["psql_copy"] = middle / statistics.median(theirs)


def _measure_deliveries(report: Report, ours: _Ours, window: _Window, wanted: set[str], folder: Path) -> None:
    spool = folder / "received"
    rates: list[float] = []
    theirs: dict[str, list[float]] = {"bare": [], "wire": []}
    for _ in range(_RUNS + 1):
        with ReceiverProcess(spool) as receiver:
            seconds = ours.deliver(window, receiver)
        seen, bodies = _received(spool)
        report.lost += len(wanted - set(seen))
        for who, client in (("bare", by_aiohttp), ("wire", by_wire)):
            with ReceiverProcess(spool) as receiver:
                theirs[who].append(window.events / client(bodies, [receiver.port], BUNDLE_LANES_MAX))
            spool.unlink()
        rates.append(window.events / seconds)
        told = ", ".join(f"{who} {found[-1]:,.0f}/s" for who, found in theirs.items())
        say(f"delivered: ours {rates[-1]:,.0f}/s, {told}, lost {report.lost}")
    middle = report.spread("delivered_events_per_s", rates[1:])  # the first one warms up
    for who, found in theirs.items():
        report.spread(f"{who}_bundled_events_per_s", found[1:])
        report.ratios[f"{who}_bundled"] = middle / statistics.median(found[1:])
