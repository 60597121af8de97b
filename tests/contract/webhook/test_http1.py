"""One connection, many requests: each has its own time and its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from evermark.delivery.webhook.guard import Guard
from evermark.delivery.webhook.http1 import Pool, Wire

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
