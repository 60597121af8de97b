"""The HTTP server of every instance: probes and the API, as one Starlette application, served by uvicorn."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from contextlib import suppress

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from evermark.errors import ConfigError
from evermark.observe.health import HealthBoard
from evermark.observe.metrics import Metrics
from evermark.server.api import Api
from evermark.server.probes import Probes
from evermark.server.tail import Tail
from evermark.server.tokens import Tokens

# Requests under way may end by themselves for this long when the server stops; then their clients see it hang up.
_STOP_WAIT_S = 1
_REQUEST_WAIT_S = 15.0
_STUCK_LOOKS = 4  # of so many seconds each
_KEEP_ALIVE_S = 75
_DATE_EVERY_S = 1.0
_HEAD_BYTES_MAX = 16 * 1024
_SEND_BUFFER_BYTES = 128 * 1024
_CONNECTIONS_MAX = 10_000
_DESCRIPTORS_MAX = 20_000


class Server:
    """Runs in a thread and an event loop of its own, so that it answers while everything else is busy."""

    def __init__(
        self, host: str, port: int, board: HealthBoard, metrics: Metrics, tokens: Tokens | None = None
    ) -> None:
        self._host, self.port = host, port
        self.api = Api(tokens or Tokens({}))
        self._probes = Probes(board, metrics)
        self.tail = Tail(metrics, board)
        self.app = self.api.application(*self._probes.routes(), *self.tail.routes())
        config = uvicorn.Config(
            self.app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # what goes wrong in a request is logged by `Api`; clients that err are not our news
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_WAIT_S,
            h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
        )
        self._server = _Uvicorn(config)
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(self._sockets)), name="server", daemon=True
        )

    def start(self) -> None:
        """The server listens when this returns. Outside the main thread uvicorn leaves signals alone."""
        _allow_descriptors()
        try:
            self._sockets = _listening(self._host, self.port)
        except OSError as error:
            raise ConfigError(
                f"server.listen: cannot listen on {self._host}:{self.port}: {error.strerror or error}",
                hint="another program has the port; set server.listen to a free port, or 127.0.0.1:0 for any",
            ) from error
        self.port = self._sockets[0].getsockname()[1]
        self._thread.start()

    def refuse(self) -> None:
        """The first step of a stop: no more requests of the API, no new clients of the live tail. Probes answer on."""
        self.api.close()
        self.tail.refuse()

    def stop(self) -> None:
        self._server.stop()
        self._thread.join(timeout=5)
        self.api.end()
        self._probes.end()


class _Uvicorn(uvicorn.Server):
    """Wakes once a second, for the date in its answers; uvicorn itself looks ten times whether it is to stop."""

    _stopping: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def main_loop(self) -> None:
        stopping = asyncio.Event()
        self._stopping = (asyncio.get_running_loop(), stopping)
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _DATE_EVERY_S)

    def stop(self) -> None:
        """By another thread."""
        self.should_exit = True  # before the look at its loop: one that is about to begin sees it
        if self._stopping is not None:
            loop, stopping = self._stopping
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(stopping.set)


class _Protocol(H11Protocol):
    """Hangs up on a client that is slow to send its request, or takes nothing of its answer: uvicorn itself would wait
    for it for ever.
    """

    _left = _stuck = 0  # bytes that wait for the client, and how many looks ago they were as many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The system would let it grow to megabytes: with thousands of slow clients of the live tail that is gigabytes.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._look((None, None))

    def _look(self, before: tuple[object, object]) -> None:
        now = (self.conn.their_state, self.cycle)
        if self.transport.is_closing():
            return
        is_kept_alive = self.timeout_keep_alive_task is not None  # and uvicorn ends it
        is_unfinished = now[0] is h11.SEND_BODY or (now[0] is h11.IDLE and not is_kept_alive)
        left = self.transport.get_write_buffer_size()
        self._stuck = self._stuck + 1 if left and left == self._left else 0
        self._left = left
        if is_unfinished and now == before:
            self.transport.close()
        elif self._stuck >= _STUCK_LOOKS:
            self.transport.abort()  # to close it would wait for these bytes, too
        else:
            self.loop.call_later(_REQUEST_WAIT_S, self._look, now)


def _allow_descriptors() -> None:
    """As many as this user may have: each client of the live tail is one. Many systems begin with 1 024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listening(host: str, port: int) -> list[socket.socket]:
    """A socket for each address that the host has: `localhost` may have two."""
    found: list[socket.socket] = []
    try:
        every = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(every):
            found.append(socket.create_server(address, family=family))
            # asyncio does so only for sockets whose protocol is named: the body of an answer would wait 40 ms for the
            # client's word that it has the head.
            found[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        for each in found:
            each.close()
        raise
    return found
