"""The HTTP server as a process lives with it: ports, signals, silence, clients that dawdle, streams, and its end."""

from __future__ import annotations

import asyncio
import http.client
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from evermark.errors import ConfigError
from evermark.observe.health import HealthBoard
from evermark.observe.metrics import Metrics
from evermark.server import http as server_module
from evermark.server.http import Server
from evermark.server.tokens import Tokens
from evermark.testing.answer_times import median_s_of_answers
from evermark.testing.until import until
from tests.unit.server.api_scene import TOKENS, WRITER


def made(host: str = "127.0.0.1", port: int = 0) -> Server:
    return Server(host, port, HealthBoard(), Metrics(), Tokens(TOKENS))


@contextmanager
def started(server: Server | None = None) -> Iterator[Server]:
    server = server or made()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def livez(server: Server, host: str = "127.0.0.1") -> int:
    connection = http.client.HTTPConnection(host, server.port, timeout=10)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status
    finally:
        connection.close()


def said_to(server: Server, sent: bytes) -> bytes:
    """Everything that the server answers to these bytes until it hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(sent)
        found = b""
        while piece := client.recv(65536):
            found += piece
        return found


def test_port_0_is_any_and_a_taken_port_is_an_error_with_a_hint() -> None:
    """GIVEN port 0 WHEN started THEN the port is told; WHEN another wants that port THEN a hint says what to do."""
    with started() as first:
        assert first.port > 0 and livez(first) == 200
        with pytest.raises(ConfigError, match=r"server\.listen: cannot listen on 127\.0\.0\.1") as refused:
            made(port=first.port).start()
        assert "another program has the port" in refused.value.hint
    with started(made(port=first.port)) as again:
        assert livez(again) == 200, "the port is free at once after a stop"


def test_an_answer_is_not_held_back_for_a_word_of_the_client() -> None:
    """GIVEN a client that asks again and again over one connection THEN no answer waits the 40 ms after which a client
    says at last that it has the head."""
    with started() as server:
        assert median_s_of_answers(server.port, "/livez") < 0.03


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_a_host_that_is_not_ours_is_an_error(host: str) -> None:
    """GIVEN an address of somebody else WHEN started THEN it is an error of the file, and not a crash of a thread."""
    with pytest.raises(ConfigError, match=r"server\.listen"):
        made(host).start()


def test_signals_stay_with_the_process(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a server WHEN it starts, is sent nonsense and stops THEN signals are handled as before, in silence."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with caplog.at_level(logging.INFO), started() as server:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        assert said_to(server, b"\x00nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert livez(server) == 200
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert caplog.text == "" and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"PATCH /v1/bots/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        b"PATCH /v1/bots/x HTTP/1.1\r\nAuthorization: Bearer %b\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        % WRITER.encode(),
    ],
    ids=["nothing", "half a head", "half a body, refused", "half a body, awaited"],
)
def test_a_client_that_does_not_finish_its_request_is_hung_up_on(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN nothing, half a head or half a body WHEN nothing more comes THEN the connection ends, others are served."""
    monkeypatch.setattr(server_module, "_REQUEST_WAIT_S", 0.2)
    with started() as server:
        begun = time.monotonic()
        said_to(server, sent)
        assert 0.2 <= time.monotonic() - begun < 5
        assert livez(server) == 200
        until(lambda: not server._server.server_state.connections, "no connection is left")


def test_a_head_that_is_too_large_is_refused() -> None:
    """GIVEN a head that does not end WHEN it passes the limit THEN 400, before all of it was read."""
    with started() as server:
        answer = said_to(server, b"GET /livez HTTP/1.1\r\nX-Large: " + b"x" * (server_module._HEAD_BYTES_MAX + 1))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert livez(server) == 200


def test_a_stream_of_events_is_served_and_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a route that sends events for ever WHEN many listen THEN all get them, until the server stops."""
    monkeypatch.setattr(server_module, "_REQUEST_WAIT_S", 0.1)
    server = made()

    async def events() -> AsyncIterator[str]:
        while True:
            yield "data: x\n\n"
            await asyncio.sleep(0.05)

    async def tail(_: Request) -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    server.app.router.routes.append(Route("/tail", tail))
    clients = []
    with started(server):
        for _ in range(50):
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            client.request("GET", "/tail")
            clients.append((client, client.getresponse()))
        assert livez(server) == 200
        for _, answer in clients:
            assert [answer.read(9) for _ in range(8)] == [b"data: x\n\n"] * 8, "longer than a request may take to come"
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 3
    for client, answer in clients:
        with suppress(http.client.HTTPException, OSError):
            answer.read()
        client.close()


def test_a_failure_of_a_probe_is_logged_and_told_as_500(capfd: pytest.CaptureFixture[str]) -> None:
    """GIVEN a board with a bug WHEN health is asked for THEN 500 in our form, and our log says why."""
    server = made()

    def fail() -> None:
        raise RuntimeError("a bug")

    server._probes._board.ask = fail
    with started(server):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert answer.status == 500 and b'"this request failed"' in answer.read()
        assert livez(server) == 200
        connection.close()
    said = capfd.readouterr()
    assert "a bug" in said.out + said.err and "Traceback" not in said.err


def test_a_client_that_takes_nothing_of_its_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN an answer larger than all buffers WHEN its client reads nothing THEN the server hangs up in a while."""
    monkeypatch.setattr(server_module, "_REQUEST_WAIT_S", 0.05)
    server, ended = made(), []

    async def much() -> AsyncIterator[bytes]:
        try:
            for _ in range(1_000):
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    async def answer(_: Request) -> StreamingResponse:
        return StreamingResponse(much())

    server.app.router.routes.append(Route("/much", answer))
    with started(server), socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: ended, "the answer was given up")
