"""The live tail as HTTP clients see it: who may follow, what is refused, how it ends, and what a slow client costs."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import pytest

from evermark.delivery.model import BotSpec, SourcePartition, SubscriptionSpec
from evermark.delivery.tail import hub as hub_module
from evermark.delivery.tail.hub import TailLimits
from evermark.delivery.tail.wish import BySpark, Wish, no_spark
from evermark.errors import NotFoundError
from evermark.log.pieces import LogPiece
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
    board: HealthBoard

    def value(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"evermark_{name}") or 0.0

    def follow(
        self, path: str = "/v1/tail", token: str | None = READER, *, method: str = "GET", **headers: str
    ) -> Following:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        sent = {"Authorization": f"Bearer {token}"} if token is not None else {}
        connection.request(method, path, headers={**sent, **headers})
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
def served(by_spark: BySpark = no_spark) -> Iterator[Scene]:
    log, metrics, board = MemoryLog(), Metrics(), HealthBoard()
    log.take(P0)
    server = Server("127.0.0.1", 0, board, metrics, Tokens(TOKENS))
    server.start()
    try:
        server.tail.open(TailOf(log, frozenset({"shop"}), subscription, by_spark, TailLimits(ring_bytes=2_000_000)))
        yield Scene(log, server, metrics, board)
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
        ("/v1/subscriptions/%00/tail", {}, 404, "there is no"),
        ("/v1/tail?stream=a&stream=%00", {}, 422, "NUL"),
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


def test_head_is_answered_as_get_would_be_and_follows_nothing(scene: Scene) -> None:
    """GIVEN a subscription that is there and one that is not WHEN asked with HEAD THEN 200 and 404; nobody follows."""
    found = scene.follow("/v1/subscriptions/billing/tail", method="HEAD").answer
    assert (found.status, found.getheader("content-type")) == (200, "text/event-stream")
    assert scene.follow("/v1/subscriptions/nobody/tail", method="HEAD").answer.status == 404
    assert scene.value("tail_clients") == 0
    scene.server.tail.close()
    assert scene.follow(method="HEAD").answer.status == 503


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


@dataclass
class SlowSpark:
    """Answers nobody until it may: then the events of key 1."""

    may: threading.Event = field(default_factory=threading.Event)
    asked: int = 0

    def __call__(self, place: SourcePartition, piece: LogPiece, wish: Wish) -> set[tuple[int, str]]:
        self.asked += 1
        assert self.may.wait(300)
        return {(row["batch"], row["position"]) for row in piece.rows.to_pylist() if row["key"] == "1"}


@pytest.mark.parametrize("in_doubt", [False, True])
def test_clients_that_wait_for_spark_hold_up_no_other(in_doubt: bool) -> None:
    """GIVEN a Spark that does not answer, and several clients whose predicates only it can decide, or whose events
    leave them in doubt WHEN another client begins at the beginning THEN it is let in at once, gets all that there is
    and what comes; WHEN Spark answers THEN they have theirs.
    """
    spark = SlowSpark()
    with served(spark) as scene:
        made = scene.log.ids() + scene.log.take(P0, 3)
        if in_doubt:
            scene.log.batches[P0][-1][1]["payload"] = '{"n": 1, "n": 2}'
        wanted = [f"data.n in (1, {n})" if in_doubt else f"key rlike '^1{{1,{n}}}$'" for n in range(10, 16)]
        waiting = [scene.follow("/v1/tail?" + urlencode({"from": "beginning", "where": where})) for where in wanted]
        connected(scene, *waiting)
        until(lambda: spark.asked >= 2, what="all threads that ask Spark wait for it")
        plain = scene.follow("/v1/tail?from=beginning")
        until(lambda: plain.ids == made, timeout_s=20, what="it has all that there is")
        made += scene.log.take(P0)
        until(lambda: plain.ids == made, timeout_s=20, what="and what comes")
        assert all(each.ids == [] for each in waiting) or in_doubt
        spark.may.set()
        until(lambda: all(made[2] in each.ids for each in waiting), what="they have theirs")


def test_different_predicates_that_need_spark_are_few(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN as many predicates that only Spark can decide as there may be WHEN a client comes with another THEN it is
    refused with the bound, and what to do; not one with the same, or one that needs no Spark; WHEN the clients of one
    are gone THEN there is room.
    """
    monkeypatch.setattr(tail_module, "SPARK_WISHES_MAX", 2)

    def follow(number: int) -> Following:
        return scene.follow("/v1/tail?" + urlencode({"where": f"key rlike '{number}'"}))

    clients = [follow(number) for number in (1, 2, 2)]
    refused = follow(3)
    assert refused.answer.status == 503
    error = refused.error
    assert "2 different predicates" in error["message"] and "rlike" in error["hint"]
    assert scene.follow("/v1/tail?" + urlencode({"where": "data.n = 3"})).answer.status == 200
    connected(scene, *clients)
    clients[1].hang_up()
    until(lambda: scene.value("tail_clients") == 3, what="the server sees that it is gone")
    assert follow(3).answer.status == 503
    clients[2].hang_up()
    until(lambda: scene.value("tail_clients") == 2, what="the server sees that the other is gone")
    assert follow(3).answer.status == 200


def test_health_names_the_file_that_clients_wait_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a client that comes to a missing file WHEN it waits THEN health names the file and what to do, and so does
    what the client is told; WHEN the file is back THEN the client goes on by itself, and all is well.
    """
    monkeypatch.setattr(hub_module, "STUCK_REST_S", 0.2)
    made = scene.log.take(P0)
    scene.log.lost.add((P0, 2))
    client = scene.follow("/v1/tail?from=beginning")
    said = "the file shop/p0-b2.parquet of the log is missing"
    until(lambda: [kind for kind, _ in client.events] == ["stuck"], what="the client is told")
    assert client.events[0][1]["message"] == said
    (trouble,) = scene.board.log_troubles()
    assert (trouble.source, trouble.what) == ("shop", "the live tail of partition 0")
    assert said in trouble.reason and "put it back" in trouble.hint
    scene.log.lost.clear()
    until(lambda: client.ids[-1:] == made, what="it goes on")
    until(lambda: [kind for kind, _ in client.events] == ["stuck", "unstuck"], what="and is told")
    assert scene.board.log_troubles() == []


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
