"""A running instance with 10 000 subscriptions, each with a predicate of its own, at 200 events a second.

One in a thousand of them wants an event: 2 000 requests a second. From a commit's return until the receiver has it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path

import psycopg

from bench.instance import Instance
from bench.report import Report, say
from bench.shop import shop
from bench.sick_child import SickReceivers
from evermark.delivery.webhook.signing import new_secret

_SUBSCRIPTIONS, _WANTED_BY = 10_000, 10
_VALUES = _SUBSCRIPTIONS // _WANTED_BY
_RATE = 200
_SECONDS, _SECONDS_MIN = 60.0, 10.0
_WARM_S = 5.0
_START_S_MAX, _DRAIN_S = 300.0, 240.0
_CONFIG = """\
version: 1
name: bench
data: {data}
server: {{listen: "127.0.0.1:0"}}
sources:
  shop: {{type: postgres, dsn: "${{SHOP_DSN}}", tables: [public.orders]}}
subscriptions:
"""
_SUBSCRIPTION = """\
  r{n}:
    url: "http://127.0.0.1:{port}/{n}"
    secret: "${{BENCH_SECRET}}"
    allow_networks: [127.0.0.0/8]
    where: "{where}"
"""


def ten_thousand(report: Report, scale: float, folder: Path) -> None:
    """`p99_10000_s`, and how long the instance took to its first delivery."""
    folder.mkdir()
    with shop(folder) as server, SickReceivers(folder / "received") as receivers:
        dsn = server.dsn()
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(
                "create table public.orders"
                " (id bigint generated always as identity primary key, kind text not null, total int)"
            )
        text = _CONFIG.format(data=folder / "data")
        for n in range(_SUBSCRIPTIONS):
            text += _SUBSCRIPTION.format(n=n, port=receivers.well, where=_where(n))
        with Instance(folder, text, {"SHOP_DSN": dsn, "BENCH_SECRET": new_secret()}) as instance:
            _Many(report, dsn, receivers, instance).run(max(_SECONDS_MIN, _SECONDS * scale))


def _where(n: int) -> str:
    """As in the other measure: most ask for a value, some for a range beside it, a few for something no index knows."""
    value = n % _VALUES
    if n % 10 < 6:
        return f"data.kind = 'v{value}'"
    return f"data.kind = 'v{value}' and data.total >= 0" if n % 10 < 9 else f"upper(data.kind) = 'V{value}'"


class _Many:
    def __init__(self, report: Report, dsn: str, receivers: SickReceivers, instance: Instance) -> None:
        self._report, self._dsn, self._receivers, self._instance = report, dsn, receivers, instance
        self._committed: dict[int, float] = {}
        self._came: dict[int, dict[int, float]] = defaultdict(dict)  # by order and receiver
        self._at = 0

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        (first,) = self._sell(1)
        self._wait([first], _START_S_MAX)
        self._report.figures["start_10000_s"] = time.monotonic() - began
        say(f"the first event came after {time.monotonic() - began:.0f} s")
        self._wait(self._sell(int(_WARM_S * _RATE)), _DRAIN_S)
        before_s = self._instance.cpu_s()
        made = self._sell(int(seconds * _RATE))
        self._wait(made, _DRAIN_S)
        self._report.figures["cpu_s_per_1000_10000"] = (self._instance.cpu_s() - before_s) / (len(made) / 1000)
        ages = [at - self._committed[order] for order in made for at in self._came[order].values()]
        p50, p99 = statistics.median(ages), statistics.quantiles(ages, n=100)[98]
        self._report.figures |= {"p50_10000_s": p50, "p99_10000_s": p99}
        say(f"10 000 subscriptions: p50 {p50:.2f} s, p99 {p99:.2f} s")

    def _sell(self, count: int) -> list[int]:
        made = []
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            began = time.perf_counter()
            for n in range(count):
                time.sleep(max(0.0, began + n / _RATE - time.perf_counter()))
                row = conn.execute(
                    "insert into public.orders (kind, total) values (%s, %s) returning id", (f"v{n % _VALUES}", n)
                ).fetchone()
                assert row is not None
                self._committed[row[0]] = time.time()
                made.append(row[0])
        return made

    def _wait(self, orders: list[int], timeout_s: float) -> None:
        """Until each came to all that want it; what is missing then is lost."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._receivers.make("well")  # which writes what came
            self._read()
            lacks = sum(_WANTED_BY - len(self._came[order]) for order in orders)
            if not lacks:
                return
            if time.monotonic() > deadline:
                raise self._instance.error(f"{lacks} deliveries are missing")
            time.sleep(0.2)

    def _read(self) -> None:
        with self._receivers.path.open() as file:
            file.seek(self._at)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    break
                self._at += len(line)
                at, receiver, order = line.split()
                self._came[int(order)].setdefault(int(receiver), float(at))
