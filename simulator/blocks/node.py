"""A block node in memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from evermark.errors import BusyError, NotFoundError, UnreachableError
from evermark.sources.blocks.chain import (
    START,
    Block,
    BlockEvent,
    Cookie,
    EventKind,
    Snapshot,
    StreamKind,
    block_from,
    make_block,
    make_event,
    sum_up,
)
from evermark.sources.blocks.decide.resume import Answer, answer_from
from evermark.sources.blocks.nodes.client import Listed, Listing, Node, NodeInfo, NoSuchBlockError

_NUMBERS = itertools.count()
FORGED = "forged"


@dataclass
class ModelStream:
    incarnation: str
    blocks: list[Block]
    kind: StreamKind = StreamKind.CHANNEL
    pool: list[BlockEvent] = field(default_factory=list)
    snapshot: int = 0
    touched: int = 0
    deleted: bool = False
    members: set[str] = field(default_factory=set)  # after the last block

    @property
    def cookie(self) -> Cookie:
        return self.blocks[-1].cookie


class ModelNode(Node):
    """Streams as a node has them. `refusing` requests for blocks fail; blocks in `lies` come with another event, and of
    the first event of blocks in `garbled` comes the hash alone. Its clock counts changes, as its `touched` does."""

    def __init__(
        self,
        name: str = "one",
        *,
        snapshot_every: int = 3,
        page_blocks: int = 2,
        resume_blocks: int = 4,
        numbers: Iterator[int] = _NUMBERS,
    ) -> None:
        self.url, self.name = f"http://{name}", name
        self.streams: dict[str, ModelStream] = {}
        self.snapshot_every, self.page_blocks, self.resume_blocks = snapshot_every, page_blocks, resume_blocks
        self.leader: str | None = None
        self.down = False
        self.refusing = 0
        self.owed = 0  # streams that it could not copy
        self.lies: set[tuple[str, int]] = set()
        self.garbled: set[tuple[str, int]] = set()
        self.pages: list[tuple[str, int, int]] = []
        self.cookies: list[Cookie | None] = []
        self._touched = 0
        self._numbers = numbers

    def copied(self, name: str) -> ModelNode:
        """A follower, as it is when it copied all there was at this moment."""
        other = copy.deepcopy(self, {id(self._numbers): self._numbers})
        other.url, other.name, other.leader = f"http://{name}", name, self.name
        return other

    # What clients do to it.

    def create(self, stream: str, kind: StreamKind = StreamKind.CHANNEL, members: Sequence[str] = ()) -> None:
        incarnation = f"incarnation {next(self._numbers)}"
        snapshot = Snapshot(kind, "alice", incarnation, tuple(sorted(members)), {})
        block = make_block(stream, START, next(self._numbers), (), snapshot)
        self.streams[stream] = ModelStream(incarnation, [block], kind, members=set(members))
        self._touch(stream)

    def say(self, stream: str, count: int = 1) -> list[str]:
        return [self.add(stream, self.event(stream)) for _ in range(count)]

    def event(self, stream: str) -> BlockEvent:
        number = next(self._numbers)
        return make_event(
            stream, EventKind.MESSAGE, "alice", at_us=number, nonce=str(number), payload=f'{{"n":{number}}}'
        )

    def join(self, stream: str, member: str, *, leave: bool = False) -> str:
        kind, number = EventKind.LEAVE if leave else EventKind.JOIN, next(self._numbers)
        return self.add(stream, make_event(stream, kind, "alice", at_us=number, nonce=str(number), member=member))

    def add(self, stream: str, event: BlockEvent) -> str:
        self.streams[stream].pool.append(event)
        self._touch(stream)
        return event.hash

    def seal(self, stream: str) -> None:
        it = self.streams[stream]
        if not it.pool:
            return
        sum_up(it.members, {}, it.pool)
        number = it.cookie.minipool_gen
        due = number - it.snapshot >= self.snapshot_every
        snapshot = Snapshot(it.kind, "alice", it.incarnation, tuple(sorted(it.members)), {}) if due else None
        it.blocks.append(make_block(stream, it.cookie, next(self._numbers), it.pool, snapshot))
        it.snapshot = number if due else it.snapshot
        it.pool = []
        self._touch(stream)

    def rewrite(self, stream: str, blocks: int) -> list[str]:
        """Its history from that block on is another one, and longer; the events that are new in it."""
        it = self.streams[stream]
        old, it.blocks, it.pool = it.blocks[blocks:], it.blocks[:blocks], []
        it.snapshot = max(block.number for block in it.blocks if block.snapshot is not None)
        first = it.blocks[0].snapshot
        it.members = set(first.members) if first is not None else set()
        sum_up(it.members, {}, (event for block in it.blocks for event in block.events))
        fresh = []
        for each in old:
            fresh += self.say(stream)
            for event in each.events:  # what was taken once stands in another block now
                self.add(stream, event)
            self.seal(stream)
        fresh += self.say(stream)
        self.seal(stream)
        return fresh

    def delete(self, stream: str) -> None:
        self.streams[stream].deleted = True
        self._touch(stream)

    def hashes(self, stream: str) -> list[str]:
        it = self.streams[stream]
        return [event.hash for block in it.blocks for event in block.events] + [event.hash for event in it.pool]

    def members(self, stream: str) -> set[str]:
        found = set(self.streams[stream].members)
        sum_up(found, {}, self.streams[stream].pool)
        return found

    # What a source asks of it.

    def about(self) -> NodeInfo:
        self._up()
        return NodeInfo(self.name, self.leader)

    def follows(self) -> bool:
        return self.about().leader is not None

    def listing(self, touched_after: int, wait_s: float) -> Listing:
        self._up()
        rows = sorted(
            (Listed(stream, str(it.kind), it.touched, it.deleted) for stream, it in self.streams.items()),
            key=lambda row: row.touched,
        )
        some = tuple(row for row in rows if row.touched > touched_after)[:3]
        return Listing(self.name, some, some[-1].touched if some else touched_after, self._touched, self.owed)

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
            raise BusyError("behind") if self.leader else NoSuchBlockError("range_impossible")
        page = it.blocks[start : min(end, start + self.page_blocks)]
        return [block_from(self._told(stream, block), stream, raw=True) for block in page]

    def close(self) -> None:
        pass

    def _told(self, stream: str, block: Block) -> dict[str, Any]:
        wire, here = block.wire(), (stream, block.number)
        if here in self.lies and block.events:
            wire["events"][0]["payload"] = FORGED
        if here in self.garbled and block.events:
            wire["events"][0] = {"hash": block.events[0].hash}
        return wire

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
            "blocks": [self._told(stream, block) for block in blocks],
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
