"""Clients that do nothing but post ready-made, unsigned bodies: what delivery is measured against.

`by_aiohttp` is what most people would write: one session of the usual library, some requests at a time. `by_wire` takes
Evermark's own connections instead, which do nothing but HTTP/1.1: it tells what everything around the posting costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from evermark.delivery.webhook.guard import Guard
from evermark.delivery.webhook.http1 import Pool
from evermark.errors import EvermarkError

_TIMEOUT_S = 10.0
Post = Callable[[int, bytes], Awaitable[None]]


def by_aiohttp(bodies: Sequence[bytes], ports: Sequence[int], lanes: int) -> float:
    """Seconds until every receiver has every body, over `lanes` connections to each."""

    async def run() -> float:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        headers = {"content-type": "application/json"}
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

            async def post(port: int, body: bytes) -> None:
                async with session.post(f"http://127.0.0.1:{port}/", data=body) as answer:
                    await answer.read()
                    _require_ok(answer.status)

            return await _posted(post, bodies, ports, lanes)

    return asyncio.run(run())


def by_wire(bodies: Sequence[bytes], ports: Sequence[int], lanes: int) -> float:
    """The same, with our own connections."""

    async def run() -> float:
        post, pool = wire_post()
        try:
            return await _posted(post, bodies, ports, lanes)
        finally:
            pool.close()

    return asyncio.run(run())


def wire_post() -> tuple[Post, Pool]:
    pool = Pool(Guard(["127.0.0.0/8"], opened_only=True).socket, None)

    async def post(port: int, body: bytes) -> None:
        head = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        wire = pool.kept("127.0.0.1", port) or await pool.dial("127.0.0.1", port, _TIMEOUT_S)
        _require_ok((await wire.post(request, _TIMEOUT_S)).status)

    return post, pool


async def _posted(post: Post, bodies: Sequence[bytes], ports: Sequence[int], lanes: int) -> float:
    async def lane(port: int, waiting: Sequence[bytes]) -> None:
        for body in waiting:
            await post(port, body)

    began = time.perf_counter()
    await asyncio.gather(*(lane(port, bodies[n::lanes]) for port in ports for n in range(lanes)))
    return time.perf_counter() - began


def _require_ok(status: int) -> None:
    if status != 200:
        raise EvermarkError(f"the receiver said {status}")
