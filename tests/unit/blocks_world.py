"""Block streams in memory: a node, a store of plans, and a pipeline that may be cut off between any two effects."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from evermark.errors import BusyError, EvermarkError, GapError, NotFoundError, UnreachableError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import (
    START,
    Block,
    BlockEvent,
    Cookie,
    EventKind,
    Snapshot,
    StreamKind,
    make_block,
    make_event,
)
from evermark.sources.blocks.client import Family, Listed, Listing, Node, NodeClient
from evermark.sources.blocks.place import BlocksPlace, Pace, Plain
from evermark.sources.blocks.plan import Item, Move, Tick, path
from evermark.sources.blocks.plans import Stale, Standing
from evermark.sources.blocks.resume import Answer, answer_from
from evermark.sources.blocks.source import BlockStreams

PACE = Pace(patience_s=0.0, requests_per_s=1e9)
Cut = Literal["planned", "read", "logged", "confirmed", "unconfirmed"]
_numbers = itertools.count()


@dataclass
class ModelStream:
    incarnation: str
    blocks: list[Block]
    kind: StreamKind = StreamKind.CHANNEL
    pool: list[BlockEvent] = field(default_factory=list)
    snapshot: int = 0
    touched: int = 0
    deleted: bool = False

    @property
    def cookie(self) -> Cookie:
        return self.blocks[-1].cookie


class ModelNode(Node):
    """Streams as a node has them. `refusing` requests for blocks fail; blocks in `lies` come with another event."""

    def __init__(
        self, name: str = "one", *, snapshot_every: int = 3, page_blocks: int = 2, resume_blocks: int = 4
    ) -> None:
        self.url, self.name = f"http://{name}", name
        self.streams: dict[str, ModelStream] = {}
        self.snapshot_every, self.page_blocks, self.resume_blocks = snapshot_every, page_blocks, resume_blocks
        self.leader: str | None = None
        self.down = False
        self.refusing = 0
        self.lies: set[tuple[str, int]] = set()
        self.pages: list[tuple[str, int, int]] = []
        self.cookies: list[Cookie | None] = []
        self._touched = 0

    def copied(self, name: str) -> ModelNode:
        """A follower, as it is when it copied all there was at this moment."""
        other = copy.deepcopy(self)
        other.url, other.name, other.leader = f"http://{name}", name, self.name
        return other

    # What clients do to it.

    def create(self, stream: str, kind: StreamKind = StreamKind.CHANNEL) -> None:
        incarnation = f"incarnation {next(_numbers)}"
        snapshot = Snapshot(kind, "alice", incarnation, (), {})
        block = make_block(stream, START, next(_numbers), (), snapshot)
        self.streams[stream] = ModelStream(incarnation, [block], kind)
        self._touch(stream)

    def say(self, stream: str, count: int = 1) -> list[str]:
        return [self.add(stream, self.event(stream)) for _ in range(count)]

    def event(self, stream: str) -> BlockEvent:
        number = next(_numbers)
        return make_event(
            stream, EventKind.MESSAGE, "alice", at_us=number, nonce=str(number), payload=f'{{"n":{number}}}'
        )

    def add(self, stream: str, event: BlockEvent) -> str:
        self.streams[stream].pool.append(event)
        self._touch(stream)
        return event.hash

    def seal(self, stream: str) -> None:
        it = self.streams[stream]
        if not it.pool:
            return
        number = it.cookie.minipool_gen
        due = number - it.snapshot >= self.snapshot_every
        snapshot = Snapshot(it.kind, "alice", it.incarnation, (), {}) if due else None
        it.blocks.append(make_block(stream, it.cookie, next(_numbers), it.pool, snapshot))
        it.snapshot = number if due else it.snapshot
        it.pool = []
        self._touch(stream)

    def delete(self, stream: str) -> None:
        self.streams[stream].deleted = True
        self._touch(stream)

    def hashes(self, stream: str) -> list[str]:
        it = self.streams[stream]
        return [event.hash for block in it.blocks for event in block.events] + [event.hash for event in it.pool]

    # What a source asks of it.

    def family(self) -> Family:
        self._up()
        return Family(self.name, self.leader)

    def follows(self) -> bool:
        return self.family().leader is not None

    def listing(self, touched_after: int, wait_s: float) -> Listing:
        self._up()
        rows = sorted(
            (Listed(stream, str(it.kind), it.touched, it.deleted) for stream, it in self.streams.items()),
            key=lambda row: row.touched,
        )
        some = tuple(row for row in rows if row.touched > touched_after)[:3]
        return Listing(self.name, some, some[-1].touched if some else touched_after, 0)

    def view(self, stream: str, cookie: Cookie | None) -> Answer:
        it = self._stream(stream)
        self.cookies.append(cookie)
        end = it.cookie.minipool_gen
        continues = cookie is not None and 0 < cookie.minipool_gen <= end and cookie in {b.cookie for b in it.blocks}
        if continues and cookie is not None and end - cookie.minipool_gen <= self.resume_blocks:
            blocks = it.blocks[cookie.minipool_gen :][: self.page_blocks]
            at = blocks[-1].cookie if blocks else cookie
            more = at != it.cookie
            return self._answer(stream, it, blocks, [] if more else it.pool, at, reset=False, more=more, asked=cookie)
        return self._answer(stream, it, it.blocks[it.snapshot :], it.pool, it.cookie, reset=True)

    def page(self, stream: str, start: int, end: int) -> list[Block]:
        it = self._stream(stream)
        assert start < end, "an empty range is an error at the node"
        self.pages.append((stream, start, end))
        if self.refusing > 0:
            self.refusing -= 1
            raise BusyError("this node refuses")
        if end > it.cookie.minipool_gen:
            raise BusyError("behind") if self.leader else GapError("range_impossible")
        return [self._told(stream, block) for block in it.blocks[start : min(end, start + self.page_blocks)]]

    def close(self) -> None:
        pass

    def _told(self, stream: str, block: Block) -> Block:
        if (stream, block.number) not in self.lies or not block.events:
            return block
        return replace(block, events=(replace(block.events[0], payload="forged"), *block.events[1:]))

    def _answer(
        self,
        stream: str,
        it: ModelStream,
        blocks: Sequence[Block],
        pool: Sequence[BlockEvent],
        cookie: Cookie,
        *,
        reset: bool,
        more: bool = False,
        asked: Cookie | None = None,
    ) -> Answer:
        wire = {
            "kind": str(it.kind),
            "reset": reset,
            "more": more,
            "cookie": cookie.wire(),
            "blocks": [self._told(stream, block).wire() for block in blocks],
            "minipool": [event.wire() for event in pool],
        }
        return answer_from(wire, stream, asked)

    def _stream(self, stream: str) -> ModelStream:
        self._up()
        it = self.streams.get(stream)
        if it is None or it.deleted:
            raise BusyError("behind") if it is None and self.leader else NotFoundError(f"no stream {stream}")
        return it

    def _up(self) -> None:
        if self.down:
            raise UnreachableError(f"{self.name} is down")

    def _touch(self, stream: str) -> None:
        self._touched += 1
        self.streams[stream].touched = self._touched


class MemoryPlans:
    """`Plans`, kept by nobody. Stale streams are due whenever `patient` is not set."""

    def __init__(self) -> None:
        self.partitions: dict[int, Standing] = {}
        self.all_ticks: dict[int, dict[int, tuple[Tick, list[Item]]]] = {}
        self.streams: dict[str, tuple[int, Move]] = {}
        self.gaps: dict[str, tuple[int, int, str]] = {}
        self.nodes: set[str] = set()
        self.patient = False
        self.writes: list[tuple[str, int]] = []  # of sync state: stream, generation

    def close(self) -> None:
        pass

    def standing(self, partition: int) -> Standing:
        return self.partitions.get(partition, Standing())

    def begin(self, partition: int, cold_before: int) -> None:
        self.partitions.setdefault(partition, Standing(cold_before=cold_before))

    def ticks(self, partition: int) -> list[Tick]:
        return [tick for tick, _ in self.all_ticks.get(partition, {}).values()]

    def items(self, partition: int, ends: int) -> list[Item]:
        return list(self.all_ticks[partition][ends][1])

    def moves(self, partition: int, ends: Sequence[int]) -> dict[str, Move]:
        items = [item for end in sorted(ends) for item in self.all_ticks[partition][end][1]]
        return {item.stream: item.move for item in items if item.move is not None}

    def known(self, streams: Sequence[str]) -> dict[str, Move]:
        return {stream: self.streams[stream][1] for stream in streams if stream in self.streams}

    def unfinished(self, partition: int) -> list[str]:
        return [stream for stream, (at, move) in self.streams.items() if move.more and at == partition]

    def repeats(self, starts: int) -> bool:
        found = [items for made in self.all_ticks.values() for tick, items in made.values() if tick.starts == starts]
        return any(item.repeats for items in found for item in items)

    def add(self, partition: int, tick: Tick, items: Sequence[Item]) -> int:
        standing = self.partitions[partition]
        ends = max(standing.last_tick, tick.starts) + 1
        self.partitions[partition] = replace(standing, last_tick=ends)
        self.all_ticks.setdefault(partition, {})[ends] = (replace(tick, ends=ends), list(items))
        return ends

    def looked(self, partition: int, confirmed: int, touched: int, wanted: str) -> None:
        standing = self.partitions[partition]
        if standing.confirmed == confirmed:
            self.partitions[partition] = replace(standing, touched=touched, wanted=wanted)

    def void(self, partition: int, starts: int) -> None:
        for ends, (tick, items) in self.all_ticks.get(partition, {}).items():
            if tick.starts >= starts:
                self.all_ticks[partition][ends] = (replace(tick, void=True), items)

    def confirm(self, partition: int, to: int) -> None:
        standing = self.standing(partition)
        if to <= standing.confirmed:
            return
        way = path(self.ticks(partition), standing.confirmed, to)
        for stream, move in self.moves(partition, [tick.ends for tick in way]).items():
            self.gaps.pop(stream, None)
            before = self.streams.pop(stream, None)
            if move.known is not None:
                self.streams[stream] = (partition, move)
                old = before[1].known.cookie if before and before[1].known else None
                if old != move.known.cookie:
                    self.writes.append((stream, move.known.cookie.minipool_gen))
        last = way[-1]
        self.partitions[partition] = replace(standing, confirmed=to, touched=last.touched, wanted=last.wanted)
        kept = self.all_ticks[partition].items()
        self.all_ticks[partition] = {ends: made for ends, made in kept if made[0].starts >= to}

    def adopt(self, partition: int, tick: int, now_us: int) -> None:
        self.streams = {stream: it for stream, it in self.streams.items() if it[0] != partition}
        self.all_ticks.pop(partition, None)
        self.partitions[partition] = Standing(confirmed=tick, last_tick=tick, forgot_us=now_us)

    def stale(self, partition: int) -> dict[str, Stale]:
        mine = [(stream, gap) for stream, gap in self.gaps.items() if gap[0] == partition]
        return {stream: Stale(block, reason, not self.patient) for stream, (_, block, reason) in mine}

    def mark_stale(self, partition: int, stream: str, block: int, reason: str) -> None:
        self.gaps[stream] = (partition, block, reason)

    def unmark_stale(self, stream: str) -> None:
        self.gaps.pop(stream, None)

    def family(self, partitions: int) -> frozenset[str]:
        return frozenset(self.nodes)

    def learn(self, partitions: int, nodes: Sequence[str]) -> None:
        self.nodes |= set(nodes)

    def forget(self, partition: int, older_s: float, wanted: Callable[[str, str], bool], now_us: int) -> int:
        gone = [s for s, (at, move) in self.streams.items() if at == partition and not wanted(s, move.kind)]
        for stream in gone:
            del self.streams[stream]
        if gone:
            self.partitions[partition] = replace(self.partitions[partition], forgot_us=now_us)
        return len(gone)


class Crash(Exception):
    """The process ended here."""


class Pipeline:
    """What ingest does with a source, in small. The log is what survives; `start` is what a new process does."""

    def __init__(self, make: Callable[[], BlockStreams]) -> None:
        self._make = make
        self.log: dict[int, list[dict[str, Any]]] = {}
        self.ends: dict[int, str] = {}
        self.dropped = 0
        self.source = make()

    def start(self) -> None:
        self.source = self._make()
        starts = {p: self.ends.get(p) or self.source.earliest(p) for p in self.source.partitions()}
        self.source.check(starts)
        self.ends = starts

    def step(self, limit: Limit, cut: Cut | None = None) -> bool:
        """One batch of each partition; whether there was any. Ends with `Crash` where `cut` says; `unconfirmed`
        goes on, as ingest does when a source is too busy to be told."""
        after = dict(self.ends)
        found = self.source.latest(after, limit)
        self._cut(cut, "planned")
        for partition, end in found.items():
            if end == after[partition]:
                continue
            rows = self._read(partition, after[partition], end)
            self._cut(cut, "read")
            self.log.setdefault(partition, []).extend(rows)
            self.ends[partition] = end
            self._cut(cut, "logged")
            if cut != "unconfirmed":
                self.source.confirm(partition, end)
            self._cut(cut, "confirmed")
        return found != after

    def _read(self, partition: int, start: str, end: str) -> list[dict[str, Any]]:
        rows = []
        for piece in self.source.slices(partition, start, end):
            rows += [row for batch in self.source.read(piece) for row in batch.to_pylist()]
        positions = [row["position"] for row in rows]
        assert positions == sorted(set(positions)), "positions within a batch increase"
        assert all(start <= position < end for position in positions)
        since = self.source.may_repeat_from(start)
        had = {row["event_id"] for row in self.log.get(partition, ()) if row["position"] >= since}
        kept = [row for row in rows if since == start or row["event_id"] not in had]
        self.dropped += len(rows) - len(kept)
        return kept

    @staticmethod
    def _cut(wanted: Cut | None, here: Cut) -> None:
        if wanted == here:
            raise Crash(here)

    def drain(self, limit: Limit, tries: int = 200) -> None:
        """Until nothing is new. A batch that cannot be read is begun anew, as the runner does."""
        for _ in range(tries):
            try:
                if not self.step(limit):
                    return
            except EvermarkError:
                self.start()
        raise AssertionError("this does not come to an end")

    def rows(self, stream: str) -> list[dict[str, Any]]:
        return [row for rows in self.log.values() for row in rows if row["stream"] == stream]

    def ids(self, stream: str) -> list[str]:
        return [row["event_id"] for row in self.rows(stream) if row["op"] != "truncate"]

    def notes(self, stream: str) -> list[str]:
        return [row["payload"] for row in self.rows(stream) if row["op"] == "truncate"]


def place(*, nodes: int = 1, **more: Any) -> BlocksPlace:
    names = tuple(f"http://{n}" for n in range(nodes))
    return BlocksPlace("chat", names, Plain("none"), "none", **({"pace": PACE} | more))


def pipeline(nodes: Sequence[ModelNode], plans: MemoryPlans | None = None, **more: Any) -> Pipeline:
    kept = plans if plans is not None else MemoryPlans()
    here = place(nodes=len(nodes), **more)
    made = Pipeline(lambda: BlockStreams(here, lambda _: kept, lambda _: NodeClient(nodes, here.pace)))
    made.start()
    return made


__all__ = [
    "Crash",
    "Cut",
    "MemoryPlans",
    "ModelNode",
    "Pipeline",
    "pipeline",
    "place",
]
