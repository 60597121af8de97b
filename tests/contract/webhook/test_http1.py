"""One connection, many requests: each has its own time and its own answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from unittest.mock import ANY

import pytest

from evermark.delivery.webhook.guard import Guard
from evermark.delivery.webhook.http1 import (
    CHUNK_LINE_BYTES_MAX,
    DRAINING_MAX,
    INTERIM_HEADS_MAX,
    NotHttpError,
    Pool,
    Reply,
    Wire,
)

_REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_FULL = b"HTTP/1.1 503 Full\r\ncontent-length: 5\r\nretry-after: 7\r\n\r\nlater"
_HINT = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"


def _with_wire(answers: Sequence[bytes], use: Callable[[Wire], Awaitable[None]]) -> None:
    """Use a connection to a server that answers one request after another so; nothing at all for an empty answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        await reader.read()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = Pool(Guard(["127.0.0.0/8"], opened_only=True).socket, None)
        try:
            await use(await pool.dial("127.0.0.1", server.sockets[0].getsockname()[1], 5.0))
        finally:
            pool.close()
            server.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_each_answer_is_the_one_that_was_given() -> None:
    """GIVEN a receiver that changes its mind WHEN asked over one connection THEN nothing of the last answer is left."""

    async def use(wire: Wire) -> None:
        replies = [await wire.post(_REQUEST, 5.0) for _ in range(6)]
        assert [reply.status for reply in replies] == [200, 200, 503, 200, 503, 200]
        assert [reply.said for reply in replies] == [b"", b"", b"later", b"", b"later", b""]
        assert [reply.headers.get("retry-after") for reply in replies] == [None, None, "7", None, "7", None]
        assert wire.uses == 6

    _with_wire([_OK, _OK, _FULL, _HINT + _OK, _FULL, _HINT + _HINT + _OK], use)


@pytest.mark.parametrize(("first_s", "second_s"), [(0.4, 0.4), (30.0, 0.4), (0.3, 0.6)])
def test_a_request_is_late_by_its_own_time(first_s: float, second_s: float) -> None:
    """GIVEN a connection on which one was answered WHEN the next is not THEN it is late after its own time."""

    async def use(wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        assert (await wire.post(_REQUEST, first_s)).status == 200
        await asyncio.sleep(0.2)  # part of the first one's time passes
        begun = loop.time()
        with pytest.raises(TimeoutError):
            await wire.post(_REQUEST, second_s)
        assert second_s * 0.95 <= loop.time() - begun < second_s + 5.0
        assert wire.closed

    _with_wire([_OK, b""], use)


def test_an_idle_connection_outlives_the_time_of_its_last_request() -> None:
    """GIVEN an answer within its time WHEN that time has passed THEN the connection still serves."""

    async def use(wire: Wire) -> None:
        assert (await wire.post(_REQUEST, 0.1)).status == 200
        await asyncio.sleep(0.3)
        assert not wire.closed
        assert (await wire.post(_REQUEST, 5.0)).status == 200

    _with_wire([_OK, _OK], use)


class _Transport(asyncio.Transport):
    """Takes what is sent, and notes that it was closed."""

    is_closed = False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0


def _answered(*pieces: bytes | None) -> tuple[Reply | None, bool]:
    """The answer that comes in these pieces (None: the connection ends), if there is one, and whether the connection
    may be used again."""

    async def run() -> tuple[Reply | None, bool]:
        freed: list[Wire] = []
        wire = Wire(asyncio.get_running_loop(), freed.append, lambda _: None)
        wire.connection_made(_Transport())
        asked = asyncio.ensure_future(wire.post(_REQUEST, 30.0))
        await asyncio.sleep(0)
        for piece in pieces:
            if piece is None:
                wire.connection_lost(None)
            else:
                wire.data_received(piece)
        reply = None
        with suppress(NotHttpError):
            reply = await asyncio.wait_for(asked, 5.0)
        return reply, freed == [wire]

    return asyncio.run(run())


_CHUNKED = b"HTTP/1.1 503 Full\r\ntransfer-encoding: chunked\r\n\r\n"


def test_a_body_in_chunks_is_the_same_wherever_it_was_cut() -> None:
    """GIVEN a refusal in chunks, with extensions and trailers WHEN it comes in two pieces, or one byte after the other
    THEN all of it is heard, and the connection is used again."""
    answer = _CHUNKED + b"3;a=b\r\nlat\r\n2 \r\ner\r\n0\r\nx-more: 1\r\n\r\n"
    for cut in range(len(answer)):
        assert _answered(answer[:cut], answer[cut:]) == (Reply(503, ANY, b"later"), True), cut
    assert _answered(*(answer[n : n + 1] for n in range(len(answer)))) == (Reply(503, ANY, b"later"), True)


@pytest.mark.parametrize(
    "body",
    [
        b"\r\n3\r\nlat\r\n0\r\n\r\n",  # no size
        b"3\r\nlat1\r\nx\r\n0\r\n\r\n",  # more than the size
        b"x\r\n",
        b"3;" + b"a" * CHUNK_LINE_BYTES_MAX,  # no end of the line
        b"0\r\n\r\nHTTP/1.1 200 OK",  # more than the answer
    ],
)
def test_odd_chunks_cost_the_connection(body: bytes) -> None:
    """GIVEN a refusal whose chunks make no sense WHEN it comes THEN it counts, and the connection is not used again."""
    reply, is_kept = _answered(_CHUNKED + body)
    assert reply is not None and reply.status == 503 and not is_kept


@pytest.mark.parametrize("line", [b"\r\n", b"1\r\nx\r\n", b"1\r\nx", b"0;\r\n"])
def test_an_answer_of_the_smallest_chunks_takes_no_time(line: bytes) -> None:
    """GIVEN as many bytes as a system hands over at once, all of them tiny lines WHEN they are read THEN that takes
    the loop, which all subscriptions share, no time worth speaking of, and the connection ends."""
    began = time.thread_time()
    reply, is_kept = _answered(_CHUNKED.replace(b"503", b"200") + line * (256 * 1024 // len(line)))
    assert reply is not None and reply.status == 200 and not is_kept
    assert time.thread_time() - began < 0.3


@pytest.mark.parametrize("length", [b"9" * 19, b"1" * 5_000, b"-1", b"\xb2"])
@pytest.mark.parametrize("status", [200, 503])
def test_a_length_that_is_none_costs_the_connection_alone(status: int, length: bytes) -> None:
    """GIVEN an answer whose stated length is no number, or one that nobody could mean WHEN its head is read THEN an
    accepting status counts at once, and a refusal when the connection ends, which is not used again."""
    reply, is_kept = _answered(b"HTTP/1.1 %d So\r\ncontent-length: %b\r\n\r\nlater" % (status, length), None)
    assert reply is not None and reply.status == status and not is_kept


@pytest.mark.parametrize(
    ("head", "body", "is_cut"),
    [
        (b"content-length: 5", b"later", False),
        (b"content-length: 900", b"later", True),  # the connection ends first
        (b"content-length: 900", b"a" * 300, True),
        (b"x: y", b"later", True),  # nobody knows
        (b"transfer-encoding: chunked", b"5\r\nlater\r\n0\r\n\r\n", False),
        (b"transfer-encoding: chunked", b"5\r\nlater\r\n9\r\n", True),
        (b"transfer-encoding: chunked", b"5\r\nlater\r\nx\r\n", True),
    ],
)
def test_a_refusal_says_whether_there_was_more_of_it(head: bytes, body: bytes, is_cut: bool) -> None:
    """GIVEN a refusal WHEN its connection ends before its body does, or the body is too long, or makes no sense THEN
    what was heard of it is known to be a part."""
    reply, _ = _answered(b"HTTP/1.1 503 Full\r\n%b\r\n\r\n" % head, body, None)
    assert reply is not None and reply.said and reply.is_cut is is_cut


def test_heads_before_the_answer_come_to_an_end() -> None:
    """GIVEN a receiver that says for ever that its answer is to come WHEN it is listened to THEN that is not HTTP."""
    assert _answered(_HINT * INTERIM_HEADS_MAX + _OK) == (Reply(200, ANY), True)
    assert _answered(_HINT * (INTERIM_HEADS_MAX + 1) + _OK) == (None, False)


def test_few_connections_wait_for_bodies_that_do_not_come() -> None:
    """GIVEN a receiver that accepts, and keeps its bodies back WHEN much is sent to it THEN few connections are open,
    however many were needed, and none is once it is over."""
    most = opened = 0
    none_left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most, opened
        opened += 1
        most = max(most, opened)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
        with suppress(ConnectionError):
            await reader.read()
        opened -= 1
        writer.close()
        if not opened:
            none_left.set()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = Pool(Guard(["127.0.0.0/8"], opened_only=True).socket, None)
        for _ in range(4 * DRAINING_MAX):
            assert pool.kept("127.0.0.1", port) is None
            wire = await pool.dial("127.0.0.1", port, 5.0)
            assert (await wire.post(_REQUEST, 5.0)).status == 200
        none_left.clear()
        pool.close()
        await none_left.wait()
        server.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    # One is being used, and the server hears of an end a moment later.
    assert DRAINING_MAX <= most <= DRAINING_MAX + 4
