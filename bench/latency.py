"""Commit → webhook received, at 200 events a second through the whole pipeline as `evermark up` runs it.

Then with another transaction open, with lanes of ten seconds, which are renewed on the way, and with two lanes, a
subscription in each. Against Debezium's embedded engine, commit → its handler: it is spared the request that would
carry the event on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path

import psycopg

from bench.debezium import Debezium, debezium, postgres_connector, subscribe
from bench.instance import Instance
from bench.report import Report, say
from bench.shop import shop
from evermark.delivery.decide.shards import shard_of
from evermark.delivery.webhook.signing import new_secret
from evermark.errors import EvermarkError
from evermark.testing.listener import Listener, Record

_RATE = 200
_SECONDS = 60.0
_WARM_S = 10.0
_RENEWED_S_MIN = 25.0  # of lanes that live for ten
_POLL_MS_MIN = 1

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
  {name}: {{url: "{url}", secret: "${{BENCH_SECRET}}", allow_networks: [127.0.0.0/8]}}
"""


class _Clockwork:
    """One insert per commit at a steady rate; when each commit returned, by the order's id."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.committed: dict[str, float] = {}

    def run(self, seconds: float) -> list[str]:
        made: list[str] = []
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            began = time.perf_counter()
            for n in range(int(seconds * _RATE)):
                wait = began + n / _RATE - time.perf_counter()
                if wait > 0:
                    time.sleep(wait)
                row = conn.execute("insert into public.orders (total) values (%s) returning id", (n,)).fetchone()
                assert row is not None
                self.committed[str(row[0])] = time.time()
                made.append(str(row[0]))
        return made


class _Receiver:
    def __init__(self, secret: str) -> None:
        self.received: dict[str, float] = {}
        self.listener = Listener(secrets=[secret], on_record=self._on_record, records_max=1)

    def _on_record(self, record: Record) -> None:
        if record.event.key is not None:
            self.received.setdefault(record.event.key, datetime.fromisoformat(record.at).timestamp())

    def wait_for(self, keys: list[str], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(key in self.received for key in keys[-1:]) and all(key in self.received for key in keys):
                return True
            time.sleep(0.05)
        return False


def run(scale: float, folder: Path) -> Report:
    report = Report()
    seconds = max(6.0, _SECONDS * scale)
    with shop(folder, tcp=True) as server:
        dsn = server.dsn()
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create table public.orders (id bigint generated always as identity primary key, total int)")
        with _warm(folder, dsn, "one") as (instance, receivers):
            say("warm; measuring")
            before_s = instance.cpu_s()
            _measure(report, dsn, receivers, seconds, "")
            report.figures["cpu_s_per_1000"] = (instance.cpu_s() - before_s) / (seconds * _RATE / 1000)
            with psycopg.connect(dsn) as other:
                other.execute("select txid_current()")
                say("once more, with another transaction open")
                _measure(report, dsn, receivers, seconds, "_open_tx")
        with _warm(folder, dsn, "one", spark="{lane: 10s}") as (_, receivers):
            say("lanes of ten seconds")
            _measure(report, dsn, receivers, max(_RENEWED_S_MIN, seconds), "_renewed")
        with _warm(folder, dsn, *_in_each_of(2), spark="{lanes: 2}") as (_, receivers):
            say("two lanes")
            _measure(report, dsn, receivers, seconds, "_two_shards")
        # Not at the same time: two pipelines on two cores would measure each other.
        with debezium(postgres_connector(server), folder / "debezium") as engine:
            if engine is not None:
                _compare(report, engine, dsn, seconds)
    return report


@contextmanager
def _warm(folder: Path, dsn: str, *names: str, spark: str = "{}") -> Iterator[tuple[Instance, list[_Receiver]]]:
    """An instance with these subscriptions, and their receivers, once events have come through."""
    secret = new_secret()
    receivers = [_Receiver(secret) for _ in names]
    with ExitStack() as stack:
        config = _CONFIG.format(data=folder / "data")
        for name, receiver in zip(names, receivers, strict=True):
            config += _SUBSCRIPTION.format(name=name, url=stack.enter_context(receiver.listener).url)
        config += f"spark: {spark}\n"
        instance = stack.enter_context(Instance(folder, config, {"SHOP_DSN": dsn, "BENCH_SECRET": secret}))
        warm = _Clockwork(dsn).run(_WARM_S)
        if not all(receiver.wait_for(warm, 120) for receiver in receivers):
            raise instance.error("nothing came through")
        yield instance, receivers


def _in_each_of(shards: int) -> list[str]:
    """Names of subscriptions, one for each shard."""
    found: dict[int, str] = {}
    for n in count():
        found.setdefault(shard_of(f"s{n}", shards), f"s{n}")
        if len(found) == shards:
            return [found[shard] for shard in range(shards)]
    raise AssertionError("unreachable: some name is in each shard")


def _measure(report: Report, dsn: str, receivers: Sequence[_Receiver], seconds: float, suffix: str) -> None:
    clockwork = _Clockwork(dsn)
    made = clockwork.run(seconds)
    ages: list[float] = []
    for receiver in receivers:
        receiver.wait_for(made, 60)
        report.lost += sum(key not in receiver.received for key in made)
        ages += [receiver.received[k] - clockwork.committed[k] for k in made if k in receiver.received]
    _percentiles(report, "", suffix, ages)


def _compare(report: Report, engine: Debezium, dsn: str, seconds: float) -> None:
    lost = 0
    for variant, poll_ms in (("debezium_", None), ("debezium_tuned_", _POLL_MS_MIN)):
        say(f"Debezium, polling {'as it does' if poll_ms is None else f'every {poll_ms} ms'}")
        slot = f"bench_{variant}".rstrip("_")
        subscribe(dsn, slot, "public.orders")
        clockwork = _Clockwork(dsn)
        engine.begin(slot, "public.orders", sum(int(s * _RATE) for s in (_WARM_S, seconds)), poll_ms)
        warm = clockwork.run(_WARM_S)
        engine.wait_for(len(warm), 120)
        before_s = engine.cpu_s()
        made = clockwork.run(seconds)
        report.figures[f"{variant}cpu_s_per_1000"] = (engine.cpu_s() - before_s) / (len(made) / 1000)
        at = engine.end().at
        lost += sum(key not in at for key in made)
        _percentiles(report, variant, "", [at[k] - clockwork.committed[k] for k in made if k in at])
    ours = report.figures
    report.ratios["debezium_p50"] = ours["p50_s"] / ours["debezium_p50_s"]
    report.ratios["debezium_p99"] = ours["p99_s"] / ours["debezium_p99_s"]
    report.ratios["debezium_tuned_p50"] = ours["p50_s"] / ours["debezium_tuned_p50_s"]
    report.figures["debezium_lost"] = lost


def _percentiles(report: Report, prefix: str, suffix: str, ages: list[float]) -> None:
    if not ages:
        raise EvermarkError("nothing was received")
    ages = sorted(ages)
    report.figures[f"{prefix}p50{suffix}_s"] = ages[len(ages) // 2]
    report.figures[f"{prefix}p99{suffix}_s"] = ages[int(len(ages) * 0.99)]
    say(json.dumps({k: round(v, 3) for k, v in report.figures.items()}))
