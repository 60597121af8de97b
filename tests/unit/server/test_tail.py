"""The live tail as HTTP clients see it: who may follow, what is refused, how it ends, and what a slow client costs."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import pytest

from evermark.delivery.base import BotSpec, SubscriptionSpec
from evermark.delivery.tail.hub import TailLimits
from evermark.delivery.tail.wish import no_spark
from evermark.errors import NotFoundError
from evermark.observe.health import HealthBoard
from evermark.observe.metrics import Metrics
from evermark.server import tail as tail_module
from evermark.server.http import Server
from evermark.server.tail import TailOf
from evermark.server.tokens import Tokens
from evermark.testing.until import until
from tests.unit.delivery.tail.tail_scene import P0, Browser, MemoryLog
from tests.unit.server.api_scene import READER, TOKENS, WRITER

SPECS = {
    "billing": SubscriptionSpec("billing", "", streams=("public.orders",), where="data.n > 0"),
    "helper": SubscriptionSpec("helper", "", bot=BotSpec("shop", "u")),
}


@dataclass
class Scene:
    log: MemoryLog
    server: Server
    metrics: Metrics

    def value(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"evermark_{name}") or 0.0

    def follow(self, path: str = "/v1/tail", token: str | None = READER, **headers: str) -> Following:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        sent = {"Authorization": f"Bearer {token}"} if token is not None else {}
        connection.request("GET", path, headers={**sent, **headers})
        return Following(connection, connection.getresponse())


@dataclass
class Following(Browser):
    connection: Any = None
    answer: Any = None
    ended: bool = False

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        super().__init__()
        self.connection, self.answer = connection, answer
        if answer.status == 200:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(http.client.IncompleteRead):  # it hung up itself
            while text := self.answer.read1(65536):
                self.read(text)
        self.ended = True

    @property
    def error(self) -> Any:
        return json.loads(self.answer.read())["error"]

    def hang_up(self) -> None:
        self.connection.sock.shutdown(socket.SHUT_RDWR)


def subscription(name: str) -> SubscriptionSpec:
    if name not in SPECS:
        raise NotFoundError(f"no subscription is called {name}", hint="look")
    return SPECS[name]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with served() as made:
        yield made


@contextmanager
def served() -> Iterator[Scene]:
    log, metrics = MemoryLog(), Metrics()
    log.take(P0)
    server = Server("127.0.0.1", 0, HealthBoard(), metrics, Tokens(TOKENS))
    server.start()
    try:
        server.tail.open(TailOf(log, frozenset({"shop"}), subscription, no_spark, TailLimits(ring_bytes=2_000_000)))
        yield Scene(log, server, metrics)
    finally:
        server.tail.close()
        server.stop()


def connected(scene: Scene, *clients: Following) -> None:
    until(lambda: all(each.last_id for each in clients), what="every client knows where it stands")


def test_d14_clients_follow_a_subscription_or_a_predicate_and_resume_by_id(scene: Scene) -> None:
    """GIVEN a client of a subscription, one of a predicate, one of all WHEN batches are taken THEN each has its events
    at once; WHEN one hangs up, misses a batch and comes back with its last id THEN it has that batch, too (D14).
    """
    paths = [
        "/v1/subscriptions/billing/tail",
        "/v1/tail?" + urlencode({"where": "data.n = 1", "op": "insert"}),
        "/v1/tail",
    ]
    clients = [scene.follow(path) for path in paths]
    assert all(each.answer.getheader("content-type").startswith("text/event-stream") for each in clients)
    connected(scene, *clients)
    made = scene.log.take(P0, 3)
    scene.server.tail.wake()
    wanted = [made[1:], made[1:2], made]
    until(lambda: [each.ids for each in clients] == wanted, what="each has what it wants")
    assert scene.value("tail_clients") == 3
    clients[2].hang_up()
    until(lambda: scene.value("tail_clients") == 2, what="the server sees that it is gone")
    missed = scene.log.take(P0, 2)
    back = scene.follow("/v1/tail", **{"Last-Event-ID": clients[2].last_id})
    until(lambda: back.ids == missed, what="what it missed")
    again = scene.follow("/v1/tail?" + urlencode({"last_event_id": clients[2].last_id}))
    until(lambda: again.ids == missed, what="the same by the query")
    assert scene.value("tail_events_sent_total") >= 2 + 1 + 3 + 2 + 2


def test_from_the_beginning_and_from_a_time(scene: Scene) -> None:
    """GIVEN a log WHEN a client begins at the beginning, or at a time THEN it has what is there and what comes."""
    clients = [scene.follow(f"/v1/tail?from={start}") for start in ("beginning", "2026-11-01")]
    until(lambda: all(each.ids == scene.log.ids() for each in clients), what="all that is there")
    more = scene.log.take(P0)
    until(lambda: all(each.ids[-1:] == more for each in clients), what="and what comes")


@pytest.mark.parametrize(
    ("path", "headers", "status", "said"),
    [
        ("/v1/tail?where=" + "reflect('java.lang.System','exit')", {}, 422, "reflect"),
        ("/v1/tail?wher=x", {}, 422, "where"),
        ("/v1/tail?from=now&from=now", {}, 422, "twice"),
        ("/v1/tail?from=tomorrow", {}, 422, "from"),
        ("/v1/tail?source=no_such", {}, 422, "no_such"),
        ("/v1/tail?op=poison", {}, 422, "never delivered"),
        ("/v1/tail", {"Last-Event-ID": "1:shop/0@x"}, 422, "Last-Event-ID"),
        ("/v1/subscriptions/nobody/tail", {}, 404, "nobody"),
        ("/v1/subscriptions/helper/tail", {}, 422, "bot"),
        ("/v1/subscriptions/billing/tail?where=op%3D'insert'", {}, 422, "where"),
    ],
)
def test_what_is_not_right_is_refused_before_anything_is_sent(
    scene: Scene, path: str, headers: dict[str, str], status: int, said: str
) -> None:
    """GIVEN a wish, a start or an id that is not right WHEN asked for THEN the answer is an error that names it."""
    refused = scene.follow(path.replace(" ", "%20"), **headers)
    assert refused.answer.status == status
    error = refused.error
    assert said in error["message"] + error["hint"]
    assert scene.value("tail_clients") == 0


def test_a_tail_needs_a_token_and_an_instance_that_runs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN no token, or too many clients, or an instance that stops WHEN asked for THEN 401, 503 with a hint, 503."""
    assert scene.follow(token=None).answer.status == 401
    first = scene.follow(token=WRITER)
    connected(scene, first)
    monkeypatch.setattr(tail_module, "CLIENTS_MAX", 1)
    full = scene.follow()
    assert full.answer.status == 503 and "ulimit" in full.error["hint"] and full.answer.getheader("retry-after")
    scene.server.tail.close()
    assert scene.follow().answer.status == 503


def test_s9_an_instance_that_stops_serves_its_clients_on_and_takes_no_new_ones(scene: Scene) -> None:
    """GIVEN a client WHEN the server refuses requests, as the first step of a stop THEN a new client is refused, and
    the old one gets what is taken until the end."""
    client = scene.follow()
    connected(scene, client)
    scene.server.refuse()
    assert scene.follow().answer.status == 503
    made = scene.log.take(P0)
    until(lambda: client.ids == made, what="the client is served on")


def test_at_the_end_clients_are_told_to_connect_again(scene: Scene) -> None:
    """GIVEN clients WHEN the instance stops THEN each is told when to try again, its answer ends, nothing is lost."""
    client = scene.follow()
    connected(scene, client)
    client.retry_ms = None
    scene.server.tail.close()
    until(lambda: client.ended, what="the answer ends")
    assert client.retry_ms == 2_000 and scene.value("tail_clients") == 0
    made = scene.log.take(P0)
    with served_again(scene) as other:
        back = other.follow(**{"Last-Event-ID": client.last_id})
        until(lambda: back.ids == made, what="by another instance, over the same log")


@contextmanager
def served_again(scene: Scene) -> Iterator[Scene]:
    with served() as other:
        other.server.tail.close()
        other.server.tail.open(TailOf(scene.log, frozenset({"shop"}), subscription, no_spark))
        yield other


def test_a_client_that_takes_nothing_costs_little_and_misses_nothing(scene: Scene) -> None:
    """GIVEN a client that does not read, and much that comes WHEN others follow THEN they have it at once; WHEN it
    reads again THEN it has every event, once, in order, and it was counted as having fallen back.
    """
    quick = scene.follow()
    slow = socket.create_connection(("127.0.0.1", scene.server.port), timeout=30)
    slow.sendall(f"GET /v1/tail HTTP/1.0\r\nAuthorization: Bearer {READER}\r\n\r\n".encode())
    connected(scene, quick)
    until(lambda: scene.value("tail_clients") == 2, what="both are there")
    made: list[str] = []
    for _ in range(16):
        made += scene.log.take(P0, 30)
        for row in scene.log.batches[P0][-1]:
            row["payload"] = json.dumps({"text": "x" * 30_000})
        scene.server.tail.wake()
        until(lambda made=made: len(quick.ids) == len(made), what="the quick one has it")
    browser = Browser()
    head = b""
    while b"\r\n\r\n" not in head:
        head += slow.recv(65536)
    browser.read(head.partition(b"\r\n\r\n")[2])
    while len(browser.ids) < len(made):
        browser.read(slow.recv(1 << 20))
    assert browser.ids == made == quick.ids
    assert scene.value("tail_fallbacks_total") >= 1
    slow.close()
