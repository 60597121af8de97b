"""Block streams as a source: many streams share a partition, and a position is a tick of the plan (see plan.py).

`latest` plans, `read` carries out, `confirm` writes down how far each stream is. They share State and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import structlog

from evermark.sources.base import Limit, Seen, Slice, Source
from evermark.sources.blocks.client import Node, NodeClient
from evermark.sources.blocks.place import BlocksPlace
from evermark.sources.blocks.plan import path, slices
from evermark.sources.blocks.planner import Planner
from evermark.sources.blocks.plans import Plans
from evermark.sources.blocks.position import EARLIEST, Position
from evermark.sources.blocks.reading import SliceReader
from evermark.sources.blocks.store import StatePlans
from evermark.state.connection import State

log = structlog.get_logger(__name__)
_CONNECTIONS_MAX = 2


def open_plans(place: BlocksPlace) -> Plans:
    state = State(place.state_dsn.open, place.state_schema, connections_max=_CONNECTIONS_MAX)
    return StatePlans(state, place.source)


def open_client(place: BlocksPlace) -> NodeClient:
    return NodeClient([Node(url, place.token, place.pace) for url in place.nodes], place.pace)


class BlockStreams(Source):
    """Picklable: the place travels, connections and what is remembered do not."""

    def __init__(
        self,
        place: BlocksPlace,
        plans: Callable[[BlocksPlace], Plans] = open_plans,
        client: Callable[[BlocksPlace], NodeClient] = open_client,
    ) -> None:
        self.place = place
        self._open_plans, self._open_client = plans, client
        self._opened: tuple[Plans, NodeClient, Planner] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "plans": self._open_plans, "client": self._open_client}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.place, self._open_plans, self._open_client = state["place"], state["plans"], state["client"]
        self._opened = None

    @property
    def _open(self) -> tuple[Plans, NodeClient, Planner]:
        if self._opened is None:
            plans, client = self._open_plans(self.place), self._open_client(self.place)
            self._opened = (plans, client, Planner(self.place, plans, client))
        return self._opened

    @property
    def plans(self) -> Plans:
        return self._open[0]

    @property
    def planner(self) -> Planner:
        return self._open[2]

    def partitions(self) -> Sequence[int]:
        return list(range(self.place.partitions))

    def earliest(self, partition: int) -> str:
        return str(Position(self.plans.standing(partition).confirmed))

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        """Also takes up what a crash left: confirms what the log has, and voids plans that were not carried out."""
        self.planner.kin.check()
        for partition, text in resume.items():
            tick = Position.parse(text).tick
            standing = self.plans.standing(partition)
            there = {tick.ends for tick in self.plans.ticks(partition)}
            if tick > standing.confirmed and tick not in there:
                log.warning("blocks_state_lost", source=self.place.source, partition=partition, tick=tick)
                self.plans.adopt(partition, tick, time.time_ns() // 1000)
            self.plans.confirm(partition, tick)
            self.plans.void(partition, tick)

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        ends = dict(after)
        if not after:
            return ends
        deadline = time.monotonic() + limit.wait_s
        while True:
            for partition, text in after.items():
                found = self.planner.next_tick(partition, Position.parse(text).tick, limit)
                if found is not None:
                    ends[partition] = str(Position(found))
            remaining = deadline - time.monotonic()
            if ends != after or remaining <= 0:
                return ends
            self.planner.wait(list(after), remaining)

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        first, last = Position.parse(start).tick, Position.parse(end).tick
        if first >= last:
            return []
        way = path(self.plans.ticks(partition), first, last)
        return [piece for tick in way for piece in slices(partition, tick, self.plans.items(partition, tick.ends))]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        plans, client, _ = self._open
        return SliceReader(self.place.source, plans, client).read(piece)

    def may_repeat_from(self, position: str) -> str:
        """Events of a stream that was recreated, or whose node was restored, are compared with all there is."""
        return EARLIEST if self.plans.repeats(Position.parse(position).tick) else position

    def confirm(self, partition: int, end: str) -> None:
        self.plans.confirm(partition, Position.parse(end).tick)

    def upkeep(self) -> None:
        """Forget streams that nobody wants any more."""
        for partition in self.partitions():
            count = self.plans.forget(
                partition, self.place.keep_unwanted_s, self.place.wanted.wants, time.time_ns() // 1000
            )
            if count:
                log.info("blocks_forgotten", source=self.place.source, partition=partition, streams=count)

    def gauges(self) -> Mapping[str, float]:
        stale = sum(len(self.plans.stale(partition)) for partition in self.partitions())
        return {"streams_stale": float(stale)}

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()
            opened[1].close()
