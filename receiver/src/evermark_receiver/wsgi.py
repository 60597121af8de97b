"""A `Receiver` as a WSGI application."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from evermark_receiver.receiver import Receiver, Response, is_longer

StartResponse = Callable[[str, list[tuple[str, str]]], object]
WSGIApplication = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


def wsgi_app(receiver: Receiver) -> WSGIApplication:
    """Takes deliveries at any path. The handler has to be a plain function."""

    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        response = _response(receiver, environ)
        status = HTTPStatus(response.status)
        headers = [*response.headers.items(), ("content-length", str(len(response.body)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [response.body]

    return application


def _response(receiver: Receiver, environ: dict[str, Any]) -> Response:
    if environ["REQUEST_METHOD"] != "POST":
        return Response(405, {"allow": "POST"}, b"")
    length = environ.get("CONTENT_LENGTH") or ""
    if not (length.isascii() and length.isdigit()):
        return Response(411, {}, b"")
    if is_longer(length, receiver.body_bytes_max):
        return receiver.too_large()
    body = environ["wsgi.input"].read(int(length))
    return receiver.handle(environ, body)
