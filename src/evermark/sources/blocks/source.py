"""Block streams as a source: many streams share a partition, and a position is a tick of the plan (see plan.py).

`latest` plans, `read` carries out, `confirm` writes down how far each stream is. They share State and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import structlog

from evermark.errors import GapError, NotFoundError
from evermark.event import Seen
from evermark.sources.base import Condition, Forks, Limit, Slice, Source, StaleStream, StaleStreams, Untaken
from evermark.sources.blocks.chain import Block, UnreadableError
from evermark.sources.blocks.client import Node, NodeClient
from evermark.sources.blocks.membership import Membership
from evermark.sources.blocks.plan import partition_of, path, slices, way_to
from evermark.sources.blocks.planner import Planner
from evermark.sources.blocks.plans import Plans
from evermark.sources.blocks.position import EARLIEST, Position
from evermark.sources.blocks.reading import SliceReader
from evermark.sources.blocks.store import StatePlans
from evermark.sources.blocks.target import BlocksTarget
from evermark.sources.blocks.unreadable import read_by_any
from evermark.sources.blocks.waiting import brief, untaken
from evermark.state.connection import State

log = structlog.get_logger(__name__)
_CONNECTIONS_MAX = 2
_NAMED_MAX = 20  # stale streams that are named on the board


def open_plans(place: BlocksTarget) -> Plans:
    state = State(place.state_dsn.open, place.state_schema, connections_max=_CONNECTIONS_MAX)
    return StatePlans(state, place.source)


def open_client(place: BlocksTarget) -> NodeClient:
    return NodeClient([Node(url, place.token, place.pace) for url in place.nodes], place.pace)


class BlockStreams(Source, Forks):
    """Picklable: the place travels, connections and what is remembered do not."""

    def __init__(
        self,
        place: BlocksTarget,
        plans: Callable[[BlocksTarget], Plans] = open_plans,
        client: Callable[[BlocksTarget], NodeClient] = open_client,
    ) -> None:
        self.place = place
        self._open_plans, self._open_client = plans, client
        self._opened: tuple[Plans, NodeClient, Planner] | None = None
        self._opening = threading.Lock()
        self._looker: NodeClient | None = None  # its own: reading goes on in other threads
        self._looking = threading.Lock()
        self._upkept = ""

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "plans": self._open_plans, "client": self._open_client}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.place, self._open_plans, self._open_client = state["place"], state["plans"], state["client"]
        self._opened = None
        self._opening = threading.Lock()
        self._looker = None
        self._looking = threading.Lock()
        self._upkept = ""

    @property
    def _open(self) -> tuple[Plans, NodeClient, Planner]:
        with self._opening:  # the owner reads, and looks after it, in two threads
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
        return EARLIEST

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        for text in resume.values():
            Position.parse(text)
        self.planner.kin.check()

    def begin(self, partition: int, position: str) -> None:
        """Take up what a crash left: confirm what the log has, and void plans that were not carried out.

        Where no plan leads to what the log has, State was lost or the log set back: everything is looked at anew, and
        compared with the log. Or we are an owner of old, and our successor has gone on: then nothing we plan will be
        logged, and nothing is taken from anybody.
        """
        self.planner.kin.learn()
        tick = Position.parse(position).tick
        try:
            way_to(self.plans.ticks(partition), self.plans.standing(partition).confirmed, tick)
        except GapError as error:
            said = {"source": self.place.source, "partition": partition, "tick": tick, "why": error.message}
            log.warning("blocks_begun_anew", **said)
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
        ticks = path(self.plans.ticks(partition), first, last)
        return [piece for tick in ticks for piece in slices(partition, tick, self.plans.items(partition, tick.ends))]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        plans, client, _ = self._open
        return SliceReader(self.place.source, plans, client).read(piece)

    def may_repeat_from(self, partition: int, position: str) -> str:
        """Events of a stream that was recreated, or whose node was restored, are compared with all there is."""
        return EARLIEST if self.plans.repeats(partition, Position.parse(position).tick) else position

    def confirm(self, partition: int, end: str) -> None:
        self.plans.confirm(partition, Position.parse(end).tick)

    def upkeep(self) -> None:
        """Forget streams that nobody wants any more."""
        wanted = self.place.wanted
        if wanted.by_members:
            version = wanted.version()
            if version == self._upkept:
                return  # who is in which stream is seen with its news; only the choice itself has to be looked at
        client = self._open_client(self.place)  # its own: reading goes on in another thread

        def wants(stream: str, kind: str) -> bool:
            def readable(blocks: Sequence[Block]) -> Sequence[Block]:
                return read_by_any(client, stream, blocks, lambda: False)

            try:
                return wanted.wants(
                    stream, kind, lambda: client.anyone(lambda node: Membership().of(node, stream, readable))
                )
            except UnreadableError:
                return True  # somebody may have joined

        try:
            for partition in self.partitions():
                count = self.plans.forget(partition, self.place.keep_unwanted_s, wants, time.time_ns() // 1000)
                if count:
                    log.info("blocks_forgotten", source=self.place.source, partition=partition, streams=count)
        finally:
            client.close()
        if wanted.by_members:
            self._upkept = version

    def condition(self) -> Condition:
        """A stale stream is no warning of its own: it was said when it was found, and stands on the board."""
        found = {partition: self.plans.stale(partition) for partition in self.partitions()}
        stale = {
            partition: StaleStreams(
                len(streams), [StaleStream(stream, streams[stream].reason) for stream in sorted(streams)[:_NAMED_MAX]]
            )
            for partition, streams in found.items()
            if streams
        }
        return Condition({"streams_stale": float(sum(map(len, found.values())))}, stale=stale)

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        with self._looking:
            if self._looker is None:
                self._looker = self._open_client(replace(self.place, pace=brief(self.place.pace)))
            return untaken(self.plans, self._looker, self.place.partitions, after)

    def forks(self) -> Forks:
        return self

    def stale_reason(self, stream: str) -> str:
        found = self.plans.stale(partition_of(stream, self.place.partitions)).get(stream)
        if found is None:
            raise NotFoundError(
                f"stream {stream[:128]} of {self.place.source} is not stale: there is nothing to accept",
                hint="`evermark doctor` names the streams that are",
            )
        return found.reason

    def accept_fork(self, stream: str) -> None:
        """Take what the nodes have of a stale stream for the right one, from its first block on."""
        self.plans.accept_fork(partition_of(stream, self.place.partitions), stream)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()
            opened[1].close()
        looker, self._looker = self._looker, None
        if looker is not None:
            looker.close()
