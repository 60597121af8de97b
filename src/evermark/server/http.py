"""The HTTP server of every instance: /livez, /readyz, /health, /metrics, and the API under /v1."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from evermark.errors import ConfigError
from evermark.observe.health import HealthBoard, PartitionHealth, as_json, unready
from evermark.observe.metrics import Metrics
from evermark.server.api import BODY_BYTES_MAX, Api
from evermark.server.tokens import Tokens

# Requests under way may end by themselves for this long when the server stops; then their clients see it hang up.
_STOP_WAIT_S = 1.0


class Server:
    """Runs in a thread of its own, so that it answers while everything else is busy."""

    def __init__(
        self, host: str, port: int, board: HealthBoard, metrics: Metrics, tokens: Tokens | None = None
    ) -> None:
        self._host, self._port = host, port
        self._board, self._metrics = board, metrics
        self.api = Api(tokens or Tokens({}))
        self._started = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._runner: web.AppRunner | None = None
        self._asking: asyncio.Future[None] | None = None
        self.port = port

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(timeout=5)
        self.api.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    async def _start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics_text),
            ]
        )
        self.api.add_to(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_WAIT_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"server.listen: cannot listen on {self._host}:{self._port}: {error.strerror or error}",
                hint="another program has the port; set server.listen to a free one, or 127.0.0.1:0 for any",
            ) from error
        self.port = self._runner.addresses[0][1]

    async def _livez(self, _: web.Request) -> web.Response:
        reason = self._board.given_up()
        return web.Response(text="ok\n" if reason is None else f"{reason}\n", status=200 if reason is None else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        await self._asked()
        why = unready(self._board.partitions())
        said = "".join(f"not ready: {name}: {reason}\n" for name, reason in why.items())
        return web.Response(text=said or "ready\n", status=503 if why else 200)

    async def _health(self, _: web.Request) -> web.Response:
        await self._asked()
        body = as_json(
            self._board.partitions(),
            version=version("evermark"),
            uptime_s=time.monotonic() - self._started,
            replays=self._board.replays(),
            delivery=self._board.delivery(),
        )
        return web.json_response(body, status=503 if body["status"] == "unhealthy" else 200)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        await self._asked()
        self._show_partitions()
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _asked(self) -> None:
        """The sources were asked just now. Requests that come meanwhile wait for the same answer; the board sees to it
        that nobody waits long.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._board.ask))
        await asyncio.shield(self._asking)

    def _show_partitions(self) -> None:
        """The same numbers as in /health."""
        for name, report in self._board.partitions().items():
            source, _, partition = name.rpartition("/")
            self._metrics.partition_lag_s.labels(source, partition).set(
                math.nan if report.lag_s is None else report.lag_s
            )
            for state in PartitionHealth:
                self._metrics.partition_state.labels(source, partition, state.value).set(report.state is state)
        self._metrics.delivery_lag_s.set(self._board.delivery().lag_s)
