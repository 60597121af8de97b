"""The HTTP requests of a node, and how each is answered."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

from aiohttp import web

from evermark.blocknode.bodies import (
    STREAM_ID,
    AddAsked,
    CookieAsked,
    CreateAsked,
    SyncAsked,
    SyncChangeAsked,
    event_of,
    parsed,
    text_of,
)
from evermark.blocknode.faults import Faults, Op
from evermark.blocknode.reader import Reader, ReaderPosition
from evermark.blocknode.refusal import Code, Refused, bad_request
from evermark.blocknode.settings import BODY_BYTES_MAX, LISTED_MAX, WAIT_S_MAX, NodeSettings
from evermark.blocknode.sync import Hub, Stalled, Sync
from evermark.blocknode.writer import Writer
from evermark.observe.logging import get_logger
from evermark.sources.blocks.chain import Cookie, StreamKind

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_RETRY_AFTER_S = "1"
_STREAM_ID = re.compile(STREAM_ID, re.ASCII)
_DIGITS_MAX = 18


class Routes:
    def __init__(
        self, settings: NodeSettings, node: str, writer: Writer, reader: Reader, hub: Hub, faults: Faults
    ) -> None:
        self._settings, self._node = settings, node
        self._writer, self._reader, self._hub, self._faults = writer, reader, hub, faults
        self._token = None if settings.token is None else _digest(settings.token)
        self._log = get_logger(part="blocknode")
        self.stopping = False
        self.followed: Callable[[], dict[str, Any]] = dict  # how far this node is with copying another one

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._said_as_json])
        one = "/v1/streams/{stream}"
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/v1/node", self._about),
                web.get("/v1/streams", self._streams),
                web.put(one, self._create),
                web.get(one, self._stream),
                web.delete(one, self._delete),
                web.post(f"{one}/events", self._add),
                web.get(f"{one}/miniblocks", self._miniblocks),
                web.post("/v1/sync", self._sync),
                web.post("/v1/sync/{sync}", self._change_sync),
            ]
        )
        return app

    @web.middleware
    async def _said_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._token is not None and request.path.startswith("/v1"):
                self._check_token(request.headers.get("Authorization", ""))
            return await handler(request)
        except Refused as refusal:
            return _told(refusal)
        except web.HTTPRequestEntityTooLarge:
            said = f"the body is larger than {BODY_BYTES_MAX} bytes"
            return _told(Refused(Code.TOO_LARGE, said, "send fewer events at once"))
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            said = f"there is no {request.method[:10]} {request.path[:200]}"
            return _told(Refused(Code.NOT_FOUND, said, "docs/blocknode.md names all there is"))
        except (asyncio.CancelledError, web.HTTPException, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - the next request is answered all the same
            self._log.error("a request failed", method=request.method, error=error)
            return _told(Refused(Code.FAILED, "this request failed", "the node's log says why"))

    def _check_token(self, authorization: str) -> None:
        scheme, _, shown = authorization[:1024].partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(shown.strip()), self._token or b""):
            return
        hint = "send the header Authorization: Bearer …, with the token the node was started with"
        raise Refused(Code.UNAUTHORIZED, "this needs the node's token", hint)

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        good = not (self.stopping or self._writer.full)
        return web.Response(text="ready\n" if good else "not ready\n", status=200 if good else 503)

    async def _about(self, _: web.Request) -> web.Response:
        settings = self._settings
        named = ("seal_events", "seal_after_s", "snapshot_every", "page_blocks", "resume_blocks", "event_bytes")
        about = {
            "node": self._node,
            "version": version("evermark"),
            "follows": settings.follow,
            "followed": self.followed(),
            "settings": {name: getattr(settings, name) for name in named},
            "counts": {**asdict(self._writer.counts), "cut_off": self._hub.cut_off},
        }
        return _json(text_of(about))

    async def _streams(self, request: web.Request) -> web.Response:
        await self._faults.before(Op.STREAMS)
        after = _number(request, "touched_after", 0)
        limit = min(_number(request, "limit", LISTED_MAX), LISTED_MAX)
        kind = _kind(request.query.get("kind"))
        wait_s = min(float(_number(request, "wait_s", 0)), WAIT_S_MAX)

        def look(db: sqlite3.Connection) -> tuple[list[dict[str, Any]], int]:
            return self._reader.listing(db, after, limit, kind), self._reader.owes(db)

        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            changed = self._hub.next_change
            rows, owed = await self._reader.run(look)
            left_s = until - loop.time()
            if rows or left_s <= 0 or self.stopping:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)
        touched = rows[-1]["touched"] if rows else after
        listed = {"node": self._node, "streams": rows, "touched": touched}
        return _json(text_of(listed | ({"owed": owed} if owed else {})))

    async def _create(self, request: web.Request) -> web.Response:
        await self._faults.before(Op.CREATE)
        stream = self._writable(request)
        asked = parsed(CreateAsked, await request.read())
        incarnation = secrets.token_hex(16)
        made, cookie = await self._writer.run(lambda ledger: ledger.create(stream, asked, incarnation))
        return _json(text_of({"stream": stream, "created": made, "cookie": cookie.wire()}), 201 if made else 200)

    async def _delete(self, request: web.Request) -> web.Response:
        await self._faults.before(Op.DELETE)
        stream = self._writable(request)
        await self._writer.run(lambda ledger: ledger.delete(stream))
        return _json(text_of({"stream": stream, "deleted": True}))

    async def _add(self, request: web.Request) -> web.Response:
        await self._faults.before(Op.ADD)
        stream = self._writable(request)
        asked = parsed(AddAsked, await request.read())
        events = [event_of(stream, event, self._settings.event_bytes) for event in asked.events]
        added = await self._writer.run(lambda ledger: ledger.add(stream, events))
        return _json(text_of({"stream": stream, "events": [asdict(event) for event in added]}))

    async def _stream(self, request: web.Request) -> web.Response:
        await self._faults.before(Op.STREAM)
        stream = _stream_id(request)
        after = None
        if "minipool_gen" in request.query or "prev_miniblock_hash" in request.query:
            before = request.query.get("prev_miniblock_hash", "")
            asked = {"minipool_gen": _number(request, "minipool_gen"), "prev_miniblock_hash": before}
            after = ReaderPosition(parsed(CookieAsked, text_of(asked)).cookie())
        back = self._faults.snapshots_back(Op.STREAM)
        view = await self._reader.run(partial(self._reader.view, stream=stream, after=after, snapshots_back=back))
        self._faults.spoil(Op.STREAM, view)
        return _json(view.text())

    async def _miniblocks(self, request: web.Request) -> web.Response:
        await self._faults.before(Op.MINIBLOCKS)
        stream = _stream_id(request)
        start, end = _number(request, "from"), _number(request, "to")
        page = await self._reader.run(partial(self._reader.page, stream=stream, start=start, end=end))
        self._faults.spoil(Op.MINIBLOCKS, page)
        return _json(page.text())

    async def _sync(self, request: web.Request) -> web.StreamResponse:
        await self._faults.before(Op.SYNC)
        asked = parsed(SyncAsked, await request.read())
        sync = self._hub.open()
        try:
            self._hub.add(sync, _cookies(asked.streams))
            return await self._feed(request, sync)
        finally:
            self._hub.close(sync)

    async def _feed(self, request: web.Request, sync: Sync) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        try:
            await response.prepare(request)
            await sync.feed(self._hub, response.write)
            await response.write_eof()
        except ConnectionError:
            self._log.debug("a sync's client went away")
        except Exception as error:  # noqa: BLE001 - an answer is under way: only cutting it off can say that it failed
            if isinstance(error, Stalled):
                self._hub.cut_off += 1
                self._log.warning("a sync was cut off: its client reads nothing", streams=len(sync.positions))
            else:
                self._log.error("a sync failed", error=error)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _change_sync(self, request: web.Request) -> web.Response:
        asked = parsed(SyncChangeAsked, await request.read())
        sync = self._hub.find(request.match_info["sync"])  # after the body came: it may have ended meanwhile
        self._hub.remove(sync, asked.remove)
        self._hub.add(sync, _cookies(asked.add))
        return _json(text_of({"streams": len(sync.positions)}))

    def _writable(self, request: web.Request) -> str:
        if self._settings.follow is not None:
            hint = f"write to {self._settings.follow}"
            raise Refused(Code.READ_ONLY, "this node follows another one and only reads", hint)
        return _stream_id(request)


def _cookies(asked: dict[str, CookieAsked | None]) -> dict[str, Cookie | None]:
    return {stream: None if cookie is None else cookie.cookie() for stream, cookie in asked.items()}


def _stream_id(request: web.Request) -> str:
    stream = request.match_info["stream"]
    if not _STREAM_ID.fullmatch(stream):
        hint = "1 to 128 letters, digits or ._:@-, beginning with a letter or a digit"
        raise bad_request("this is no id of a stream", hint)
    return stream


def _kind(text: str | None) -> StreamKind | None:
    try:
        return None if text is None else StreamKind(text)
    except ValueError:
        raise bad_request(f"kind has to be one of {', '.join(StreamKind)}") from None


def _number(request: web.Request, name: str, default: int | None = None) -> int:
    text = request.query.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit() or len(text) > _DIGITS_MAX:
        raise bad_request(f"{name} has to be a whole number, 0 or more")
    return int(text)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _told(refusal: Refused) -> web.Response:
    response = _json(text_of(refusal.wire()), refusal.code.status)
    if refusal.code.status == 503:
        response.headers["Retry-After"] = _RETRY_AFTER_S
    if refusal.code.status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="evermark blocknode"'
    return response
