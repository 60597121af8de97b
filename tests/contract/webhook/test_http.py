"""The HTTP side of the webhook sink: odd answers, cut connections, refused addresses, unusable settings."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from evermark.delivery.model import Fate, MadeBy
from evermark.delivery.webhook.base import Job
from evermark.delivery.webhook.client import http_loop
from evermark.delivery.webhook.sink import WebhookSink
from evermark.testing.until import until
from tests.contract.webhook.webhook_receiver import Got, RawServer, Receiver, events, one_outcome, spec_for, tls_context

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n"
UNWELL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


def test_a_huge_answer_is_not_read_to_its_end(receiver: Receiver, sink: WebhookSink) -> None:
    """2xx counts however much follows; memory does not."""
    sent = 0

    async def answer(got: Got) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=200)
        await response.prepare(got.raw)
        try:
            while sent < 1 << 28:
                await response.write(b"x" * 65536)
                sent += 65536
        except ConnectionError:
            pass
        return response

    receiver.answer = answer
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 10))
    assert (outcome.fate, outcome.accepted) == (Fate.DONE, 1)
    assert sent < 1 << 26


def test_a_long_refusal_is_shortened_and_made_printable(receiver: Receiver, sink: WebhookSink) -> None:
    """What a receiver says is kept for people, within bounds."""
    receiver.answer = lambda got: web.Response(status=400, body=b"bad\x1b[31m\xff\n" + b"y" * 100_000)
    (parked,) = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 10)).parked
    assert parked.reason.startswith("HTTP 400: bad")
    assert parked.reason.isprintable()
    assert len(parked.reason) < 250


def test_a_refusal_that_repeats_what_it_was_told_shows_no_secret(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a gateway that repeats a header and the address, the latter where its words are cut WHEN it refuses THEN
    the reason, which many may read, has neither, and what else was said."""
    token, place = "s3cret-of-ours", "/hooks/T0KEN-in-the-path"

    def answer(got: Got) -> web.Response:
        said = f"unknown token: {got.headers['authorization']}, or {token}; cannot POST"
        return web.Response(status=422, text=f"{said:<185}{got.raw.path}")

    receiver.answer = answer
    spec = replace(spec_for(receiver.url), headers={"Authorization": f"Bearer {token}"})
    spec = replace(spec, url=spec.url.replace("/hook", place))
    (parked,) = one_outcome(sink.deliver([Job(spec, events(1))], 10)).parked
    assert token not in parked.reason and "/hooks/" not in parked.reason
    assert parked.reason.startswith("HTTP 422: unknown token: ***, or ***; cannot POST")


def test_a_refusal_that_is_cut_off_in_a_secret_shows_no_part_of_it(sink: WebhookSink) -> None:
    """GIVEN a gateway that repeats a header WHEN the connection is lost within it THEN the reason has no part of it."""
    server = RawServer(b"HTTP/1.1 403 No\r\ncontent-length: 900\r\n\r\nbad token Bearer s3cret-of-ou")
    spec = replace(spec_for(server.url), headers={"Authorization": "Bearer s3cret-of-ours"})
    outcome = one_outcome(sink.deliver([Job(spec, events(1))], 5))
    assert [one.reason for one in outcome.parked] == ["HTTP 403: bad token ***"]
    server.close()


def test_a_connection_cut_in_the_body_of_a_2xx_was_an_answer(sink: WebhookSink) -> None:
    """The answer is its status line: the event was taken."""
    server = RawServer(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\npart")
    assert one_outcome(sink.deliver([Job(spec_for(server.url), events(1))], 5)).fate is Fate.DONE
    server.close()


def test_a_kept_connection_that_was_cut_is_replaced_once(sink: WebhookSink) -> None:
    """That is how kept connections end; a new one that is cut is a failure of the endpoint."""
    ok, kept = b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 204 No Content\r\nconnection: keep-alive\r\n\r\n"
    server = RawServer(kept, None, ok)
    assert one_outcome(sink.deliver([Job(spec_for(server.url, concurrency=1), events(2))], 5)).fate is Fate.DONE
    assert server.requests == 3
    server.close()
    server = RawServer(None, ok)
    outcome = one_outcome(sink.deliver([Job(spec_for(server.url), events(1))], 5))
    assert (outcome.fate, outcome.parked) == (Fate.ENDPOINT_FAILED, ())
    assert outcome.reason == "the connection ended before the answer"
    server.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
        b"HTTP/1.1 2OO OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-long: " + b"y" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200",
    ],
)
def test_what_is_not_http_is_a_failure_of_the_endpoint(sink: WebhookSink, answer: bytes) -> None:
    """No nonsense counts as taken, and none breaks the sink."""
    server = RawServer(answer, answer)
    outcome = one_outcome(sink.deliver([Job(spec_for(server.url), events(1))], 5))
    assert (outcome.fate, outcome.accepted, outcome.parked) == (Fate.ENDPOINT_FAILED, 0, ())
    server.close()


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"5\r\nhello\r\n3;x=y\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\nconnection: keep-alive\r\n\r\nok",
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.1 204 No Content\r\nconnection: keep-alive\r\n\r\n",
    ],
)
def test_every_usual_form_of_answer_is_understood(sink: WebhookSink, answer: bytes) -> None:
    """Chunks, interim answers, old protocol versions, no body."""
    server = RawServer(answer, answer)
    results = sink.deliver([Job(spec_for(server.url, concurrency=1), events(2))], 5)
    assert (one_outcome(results).fate, one_outcome(results).accepted) == (Fate.DONE, 2)
    server.close()


def test_a_connection_that_said_too_much_is_not_used_again(sink: WebhookSink) -> None:
    """GIVEN an answer with another one behind it THEN that one answers no later request."""
    spare = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    server = RawServer(
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: keep-alive\r\n\r\nok" + spare, *[UNWELL] * 3
    )
    (result,) = sink.deliver([Job(spec_for(server.url, concurrency=1), events(2))], 5)
    assert (result.outcome.fate, result.outcome.accepted) == (Fate.ENDPOINT_FAILED, 1)
    assert server.connections == 4  # one that said too much, then three tries, each on a new one
    server.close()


def test_connections_are_kept_and_used_again(receiver: Receiver, sink: WebhookSink) -> None:
    """A connection per event would cost more than the event."""
    peers: set[Any] = set()

    def answer(got: Got) -> int:
        assert got.raw.transport is not None
        peers.add(got.raw.transport.get_extra_info("peername"))
        return 200

    receiver.answer = answer
    for _ in range(3):
        sink.deliver([Job(spec_for(receiver.url, concurrency=2), events(50))], 10)
    assert len(peers) <= 3


def test_a_certificate_that_is_not_trusted_is_refused(sink: WebhookSink, tmp_path: Path) -> None:
    """Nothing is sent, nothing is parked, and the reason says it."""
    receiver = Receiver(tls=tls_context(tmp_path))
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(2))], 5))
    assert (outcome.fate, outcome.parked, receiver.got) == (Fate.ENDPOINT_FAILED, (), [])
    assert "certificate" in outcome.reason
    plain = spec_for(receiver.url.replace("https", "http"))
    assert one_outcome(sink.deliver([Job(plain, events(1))], 5)).fate is Fate.ENDPOINT_FAILED
    receiver.close()


def test_https_with_a_trusted_certificate_works(
    sink: WebhookSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a certificate this machine trusts THEN bodies of any size arrive, over kept connections."""
    receiver = Receiver(tls=tls_context(tmp_path))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    spec = spec_for(receiver.url, concurrency=2)
    assert one_outcome(sink.deliver([Job(spec, events(20, payload='"' + "x" * 500_000 + '"'))], 20)).fate is Fate.DONE
    assert len(receiver.ids) == 20
    receiver.close()


def test_closing_the_sink_ends_work_under_way_as_unfinished(receiver: Receiver, sink: WebhookSink) -> None:
    """Whoever waits for results gets them, and nothing counts as failed."""

    async def hang(_: Got) -> int:
        await asyncio.Event().wait()
        return 200

    receiver.answer = hang
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(sink.deliver, [Job(spec_for(receiver.url), events(3))], 30)
        until(lambda: receiver.got, "a request is under way")
        sink.close()
        assert one_outcome(waiting.result(5)).fate is Fate.UNFINISHED


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"])
def test_a_private_address_is_refused_however_it_is_written(receiver: Receiver, sink: WebhookSink, host: str) -> None:
    """Nothing is lost: it counts as a failed endpoint, and the reason holds the line to add."""
    spec = spec_for(f"http://{host}:{receiver.port}/", allow_networks=())
    outcome = one_outcome(sink.deliver([Job(spec, events(1))], 5))
    assert (outcome.fate, outcome.parked, receiver.got) == (Fate.ENDPOINT_FAILED, (), [])
    assert "is not allowed" in outcome.reason
    assert "allow_networks: [" in outcome.reason


def test_subscriptions_made_by_api_open_no_networks(receiver: Receiver, sink: WebhookSink) -> None:
    """Whatever their row says."""
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url, made_by=MadeBy.API), events(1))], 5))
    assert outcome.fate is Fate.ENDPOINT_FAILED
    assert "is not allowed" in outcome.reason


def test_the_guard_decides_on_the_address_that_is_dialled(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a name that is public when looked at and loopback when dialled THEN it is refused."""
    asked: list[str] = []

    def rebinding(host: str | bytes, port: int, *_: object, **__: object) -> list[Any]:
        asked.append(str(host))
        address = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    assert socket.getaddrinfo("rebind.example", receiver.port)[0][4][0] == "93.184.216.34"
    spec = spec_for(f"http://rebind.example:{receiver.port}/", allow_networks=("93.184.216.34/32",))
    outcome = one_outcome(sink.deliver([Job(spec, events(1))], 5))
    assert asked[1:] == ["rebind.example"]
    assert outcome.fate is Fate.ENDPOINT_FAILED
    assert "127.0.0.1 is not allowed (loopback)" in outcome.reason
    assert not receiver.got


def test_connections_opened_for_one_subscription_do_not_serve_another(receiver: Receiver, sink: WebhookSink) -> None:
    """A kept connection into an opened network is no way in for a subscription that may not go there."""
    assert one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 5)).fate is Fate.DONE
    closed = spec_for(receiver.url, name="other", allow_networks=())
    assert one_outcome(sink.deliver([Job(closed, events(1))], 5)).fate is Fate.ENDPOINT_FAILED
    assert len(receiver.got) == 1


def test_a_name_that_does_not_resolve_is_a_failed_endpoint(sink: WebhookSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS errors retry."""

    def nothing(*_: object, **__: object) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    outcome = one_outcome(sink.deliver([Job(spec_for("https://nowhere.invalid/"), events(1))], 5))
    assert outcome.fate is Fate.ENDPOINT_FAILED
    assert "nowhere.invalid cannot be resolved" in outcome.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "ftp://x/token-in-url"},
        {"url": "https://"},
        {"secrets": ("whsec_hunter2hunter2!",)},
        {"headers": {"Webhook-Id": "mine"}},
        {"headers": {"x": "a\r\nb: c"}},
        {"body": "xml"},
        {"allow_networks": ("everywhere",)},
    ],
)
def test_settings_that_cannot_be_used_lose_nothing_and_show_no_secret(
    receiver: Receiver, sink: WebhookSink, changes: dict[str, Any]
) -> None:
    """The subscription waits for somebody to repair it; the others are served."""
    broken = replace(spec_for(receiver.url, name="broken"), **changes)
    results = sink.deliver([Job(broken, events(2)), Job(spec_for(receiver.url), events(2))], 5)
    fates = {r.subscription: r.outcome for r in results}
    assert fates["billing"].fate is Fate.DONE
    assert fates["broken"].fate is Fate.ENDPOINT_FAILED
    assert "hint:" in fates["broken"].reason
    assert "hunter2" not in fates["broken"].reason
    assert "token-in-url" not in fates["broken"].reason


def test_when_this_machine_runs_out_of_descriptors_nobody_is_blamed(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is unfinished, and done next time."""

    def none_left(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        http_loop()
        patch.setattr(socket, "socket", none_left)
        outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(3))], 5))
    assert outcome.fate is Fate.UNFINISHED
    assert "Too many open files" in outcome.reason
    assert one_outcome(sink.deliver([Job(spec_for(receiver.url), events(3))], 5)).fate is Fate.DONE


def test_a_forked_child_makes_its_own_loop(receiver: Receiver, sink: WebhookSink) -> None:
    """Spark forks its workers: a child must not wait for a thread that stayed with its parent."""
    assert one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 5)).fate is Fate.DONE
    parent = http_loop()
    child = os.fork()
    if child == 0:
        try:
            fine = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(2))], 5)).fate is Fate.DONE
            os._exit(0 if fine and http_loop() is not parent else 1)
        finally:
            os._exit(2)
    ended: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
        return bool(ended)

    try:
        until(has_ended, "the child ends")
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ended == [0]
    assert one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 5)).fate is Fate.DONE


def test_a_closed_sink_opens_again_when_needed(receiver: Receiver, sink: WebhookSink) -> None:
    """Closing lets go of connections, not of the ability to make new ones."""
    for _ in range(2):
        assert one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 5)).fate is Fate.DONE
        sink.close()


def test_the_environment_names_no_proxy(receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy variable does not lead the requests past the guard."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 5)).fate is Fate.DONE
