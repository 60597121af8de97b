"""The header objects that web frameworks hand to a receiver, made by the frameworks themselves."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from wsgiref.headers import Headers as WsgirefHeaders

import pytest
from aiohttp.test_utils import make_mocked_request
from django.conf import settings as django_settings
from django.http import HttpRequest
from multidict import CIMultiDict, CIMultiDictProxy
from starlette.datastructures import Headers as StarletteHeaders
from starlette.requests import Request as StarletteRequest
from werkzeug.datastructures import EnvironHeaders
from werkzeug.datastructures import Headers as WerkzeugHeaders
from werkzeug.test import EnvironBuilder
from werkzeug.wrappers import Request as WerkzeugRequest

from evermark_receiver import Event, Receiver, Response, VerificationError, sign, verify

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
ABOUT = {"v": 1, "source": "shop", "stream": "public.orders", "key": "42", "op": "insert", "id": "evt_1"}
BODY = json.dumps({"type": "t", "data": {"n": 1}, "evermark": ABOUT}).encode()
NAMES = ("webhook-id", "webhook-timestamp", "webhook-signature")

Signed = dict[str, str]


def signed(prefix: str = "webhook") -> Signed:
    made = sign("evt_1", int(time.time()), BODY, SECRET)
    return {name.replace("webhook", prefix, 1): value for name, value in made.items()}


def environ(headers: Signed) -> dict[str, Any]:
    return EnvironBuilder(method="POST", path="/hooks", data=BODY, headers=headers).get_environ()


def message(pairs: Iterable[tuple[str, str]]) -> Message:
    made = http.client.HTTPMessage()
    for name, value in pairs:
        made[name] = value
    return made


def django_request(headers: Signed) -> HttpRequest:
    if not django_settings.configured:
        django_settings.configure()
    from django.core.handlers.wsgi import WSGIRequest

    return WSGIRequest(environ(headers))


def scope(headers: Signed) -> dict[str, Any]:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/hooks", "headers": raw}


# What `request.headers`, or what stands for it, is in each framework.
FRAMEWORKS: dict[str, Callable[[Signed], Any]] = {
    "a dict": dict,
    "a dict in upper case": lambda headers: {name.upper(): value for name, value in headers.items()},
    "a list of pairs": lambda headers: list(headers.items()),
    "a generator of pairs": lambda headers: iter(headers.items()),
    "a dict of lists": lambda headers: {name: [value] for name, value in headers.items()},
    "http.server": lambda headers: message(headers.items()),
    "wsgiref": lambda headers: WsgirefHeaders([(name.title(), value) for name, value in headers.items()]),
    "WSGI environ": environ,
    "ASGI scope": lambda headers: scope(headers)["headers"],
    "aiohttp": lambda headers: make_mocked_request("POST", "/hooks", headers=headers).headers,
    "multidict": lambda headers: CIMultiDictProxy(CIMultiDict(headers)),
    "Starlette": lambda headers: StarletteRequest(scope(headers)).headers,
    "Starlette raw": lambda headers: StarletteHeaders(headers).raw,
    "Flask": lambda headers: WerkzeugRequest(environ(headers)).headers,
    "Werkzeug environ": lambda headers: EnvironHeaders(environ(headers)),
    "Werkzeug": lambda headers: WerkzeugHeaders(list(headers.items())),
    "Django": lambda headers: django_request(headers).headers,
    "Django META": lambda headers: django_request(headers).META,
}
# These keep a header that comes twice as two.
REPEATING: dict[str, Callable[[list[tuple[str, str]]], Any]] = {
    "pairs": list,
    "http.server": message,
    "wsgiref": WsgirefHeaders,
    "multidict": CIMultiDict,
    "Starlette": lambda pairs: StarletteHeaders(raw=[(n.lower().encode(), v.encode()) for n, v in pairs]),
    "Werkzeug": WerkzeugHeaders,
    "a dict of lists": lambda pairs: {name: [v for n, v in pairs if n == name] for name, _ in pairs},
}


def taken(headers: Any) -> tuple[Response, list[str]]:
    got: list[str] = []

    def take(event: Event) -> None:
        got.append(event.id)

    return Receiver(SECRET, handler=take).handle(headers, BODY), got


@pytest.mark.parametrize("prefix", ["webhook", "svix"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_headers_of_every_framework_are_taken_as_they_are(framework: str, prefix: str) -> None:
    """GIVEN request.headers of a framework, under either family of names WHEN handled THEN the event is taken."""
    response, got = taken(FRAMEWORKS[framework](signed(prefix)))
    assert (response.status, got) == (200, ["evt_1"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_wrong_signature_is_refused_in_every_form(framework: str) -> None:
    """GIVEN the same objects with another id WHEN handled THEN 401, and no handler is called."""
    response, got = taken(FRAMEWORKS[framework]({**signed(), "webhook-id": "evt_2"}))
    assert (response.status, got) == (401, [])


@pytest.mark.parametrize("framework", REPEATING)
@pytest.mark.parametrize("name", NAMES)
def test_a_header_that_comes_twice_is_refused_in_every_form(framework: str, name: str) -> None:
    """GIVEN a repeated header WHEN verified THEN refused: only one of them can be the signed one."""
    pairs = [*signed().items(), (name, signed()[name])]
    with pytest.raises(VerificationError, match=f"{name} is given twice"):
        verify(REPEATING[framework](pairs), BODY, SECRET)


def test_families_of_names_are_never_mixed() -> None:
    """GIVEN headers of both families WHEN verified THEN whole ones count, webhook-* first; halves do not add up."""
    theirs, ours = signed("svix"), signed()
    assert verify({**theirs, "webhook-id": "evt_9"}, BODY, SECRET).id == "evt_1", "one stray header is no family"
    assert verify({**ours, **dict.fromkeys(theirs, "nonsense")}, BODY, SECRET).id == "evt_1"
    mixed = {"webhook-id": "evt_1", **{name: value for name, value in theirs.items() if name != "svix-id"}}
    with pytest.raises(VerificationError, match="missing headers: webhook-timestamp, webhook-signature"):
        verify(mixed, BODY, SECRET)
    with pytest.raises(VerificationError, match="svix-id is given twice"):
        verify([*theirs.items(), ("Svix-Id", "evt_2")], BODY, SECRET)
    with pytest.raises(VerificationError, match="svix-timestamp is malformed"):
        verify({**theirs, "svix-timestamp": "x" * 9000}, BODY, SECRET)


@pytest.mark.parametrize("headers", [None, 7, "webhook-id: evt_1", b"raw", ["webhook-id"], [("a", "b", "c")], [None]])
def test_what_are_no_headers_is_the_callers_mistake_and_said_so(headers: Any) -> None:
    """GIVEN something without names and values WHEN handled THEN TypeError says what to pass, not "too many values"."""
    with pytest.raises(TypeError, match=r"headers.*request\.headers"):
        taken(headers)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_example_of_the_standard_librarys_server_works_over_a_socket() -> None:
    """GIVEN the handler from the docs WHEN a signed request comes, twice, and a wrong one THEN 200, 200 and 401."""
    receiver = Receiver(SECRET)
    got: list[str] = []
    receiver.on_event(lambda event: got.append(event.id))

    class Hooks(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            response = receiver.handle(self.headers, body)
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

        def log_message(self, *_: object) -> None:
            return

    def post(port: int, headers: Signed) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/hooks", BODY, headers)
        return connection.getresponse().status

    with serving(Hooks) as port:
        answers = [post(port, signed()), post(port, signed("svix")), post(port, {**signed(), "webhook-id": "x"})]
    assert (answers, got) == ([200, 200, 401], ["evt_1"])
