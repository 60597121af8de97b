"""/health, /readyz and /metrics as they are asked for: by one voice, at once, and though a source hangs."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evermark.app import source_lag
from evermark.app.source_lag import Lags
from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.observe.health import LAGGING_AFTER_S, HealthBoard, PartitionHealth, SourceAnswer
from evermark.observe.metrics import Metrics
from evermark.server.http import Server
from evermark.server.probes import Probes
from evermark.sources.base import Source, Untaken
from evermark.state.connection import State
from evermark.testing.until import until


@contextmanager
def served(board: HealthBoard, metrics: Metrics | None = None) -> Iterator[Server]:
    server = Server("127.0.0.1", 0, board, metrics or Metrics())
    server.start()
    try:
        yield server
    finally:
        server.stop()


def ask(server: Server, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_health_ready_and_metrics_say_the_same() -> None:
    """GIVEN a source whose events wait WHEN each is asked THEN lag and state are the same in all, and codes follow."""
    board = HealthBoard()
    board.put("shop", 0, PartitionHealth.HEALTHY)
    waits = [LAGGING_AFTER_S + 10]
    board.ask = lambda: board.answered("shop", SourceAnswer(time.monotonic(), {0: waits[0]} if waits else {}))
    with served(board) as server:
        code, text = ask(server, "/health")
        told = json.loads(text)
        assert (code, told["status"], told["partitions"]["shop/0"]["status"]) == (503, "unhealthy", "lagging")
        assert told["partitions"]["shop/0"]["lag_s"] == pytest.approx(waits[0], abs=1)
        assert ask(server, "/readyz") == (200, "ready\n"), "a backlog does not make it unready"
        _, metrics = ask(server, "/metrics")
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        place = 'partition="0",source="shop"'
        assert float(lines[f"evermark_partition_lag_seconds{{{place}}}"]) == pytest.approx(waits[0], abs=1)
        assert float(lines[f'evermark_partition_state{{{place},state="lagging"}}']) == 1
        assert float(lines[f'evermark_partition_state{{{place},state="healthy"}}']) == 0

        waits.clear()
        assert json.loads(ask(server, "/health")[1])["partitions"]["shop/0"]["lag_s"] == 0
        _, metrics = ask(server, "/metrics")
        assert f"evermark_partition_lag_seconds{{{place}}} 0.0" in metrics


def test_s11_the_whole_text_of_metrics_is_read_by_prometheus_own_parser() -> None:
    """GIVEN an instance WHEN it is scraped THEN its text parses, and every metric of the program is in it, with what it
    means."""
    metrics = Metrics()
    with served(HealthBoard(), metrics) as server:
        code, text = ask(server, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert code == 200
    assert families.keys() >= {family.name for family in metrics.registry.collect()}
    assert all(
        family.documentation and family.type in {"counter", "gauge", "histogram"} for family in families.values()
    )


def test_before_anything_is_known_it_is_not_ready() -> None:
    """GIVEN a server without a deployment WHEN asked THEN it is not ready, and says that nobody delivers."""
    with served(HealthBoard()) as server:
        assert ask(server, "/readyz")[0] == 503
        code, text = ask(server, "/health")
        assert code == 200 and json.loads(text)["delivering"] is False


def test_s9_an_instance_that_stops_is_not_ready_any_more() -> None:
    """GIVEN a partition that is read WHEN the instance is told to stop THEN it is not ready, and says why."""
    board = HealthBoard()
    board.put("shop", 0, PartitionHealth.HEALTHY)
    with served(board) as server:
        assert ask(server, "/readyz")[0] == 200
        board.is_stopping = True
        assert ask(server, "/readyz") == (503, "not ready: instance: stopping\n")
        listed = json.loads(ask(server, "/health?partitions=list")[1])["partitions"]
        assert [(each["source"], each["id"]) for each in listed] == [("shop", 0)]


def test_many_who_ask_at_once_wait_for_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a slow answer WHEN twenty ask meanwhile THEN the sources are asked once, and all are answered."""
    board = HealthBoard()
    board.put("shop", 0, PartitionHealth.HEALTHY)
    gate, asked, come = threading.Event(), [], []
    board.ask = lambda: (asked.append(1), gate.wait(60), None)[-1]
    answered = Probes._asked

    async def counted(probes: Probes) -> None:
        come.append(1)
        await answered(probes)

    monkeypatch.setattr(Probes, "_asked", counted)
    with served(board) as server:
        codes: list[int] = []
        threads = [threading.Thread(target=lambda: codes.append(ask(server, "/health")[0])) for _ in range(20)]
        for thread in threads:
            thread.start()
        assert ask(server, "/livez")[0] == 200, "whoever hangs, the process is alive"
        # A request that reaches the server after the answer is asked for anew, and rightly.
        until(lambda: len(come) == 20, "all twenty have asked", timeout_s=30)
        gate.set()
        for thread in threads:
            thread.join(20)
        assert codes == [200] * 20 and len(asked) == 1


class Hanging(Source):
    """Answers when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        self.gate.wait(60)
        return {}

    def partitions(self) -> list[int]:
        return [0]

    def earliest(self, partition: int) -> str:
        return "0"

    def latest(self, after: Any, limit: Any) -> Any: ...
    def slices(self, partition: int, start: str, end: str) -> Any: ...
    def read(self, piece: Any) -> Any: ...


class Well(Hanging):
    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        return {0: Untaken("1", 45.0)}


def test_health_answers_in_time_though_a_source_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a source that hangs, one that is well, and no state WHEN health is asked for THEN all is said in time."""
    monkeypatch.setattr(source_lag, "WAIT_S", 0.5)
    hanging = Hanging()
    deployment: Any = SimpleNamespace(
        sources={"hung": hanging, "well": Well()},
        checkpoints_through=lambda _: MemoryCheckpoints(),
        another_state=lambda **_: State(lambda: "host=127.0.0.1 port=1", "nowhere"),
    )
    board = HealthBoard()
    for name in deployment.sources:
        board.put(name, 0, PartitionHealth.HEALTHY)
    lags = Lags(deployment, board)
    lags.start()
    try:
        with served(board) as server:
            began = time.monotonic()
            until(lambda: "has not answered" in ask(server, "/health")[1], "it is said that it hangs", timeout_s=5)
            assert time.monotonic() - began < 5
            code, text = ask(server, "/health")
            told = json.loads(text)["partitions"]
            assert code == 503 and told["hung/0"]["status"] == "stale"
            assert told["well/0"]["status"] == "lagging" and told["well/0"]["lag_s"] >= 45
            assert ask(server, "/readyz")[1].startswith("not ready: hung/0: stale")
    finally:
        hanging.gate.set()
        lags.stop()
