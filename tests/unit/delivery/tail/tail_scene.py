"""A log in memory, and clients of the live tail that read what they are sent as a browser would."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.tail.hub import Client, Hub, TailLimits
from evermark.delivery.tail.place import Resync, Trouble
from evermark.delivery.tail.wish import no_spark
from evermark.errors import EvermarkError
from evermark.log.opened import lost
from evermark.log.pieces import LogPiece
from evermark.log.row_reader import ROWS

T0 = datetime(2026, 11, 15, tzinfo=UTC)
P0, P1 = SourcePartition("shop", 0), SourcePartition("shop", 1)


def rows_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=ROWS)


@dataclass
class MemoryLog:
    """A `TailLog`. `head` may stand before the last batch: then the rest is not durable yet."""

    batches: dict[SourcePartition, list[list[dict[str, Any]]]] = field(default_factory=dict)
    head: dict[SourcePartition, int] = field(default_factory=dict)
    removed: dict[SourcePartition, int] = field(default_factory=dict)  # batches that retention took
    gaps: dict[SourcePartition, Trouble] = field(default_factory=dict)
    heard: dict[SourcePartition, Trouble] | None = None  # gaps as this instance last looked; None: it looks each time
    lost: set[tuple[SourcePartition, int]] = field(default_factory=set)  # batches whose file cannot be read
    away: EvermarkError | None = None  # why; None: the file is missing
    pieces_read: int = 0

    def take(
        self, place: SourcePartition, count: int = 1, *, stream: str = "public.orders", durable: bool = True
    ) -> list[str]:
        """One batch of so many events; returns their ids."""
        mine = self.batches.setdefault(place, [])
        number = len(mine) + 1
        rows = [
            {
                "event_id": f"{place.source}/{place.partition}/{number}/{n}", "source": place.source,
                "partition": place.partition, "batch": number, "position": f"{number:06}:{n:06}", "stream": stream,
                "op": "insert", "key": str(n), "event_time": T0, "ingested_at": T0,
                "payload": json.dumps({"n": n, "total": number}),
            }
            for n in range(count)
        ]  # fmt: skip
        mine.append(rows)
        if durable:
            self.head[place] = number
        return [row["event_id"] for row in rows]

    def ids(self, *places: SourcePartition) -> list[str]:
        """Of all durable events, or those of these partitions."""
        mine = {p: b[: self.head.get(p, 0)] for p, b in self.batches.items() if not places or p in places}
        return [row["event_id"] for batches in mine.values() for batch in batches for row in batch]

    def heads(self) -> Mapping[SourcePartition, int]:
        return dict(self.head)

    def troubles(self, *, afresh: bool = False) -> Mapping[SourcePartition, Trouble]:
        return dict(self.gaps if afresh or self.heard is None else self.heard)

    def first_batch(self, place: SourcePartition) -> int | None:
        first = self.removed.get(place, 0) + 1
        return first if first <= len(self.batches.get(place, ())) else None

    def piece(self, place: SourcePartition, after: Cursor, to: int, rows_max: int, bytes_max: int) -> LogPiece:
        self.pieces_read += 1
        assert to <= self.head[place], "nothing beyond log_head is ever read"
        if (place, after.batch + 1) in self.lost:
            raise self.away or lost(f"{place.source}/p{place.partition}-b{after.batch + 1}.parquet")
        to = min([n - 1 for at, n in self.lost if at == place and after.batch < n <= to], default=to)
        kept = self.batches[place][self.removed.get(place, 0) : to]
        found = [row for b in kept for row in b if Cursor(row["batch"] - 1, row["position"]) > after]
        rows_max = min(rows_max, max(1, bytes_max // max((len(row["payload"]) + 200 for row in found), default=1)))
        some = found[:rows_max]
        if len(some) == len(found):
            return LogPiece(rows_of(some), to, "", ())
        return LogPiece(rows_of(some), some[-1]["batch"] - 1, some[-1]["position"], ())

    def batch_at(self, place: SourcePartition, since: str) -> int:
        return 0


@dataclass
class Reported:
    """A `TailReport`."""

    now: int = 0
    events: int = 0
    fallbacks: int = 0
    resyncs: list[Resync] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    waits: dict[SourcePartition, str] = field(default_factory=dict)  # where, and for what

    def clients(self, change: int) -> None:
        self.now += change

    def sent(self, events: int) -> None:
        self.events += events

    def fell_back(self) -> None:
        self.fallbacks += 1

    def resync(self, resync: Resync) -> None:
        self.resyncs.append(resync)

    def failed(self, error: Exception) -> None:
        self.failures.append(repr(error))

    def stuck(self, place: SourcePartition, error: EvermarkError, hub: frozenset[str]) -> None:
        self.waits[place] = error.message

    def unstuck(self, place: SourcePartition, hub: frozenset[str]) -> None:
        del self.waits[place]


class AtOnce(Executor):
    """Runs in the thread of the event loop, so that a test decides the order of everything."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where the result is used
            future.set_exception(error)
        return future


async def hub_over(log: MemoryLog, report: Reported | None = None, **more: Any) -> Hub:
    sources = frozenset({"shop"})
    more.setdefault("limits", TailLimits(rest_s=0.0, pace_s=0.0, retry_s=0.0))
    hub = Hub(sources, log, report or Reported(), more.pop("by_spark", no_spark), AtOnce(), AtOnce(), AtOnce(), **more)
    await hub.open()
    return hub


@dataclass
class Browser:
    """What a browser makes of server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

    last_id: str = ""
    ids: list[str] = field(default_factory=list)  # of the log's events
    events: list[tuple[str, Any]] = field(default_factory=list)  # type and data of all others
    retry_ms: int | None = None
    _left: bytes = b""

    def read(self, text: bytes) -> None:
        *blocks, self._left = (self._left + text).split(b"\n\n")
        for block in blocks:
            self._block(block.decode())

    def _block(self, block: str) -> None:
        kind, data = "message", []
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "id":
                self.last_id = value
            elif name == "event":
                kind = value
            elif name == "data":
                data.append(value)
            elif name == "retry":
                self.retry_ms = int(value)
            else:
                assert not name, f"no field of server-sent events: {line!r}"
        if data and kind == "message":
            self.ids.append(json.loads("\n".join(data))["evermark"]["id"])
        elif data:
            self.events.append((kind, json.loads("\n".join(data))))


async def taken(client: Client, browser: Browser, pieces_max: int = 1_000) -> None:
    """Everything that there is for a client now, or so many pieces of it; then it hangs up."""
    pieces = client.pieces()
    client._hub.news = _no_news(client)  # type: ignore[method-assign]
    async for text in pieces:
        browser.read(text)
        pieces_max -= 1
        if not pieces_max:
            break
    await pieces.aclose()
    client.close()


def _no_news(client: Client) -> Callable[[Client], Any]:
    async def hang_up(_: Client) -> None:
        client.hang_up()

    return hang_up
