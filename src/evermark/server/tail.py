"""The live tail over HTTP: server-sent events of a wish, or of what a subscription wants.

A client that is slow is waited for by its own task alone, and the operating system keeps a bounded amount for it. What
it misses meanwhile it reads from the log (`delivery/tail/hub.py`).
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_origin

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from evermark.delivery.model import SourcePartition, SubscriptionSpec
from evermark.delivery.tail.hub import Client, Hub, TailLimits
from evermark.delivery.tail.place import Resync, places_of
from evermark.delivery.tail.ports import TailLog, TailReport
from evermark.delivery.tail.wish import BySpark, Wish, require_fit
from evermark.errors import BusyError, ConfigError, EvermarkError
from evermark.observe.health import HealthBoard
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.server.followed import FOLLOWED, FollowAsked, TailAsked
from evermark.server.messages import read_as
from evermark.settings.problems import Problem, refused

CLIENTS_MAX = 8_000
HUBS_MAX = 32
# Different wishes that need Spark. Each of them costs a job of Spark for each piece of the log that its clients read.
SPARK_WISHES_MAX = 16
DESCRIPTORS_FOR_OTHERS = 512
SEND_BYTES_MAX = 32 * 1024
CLOSE_WAIT_S = 2.0
_THREADS = 2
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy that keeps events back would make them late
)


@dataclass(frozen=True)
class TailOf:
    """What the tail of a deployment needs."""

    log: TailLog
    sources: frozenset[str]
    subscription: Callable[[str], SubscriptionSpec]
    by_spark: BySpark
    limits: TailLimits = field(default_factory=TailLimits)


class _Report(TailReport):
    def __init__(self, metrics: Metrics, board: HealthBoard) -> None:
        self._metrics = metrics
        self._board = board
        self._log = get_logger(part="tail")
        self._failing = False
        self._stuck: dict[SourcePartition, dict[frozenset[str], str]] = {}  # by hub, what was said

    def clients(self, change: int) -> None:
        self._metrics.tail_clients.inc(change)

    def sent(self, events: int) -> None:
        self._failing = False
        if events:
            self._metrics.tail_events_sent.inc(events)

    def fell_back(self) -> None:
        self._metrics.tail_fallbacks.inc()

    def resync(self, resync: Resync) -> None:
        self._metrics.tail_resyncs.labels(resync.why.value).inc()

    def failed(self, error: Exception) -> None:
        if not self._failing:  # it is tried again every second
            self._log.warning("the live tail cannot be read on; it is tried until it can", error=error)
        self._failing = True

    def stuck(self, place: SourcePartition, error: EvermarkError, hub: frozenset[str]) -> None:
        self._board.log_unwell(place.source, _of(place), f"clients wait: {error.message}", error.hint)
        said = self._stuck.setdefault(place, {})
        is_new = error.message not in said.values()
        said[hub] = error.message
        if is_new:
            source, partition = place.source, place.partition
            self._log.error("the live tail cannot go on here", source=source, partition=partition, error=error)

    def unstuck(self, place: SourcePartition, hub: frozenset[str]) -> None:
        said = self._stuck.get(place, {})
        said.pop(hub, None)
        if said:
            return  # clients of another hub still wait
        self._stuck.pop(place, None)
        self._board.log_well(place.source, _of(place))
        self._log.info("the live tail waits here no longer", source=place.source, partition=place.partition)


def _of(place: SourcePartition) -> str:
    return f"the live tail of partition {place.partition}"


class Tail:
    """Refuses clients until `open`, and after `refuse` or `close`."""

    def __init__(self, metrics: Metrics, board: HealthBoard) -> None:
        self._report = _Report(metrics, board)
        self._of: TailOf | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hubs: dict[frozenset[str], tuple[Hub, asyncio.Task[None]]] = {}
        self._opening = asyncio.Lock()
        self._clients = 0
        self._asking: Counter[tuple[Wish, frozenset[str]]] = Counter()  # clients of each wish that needs Spark
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor, ThreadPoolExecutor] | None = None

    def routes(self) -> list[Route]:
        return [Route(path, _Endpoint(self, query), methods=["GET"]) for path, query in FOLLOWED.items()]

    # by other threads

    def open(self, of: TailOf) -> None:
        self._threads = (
            ThreadPoolExecutor(_THREADS, thread_name_prefix="tail"),
            ThreadPoolExecutor(_THREADS, thread_name_prefix="tail-log"),
            ThreadPoolExecutor(_THREADS, thread_name_prefix="tail-spark"),
        )
        self._of = of

    def wake(self) -> None:
        """A batch was taken."""
        if self._hubs and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def refuse(self) -> None:
        """Take no new clients; connected clients are served until `close`."""
        self._of = None

    def close(self) -> None:
        """Clients are told to connect again, elsewhere; returns when nothing is read any more."""
        self.refuse()
        if self._loop is not None:
            with suppress(RuntimeError, LateError):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_WAIT_S)
        for threads in self._threads or ():
            threads.shutdown(wait=False, cancel_futures=True)

    # in the event loop

    def _wake(self) -> None:
        for hub, _ in self._hubs.values():
            hub.wake()

    async def _end(self) -> None:
        ending = list(self._hubs.values())
        self._hubs = {}
        for hub, _ in ending:
            hub.close()
        if ending:
            await asyncio.wait([task for _, task in ending], timeout=CLOSE_WAIT_S / 2)

    async def require(self, asked: FollowAsked, name: str | None) -> None:
        """Raises what a client that asks so would be refused with."""
        await asyncio.to_thread(_wished, self._opened(), asked, name)

    def _opened(self) -> TailOf:
        if self._of is None:
            raise BusyError("this instance is starting or stopping", hint="try again in a moment")
        return self._of

    async def client(self, asked: FollowAsked, name: str | None, last_id: str) -> Client:
        of = self._opened()
        if self._clients >= clients_max():
            raise BusyError(
                f"the live tail has {self._clients} clients, and takes no more",
                hint="use another instance, or start this one with a higher limit of open files (ulimit -n)",
            )
        self._clients += 1
        try:
            wish, sources = await asyncio.to_thread(_wished, of, asked, name)
            self._asks(wish, sources)
            try:
                places = places_of(last_id) if last_id else None
                return await (await self._hub(of, sources)).client(wish, places, asked.start)
            except BaseException:
                self._asks_no_more(wish, sources)
                raise
        except BaseException:
            self._clients -= 1
            raise

    def ended(self, client: Client) -> None:
        self._clients -= 1
        self._asks_no_more(client.wish, client.sources)
        client.close()

    def _asks(self, wish: Wish, sources: frozenset[str]) -> None:
        if not wish.needs_spark:
            return
        if (wish, sources) not in self._asking and len(self._asking) >= SPARK_WISHES_MAX:
            raise BusyError(
                f"the live tail follows {SPARK_WISHES_MAX} different predicates that only Spark can decide already, and"
                " takes no more",
                hint="say it without what only Spark can decide, such as rlike (docs/tail.md); or follow without"
                " `where`, and choose among what comes; or use another instance",
            )
        self._asking[wish, sources] += 1

    def _asks_no_more(self, wish: Wish, sources: frozenset[str]) -> None:
        if wish.needs_spark:
            self._asking[wish, sources] -= 1
            self._asking += Counter()  # without those of nobody

    async def _hub(self, of: TailOf, sources: frozenset[str]) -> Hub:
        async with self._opening:
            self._loop = asyncio.get_running_loop()
            self._hubs = {key: kept for key, kept in self._hubs.items() if not kept[1].done()}
            if sources not in self._hubs:
                if len(self._hubs) >= HUBS_MAX or self._threads is None:
                    raise BusyError(
                        f"the live tail follows {HUBS_MAX} different sets of sources already", hint="try again later"
                    )
                hub = Hub(sources, of.log, self._report, of.by_spark, *self._threads, of.limits)
                await hub.open()
                self._hubs[sources] = hub, asyncio.create_task(hub.run())
            return self._hubs[sources][0]


def clients_max() -> int:
    """As many as there are descriptors for, beside everything else that needs some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CLIENTS_MAX if soft == resource.RLIM_INFINITY else max(1, min(CLIENTS_MAX, soft - DESCRIPTORS_FOR_OTHERS))


def _wished(of: TailOf, asked: FollowAsked, name: str | None) -> tuple[Wish, frozenset[str]]:
    """In a thread: State is asked for the subscription, and a predicate takes milliseconds to vet."""
    if name is not None:
        spec = of.subscription(name)
        if spec.bot is not None:
            raise ConfigError(
                f"{name[:80]} is a bot, and what a bot gets depends on its memberships",
                hint="follow its streams with /v1/tail?stream=…",
            )
        return Wish(spec.streams, spec.ops, spec.where), of.sources
    if not isinstance(asked, TailAsked):
        raise TypeError("a tail without a subscription names its wish")
    wish = Wish(tuple(dict.fromkeys(asked.stream)), tuple(dict.fromkeys(asked.op)), asked.where)
    require_fit(wish)
    if unknown := [source for source in asked.source if source not in of.sources]:
        there_are = f"there are {', '.join(sorted(of.sources)[:20])}"
        raise refused("the query", [Problem(("source",), f"no source is called {unknown[0][:80]}", there_are)])
    return wish, frozenset(asked.source) or of.sources


class _Endpoint:
    """An ASGI application."""

    def __init__(self, tail: Tail, query: type[FollowAsked]) -> None:
        self._tail, self._query = tail, query
        self._lists = [name for name, field in query.model_fields.items() if get_origin(field.annotation) is tuple]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        asked = read_as(self._query, self._given(request.query_params.multi_items()), "the query")
        last_id = request.headers.get("last-event-id") or asked.last_event_id
        name = request.path_params.get("name")
        if name is not None and "\0" in name:  # State cannot be asked for it
            raise HTTPException(404)
        if request.method == "HEAD":
            await self._tail.require(asked, name)
            await Response(headers={"content-type": "text/event-stream"})(scope, receive, send)
            return
        client = await self._tail.client(asked, name, last_id)
        watching = asyncio.create_task(_watch(receive, client))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            async for text in client.pieces():
                for start in range(0, len(text), SEND_BYTES_MAX):
                    part = text if len(text) <= SEND_BYTES_MAX else text[start : start + SEND_BYTES_MAX]
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    if client.gone:
                        return
                await asyncio.sleep(0)  # sending waits only for a client whose buffers are full
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watching.cancel()
            self._tail.ended(client)

    def _given(self, items: Iterable[tuple[str, str]]) -> Mapping[str, Any]:
        given: dict[str, Any] = {}
        for name, value in items:
            if name in self._lists:
                given.setdefault(name, []).append(value)
            elif name in given:
                raise refused("the query", [Problem((name,), "stands there twice")])
            else:
                given[name] = value
        return given


async def _watch(receive: Receive, client: Client) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.hang_up()
