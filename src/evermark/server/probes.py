"""/livez, /readyz, /health and /metrics: how an instance is, for anybody who may reach its port."""

from __future__ import annotations

import asyncio
import math
import time
from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from evermark.observe.health import HealthBoard, PartitionHealth, as_json, unready
from evermark.observe.metrics import Metrics
from evermark.server.api import Threads


class Probes:
    def __init__(self, board: HealthBoard, metrics: Metrics) -> None:
        self._board, self._metrics = board, metrics
        self._started = time.monotonic()
        self._thread = Threads(1, 1, "probes")
        self._asking: asyncio.Future[None] | None = None

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/health", self._health),
            Route("/metrics", self._metrics_text),
        ]

    def end(self) -> None:
        self._thread.close()

    async def _livez(self, _: Request) -> Response:
        reason = self._board.given_up()
        return PlainTextResponse("ok\n" if reason is None else f"{reason}\n", 200 if reason is None else 503)

    async def _readyz(self, _: Request) -> Response:
        await self._asked()
        why = {"instance": "stopping"} if self._board.is_stopping else unready(self._board.partitions())
        said = "".join(f"not ready: {name}: {reason}\n" for name, reason in why.items())
        return PlainTextResponse(said or "ready\n", 503 if why else 200)

    async def _health(self, request: Request) -> Response:
        await self._asked()
        body = as_json(
            self._board.partitions(),
            version=version("evermark"),
            uptime_s=time.monotonic() - self._started,
            replays=self._board.replays,
            delivery=self._board.delivery,
            copies=self._board.failing_copies(),
            stores_away=self._board.stores_away,
            log_troubles=self._board.log_troubles(),
            as_list=request.query_params.get("partitions") == "list",
        )
        return JSONResponse(body, 503 if body["status"] == "unhealthy" else 200)

    async def _metrics_text(self, _: Request) -> Response:
        await self._asked()
        self._show_partitions()
        return Response(generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _asked(self) -> None:
        """Have the sources asked now. Requests that come meanwhile share the answer; the board bounds the wait."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._thread.run(self._board.ask))
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
        self._metrics.delivery_lag_s.set(self._board.delivery.lag_s)
        self._metrics.checkpoints_away.clear()  # what is over is not shown as 0 for ever
        for source in self._board.stores_away:
            self._metrics.checkpoints_away.labels(source).set(1)
        self._metrics.log_unwell.clear()
        for trouble in self._board.log_troubles():
            self._metrics.log_unwell.labels(trouble.source, trouble.what).set(1)
