"""Commit → server-sent event, for 2 000 clients of the live tail at 500 events a second; again with 100 slow clients.

Each client follows one of 100 customers by a predicate, so that every event has 20 takers; the slow clients follow all
events and read 8 KiB a second. `kb_per_client` is what the process that serves them grows by, clients and traffic and
all. Every client must have each of its events once; two of the slow ones read on at last, and must, too.
"""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import psycopg

from bench.instance import Instance, Memory
from bench.report import Report, say
from bench.shop import shop
from bench.tail_child import RECORD
from evermark.errors import EvermarkError

_CLIENTS, _SLOW, _CUSTOMERS = 2_000, 100, 100
_RATE, _COMMITS_PER_S = 500, 50
_SECONDS, _WARM_S = 60.0, 5.0
_SLOW_CHECKED = 2
_WAIT_S = 120.0
_DESCRIPTORS_FOR_OTHERS = 1_000
_TOKEN = "bench-token-of-the-live-tail"
_CONFIG = """\
version: 1
name: bench
data: {data}
server: {{listen: "127.0.0.1:{port}", tokens: {{bench: "${{TAIL_TOKEN}}"}}}}
sources:
  shop: {{type: postgres, dsn: "${{SHOP_DSN}}", tables: [public.orders]}}
"""
_TABLE = "create table public.orders (id bigint generated always as identity primary key, customer int, total int)"
_INSERT = """
insert into public.orders (customer, total) select (random() * 1000)::int %% %s, n from generate_series(1, %s) n
returning id, customer
"""
Records = npt.NDArray[np.void]


class _Clients:
    """The child process, from outside."""

    def __init__(self, port: int, path: Path) -> None:
        command = [sys.executable, "-m", "bench.tail_child", str(port), _TOKEN, str(path)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()

    def order(self, *words: object) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(" ".join(map(str, words)) + "\n")
        self._child.stdin.flush()
        if not self._child.stdout.readline():
            raise EvermarkError("the clients failed", hint="what they said stands above")

    def got(self) -> Records:
        self.order("flush")
        return np.fromfile(self._path, np.dtype([("client", "<i4"), ("key", "<i8"), ("at", "<f8")], align=False))


class _Shop:
    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.customers: dict[int, int] = {}
        self.committed: dict[int, float] = {}

    def sell(self, seconds: float) -> list[int]:
        """Orders at a steady rate, some in each commit."""
        made: list[int] = []
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            began = time.perf_counter()
            for n in range(int(seconds * _COMMITS_PER_S)):
                time.sleep(max(0.0, began + n / _COMMITS_PER_S - time.perf_counter()))
                rows = conn.execute(_INSERT, (_CUSTOMERS, _RATE // _COMMITS_PER_S)).fetchall()
                now = time.time()
                self.customers |= dict(rows)
                self.committed |= dict.fromkeys((order for order, _ in rows), now)
                made += [order for order, _ in rows]
        return made


def run(scale: float, folder: Path) -> Report:
    report = Report()
    clients = _as_many_as_may_be(max(200, int(_CLIENTS * scale)))
    seconds = max(8.0, _SECONDS * scale)
    with shop(folder) as server:
        dsn = server.dsn()
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(_TABLE)
        port = _free_port()
        config = _CONFIG.format(data=folder / "data", port=port)
        with Instance(folder, config, {"SHOP_DSN": dsn, "TAIL_TOKEN": _TOKEN}) as instance:
            instance.wait_for(lambda: "up" in instance.said(), "it did not start", 120)
            with _Clients(port, folder / "got") as following:
                _Phases(report, _Shop(dsn), following, instance, clients).run(seconds)
    return report


class _Phases:
    def __init__(self, report: Report, shop_: _Shop, following: _Clients, instance: Instance, clients: int) -> None:
        self._report, self._shop, self._following, self._instance = report, shop_, following, instance
        self._clients = clients
        self._last: list[int] = []  # the orders of the last phase

    def run(self, seconds: float) -> None:
        following, report = self._following, self._report
        following.order("follow", 1, "/v1/tail")  # client 0 has all: so it is warm before memory is measured
        warm = self._shop.sell(_WARM_S)
        self._wait(warm, 0)
        before = self._memory_kb()
        say(f"warm; {self._clients} clients connect")
        began = time.monotonic()
        for customer in range(_CUSTOMERS):
            count = self._clients // _CUSTOMERS + (customer < self._clients % _CUSTOMERS)
            following.order("follow", count, f"/v1/tail?where=data.customer%20=%20{customer}")
        report.figures["connect_s"] = time.monotonic() - began
        self._report.figures["p99_s"] = well = self._p99("p50_s", seconds)
        report.figures["kb_per_client"] = (self._memory_kb() - before) / self._clients
        say(f"p99 {well:.3f} s, {report.figures['kb_per_client']:.1f} KiB a client; {_SLOW} slow clients connect")
        following.order("slow", _SLOW, "/v1/tail")
        report.figures["slow_p99_s"] = slow = self._p99("slow_p50_s", seconds)
        report.figures["kb_with_slow"] = (self._memory_kb() - before) / (self._clients + _SLOW)
        report.ratios["slow_p99"] = slow / well
        say(f"with slow clients p99 {slow:.3f} s; {_SLOW_CHECKED} of them read on")
        following.order("hurry", _SLOW_CHECKED)
        following.order("drop")
        self._check_slow()
        self._report.lost += int(self._report.figures["doubled"])

    def _p99(self, median: str, seconds: float) -> float:
        self._last = made = self._shop.sell(seconds)
        self._wait(made, 0)
        want = self._wanted(made)
        got = self._got(made, want)
        pairs = np.unique(got[["client", "key"]])
        self._report.lost += want - len(pairs)
        self._report.figures["doubled"] = self._report.figures.get("doubled", 0) + len(got) - len(pairs)
        ages = np.sort(got["at"] - np.array([self._shop.committed[key] for key in got["key"]]))
        self._report.figures[median] = float(ages[len(ages) // 2])
        return float(ages[int(len(ages) * 0.99)])

    def _wanted(self, made: list[int]) -> int:
        takers = [self._clients // _CUSTOMERS + (c < self._clients % _CUSTOMERS) for c in range(_CUSTOMERS)]
        return sum(takers[self._shop.customers[order]] for order in made)

    def _got(self, made: list[int], count: int) -> Records:
        """What clients of a customer got of these orders; waited for, but not for ever."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            got = self._following.got()
            got = got[(got["key"] >= made[0]) & (got["key"] <= made[-1])]
            got = got[(got["client"] > 0) & (got["client"] <= self._clients)]
            if len(got) >= count or time.monotonic() > deadline:
                return got
            time.sleep(0.5)

    def _wait(self, made: list[int], client: int) -> None:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            got = self._following.got()
            if made[-1] in got["key"][got["client"] == client]:
                return
            time.sleep(0.2)
        raise self._instance.error(f"client {client} did not get all")

    def _check_slow(self) -> None:
        """They followed all orders of the last phase."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            got = self._following.got()
            found = [got["key"][got["client"] == self._clients + 1 + n] for n in range(_SLOW_CHECKED)]
            if all(self._last[-1] in one for one in found) or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        for keys in found:
            self._report.lost += len(set(self._last) - set(keys.tolist()))
            self._report.figures["doubled"] += len(keys) - len(set(keys.tolist()))

    def _memory_kb(self) -> float:
        """Of the process that serves."""
        return Memory.of(self._instance.processes()[:1]).mb * 1024


def _as_many_as_may_be(wanted: int) -> int:
    """Each client is a descriptor in two processes, which inherit this limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < wanted + _DESCRIPTORS_FOR_OTHERS:
        raise EvermarkError(
            f"{wanted} clients need more descriptors than {hard}",
            hint=f"raise the hard limit: ulimit -Hn {wanted + _DESCRIPTORS_FOR_OTHERS}",
        )
    return wanted


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as some:
        return int(some.getsockname()[1])


assert RECORD.size == 20, "as `got` reads them"
