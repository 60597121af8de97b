"""A small HTTP/1.1 client for one purpose: POST a body, learn the status, keep the connection.

It exists for speed (a general client costs several times the CPU of everything else about a delivery) and for two
rules a general client does not have: the answer is its status line, so a 2xx counts the moment its head is read; and
whatever looks odd costs only the connection, which is then closed instead of being used again. It knows no redirects,
no cookies, no proxies and no content encodings.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import aiohappyeyeballs

from evermark.delivery.decide.answers import ACCEPTED_STATUSES

ANSWER_BYTES_MAX = 64 * 1024
HEAD_BYTES_MAX = 32 * 1024
CHUNK_LINE_BYTES_MAX = 4 * 1024
INTERIM_HEADS_MAX = 16  # "103 Early Hints" and its like, before an answer
SAID_BYTES_MAX = 200
IDLE_S_MAX = 15.0
DRAIN_S_MAX = 5.0
# An answer counts before its body is here, and the next request is sent on another connection. Of a receiver that keeps
# its bodies back so many connections wait for them; those that have waited longest are closed.
DRAINING_MAX = 32
ADDRESS_AGE_S_MAX = 10.0
ADDRESSES_MAX = 16
_STAGGER_S = 0.25
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")  # Python refuses to read numbers of thousands of digits
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")

AddressInfo = tuple[int, int, int, str, tuple[object, ...]]
SocketFactory = Callable[[AddressInfo], socket.socket]


class NotHttpError(Exception):
    """The answer is not HTTP/1."""


class NoConnectionError(Exception):
    """There is no connection; the cause says why."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    said: bytes = b""  # how the body begins, unless the status is 2xx
    is_cut: bool = False  # there may be more of it


@dataclass(frozen=True)
class _Head:
    """The head of an answer: its status, how the body is framed, whether the connection may be kept."""

    reply: Reply
    keep: bool
    chunked: bool
    left: int | None  # as in `Wire`


def _read(head: bytes) -> _Head:
    first, *lines = head.split(b"\r\n")
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        raise NotHttpError
    status = int(match[2])
    if status == 101:
        raise NotHttpError
    headers: dict[str, str] = {}
    for line in lines if status >= 200 else ():
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip() or not name:
            raise NotHttpError
        headers[name.lower().decode("latin-1")] = value.strip().decode("latin-1")
    chunked, left = False, None
    length = headers.get("content-length")
    if status in (204, 304):
        left = 0
    elif "transfer-encoding" in headers:
        chunked = headers["transfer-encoding"].lower() == "chunked"
        left = 0 if chunked else None
    elif length and _LENGTH.fullmatch(length):
        left = int(length)
    keep = match[1] == b"1" and "close" not in headers.get("connection", "").lower()
    return _Head(Reply(status, headers), keep, chunked, left)


class Wire(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_free: Callable[[Wire], None], on_drain: Callable[[Wire], None]
    ) -> None:
        self._loop = loop
        self._on_free = on_free
        self._on_drain = on_drain
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._drain_limit: asyncio.TimerHandle | None = None
        self._late_at = 0.0
        self._late: asyncio.TimerHandle | None = None
        self._known: tuple[bytes, _Head] | None = None
        self.uses = 0
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._reply: Reply | None = None
        self._buffer = b""
        self._interims = 0
        self._said = b""
        self._body_bytes = 0
        self._left: int | None = 0  # of the body or of the chunk; None: until the connection ends
        self._chunked = False
        self._last_chunk = False
        self._chunk_ended = True  # what ends a chunk was read, so a size comes next
        self._keep = False

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def draining(self) -> bool:
        """The rest of an answer's body is waited for."""
        return self._drain_limit is not None and not self.closed

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def post(self, request: bytes, timeout_s: float) -> Reply:
        """Send, and wait for the answer. Cancelled or late, the connection is closed: its answer may still come."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._begin()
        self.uses += 1
        waiter: asyncio.Future[Reply] = self._loop.create_future()
        self._waiter = waiter
        self._watch(timeout_s)
        self._transport.write(request)
        try:
            return await waiter
        except BaseException:
            self.close()
            raise

    def _watch(self, timeout_s: float) -> None:
        """Time out in so many seconds. The timer of the last request serves, if it is not too late: a new timer
        for each request would cost as much as reading the answer.
        """
        self._late_at = self._loop.time() + timeout_s
        if self._late is not None and self._late.when() > self._late_at:
            self._late.cancel()
            self._late = None
        if self._late is None:
            self._late = self._loop.call_at(self._late_at, self._be_late)

    def _be_late(self) -> None:
        self._late = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._late_at:
            self._late = self._loop.call_at(self._late_at, self._be_late)
            return
        # The head of a refusal may be here while its body is not: that is an answer.
        if self._reply is not None:
            self._cut_short()
        else:
            self._fail(TimeoutError())

    def _fail(self, problem: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(problem)
        self.close()

    def _answer(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._reply is not None:
            reply, said = self._reply, self._said
            is_whole = self._last_chunk if self._chunked else self._left == 0
            is_cut = len(said) >= SAID_BYTES_MAX or not is_whole
            self._waiter.set_result(Reply(reply.status, reply.headers, said, is_cut) if said else reply)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._drain_limit, self._late):
            if timer is not None:
                timer.cancel()
        if self._reply is not None:
            self._answer()
        else:
            self._fail(ConnectionResetError("the connection ended before the answer"))

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.close()  # an answer without a request
            return
        try:
            if self._reply is None:
                self._buffer += data
                self._read_head()
            else:
                self._read_body(data)
        except NotHttpError as problem:
            self._fail(problem)

    # reading

    def _read_head(self) -> None:
        while self._reply is None:
            end = self._buffer.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
            if end < 0:
                if len(self._buffer) >= HEAD_BYTES_MAX or not self._buffer.startswith(b"HTTP/1."[: len(self._buffer)]):
                    raise NotHttpError
                return
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            if self._known is None or self._known[0] != head:  # a receiver mostly sends the same head
                self._known = head, _read(head)
            known = self._known[1]
            if known.reply.status < 200:
                self._interims += 1
                if self._interims > INTERIM_HEADS_MAX:
                    raise NotHttpError
            else:
                self._reply, self._keep, self._chunked, self._left = known.reply, known.keep, known.chunked, known.left
        rest, self._buffer = self._buffer, b""
        if self._reply.status in ACCEPTED_STATUSES:
            self._answer()
        self._read_body(rest)

    def _read_body(self, data: bytes) -> None:
        before = self._body_bytes
        self._body_bytes += len(data)
        if self._body_bytes > ANSWER_BYTES_MAX:  # what is beyond is not even looked at
            data = data[: max(0, ANSWER_BYTES_MAX - before)]
            self._keep = False
        if self._chunked:
            finished = self._read_chunks(data)
        elif self._left is None:
            self._hear(data, 0, len(data))
            finished = False
        else:
            self._hear(data, 0, self._left)
            self._keep = self._keep and len(data) <= self._left
            self._left = max(0, self._left - len(data))
            finished = self._left == 0
        if finished:
            self._finish()
        elif self._body_bytes > ANSWER_BYTES_MAX:
            self._cut_short()
        elif self._drain_limit is None:
            self._drain_limit = self._loop.call_later(DRAIN_S_MAX, self._cut_short)
            self._on_drain(self)

    def _read_chunks(self, data: bytes) -> bool:
        """Whether the body ends here, or makes no sense. Nothing is copied twice: a hostile one has a line for every
        two bytes."""
        found, at = self._buffer + data, 0
        self._buffer = b""
        while at < len(found):
            if self._left:
                taken = min(self._left, len(found) - at)
                self._hear(found, at, at + taken)
                at, self._left = at + taken, self._left - taken
                continue
            end = found.find(b"\r\n", at)
            if end < 0:
                self._buffer = found[at:]
                self._keep = self._keep and len(self._buffer) <= CHUNK_LINE_BYTES_MAX
                return len(self._buffer) > CHUNK_LINE_BYTES_MAX
            line, at = found[at:end], end + 2
            if self._last_chunk:
                if not line:  # else a trailer, which is not looked at
                    self._keep = self._keep and at == len(found)
                    return True
            elif self._chunk_ended and (size := _CHUNK_SIZE.fullmatch(line)):
                self._left = int(size[1], 16)
                self._last_chunk, self._chunk_ended = self._left == 0, False
            elif not self._chunk_ended and not line:
                self._chunk_ended = True
            else:
                self._keep = False
                return True
        return False

    def _hear(self, data: bytes, start: int, end: int) -> None:
        if self._reply is not None and self._reply.status not in ACCEPTED_STATUSES and len(self._said) < SAID_BYTES_MAX:
            self._said += data[start : min(end, start + SAID_BYTES_MAX - len(self._said))]

    def _finish(self) -> None:
        self._answer()
        self._waiter = None
        if self._drain_limit is not None:
            self._drain_limit.cancel()
            self._drain_limit = None
        transport = self._transport
        if self._keep and transport is not None and transport.get_write_buffer_size() == 0:
            self._on_free(self)
        else:
            self.close()

    def _cut_short(self) -> None:
        self._answer()
        self.close()


class Pool:
    """Connections that were opened under one guard. Everything here runs in one event loop."""

    def __init__(self, socket_factory: SocketFactory, tls: ssl.SSLContext | None) -> None:
        self._socket_factory = socket_factory
        self._tls = tls
        self._idle: dict[tuple[str, int], list[Wire]] = {}
        self._draining: dict[tuple[str, int], list[Wire]] = {}
        self._addresses: dict[tuple[str, int], tuple[float, asyncio.Future[Sequence[AddressInfo]]]] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def kept(self, host: str, port: int) -> Wire | None:
        """A connection that is open and idle, or None."""
        idle = self._idle.get((host, port))
        while idle:
            wire = idle.pop()
            if not wire.closed:
                return wire
        return None

    async def dial(self, host: str, port: int, timeout_s: float) -> Wire:
        """A new connection; the guard sees each address right before it is dialled."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                infos = await self._resolve(host, port)
                dialled = await aiohappyeyeballs.start_connection(
                    cast("Sequence[aiohappyeyeballs.AddrInfoType]", infos),
                    happy_eyeballs_delay=_STAGGER_S,
                    socket_factory=cast("aiohappyeyeballs.SocketFactoryType", self._socket_factory),
                )
                _, wire = await loop.create_connection(
                    lambda: Wire(
                        loop, lambda freed: self._keep(host, port, freed), lambda wire: self._drain(host, port, wire)
                    ),
                    sock=dialled,
                    ssl=self._tls,
                    server_hostname=host if self._tls else None,
                )
        except TimeoutError:
            raise
        except (OSError, UnicodeError, RuntimeError) as problem:
            raise NoConnectionError from problem
        return wire

    async def _resolve(self, host: str, port: int) -> Sequence[AddressInfo]:
        """The addresses of a name; looked up once for all requests that wait, and not again for a few seconds."""
        loop, key = asyncio.get_running_loop(), (host, port)
        known = self._addresses.get(key)
        if known is None or loop.time() - known[0] > ADDRESS_AGE_S_MAX or (known[1].done() and known[1].exception()):
            found = asyncio.ensure_future(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            known = self._addresses[key] = (loop.time(), cast("asyncio.Future[Sequence[AddressInfo]]", found))
        # Shielded: a request that gives up must not take the answer from the others.
        return (await asyncio.shield(known[1]))[:ADDRESSES_MAX]

    def _keep(self, host: str, port: int, wire: Wire) -> None:
        wire.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault((host, port), []).append(wire)
        self._sweep_soon()

    def _drain(self, host: str, port: int, wire: Wire) -> None:
        others = [one for one in self._draining.get((host, port), ()) if one is not wire and one.draining]
        for one in others[: max(0, len(others) + 1 - DRAINING_MAX)]:
            one.close()
        self._draining[host, port] = [*others[-DRAINING_MAX + 1 :], wire]
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(IDLE_S_MAX, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_S_MAX
        for key, wires in list(self._idle.items()):
            for wire in wires:
                if wire.idle_since < oldest:
                    wire.close()
            wires[:] = [wire for wire in wires if not wire.closed]
            if not wires:
                del self._idle[key]
        self._addresses = {k: v for k, v in self._addresses.items() if loop.time() - v[0] <= ADDRESS_AGE_S_MAX}
        draining = {key: [wire for wire in wires if wire.draining] for key, wires in self._draining.items()}
        self._draining = {key: wires for key, wires in draining.items() if wires}
        self._sweeper = None
        if self._idle or self._addresses or self._draining:
            self._sweep_soon()

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for wires in (*self._idle.values(), *self._draining.values()):
            for wire in wires:
                wire.close()
        self._idle.clear()
        self._draining.clear()
