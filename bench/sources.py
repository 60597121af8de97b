"""A thousand idle sources beside ten busy ones, against the ten alone: how late events are, and how much memory.

The busy ones are Postgres outboxes, each in a database of its own. The idle ones are files to which nobody writes, and
block streams in which nothing happens: a thousand slots of Postgres would each decode all WAL, whoever reads them.
Two deployments read the same databases, and run in turns: two at a time on two cores would measure each other. At the
end of a turn with the idle ones, one of them wakes: how long its event takes is `woken_s`.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psycopg

from bench.instance import Instance
from bench.report import Report, say
from bench.shop import prepare, shop
from evermark.delivery.webhook.signing import new_secret
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.testing.blocknodes import Node
from evermark.testing.listener import Listener, Record
from evermark.testing.number_files import NumberFiles

_IDLE = 1_000
_BLOCKS_SHARE = 10  # one of so many idle sources is a block source
_BUSY = 10
_RATE = 20  # events a second, of all busy sources together
_SECONDS = 30.0
_SECONDS_MIN = 10.0
_WARM_S = 5.0
_TURNS = 2
_START_S = 300.0
_INSERT = "insert into pgstream.events (stream, op, key, payload) values ('orders', 'insert', %s, '{}')"
_LISTEN = re.compile(r"listen\W+127\.0\.0\.1:(\d+)")
_CONFIG = """\
version: 1
name: {name}
data: {data}
server: {{listen: "127.0.0.1:0"}}
subscriptions:
  one: {{url: "{url}", secret: "${{BENCH_SECRET}}", allow_networks: [127.0.0.0/8]}}
sources:
"""
_POSTGRES = '  busy{n:02}: {{type: postgres, dsn: "${{SHOP_{n}}}", slot: {slot}, publication: {slot}}}\n'
_FILES = '  idle{n:04}: {{type: "{kind}", options: {{folder: "{folder}", partitions: 1}}}}\n'
_KIND = "evermark.testing.number_files:NumberFiles"
_BLOCKS = '  idle{n:04}: {{type: blocks, nodes: ["{url}"], streams: [quiet]}}\n'


class _Received:
    """When each event came, by its key, and how often."""

    def __init__(self, secret: str) -> None:
        self.at: dict[str, float] = {}
        self.listener = Listener(secrets=[secret], on_record=self._on_record, records_max=1)

    def _on_record(self, record: Record) -> None:
        key = record.event.key
        if key is not None:
            self.at.setdefault(key, datetime.fromisoformat(record.at).timestamp())

    def lacks(self, keys: list[str]) -> int:
        return sum(key not in self.at for key in keys)


class _Shops:
    def __init__(self, server: EmbeddedPostgres) -> None:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            for n in range(_BUSY):
                conn.execute(f"create database shop_{n}")
        self.dsns = [server.dsn(f"shop_{n}") for n in range(_BUSY)]
        self._sold = itertools.count()

    def sell(self, seconds: float) -> dict[str, float]:
        """In all shops at a steady rate; when each commit returned, by the order's id."""
        with ThreadPoolExecutor(_BUSY) as pool:
            sold = list(pool.map(lambda n: self._sell(n, seconds), range(_BUSY)))
        return {key: at for each in sold for key, at in each.items()}

    def _sell(self, shop_: int, seconds: float) -> dict[str, float]:
        sold = {}
        every_s = _BUSY / _RATE
        with psycopg.connect(self.dsns[shop_], autocommit=True) as conn:
            began = time.perf_counter() + every_s * shop_ / _BUSY
            for n in range(int(seconds / every_s)):
                time.sleep(max(0.0, began + n * every_s - time.perf_counter()))
                key = f"order-{shop_}-{next(self._sold)}"
                conn.execute(_INSERT, (key,))
                sold[key] = time.time()
        return sold


@dataclass
class _Found:
    p50_s: list[float] = field(default_factory=list)
    p99_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    cpu_cores: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)


class _Bench:
    def __init__(self, folder: Path, report: Report, shops: _Shops, received: _Received, secret: str) -> None:
        self._folder, self._report, self._shops, self._received = folder, report, shops, received
        self._env = {f"SHOP_{n}": dsn for n, dsn in enumerate(shops.dsns)} | {"BENCH_SECRET": secret}
        self._woken: list[float] = []

    def instance(self, name: str, idle: int, node: Node) -> Instance:
        folder = self._folder / name
        folder.mkdir()
        text = _CONFIG.format(name=name, data=folder / "data", url=self._received.listener.url)
        text += "".join(_POSTGRES.format(n=n, slot=f"{name}_{n}") for n in range(_BUSY))
        for n in range(idle):
            place = folder / "files" / str(n)
            place.mkdir(parents=True)
            text += (
                _FILES.format(n=n, kind=_KIND, folder=place) if n % _BLOCKS_SHARE else _BLOCKS.format(n=n, url=node.url)
            )
        for n, dsn in enumerate(self._shops.dsns):
            prepare(dsn, f"{name}_{n}")
        return Instance(folder, text, self._env, installed=True)

    def turn(self, instance: Instance, seconds: float, found: _Found, idle: int) -> None:
        with instance:
            warm = self._shops.sell(_WARM_S)
            self._wait(instance, warm, "nothing came through")
            instance.wait_for(lambda: self._all_read(instance, _BUSY + idle), "not all sources are read", _START_S)
            found.start_s.append(time.time() - instance.began)
            began_s, began = instance.cpu_s(), time.monotonic()
            sold = self._shops.sell(seconds)
            self._wait(instance, sold, "not all came through")
            found.cpu_cores.append((instance.cpu_s() - began_s) / (time.monotonic() - began))
            ages = sorted(self._received.at[key] - at for key, at in sold.items())
            found.p50_s.append(ages[len(ages) // 2])
            found.p99_s.append(ages[int(len(ages) * 0.99)])
            found.rss_mb.append(instance.memory().mb)
            found.threads.append(sum(process.num_threads() for process in instance.processes()))
            began = time.monotonic()
            _health(instance)
            found.health_s.append(time.monotonic() - began)
            if idle:
                self._wake(instance, idle)

    def _wait(self, instance: Instance, sold: dict[str, float], what: str) -> None:
        keys = list(sold)
        instance.wait_for(lambda: not self._received.lacks(keys), what, _START_S)
        self._report.lost += self._received.lacks(keys)

    def _all_read(self, instance: Instance, sources: int) -> bool:
        return instance.said().count("source owned") >= sources

    def _wake(self, instance: Instance, idle: int) -> None:
        number = idle - 1 if (idle - 1) % _BLOCKS_SHARE else idle - 2
        files = NumberFiles(str(self._folder / "many" / "files" / str(number)), 1)
        key, began = str(files.count(0)), time.time()
        files.add(0)
        instance.wait_for(lambda: key in self._received.at, "the idle source that woke was not read", _START_S)
        self._woken.append(self._received.at[key] - began)


def _health(instance: Instance) -> object:
    ports = _LISTEN.findall(instance.said())
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/health", timeout=60) as answer:
        return json.load(answer)


def run(scale: float, folder: Path) -> Report:
    report, secret = Report(), new_secret()
    idle, seconds = max(20, int(_IDLE * scale)), max(_SECONDS_MIN, _SECONDS * scale)
    received = _Received(secret)
    (folder / "node").mkdir()
    with shop(folder, tcp=True) as server, received.listener, Node(folder / "node") as node:
        bench = _Bench(folder, report, _Shops(server), received, secret)
        few, many = bench.instance("few", 0, node), bench.instance("many", idle, node)
        found = {"few": _Found(), "many": _Found()}
        for _ in range(_TURNS if scale >= 1 else 1):
            for name, instance, beside in (("few", few, 0), ("many", many, idle)):
                bench.turn(instance, seconds, found[name], beside)
                told = {what: round(values[-1], 3) for what, values in vars(found[name]).items()}
                say(f"{beside} idle beside {_BUSY} busy: {json.dumps(told)}")
    report.figures["idle"] = idle
    for what, values in vars(found["many"]).items():
        report.spread(what, values)
    for what, values in vars(found["few"]).items():
        report.spread(f"alone_{what}", values)
    report.figures["woken_s"] = statistics.median(bench._woken)
    report.ratios["latency"] = report.figures["p50_s"] / report.figures["alone_p50_s"]
    report.ratios["memory"] = report.figures["rss_mb"] / report.figures["alone_rss_mb"]
    return report
