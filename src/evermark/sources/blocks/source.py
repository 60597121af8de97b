"""Block streams as a source: many streams share a partition, and a position is a tick of the plan (decide/ticks.py).

`latest` plans, `read` carries out, `confirm` writes down how far each stream is. They share State and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
import structlog

from evermark.errors import FormatError, GapError, NotFoundError
from evermark.event import Seen
from evermark.sources.base import Condition, Forks, Limit, Slice, Source, StaleStream, StaleStreams, Untaken
from evermark.sources.blocks.decide.ticks import EARLIEST, Position, partition_of, path, sharing, slices, way_to
from evermark.sources.blocks.nodes.client import Node, NodeClient
from evermark.sources.blocks.nodes.members import members_of
from evermark.sources.blocks.nodes.unreadable import read_by_any
from evermark.sources.blocks.plan.planner import Planner
from evermark.sources.blocks.plan.untaken import brief, untaken
from evermark.sources.blocks.read.slices import SliceReader
from evermark.sources.blocks.store.base import Plans
from evermark.sources.blocks.store.state import StatePlans
from evermark.sources.blocks.target import BlocksTarget
from evermark.state.process_states import SHARED

log = structlog.get_logger(__name__)
_NAMED_MAX = 20  # stale streams that `/health` names


def open_plans(target: BlocksTarget) -> Plans:
    state, let_go = SHARED.of(target.state_dsn, target.state_schema)
    return StatePlans(state, target.source, let_go)


def open_client(target: BlocksTarget) -> NodeClient:
    return NodeClient([Node(url, target.token, target.pace) for url in target.nodes], target.pace)


class BlockStreams(Source, Forks):
    """Picklable: the target travels, connections and what is remembered do not."""

    def __init__(
        self,
        target: BlocksTarget,
        plans: Callable[[BlocksTarget], Plans] = open_plans,
        client: Callable[[BlocksTarget], NodeClient] = open_client,
    ) -> None:
        self.target = target
        self._open_plans, self._open_client = plans, client
        self._opened: tuple[Plans, NodeClient, Planner] | None = None
        self._opening = threading.Lock()
        self._monitor: NodeClient | None = None  # of `untaken`: reading goes on in other threads
        self._watch = threading.Lock()
        self._upkept = ""  # the version of the choice at the last upkeep

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.target, self._open_plans, self._open_client)

    @property
    def _open(self) -> tuple[Plans, NodeClient, Planner]:
        with self._opening:  # the owner's reading and its upkeep are two threads
            if self._opened is None:
                plans, client = self._open_plans(self.target), self._open_client(self.target)
                self._opened = (plans, client, Planner(self.target, plans, client))
            return self._opened

    @property
    def plans(self) -> Plans:
        return self._open[0]

    @property
    def planner(self) -> Planner:
        return self._open[2]

    def partitions(self) -> Sequence[int]:
        return list(range(self.target.partitions))

    def divisible(self) -> bool:
        return True

    def earliest(self, partition: int) -> str:
        return EARLIEST

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        for text in resume.values():
            Position.parse(text)
        self.planner.identity.check()

    def begin(self, partition: int, position: str) -> None:
        """Confirm the ticks that the log has, and void the ticks that a crash left unread.

        If no plan leads to the end of the log, State was lost or the log was set back: all streams are looked at anew,
        and compared with the log. Or this owner lost its lease and its successor has gone on: then nothing that this
        owner plans will be logged, and nothing is taken from its successor.
        """
        self.planner.identity.learn()
        tick = Position.parse(position).tick
        try:
            way_to(self.plans.ticks(partition), self.plans.state(partition).confirmed, tick)
        except GapError as error:
            said = {"source": self.target.source, "partition": partition, "tick": tick, "why": error.message}
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
        plan = ((tick, self.plans.items(partition, tick.ends)) for tick in ticks)
        return sharing(
            [piece for tick, items in plan for piece in slices(partition, tick, items)], len(self.partitions())
        )

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        plans, client, _ = self._open
        return SliceReader(self.target.source, plans, client).read(piece)

    def may_repeat_from(self, partition: int, position: str) -> str:
        """Events of a stream that was recreated, or whose node was restored, are compared with the whole log."""
        return EARLIEST if self.plans.repeats(partition, Position.parse(position).tick) else position

    def confirm(self, partition: int, end: str) -> None:
        self.plans.confirm(partition, Position.parse(end).tick)

    def upkeep(self) -> None:
        """Remove the state of streams that are not chosen any more."""
        choice = self.target.choice
        version = choice.version()
        if choice.by_members and version == self._upkept:
            return  # changes of members are seen with each stream's news: only another set of bots matters here

        def chosen(stream: str, kind: str) -> bool:
            def ask(node: Node) -> frozenset[str]:
                return members_of(node, stream, lambda blocks: read_by_any(client, stream, blocks, lambda: False))

            try:
                return choice.wants(stream, kind, lambda: client.ask_any(ask))
            except NotFoundError:
                return False  # no node has it any more, though none has listed it as deleted
            except (FormatError, GapError):
                return True  # what no node says truly, an unreadable event say, may be a bot's join

        with closing(self._open_client(self.target)) as client:  # its own: reading goes on in another thread
            for partition in self.partitions():
                count = self.plans.forget(partition, self.target.keep_unwanted_s, chosen, time.time_ns() // 1000)
                if count:
                    log.info("blocks_forgotten", source=self.target.source, partition=partition, streams=count)
        self._upkept = version

    def condition(self) -> Condition:
        """A stale stream is no warning here: it was logged when it was found, and `/health` lists it."""
        found = {partition: self.plans.stale(partition) for partition in self.partitions()}
        stale = {}
        for partition, streams in found.items():
            first = [StaleStream(stream, streams[stream].reason) for stream in sorted(streams)[:_NAMED_MAX]]
            if streams:
                stale[partition] = StaleStreams(len(streams), first)
        return Condition({"streams_stale": float(sum(map(len, found.values())))}, stale=stale)

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        with self._watch:
            if self._monitor is None:
                self._monitor = self._open_client(replace(self.target, pace=brief(self.target.pace)))
            return untaken(self.plans, self._monitor, self.target.partitions, after)

    def forks(self) -> Forks:
        return self

    def stale_reason(self, stream: str) -> str:
        found = self.plans.stale(partition_of(stream, self.target.partitions)).get(stream)
        if found is None:
            raise NotFoundError(
                f"stream {stream[:128]} of {self.target.source} is not stale: there is nothing to accept",
                hint="`evermark doctor` names the streams that are",
            )
        return found.reason

    def accept_fork(self, stream: str) -> None:
        """What the nodes have of the stale stream is right; it is taken from its first block on."""
        self.plans.accept_fork(partition_of(stream, self.target.partitions), stream)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        watching, self._monitor = self._monitor, None
        for each in (*(opened or ())[:2], watching):
            if each is not None:
                each.close()
