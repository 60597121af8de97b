"""A replica's answers over HTTP: one Starlette application, served by uvicorn in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from evermark.errors import (
    BusyError,
    ConfigError,
    DeniedError,
    EvermarkError,
    FormatError,
    NotFoundError,
    UnreachableError,
)
from evermark.observe.logging import get_logger
from evermark.replicas.auth import TOLERANCE_MS, Gate, Party
from evermark.replicas.digests import FANOUT, SPANS_MAX, Span
from evermark.replicas.exchange import Hello
from evermark.replicas.ranges import held_as_json, held_from
from evermark.replicas.replica import Replica
from evermark.replicas.wire import (
    BODY_BYTES_MAX,
    coverage_as_json,
    error_as_json,
    events_from_bytes,
    events_to_bytes,
    note_of,
)

THREADS = 4
_CONNECTIONS_MAX = 1000
_STOP_WAIT_S = 2
_JSON_BYTES_MAX = 16 * 1024 * 1024
BODIES_BYTES_MAX = 4 * BODY_BYTES_MAX
BODY_S_MAX = TOLERANCE_MS / 1000  # a request that is older is refused when it is whole

Answer = Callable[[Replica, str, bytes], bytes]


class ReplicaServer:
    """`replica` gives each of its threads a node on a store of its own."""

    def __init__(
        self, host: str, port: int, gate: Gate, replica: Callable[[], Replica], registry: CollectorRegistry
    ) -> None:
        self._host, self.port, self._gate, self._registry = host, port, gate, registry
        self._make, self._local, self._bodies = replica, threading.local(), Bodies()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="replica-answer")
        self._log = get_logger(part="replica")
        routes = [Route("/livez", lambda _: PlainTextResponse("ok\n")), Route("/metrics", self._metrics)]
        routes += [
            Route(f"/v1/replica/{name}", self._answering(answer), methods=["POST"]) for name, answer in _ALL.items()
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_graceful_shutdown=_STOP_WAIT_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="replica-server", daemon=True)

    def start(self) -> None:
        """It listens when this returns."""
        try:
            self._socket = socket.create_server((self._host, self.port))
            # asyncio does so only for sockets whose protocol is named: the body of an answer would wait 40 ms for the
            # client's word that it has the head.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self.port}: {error.strerror or error}",
                hint="another program has the port: choose another with --listen, or port 0 for any",
            ) from None
        self.port = self._socket.getsockname()[1]
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    def _replica(self) -> Replica:
        found: Replica | None = getattr(self._local, "replica", None)
        if found is None:
            try:
                found = self._local.replica = self._make()
            except NotFoundError as error:  # a file that was there when the node started: peers are to ask again
                raise UnreachableError(error.message, hint=error.hint) from error
        return found

    def _drop_replica(self) -> None:
        found: Replica | None = getattr(self._local, "replica", None)
        self._local.replica = None
        if found is not None:
            with suppress(Exception):  # what is wrong with it was said already
                found.store.close()

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    def _answering(self, answer: Answer) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            with self._bodies.one() as take:
                try:
                    self._gate.expected(request.headers, _now_ms())
                    body = await _body(request, take)
                    party = self._gate.check(request.method, request.url.path, request.headers, body, _now_ms())
                except (DeniedError, FormatError, BusyError) as error:
                    self._log.warning("a request was refused", error=error)
                    code, status = ("busy", 503) if isinstance(error, BusyError) else ("denied", 401)
                    return Response(json.dumps({"code": code, "message": error.message}).encode(), status)
                loop = asyncio.get_running_loop()
                status, said = await loop.run_in_executor(self._threads, self._answer, answer, party, body)
                headers = party.sign_answer(request.headers["evermark-nonce"], status, said)
                return Response(said, status, headers)

        return handle

    def _answer(self, answer: Answer, party: Party, body: bytes) -> tuple[int, bytes]:
        try:
            return 200, answer(self._replica(), party.peer, body)
        except EvermarkError as error:
            status, said = error_as_json(error)
            if isinstance(error, UnreachableError):
                self._drop_replica()  # a connection that was cut stays so: the next request gets a new one
            if status == 500 or isinstance(error, UnreachableError):
                self._log.error("a peer's request failed", peer=party.peer, error=error)
        except Exception as error:  # noqa: BLE001 - the next request is answered all the same
            self._log.error("a peer's request failed", peer=party.peer, error=error)
            status, said = error_as_json(EvermarkError("the request failed", hint="the node's log says why"))
            self._drop_replica()
        return status, json.dumps(said).encode()


class Bodies:
    """How many bytes of requests are in memory, of all that are under way together: whose they are is known only when
    they are whole. Of one thread."""

    def __init__(self) -> None:
        self._bytes = 0

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """What is yielded is told the size of each piece of a body; all of it counts until the answer is made."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._bytes + size > BODIES_BYTES_MAX:
                raise BusyError("too many large requests are under way", hint="ask again in a while")
            self._bytes += size
            taken += size

        try:
            yield take
        finally:
            self._bytes -= taken


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _body(request: Request, take: Callable[[int], None]) -> bytes:
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for piece in request.stream():
                take(len(piece))
                found += piece
                if len(found) > BODY_BYTES_MAX:
                    raise FormatError(f"a body is larger than {BODY_BYTES_MAX} bytes", hint="send smaller pages")
    except TimeoutError:
        raise FormatError(f"a body takes longer than {BODY_S_MAX} s", hint="look at the network") from None
    return bytes(found)


def _asked(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body) if len(body) <= _JSON_BYTES_MAX else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FormatError("a request is no JSON mapping", hint="the peer is of another version")
    return found


def _hello(replica: Replica, peer: str, body: bytes) -> bytes:
    return json.dumps(replica.answers.hello(peer, Hello.from_json(_asked(body))).as_json()).encode()


def _standing(replica: Replica, _peer: str, _body: bytes) -> bytes:
    return json.dumps(replica.answers.standing().as_json()).encode()


def _pull(replica: Replica, peer: str, body: bytes) -> bytes:
    asked = _asked(body)
    held = held_from(asked.get("from_by_origin"))
    only = held_from(asked["only"]) if "only" in asked else None
    page = replica.answers.pull(peer, str(asked["table"]), str(asked["origin"]), held, _count(asked, "limit"), only)
    return events_to_bytes(page.events, coverage_as_json(page.coverage))


def _pull_since(replica: Replica, _peer: str, body: bytes) -> bytes:
    asked = _asked(body)
    since, after = _count(asked, "from_timestamp"), str(asked.get("after_id", ""))
    return events_to_bytes(replica.answers.pull_since(str(asked["table"]), since, after, _count(asked, "limit")), {})


def _push(replica: Replica, peer: str, body: bytes) -> bytes:
    note = note_of(body)
    table = replica.node.table(str(note.get("table")))
    held = replica.answers.push(peer, table.name, str(note.get("origin")), events_from_bytes(body, table))
    return json.dumps({"held": held_as_json(held)}).encode()


def _snapshot(replica: Replica, _peer: str, body: bytes) -> bytes:
    asked = _asked(body)
    covering, native = held_from(asked.get("covering", {})), asked.get("native")
    made = replica.answers.snapshot(str(asked.get("table")), covering, None if native is None else str(native))
    return json.dumps(made.as_json()).encode()


def _chunk(replica: Replica, _peer: str, body: bytes) -> bytes:
    asked = _asked(body)
    return replica.answers.chunk(str(asked.get("snapshot")), _count(asked, "number"))


def _digests(replica: Replica, _peer: str, body: bytes) -> bytes:
    table, spans = _spans(_asked(body))
    found = [[each.rows, each.value.hex()] for each in replica.answers.digests(table, spans)]
    return json.dumps({"digests": found}).encode()


def _rows(replica: Replica, _peer: str, body: bytes) -> bytes:
    table, spans = _spans(_asked(body))
    found = [[[record, value.hex()] for record, value in rows] for rows in replica.answers.rows(table, spans)]
    return json.dumps({"rows": found}).encode()


def _cuts(replica: Replica, _peer: str, body: bytes) -> bytes:
    asked = _asked(body)
    table, spans = _spans(asked)
    return json.dumps({"cuts": replica.answers.cuts(table, spans, min(_count(asked, "pieces"), FANOUT))}).encode()


def _count(asked: Mapping[str, Any], name: str) -> int:
    value = asked.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise FormatError(f"{name} is no number", hint="the peer is of another version")
    return value


def _spans(asked: Mapping[str, Any]) -> tuple[str, list[Span]]:
    spans = asked.get("spans")
    if not isinstance(spans, list) or len(spans) > SPANS_MAX:
        raise FormatError("spans cannot be read, or are too many", hint="the peer is of another version")
    for span in spans:
        if not (isinstance(span, list) and len(span) == 2 and all(end is None or isinstance(end, str) for end in span)):
            raise FormatError("a span cannot be read", hint="the peer is of another version")
    return str(asked.get("table")), [(span[0], span[1]) for span in spans]


_ALL: Mapping[str, Answer] = {
    "hello": _hello,
    "standing": _standing,
    "pull": _pull,
    "pull-since": _pull_since,
    "push": _push,
    "snapshot": _snapshot,
    "chunk": _chunk,
    "digests": _digests,
    "rows": _rows,
    "cuts": _cuts,
}
