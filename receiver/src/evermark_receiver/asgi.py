"""A `Receiver` behind ASGI: alone, or in front of an application.

A plain handler runs in a thread, the whole request with it: if the server drops the request meanwhile, the thread
still ends what it began, and its event is remembered or released as it should be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from evermark_receiver.receiver import Receiver, Response, is_longer

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class ASGIReceiver:
    """An ASGI application that takes deliveries at any path."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _respond(send, Response(405, {"allow": "POST"}, b""))
            return
        try:
            body = await _body(scope, receive, self.receiver.body_bytes_max)
        except _TooLargeError:
            await _respond(send, self.receiver.too_large())
            return
        if body is None:
            return
        if self.receiver.is_async:
            response = await self.receiver.handle_async(scope["headers"], body)
        else:
            response = await asyncio.to_thread(self.receiver.handle, scope["headers"], body)
        await _respond(send, response)


class EvermarkMiddleware:
    """Takes deliveries at `path`; everything else goes to `app`."""

    def __init__(self, app: Application, receiver: Receiver, path: str = "/hooks") -> None:
        self.app = app
        self.path = _without_slash(path)
        self._asgi = ASGIReceiver(receiver)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _without_slash(scope["path"]) == self.path:
            await self._asgi(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class _TooLargeError(Exception):
    pass


def _without_slash(path: str) -> str:
    return path.rstrip("/") or "/"


async def _body(scope: Scope, receive: Receive, bytes_max: int) -> bytes | None:
    """The body, or None when the client left before its end."""
    for name, value in scope["headers"]:
        # Refused before it is read, where the client is honest about the size.
        if name.lower() == b"content-length" and value.isdigit() and is_longer(value, bytes_max):
            raise _TooLargeError
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > bytes_max:
            raise _TooLargeError
        if not message.get("more_body", False):
            return bytes(body)


async def _respond(send: Send, response: Response) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
    headers.append((b"content-length", str(len(response.body)).encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
