"""Memory while what is large passes: a transaction of five million rows, and rows of 50 MB. Not a race: a bound."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg

from bench.backlog import Ours
from bench.report import PeakMemory, Report, say
from bench.shop import prepare, shop, write
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.target import PostgresTarget

_ROWS = 5_000_000
_BIG_ROW = 50 * 1024 * 1024
_MANY = """
insert into pgstream.events (stream, op, key, payload)
select 'public.orders', 'insert', n::text, jsonb_build_object('id', n, 'note', repeat('x', 60))
from generate_series(1, %s::bigint) n
"""
_BIG = """
insert into pgstream.events (stream, op, key, payload)
select 'public.files', 'insert', n::text, jsonb_build_object('id', n, 'body', repeat('y', %s::int))
from generate_series(1, 4) n
"""


def run(scale: float, folder: Path) -> Report:
    report = Report()
    with shop(folder) as server:
        dsn = server.dsn()
        ours = Ours(folder)
        try:
            warm = prepare(dsn, "bench_warm")
            write(dsn, 4_000)
            with PeakMemory() as memory:
                ours.drain(PostgresOutbox(warm), warm.slot, 4_000)
            report.figures["rss_mb_small_batches"] = memory.mb
            rows = max(10_000, int(_ROWS * scale))
            _pass(report, ours, dsn, prepare(dsn, "bench_many"), _MANY, rows, rows, "transaction")
            _pass(report, ours, dsn, prepare(dsn, "bench_big"), _BIG, _BIG_ROW, 4, "big_rows")
        finally:
            ours.close()
    return report


def _pass(
    report: Report, ours: Ours, dsn: str, place: PostgresTarget, insert: str, size: int, events: int, name: str
) -> None:
    with psycopg.connect(dsn) as conn:
        began = time.perf_counter()
        conn.execute(insert.encode(), (size,))
        conn.commit()
        say(f"{name}: written in {time.perf_counter() - began:.1f} s")
    with PeakMemory() as memory:
        seconds, ids = ours.drain(PostgresOutbox(place), place.slot, events)
    report.lost += events - len(set(ids))
    report.figures[f"rss_mb_{name}"] = memory.mb
    report.figures[f"seconds_{name}"] = seconds
    report.ratios[f"memory_{name}"] = memory.mb / report.figures["rss_mb_small_batches"]
    say(f"{name}: {memory.mb:.0f} MB at most, {seconds:.1f} s, lost {report.lost}")
