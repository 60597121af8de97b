"""The receiver kit: each event reaches the handler once, and only success is remembered."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import pytest

from evermark.delivery.webhook.body import delivery_ids
from evermark_receiver import (
    ASGIReceiver,
    Busy,
    Disable,
    Event,
    EvermarkMiddleware,
    Park,
    Receiver,
    Response,
    sign,
    wsgi_app,
)

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
NOW = 1_800_000_000


def item(event_id: str, **about: Any) -> dict[str, Any]:
    base = {
        "v": 1,
        "id": event_id,
        "source": "shop",
        "stream": "public.orders",
        "key": "42",
        "op": "update",
        "before": None,
    }
    return {
        "type": "public.orders.update",
        "timestamp": "2026-11-15T01:02:03.000004Z",
        "data": {"id": 42, "total": "99.50"},
        "evermark": {**base, "tx": "731", "schema": 3, "position": "p", "historical": False, "attempt": 1, **about},
    }


def single(event_id: str, webhook_id: str = "", **about: Any) -> tuple[dict[str, str], bytes]:
    body = json.dumps(item(event_id, **about)).encode()
    return sign(webhook_id or event_id, NOW, body, SECRET), body


def bundle(*items: dict[str, Any]) -> tuple[dict[str, str], bytes]:
    body = json.dumps({"events": items}).encode()
    return sign("bundle", NOW, body, SECRET), body


def receiver_for(handler: Callable[[Event], object] | None = None, **options: Any) -> Receiver:
    return Receiver(SECRET, handler=handler, clock=lambda: NOW, **options)


class Taken(list[str]):
    """A handler that notes delivery ids and fails for some event ids, as often as told."""

    def __init__(self, failures: Mapping[str, list[Exception]] | None = None) -> None:
        super().__init__()
        self.failures = dict(failures or {})

    def __call__(self, event: Event) -> None:
        if self.failures.get(event.id):
            raise self.failures[event.id].pop()
        self.append(event.delivery_id)


def test_an_event_is_handled_once_and_its_duplicate_is_accepted() -> None:
    """GIVEN a delivery WHEN it comes twice THEN both are 200 and the handler ran once, with every field."""
    seen: list[Event] = []
    receiver = receiver_for(seen.append)
    first, second = receiver.handle(*single("a")), receiver.handle(*single("a"))
    assert (first.status, second.status) == (200, 200)
    assert [e.id for e in first.handled] == ["a"]
    assert [e.id for e in second.duplicates] == ["a"]
    (event,) = seen
    assert (event.source, event.stream, event.key, event.op) == ("shop", "public.orders", "42", "update")
    assert (event.data["total"], event.schema, event.tx, event.attempt) == ("99.50", 3, "731", 1)
    assert receiver.counters.handled == receiver.counters.duplicates == 1


def test_a_handler_that_keeps_records_by_key_hears_which_key_is_free() -> None:
    """GIVEN a record that gets another key WHEN a handler follows events by key THEN it holds the record once."""
    kept: dict[str | None, object] = {}

    def handler(event: Event) -> None:
        kept.pop(event.previous_key, None)
        kept[event.key] = event.data["total"]

    receiver = receiver_for(handler)
    for delivery in (single("a", key="1"), bundle(item("b", key="2", previous_key="1"), item("c", key="3"))):
        assert receiver.handle(*delivery).status == 200
    assert kept == {"2": "99.50", "3": "99.50"}
    assert receiver.handle(*single("d", previous_key=7)).status == 400


def test_a_failed_event_is_not_remembered() -> None:
    """GIVEN a handler that raises once WHEN the event comes again THEN it is handled then."""
    taken = Taken({"a": [OSError("database is down")]})
    receiver = receiver_for(taken)
    failed = receiver.handle(*single("a"))
    assert failed.status == 500
    assert b"database" not in failed.body
    assert receiver.handle(*single("a")).status == 200
    assert taken == ["a"]


def test_a_duplicate_during_handling_is_told_to_come_again() -> None:
    """GIVEN a handler at work WHEN the same delivery arrives THEN 409 with Retry-After, and 200 once it is done."""
    inner: list[Response] = []
    receiver = receiver_for(lambda _: inner.append(receiver.handle(*single("a"))))
    assert receiver.handle(*single("a")).status == 200
    assert inner[0].status == 409
    assert int(inner[0].headers["retry-after"]) >= 1
    assert receiver.handle(*single("a")).status == 200
    assert len(inner) == 1


def test_a_replay_reaches_the_handler_and_its_own_retry_does_not() -> None:
    """GIVEN a handled event WHEN its replay comes twice THEN it is handled once more, in a bundle as alone."""
    taken = Taken()
    receiver = receiver_for(taken)
    receiver.handle(*single("a"))
    receiver.handle(*single("a", webhook_id="a.r1", historical=True))
    assert taken == ["a", "a.r1"]
    receiver.handle(*bundle(item("a", delivery="a.r1"), item("a", delivery="a.r2"), item("a")))
    assert taken == ["a", "a.r1", "a.r2"]
    receiver.handle(*single("a", webhook_id="a.r2", historical=True))
    assert taken == ["a", "a.r1", "a.r2"]


def test_ids_of_different_streams_do_not_meet() -> None:
    """GIVEN the same id in two streams WHEN both come THEN both are handled."""
    taken = Taken()
    receiver = receiver_for(taken)
    receiver.handle(*single("a", stream="one"))
    receiver.handle(*single("a", stream="two"))
    assert taken == ["a", "a"]


def test_a_bundle_that_failed_midway_resumes_at_the_failed_event() -> None:
    """GIVEN a bundle whose second event fails WHEN it is sent again THEN the first is skipped, order is kept."""
    taken = Taken({"b": [RuntimeError("no")]})
    receiver = receiver_for(taken)
    request = bundle(item("a"), item("b"), item("c"))
    failed = receiver.handle(*request)
    assert (failed.status, [e.id for e in failed.handled]) == (500, ["a"])
    again = receiver.handle(*request)
    assert (again.status, [e.id for e in again.duplicates]) == (200, ["a"])
    assert taken == ["a", "b", "c"]


def test_an_event_taken_in_a_bundle_is_a_duplicate_alone() -> None:
    """GIVEN a bundle taken, its answer lost WHEN the sender splits it THEN single deliveries are duplicates."""
    taken = Taken()
    receiver = receiver_for(taken)
    receiver.handle(*bundle(item("a"), item("b"), item("a")))
    receiver.handle(*single("b"))
    assert taken == ["a", "b"]


@pytest.mark.parametrize("event_id", ["plain-1", "größe 1", "x" * 2000])
def test_an_id_that_no_header_can_hold_is_one_identity_in_a_bundle_and_alone(event_id: str) -> None:
    """GIVEN an id the sender has to rewrite for its header WHEN bundled, alone and replayed THEN once per delivery."""
    taken = Taken()
    receiver = receiver_for(taken)
    (live,), (replay,) = delivery_ids([event_id]), delivery_ids([event_id], "r1")
    receiver.handle(*bundle(item(event_id)))
    receiver.handle(*single(event_id, webhook_id=live))
    assert taken == [event_id]
    receiver.handle(*bundle(item(event_id, delivery=f"{event_id}.r1")))
    receiver.handle(*single(event_id, webhook_id=replay, delivery=f"{event_id}.r1"))
    assert taken == [event_id, f"{event_id}.r1"]


@pytest.mark.parametrize(
    ("failure", "status", "headers"),
    [
        (Park("total is negative"), 422, {"webhook-delivery": "park"}),
        (Disable("moved"), 410, {"webhook-delivery": "disable"}),
        (Busy("later", retry_after_s=29.5), 503, {"retry-after": "30"}),
    ],
)
def test_a_handler_chooses_the_answer(failure: Exception, status: int, headers: dict[str, str]) -> None:
    """GIVEN a handler that refuses WHEN an event comes THEN status and directive say so; nothing is remembered."""
    taken = Taken({"a": [failure]})
    receiver = receiver_for(taken)
    response = receiver.handle(*single("a"))
    assert response.status == status
    assert headers.items() <= response.headers.items()
    assert str(failure).encode() in response.body
    assert receiver.handle(*single("a")).status == 200


def test_park_in_a_bundle_does_not_park_the_others() -> None:
    """GIVEN a bundle with one bad event WHEN refused THEN no park directive, until that event stands alone."""
    receiver = receiver_for(Taken({"b": [Park("bad"), Park("bad")]}))
    refused = receiver.handle(*bundle(item("a"), item("b")))
    assert refused.status == 422
    assert "webhook-delivery" not in refused.headers
    assert receiver.handle(*bundle(item("b"))).headers["webhook-delivery"] == "park"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b'{"events": []}',
        b'{"events": {}}',
        b'{"events": [1]}',
        b'{"data": NaN}',
        b"[" * 100_000,
        b'{"data": ' + b"9" * 5000 + b"}",
        json.dumps({"data": 1}).encode(),
        json.dumps(item("a", v=2)).encode(),
        json.dumps(item("")).encode(),
        json.dumps(item("a", stream=7)).encode(),
        json.dumps(item("a", key=7)).encode(),
        json.dumps({"events": [item("a"), {}]}).encode(),
    ],
)
def test_a_signed_body_that_cannot_be_read_is_refused_without_handling(body: bytes) -> None:
    """GIVEN a malformed body WHEN it is signed well THEN 400, no handler is called, no error escapes."""
    taken = Taken()
    receiver = receiver_for(taken)
    assert receiver.handle(sign("x", NOW, body, SECRET), body).status == 400
    assert taken == []
    assert receiver.counters.rejected == 1


def test_a_number_of_any_length_is_a_number() -> None:
    """GIVEN a number longer than Python makes an int of, as a database may hold WHEN it comes THEN it is handled."""
    digits = "9" * 5_000
    body = json.dumps(item("a")).replace('"99.50"', digits).encode()
    seen: list[Event] = []
    assert receiver_for(seen.append).handle(sign("a", NOW, body, SECRET), body).status == 200
    assert seen[0].data["total"] == Decimal(digits) and seen[0].data["id"] == 42


def test_wrong_signature_and_size_are_refused_before_parsing() -> None:
    """GIVEN an unsigned and an oversized body WHEN they come THEN 401 and 413, each counted as rejected."""
    receiver = receiver_for(Taken(), body_bytes_max=500)
    headers, body = single("a")
    assert receiver.handle({**headers, "webhook-id": "b"}, body).status == 401
    assert receiver.handle({}, b"x" * 501).status == 413
    assert receiver.counters.rejected == 2


def test_what_would_lose_events_quietly_is_an_error() -> None:
    """GIVEN no handler, an unawaited async handler, or a body as text WHEN used THEN never a 200."""
    with pytest.raises(RuntimeError, match="no handler"):
        receiver_for().handle(*single("a"))
    receiver = receiver_for(lambda _: asyncio.sleep(0))
    assert receiver.handle(*single("a")).status == 500
    with pytest.raises(TypeError, match="bytes"):
        receiver_for(Taken()).handle({}, "text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="secret"):
        Receiver([])


def test_an_interrupted_handler_gives_its_event_back() -> None:
    """GIVEN Ctrl-C in a handler WHEN the event comes again THEN it is handled, not answered 409."""

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    receiver = receiver_for(interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.handle(*single("a"))
    taken = Taken()
    assert receiver.handle(*single("a"), taken).status == 200
    assert taken == ["a"]


def test_counters_add_up() -> None:
    """GIVEN all outcomes WHEN they happened THEN received is the sum of what became of the events."""
    receiver = receiver_for(Taken({"b": [RuntimeError()], "c": [StopIteration()]}))
    for request in (single("a"), single("a"), single("b"), single("c"), bundle(item("c"), item("d"))):
        receiver.handle(*request)
    c = receiver.counters
    assert (c.handled, c.duplicates, c.failed) == (3, 1, 2)
    assert c.received == c.handled + c.duplicates + c.in_progress + c.failed


async def call(
    app: Any,
    path: str,
    headers: Mapping[str, str],
    *chunks: bytes,
    method: str = "POST",
    read: list[bytes] | None = None,
) -> dict[str, Any]:
    sent: list[dict[str, Any]] = []
    messages = [
        {"type": "http.request", "body": chunk, "more_body": n + 1 < len(chunks)} for n, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        if read is not None:
            read.append(b"")
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": method, "path": path, "headers": raw}, receive, send)
    return sent[0] if sent else {}


def test_asgi_runs_plain_handlers_in_a_thread_and_async_ones_in_the_loop() -> None:
    """GIVEN either kind of handler WHEN a chunked request comes THEN it is handled where it belongs."""
    where: list[bool] = []

    def plain(event: Event) -> None:
        where.append(threading.current_thread() is threading.main_thread())

    async def in_loop(event: Event) -> None:
        where.append(threading.current_thread() is threading.main_thread())

    headers, body = single("a")
    for handler in (plain, in_loop):
        app = ASGIReceiver(receiver_for(handler))
        assert asyncio.run(call(app, "/", headers, body[:10], body[10:]))["status"] == 200
    assert where == [False, True]


def test_middleware_takes_its_path_and_leaves_the_rest() -> None:
    """GIVEN a middleware at /hooks WHEN requests come THEN only that path is taken, and only by POST."""
    others: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        others.append(scope["path"])

    taken = Taken()
    middleware = EvermarkMiddleware(app, receiver_for(taken), path="/hooks")
    headers, body = single("a")
    assert asyncio.run(call(middleware, "/hooks/", headers, body))["status"] == 200
    assert asyncio.run(call(middleware, "/hooks", {}, method="GET"))["status"] == 405
    asyncio.run(call(middleware, "/hooksy", headers, body))
    assert (taken, others) == (["a"], ["/hooksy"])


def test_asgi_bounds_the_body_and_survives_a_client_that_leaves() -> None:
    """GIVEN a body too large, announced or not, or cut short WHEN it comes THEN 413, or nothing at all."""
    taken = Taken()
    app = ASGIReceiver(receiver_for(taken, body_bytes_max=100))
    for length in ("101", "9" * 5000):
        assert asyncio.run(call(app, "/", {"content-length": length}, b""))["status"] == 413
    chunks = [b"x" * 60 for _ in range(9)]
    read: list[bytes] = []
    assert asyncio.run(call(app, "/", {}, *chunks, read=read))["status"] == 413
    assert len(read) == 2
    assert asyncio.run(call(app, "/", {})) == {}
    assert taken == []


def test_a_cancelled_async_handler_gives_its_event_back() -> None:
    """GIVEN an async handler WHEN the request is cancelled meanwhile THEN the event is unseen again."""

    async def scenario() -> int:
        begun = asyncio.Event()

        async def endless(event: Event) -> None:
            begun.set()
            await asyncio.Event().wait()

        async def quick(event: Event) -> None:
            return None

        receiver = receiver_for(endless)
        task = asyncio.create_task(receiver.handle_async(*single("a")))
        await begun.wait()
        assert (await receiver.handle_async(*single("a"))).status == 409
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await receiver.handle_async(*single("a"), quick)).status

    assert asyncio.run(scenario()) == 200


def test_a_cancelled_request_still_ends_what_its_thread_began() -> None:
    """GIVEN a plain handler in its thread WHEN the ASGI request is cancelled THEN the event is remembered as done."""
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(event: Event) -> None:
        begun.set()
        assert go.wait(10)

    receiver = receiver_for(slow)
    real_done = receiver._dedup.done

    def done(claim: Any) -> None:
        real_done(claim)
        ended.set()

    receiver._dedup.done = done  # type: ignore[method-assign]

    async def scenario() -> None:
        task = asyncio.create_task(call(ASGIReceiver(receiver), "/", *single("a")))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()

    asyncio.run(scenario())
    assert ended.wait(10)
    assert receiver.handle(*single("a")).duplicates


def test_asgi_lifespan_is_answered() -> None:
    """GIVEN a server with lifespan WHEN it starts and stops THEN both are confirmed."""

    async def scenario() -> list[str]:
        incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        sent: list[str] = []

        async def receive() -> dict[str, Any]:
            return incoming.pop(0)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await ASGIReceiver(receiver_for(Taken()))({"type": "lifespan"}, receive, send)
        return sent

    assert asyncio.run(scenario()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    ("method", "length", "status"),
    [
        ("POST", None, "200"),
        ("POST", "", "411"),
        ("POST", "9999999", "413"),
        ("POST", "9" * 5000, "413"),
        ("GET", "0", "405"),
    ],
)
def test_wsgi_answers_like_the_receiver(method: str, length: str | None, status: str) -> None:
    """GIVEN a WSGI environment WHEN called THEN the event is handled, and what is wrong is refused."""
    headers, body = single("a")
    environ = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    started: list[str] = []
    app = wsgi_app(receiver_for(Taken()))
    app(
        {
            **environ,
            "REQUEST_METHOD": method,
            "CONTENT_LENGTH": str(len(body)) if length is None else length,
            "wsgi.input": io.BytesIO(body),
        },
        lambda line, _: started.append(line),
    )
    assert started[0].startswith(status)
