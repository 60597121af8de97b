"""The HTTP API over a store in memory: a real server on a port, tokens, and a sink that says what it is told to."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.config import TokenConfig
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import MadeBy, SourcePartition
from evermark.delivery.replay.memory import MemoryReplays
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.store.stream_status import StreamStatus
from evermark.delivery.webhook.base import Answer, Try
from evermark.log.read import FileRange
from evermark.observe.health import HealthBoard
from evermark.observe.metrics import Metrics
from evermark.secrets import KeyRef, Secret, SecretBox
from evermark.server.bots import BotService
from evermark.server.calls import Services
from evermark.server.deliveries import DeliveryService
from evermark.server.http import Server
from evermark.server.replays import ReplayService
from evermark.server.statuses import StatusService
from evermark.server.subscriptions import SubscriptionService
from evermark.server.tokens import Tokens
from evermark.testing.contracts.scene import P0, P1, T0, spec

T = TypeVar("T")

WRITER, READER = "writer-token-of-some-length-1", "reader-token-of-some-length-2"
TOKENS = {
    "ops": TokenConfig(token=Secret(WRITER)),
    "dashboard": TokenConfig(token=Secret(READER), may="read"),
}
SECRET = "whsec_" + "A" * 43 + "="
BOT: dict[str, Any] = {
    "name": "helper",
    "url": "https://helper.example/hooks",
    "source": "shop",
    "user": "helper-bot",
    "device": "phone",
}
KNOWN_STREAMS = {"public.orders"}
WANTED: dict[str, Any] = {"name": "billing", "url": "https://billing.example/hooks", "streams": ["public.orders"]}


@dataclass
class Told:
    """An answer as a client sees it."""

    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        assert set(self.json) == {"error"} and set(self.json["error"]) == {"kind", "message", "hint"}, self.text
        return self.json["error"]


@dataclass
class Fired:
    """A sink for test-fires."""

    answer: Answer = field(default_factory=lambda: Answer(Verdict.ACCEPTED, 204))
    tries: list[Try] = field(default_factory=list)

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        self.tries += tries
        return [self.answer] * len(tries)


class Scene:
    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        key = folder / "key"
        key.write_text("a key that nobody will ever guess")
        self.box = SecretBox(KeyRef("file", str(key)))
        leases = MemoryLeases(is_gone=lambda holder: True)
        lease = leases.acquire(DELIVER_LEASE, Holder("i", "h", "b", 1, "1"), 60)
        assert lease is not None
        self.epoch = lease.epoch
        self.store = MemoryDelivery(leases, jitter=lambda: 0.0)
        self.sink = Fired()
        self.heads: dict[SourcePartition, int] = {P0: 7, P1: 3}
        self.statuses = [
            StreamStatus("billing", "failover", "e1", T0),
            StreamStatus("file", "replay", replay_from=T0, replay_to=T0),
            StreamStatus("mail", "healthy"),
        ]
        self.before: Callable[[], None] = lambda: None  # runs in the thread that asks state
        for place in self.heads:
            self.store.open_partition(place, 0, self.epoch)
        self.store.register([spec("file", secrets=("sealed",))], MadeBy.FILE, {}, self.epoch)
        sink: Any = self.sink
        subscriptions = SubscriptionService(
            self.store,
            self.box,
            self._as_deliverer,
            lambda: self.heads,
            self._files,
            lambda place, _: 2,
            sink,
            lambda streams: [f"stream {each}: not known" for each in streams if each not in KNOWN_STREAMS],
        )
        bots = BotService(subscriptions, self.store.bots, {P0.source})
        self.replays = MemoryReplays(self.store)
        replays = ReplayService(
            self.replays, self._as_deliverer, {P0.source}, self.store.subscriptions, subscriptions.warnings, lambda: T0
        )
        statuses = StatusService(lambda: self.statuses, lambda name: {s.subscription: s for s in self.statuses}[name])
        self.services = Services(
            subscriptions, DeliveryService(self.store, self._as_deliverer), bots, replays, statuses
        )
        self.server = server

    def _files(self, source: str) -> list[FileRange]:
        return [FileRange("f", P0.partition, P0.partition, 1, 7, 700, 1, event_time_min=T0, event_time_max=T0)]

    def _as_deliverer(self, step: Callable[[int], T]) -> T:
        self.before()
        return step(self.epoch)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = WRITER,
        headers: Mapping[str, str] | None = None,
    ) -> Told:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"Authorization": f"Bearer {token}"} if token is not None else {}
            connection.request(method, path, data, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Told(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()

    def get(self, path: str) -> Told:
        return self.ask("GET", path)

    def post(self, path: str, body: Any = None) -> Told:
        return self.ask("POST", path, body)


@contextmanager
def served(folder: Path, tokens: Mapping[str, TokenConfig] = TOKENS, *, opened: bool = True) -> Iterator[Scene]:
    """A scene with a server of its own."""
    scene = Scene(folder, _started(tokens))
    try:
        if opened:
            scene.server.api.open(scene.services)
        yield scene
    finally:
        if scene.server._thread.is_alive():
            scene.server.stop()


@contextmanager
def served_by_one(folder: Path) -> Iterator[Scene]:
    """A scene with services of its own, behind a server that other scenes have, too: its stop takes a moment."""
    scene = Scene(folder, _one())
    scene.server.api.open(scene.services)
    try:
        yield scene
    finally:
        scene.server.api.close()


@cache
def _one() -> Server:
    return _started(TOKENS)


def _started(tokens: Mapping[str, TokenConfig]) -> Server:
    server = Server("127.0.0.1", 0, HealthBoard(), Metrics(), Tokens(tokens))
    server.start()
    return server
