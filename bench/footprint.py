"""What an instance takes: to start, at rest, and under full load. All its processes, the embedded State's among them.

The first start makes State in an empty folder; the second finds it. Orders come from before the start on, ten a second,
until one is at its webhook. Then nothing is sold for a while, and the processor time of the instance is counted; then
as much is sold as four writers can.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import psycopg

from bench.instance import Instance
from bench.report import Report, say
from bench.shop import event_ids, shop, write
from evermark.delivery.webhook.signing import new_secret
from evermark.testing.listener import Listener, Record

# At least so long: what the start left to do beside the first deliveries is no rest.
_CALM_S, _CALM_S_MIN = 30.0, 15.0
_IDLE_S, _IDLE_S_MIN = 60.0, 10.0
_EVENTS, _EVENTS_MIN = 100_000, 8_000
_ORDER_EVERY_S = 0.1
_START_S_MAX = 180.0
_LOAD_S_MAX = 900.0
_LOOK_EVERY_S = 0.5
_SHARES_SHOWN = 12

_CONFIG = """\
version: 1
name: bench
data: {data}
server: {{listen: "127.0.0.1:{port}"}}
sources:
  shop: {{type: postgres, dsn: "${{SHOP_DSN}}", tables: [public.orders]}}
subscriptions:
  one: {{url: "{url}", secret: "${{BENCH_SECRET}}", allow_networks: [127.0.0.0/8]}}
"""


class _Received:
    def __init__(self) -> None:
        self.first = threading.Event()
        self.first_at = 0.0
        self.ids: set[str] = set()
        self.twice = 0

    def on_record(self, record: Record) -> None:
        if not self.first.is_set():
            self.first_at = time.time()
            self.first.set()
        self.twice += record.duplicate
        self.ids.add(record.event.id)


def run(scale: float, folder: Path) -> Report:
    report, received, secret = Report(), _Received(), new_secret()
    with shop(folder) as server, Listener(secrets=[secret], on_record=received.on_record, records_max=1) as listener:
        dsn, port = server.dsn(), _free_port()
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create table public.orders (id bigint generated always as identity primary key, total int)")
        config = _CONFIG.format(data=folder / "data", port=port, url=listener.url)
        instance = Instance(folder, config, {"SHOP_DSN": dsn, "BENCH_SECRET": secret})
        with instance:
            _start(report, instance, received, dsn, port, "")
        with instance:
            _start(report, instance, received, dsn, port, "_again")
            _idle(report, instance, scale)
            _load(report, instance, received, dsn, max(_EVENTS_MIN, int(_EVENTS * scale) // 4_000 * 4_000))
    return report


def _start(report: Report, instance: Instance, received: _Received, dsn: str, port: int, suffix: str) -> None:
    received.first.clear()
    with _orders(dsn):
        instance.wait_for(lambda: _is_ready(port), "it was not ready in time", _START_S_MAX)
        report.figures[f"start_s{suffix}"] = time.time() - instance.began
        instance.wait_for(received.first.is_set, "nothing was delivered in time", _START_S_MAX)
        report.figures[f"first_delivery_s{suffix}"] = received.first_at - instance.began
        report.figures[f"first_delivery_cpu_s{suffix}"] = instance.cpu_s()
    said = ("start_s", "first_delivery_s", "first_delivery_cpu_s")
    say(f"started{suffix}: " + ", ".join(f"{name} {report.figures[name + suffix]:.2f}" for name in said))


def _idle(report: Report, instance: Instance, scale: float) -> None:
    time.sleep(max(_CALM_S_MIN, _CALM_S * scale))
    before, began = instance.cpu_s_by_process(), time.monotonic()
    time.sleep(max(_IDLE_S_MIN, _IDLE_S * scale))
    after, seconds = instance.cpu_s_by_process(), time.monotonic() - began
    report.figures["idle_cpu_cores"] = (sum(after.values()) - sum(before.values())) / seconds
    memory = instance.memory()
    report.figures["rss_mb_idle"] = memory.mb
    report.figures["shared_pages_once"] = memory.shared_once
    kind = "PSS" if memory.shared_once else "RSS"
    say(f"idle: {report.figures['idle_cpu_cores']:.4f} cores, {memory.mb:.0f} MB ({kind})")
    shares = {process: (cpu_s - before.get(process, 0.0)) / seconds for process, cpu_s in after.items()}
    for process, share in sorted(shares.items(), key=lambda each: -each[1])[:_SHARES_SHOWN]:
        with suppress(psutil.Error):
            say(f"  {share:.4f} {process.name()} {process.pid} {' '.join(process.cmdline()).strip()[-60:]}")


def _load(report: Report, instance: Instance, received: _Received, dsn: str, events: int) -> None:
    before, twice_before = event_ids(dsn), received.twice
    with _PeakMemory(instance) as memory:
        began = time.monotonic()
        write(dsn, events)
        expected = event_ids(dsn) - before
        instance.wait_for(lambda: expected <= received.ids, "not everything was delivered in time", _LOAD_S_MAX)
        report.figures["load_events_per_s"] = events / (time.monotonic() - began)
    report.figures["rss_mb_load"] = memory.mb
    report.lost = len(expected - received.ids) + received.twice - twice_before
    say(f"load: {report.figures['load_events_per_s']:,.0f} events/s, {memory.mb:.0f} MB at most, lost {report.lost}")


class _PeakMemory(threading.Thread):
    """The most memory the instance was seen with while the block ran."""

    def __init__(self, instance: Instance) -> None:
        super().__init__(daemon=True)
        self.mb = 0.0
        self._instance = instance
        self._done = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(_LOOK_EVERY_S):
            self.mb = max(self.mb, self._instance.memory().mb)


@contextmanager
def _orders(dsn: str) -> Iterator[None]:
    """Somebody orders now and then while the block runs."""
    done = threading.Event()

    def order() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not done.wait(_ORDER_EVERY_S):
                conn.execute("insert into public.orders (total) values (1)")

    thread = threading.Thread(target=order, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
