"""The HTTP API under /v1, as routes of a Starlette application: who may call, what a request holds, and the answer.

State is asked in a few threads of its own, so that /livez and /metrics answer whatever State does. When more requests
wait for these threads than is sensible, the next request is told to come back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from evermark.errors import BusyError, ConfigError, DeniedError, EvermarkError, Kind, NotFoundError
from evermark.observe.logging import get_logger
from evermark.server.calls import CALLS, Call, Services
from evermark.server.messages import ErrorAnswer, read_as
from evermark.server.openapi import document_text
from evermark.server.tokens import Bearer, Tokens

T = TypeVar("T")

BODY_BYTES_MAX = 64 * 1024
RETRY_AFTER_S = 1
THREADS = 4
THREADS_SLOW = 2
WAITING_MAX = 64
WAITING_SLOW_MAX = 8
_ID_DIGITS_MAX = 18

# What an error of a service means to the client. Kinds that are not here are our own trouble: 500.
STATUSES: Mapping[Kind, int] = {
    Kind.CONFIG: 422,
    Kind.NOT_FOUND: 404,
    Kind.CONFLICT: 409,
    Kind.BUSY: 503,
    Kind.UNREACHABLE: 503,
    Kind.STALE: 503,
    Kind.SETUP: 503,
    Kind.DISK_FULL: 503,
}


class Threads:
    """A few threads, and a bound on the calls that wait for them."""

    def __init__(self, count: int, waiting_max: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._waiting_max = waiting_max
        self._waiting = 0

    async def run(self, call: Callable[[], T]) -> T:
        """To be used in the event loop only."""
        if self._waiting >= self._waiting_max:
            raise BusyError("too many requests wait for an answer already", hint="try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class StatusError(Exception):
    """An error whose status is not that of its kind."""

    def __init__(self, status: int, error: EvermarkError) -> None:
        super().__init__(error.message)
        self.status, self.error = status, error


class Api:
    """Answers 503 until `open` gives it the services of a deployment, and again after `close`."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._services: Services | None = None
        self._quick = Threads(THREADS, WAITING_MAX, "api")
        self._slow = Threads(THREADS_SLOW, WAITING_SLOW_MAX, "api-slow")
        self._log = get_logger(part="api")

    def open(self, services: Services) -> None:
        self._services = services

    def close(self) -> None:
        self._services = None

    def end(self) -> None:
        self._services = None
        self._quick.close()
        self._slow.close()

    def application(self, *others: BaseRoute) -> Starlette:
        """The API beside other routes, which need no token. An error of any route has the same form."""
        guard = Middleware(AuthenticationMiddleware, backend=self._tokens, on_error=self._denied)
        routes = [self._route(path) for path in dict.fromkeys(call.path for call in CALLS)]
        app = Starlette(
            routes=[*others, *routes, Route("/v1/openapi.json", self._openapi)],
            middleware=[guard],
            exception_handlers=dict.fromkeys(
                (EvermarkError, StatusError, HTTPException, ClientDisconnect, Exception), self._failed
            ),
        )
        app.router.redirect_slashes = False
        return app

    def _route(self, path: str) -> Route:
        calls = {call.method: call for call in CALLS if call.path == path}

        async def answer(request: Request) -> Response:
            return await self._answer(calls["GET" if request.method == "HEAD" else request.method], request)

        # A session may hold a slash.
        return Route(path.replace("{session}", "{session:path}"), answer, methods=list(calls))

    async def _answer(self, call: Call, request: Request) -> Response:
        bearer: Bearer = request.user
        if call.needs_all and not bearer.may_write:
            denied = DeniedError(f"the token {bearer.name} may only read", hint="use a token without `may: read`")
            raise StatusError(403, denied)
        query = read_as(call.query, request.query_params, "the query").model_dump()
        path, body = _path(request), await _body(call, request)
        services = self._services
        if services is None:
            raise BusyError("this instance is starting or stopping", hint="try again in a moment")
        answer = await (self._slow if call.slow else self._quick).run(lambda: call.run(services, path, query, body))
        if call.writes:
            named = path.get("name") or body.get("name") or body.get("subscription")
            about = path if {"id", "replay"} & path.keys() else {"subscription": str(named)[:80]}
            self._log.info("asked and done", method=call.method, path=call.path, by=bearer.name, **about)
        if answer is None:
            return Response(status_code=call.status)
        return Response(answer.model_dump_json(by_alias=True), call.status, media_type="application/json")

    async def _openapi(self, _: Request) -> Response:
        return Response(document_text(), media_type="application/json")

    def _denied(self, conn: HTTPConnection, _: Exception) -> Response:
        return _told(401, self._tokens.refusal(conn), {"WWW-Authenticate": 'Bearer realm="evermark"'})

    async def _failed(self, request: Request, error: Exception) -> Response:
        match error:
            case StatusError():
                return _told(error.status, error.error)
            case EvermarkError():
                status = STATUSES.get(error.kind, 500)
                if status == 500:
                    self._log.error("a request failed", method=request.method, error=error)
                return _told(status, error)
            case HTTPException(status_code=405):
                allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
                unknown = ConfigError(f"{request.method} is not known here", hint=f"use {allowed}")
                return _told(405, unknown, {"Allow": allowed})
            case HTTPException():
                hint = "GET /v1/openapi.json names all there is"
                return _told(error.status_code, NotFoundError(f"there is no {request.url.path[:200]}", hint=hint))
            case ClientDisconnect():
                return Response(status_code=400)  # the client will not see it
        self._log.error("a request failed", method=request.method, error=error)
        return _told(500, EvermarkError("this request failed", hint="the log of the instance says why"))


def _told(status: int, error: EvermarkError, headers: Mapping[str, str] | None = None) -> Response:
    more = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    body = ErrorAnswer.of(error).model_dump_json()
    return Response(body, status, {**more, **(headers or {})}, "application/json")


def _path(request: Request) -> dict[str, Any]:
    """The parts of the path that name something. No delivery has an id that is not a number of at most 18 digits, and
    nothing has a name with the character NUL, which State cannot be asked for.
    """
    if any("\0" in part for part in request.path_params.values()):
        raise HTTPException(404)
    ident = request.path_params.get("id")
    if ident is None:
        return request.path_params
    if not (ident.isascii() and ident.isdigit() and len(ident) <= _ID_DIGITS_MAX):
        raise HTTPException(404)
    return {"id": int(ident)}


async def _body(call: Call, request: Request) -> dict[str, Any]:
    text = bytearray()
    async for piece in request.stream():
        text += piece
        if len(text) > BODY_BYTES_MAX:
            raise StatusError(413, ConfigError(f"the body is larger than {BODY_BYTES_MAX} bytes"))
    if text and call.body is None:
        raise ConfigError("this call takes no body", hint="leave it out")
    if not text and call.body is not None and not call.body_optional:
        raise ConfigError("the body is missing", hint="send a JSON object")
    if not text:
        return {}
    try:
        body = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise StatusError(400, ConfigError("the body is not JSON, or names a key twice")) from None
    if not isinstance(body, dict):
        raise StatusError(400, ConfigError("the body is not a JSON object"))
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
