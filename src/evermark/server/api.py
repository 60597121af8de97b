"""The HTTP API under /v1: who may, what was asked, and what is answered. What is done about it, the desk does.

State is asked in a few threads of its own, so that /livez and /metrics answer whatever State does; when more wait for
them than is sensible, the next one is told to come back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from aiohttp import web
from pydantic import BaseModel

from evermark.errors import BusyError, ConfigError, DeniedError, EvermarkError, Kind, NotFoundError
from evermark.observe.logging import get_logger
from evermark.server.desk import Desk
from evermark.server.openapi import document
from evermark.server.routes import ROUTES
from evermark.server.routing import Request, Route, check_query
from evermark.server.shapes import ErrorAnswer
from evermark.server.tokens import Bearer, Tokens

BODY_BYTES_MAX = 64 * 1024
RETRY_AFTER_S = 1
THREADS = 4
THREADS_SLOW = 2
WAITING_MAX = 64
WAITING_SLOW_MAX = 8

# What an error of the desk means to whoever asked. Kinds that are not here are our own trouble: 500.
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
_HINT_401 = "send the header Authorization: Bearer …, with a token named under server.tokens in evermark.yaml"
_HINT_NO_TOKENS = (
    'add to evermark.yaml: server: {tokens: {NAME: "${VARIABLE}"}}, 24 characters at least, and start again'
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Pool:
    """Threads, and a bound on what waits for them."""

    def __init__(self, threads: int, waiting_max: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting_max = waiting_max
        self._waiting = 0

    async def run(self, call: Callable[[], BaseModel | None]) -> BaseModel | None:
        """Call it in the event loop."""
        if self._waiting >= self._waiting_max:
            raise BusyError("too many requests wait for an answer already", hint="try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Api:
    """Answers 503 until `open` gives it a desk, and again after `close`."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._desk: Desk | None = None
        self._quick = _Pool(THREADS, WAITING_MAX, "api")
        self._slow = _Pool(THREADS_SLOW, WAITING_SLOW_MAX, "api-slow")
        self._log = get_logger(part="api")
        self._document = json.dumps(document()).encode()

    def open(self, desk: Desk) -> None:
        self._desk = desk

    def close(self) -> None:
        self._desk = None

    def end(self) -> None:
        self._desk = None
        self._quick.close()
        self._slow.close()

    def add_to(self, app: web.Application) -> None:
        app.middlewares.append(self._said_as_json)
        for route in ROUTES:
            path = route.path.replace("{id}", r"{id:[0-9]{1,18}}")
            app.router.add_route(route.method, path, self._handler(route))
        app.router.add_get("/v1/openapi.json", self._openapi)

    @web.middleware
    async def _said_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever goes wrong below /v1 is told in one form; and nobody learns a thing before a token was shown."""
        if not (request.path + "/").startswith("/v1/"):
            return await handler(request)
        try:
            self._bearer(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            error: EvermarkError = ConfigError(f"the body is larger than {BODY_BYTES_MAX} bytes")
            return _told(error, 413)
        except web.HTTPNotFound:
            hint = "GET /v1/openapi.json names all there is"
            return _told(NotFoundError(f"there is no {request.path[:200]}", hint=hint), 404)
        except web.HTTPMethodNotAllowed as wrong:
            allowed = ", ".join(sorted(wrong.allowed_methods))
            error = ConfigError(f"{request.method} is not known here", hint=f"use {allowed}")
            return _told(error, 405, {"Allow": allowed})
        except _AnswerError as known:
            return _told(known.error, known.status, known.headers)
        except EvermarkError as error:
            return _told(error, STATUSES.get(error.kind, 500))
        except (asyncio.CancelledError, web.HTTPException):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the next request is answered
            self._log.error("a request failed", method=request.method, error=error)
            return _told(EvermarkError("this request failed", hint="the log of the instance says why"), 500)

    def _bearer(self, request: web.Request) -> Bearer:
        found = self._tokens.bearer(request.headers.get("Authorization"))
        if found is not None:
            return found
        said = "there are no tokens, so nobody may use the API"
        if self._tokens:
            said = "this needs a token" if "Authorization" not in request.headers else "this token is not known"
        hint = _HINT_401 if self._tokens else _HINT_NO_TOKENS
        raise _AnswerError(DeniedError(said, hint=hint), 401, {"WWW-Authenticate": 'Bearer realm="evermark"'})

    def _handler(self, route: Route) -> Handler:
        pool = self._slow if route.slow else self._quick

        async def handle(request: web.Request) -> web.StreamResponse:
            bearer = self._bearer(request)
            if route.needs_all and not bearer.may_write:
                raise _AnswerError(
                    DeniedError(f"the token {bearer.name} may only read", hint="use one without `may: read`"), 403
                )
            asked = await _request(route, request)
            desk = self._desk
            if desk is None:
                raise BusyError("this instance is starting or stopping", hint="try again in a moment")
            answer = await pool.run(lambda: route.call(desk, asked))
            if route.writes:
                what = {"id": asked.path["id"]} if "id" in asked.path else {"subscription": _about(asked)}
                self._log.info("asked and done", method=route.method, path=route.path, by=bearer.name, **what)
            if answer is None:
                return web.Response(status=route.status)
            body = answer.model_dump_json(by_alias=True).encode()
            return web.Response(status=route.status, body=body, content_type="application/json")

        return handle

    async def _openapi(self, request: web.Request) -> web.Response:
        self._bearer(request)
        return web.Response(body=self._document, content_type="application/json")


class _AnswerError(Exception):
    """An error whose status is not that of its kind."""

    def __init__(self, error: EvermarkError, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.message)
        self.error, self.status, self.headers = error, status, headers


def _told(error: EvermarkError, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    more = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    body = ErrorAnswer.of(error).model_dump_json().encode()
    return web.Response(
        status=status, body=body, content_type="application/json", headers={**more, **dict(headers or {})}
    )


async def _request(route: Route, request: web.Request) -> Request:
    check_query(route, request.query)
    body: dict[str, Any] = {}
    text = await request.read()
    if text and route.body is None:
        raise ConfigError("this call takes no body", hint="leave it out")
    if text:
        body = _parsed(text)
    elif route.body_required:
        raise ConfigError("the body is missing", hint="send a JSON object")
    return Request(dict(request.match_info), dict(request.query), body)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise _AnswerError(ConfigError("the body is not JSON, or names a key twice"), 400) from None
    if not isinstance(body, dict):
        raise _AnswerError(ConfigError("the body is not a JSON object"), 400)
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _about(asked: Request) -> str:
    return str(asked.path.get("name") or asked.body.get("name"))[:80]
