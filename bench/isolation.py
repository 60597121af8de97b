"""What the ill do to the well: 50 receivers, and then 10 % of them dead and 10 % answering after five seconds.

One running `evermark up`, 20 orders a second. From a commit's return until each receiver that stays well has the event:
first while all are well, then while ten are not, and both once more. The first five seconds after each change are a
figure of their own (`turning_p99_s`). What the ill missed they get in the end: that is waited for, and counted.
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

_RECEIVERS, _SLOW, _DEAD = 50, 5, 5
_RATE = 20
_SECONDS = 60.0
_WARM_S = 5.0
_TURN_S = 5.0
_TURNS = 2
_DRAIN_S = 240.0
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
  r{n}: {{url: "http://127.0.0.1:{port}/{n}", secret: "${{BENCH_SECRET}}", allow_networks: [127.0.0.0/8]}}
"""


class _Received:
    """What came, read from the receivers' file."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.times: dict[int, dict[int, float]] = defaultdict(dict)  # by receiver and order

    def read(self) -> None:
        with self._path.open() as file:
            file.seek(self._at)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    break
                self._at += len(line)
                at, receiver, order = line.split()
                self.times[int(receiver)].setdefault(int(order), float(at))

    def lacks(self, orders: list[int], receivers: range) -> int:
        return sum(order not in self.times[n] for n in receivers for order in orders)


class _Shop:
    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.committed: dict[int, float] = {}

    def sell(self, seconds: float) -> list[int]:
        made = []
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            began = time.perf_counter()
            for n in range(int(seconds * _RATE)):
                time.sleep(max(0.0, began + n / _RATE - time.perf_counter()))
                row = conn.execute("insert into public.orders (total) values (%s) returning id", (n,)).fetchone()
                assert row is not None
                self.committed[row[0]] = time.time()
                made.append(row[0])
        return made


def run(scale: float, folder: Path) -> Report:
    report = Report()
    seconds = max(8.0, _SECONDS * scale)
    with shop(folder) as server, SickReceivers(folder / "received") as receivers:
        dsn = server.dsn()
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create table public.orders (id bigint generated always as identity primary key, total int)")
        text = _CONFIG.format(data=folder / "data")
        well = _RECEIVERS - _SLOW - _DEAD
        for n in range(_RECEIVERS):
            port = receivers.well if n < well else receivers.slow if n < well + _SLOW else receivers.dying
            text += _SUBSCRIPTION.format(n=n, port=port)
        with Instance(folder, text, {"SHOP_DSN": dsn, "BENCH_SECRET": new_secret()}) as instance:
            _Phases(report, _Shop(dsn), receivers, instance).run(seconds)
    return report


class _Phases:
    def __init__(self, report: Report, shop_: _Shop, receivers: SickReceivers, instance: Instance) -> None:
        self._report, self._shop, self._receivers, self._instance = report, shop_, receivers, instance
        self._received = _Received(receivers.path)
        self._healthy = range(_RECEIVERS - _SLOW - _DEAD)
        self._all: list[int] = []

    def run(self, seconds: float) -> None:
        self._all += self._shop.sell(_WARM_S)
        self._wait(self._all, range(_RECEIVERS), "well")
        say("warm; measuring")
        found: dict[str, list[float]] = {"well": [], "ill": []}
        turning: list[float] = []
        for _ in range(_TURNS):
            for how in ("well", "ill"):
                self._receivers.make(how)
                turning.append(self._p99(_TURN_S, how))  # while the ill are found out, or come back
                found[how].append(self._p99(seconds, how))
                say(f"{how}: p99 {found[how][-1]:.2f} s; while it became so {turning[-1]:.2f} s")
            self._receivers.make("well")
            self._wait(self._all, range(_RECEIVERS), "well")
        self._report.lost = self._received.lacks(self._all, range(_RECEIVERS))
        sick = self._report.spread("healthy_p99_s", found["ill"])
        alone = self._report.spread("all_well_p99_s", found["well"])
        self._report.figures["turning_p99_s"] = max(turning)
        self._report.ratios["healthy_p99"] = sick / alone

    def _p99(self, seconds: float, how: str) -> float:
        made = self._shop.sell(seconds)
        self._all += made
        self._wait(made, self._healthy, how)
        times, committed = self._received.times, self._shop.committed
        return statistics.quantiles([times[n][o] - committed[o] for n in self._healthy for o in made], n=100)[98]

    def _wait(self, orders: list[int], receivers: range, how: str) -> None:
        deadline = time.monotonic() + _DRAIN_S
        while True:
            self._receivers.make(how)  # which also writes what came
            self._received.read()
            lacks = self._received.lacks(orders, receivers)
            if not lacks:
                return
            if time.monotonic() > deadline:
                raise self._instance.error(f"{lacks} deliveries are missing")
            time.sleep(0.2)
