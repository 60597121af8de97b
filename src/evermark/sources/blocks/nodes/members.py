"""Who is a member of a stream, as the nodes say: the snapshot of an answer, and the joins and leaves that follow in it.

Never from a gap: the latest snapshot sums up all blocks before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from evermark.errors import FormatError
from evermark.sources.blocks.chain import Block, BlockEvent, Cookie, sum_up
from evermark.sources.blocks.decide.resume import Answer, StreamState
from evermark.sources.blocks.nodes.client import Node, NodeClient
from evermark.sources.blocks.nodes.unreadable import read_by_any, waited_enough
from evermark.sources.blocks.store.base import Stale
from evermark.sources.blocks.target import BlocksTarget

_REMEMBERED_MAX = 10_000

AskNode = Callable[[Node], frozenset[str]]
Readable = Callable[[Sequence[Block]], Sequence[Block]]  # asks other nodes for unreadable events: they may be joins


class MemberCache:
    """Asks for all members once, and then for changes. A bounded number of streams is remembered."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Cookie, frozenset[str]]] = OrderedDict()  # members before the cookie

    def of(self, node: Node, stream: str, readable: Readable) -> frozenset[str]:
        """The members of the stream now, as this node says."""
        cookie, members = self._known.pop(stream, (None, frozenset[str]()))
        for answer in _answers(node, stream, cookie):
            members = _after_blocks(members, readable(answer.blocks))
        self._known[stream] = (answer.cookie, members)
        if len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
        return _after_events(members, answer.pool)


def members_of(node: Node, stream: str, readable: Readable) -> frozenset[str]:
    return MemberCache().of(node, stream, readable)


class StreamMembers:
    """Whether streams are chosen, perhaps by their members. If one node hides an event or lies, others say."""

    def __init__(self, target: BlocksTarget, client: NodeClient) -> None:
        self._target, self._client = target, client
        self._cache = MemberCache()

    def choose(
        self,
        node: Node,
        asked: Callable[[AskNode], frozenset[str]],
        stream: str,
        kind: str,
        stale: Stale | None,
        since: int = 0,
    ) -> bool:
        """`asked`: asks this node, and others if it cannot say."""

        def members(which: Node) -> frozenset[str]:
            of = self._cache.of if which is node else members_of
            return of(which, stream, self.reading(stream, stale, since))

        return self._target.choice.wants(stream, kind, lambda: asked(members))

    def readable(
        self,
        stream: str,
        blocks: Sequence[Block],
        stale: Stale | None,
        taken: frozenset[str] = frozenset(),
        since: int = 0,
    ) -> tuple[Block, ...]:
        """Blocks before `since` were taken: for their unreadable events all nodes are asked, but not waited for."""
        old, new = ([block for block in blocks if (block.number < since) is past] for past in (True, False))
        read = read_by_any(self._client, stream, old, lambda: True, taken)
        return read + read_by_any(self._client, stream, new, lambda: waited_enough(stale, self._target.pace), taken)

    def reading(self, stream: str, stale: Stale | None, since: int = 0) -> Readable:
        return lambda blocks: self.readable(stream, blocks, stale, since=since)


def members_at(node: Node, stream: str, taken: StreamState, readable: Readable) -> frozenset[str] | None:
    """The members of a stream exactly where it was taken up to; None if the node has less, another chain, or only a
    later snapshot."""
    gen, members = taken.cookie.minipool_gen, frozenset[str]()
    for nth, answer in enumerate(_answers(node, stream, None)):
        if not nth and answer.snapshot >= gen:
            return None
        blocks = readable([block for block in answer.blocks if block.number <= gen])
        members = _after_blocks(members, (block for block in blocks if block.number < gen))
        if any(block.number == gen - 1 and block.cookie != taken.cookie for block in blocks):
            return None
        beyond = [event for block in blocks if block.number == gen for event in block.events]
        if answer.cookie.minipool_gen > gen:
            break
    if answer.cookie.minipool_gen < gen:
        return None
    # Events taken from the minipool may stand in their block by now, before events that were not taken.
    pool = beyond if answer.cookie.minipool_gen > gen else answer.pool
    return _after_events(members, [event for event in pool if event.hash in taken.pool])


def _answers(node: Node, stream: str, cookie: Cookie | None) -> Iterator[Answer]:
    """All that the node has after the cookie, answer by answer; at least one. Each leads further than the one before:
    there has to be an end."""
    end = -1
    while True:
        answer = node.view(stream, cookie)
        yield answer
        if not answer.more:
            return
        cookie = answer.cookie
        if cookie.minipool_gen <= end:
            raise FormatError(f"stream {stream}: the node gives the same blocks again", hint="ask another node")
        end = cookie.minipool_gen


def _after_blocks(members: frozenset[str], blocks: Iterable[Block]) -> frozenset[str]:
    for block in blocks:
        # A snapshot sums up its own block too: applying that block's events once more changes nothing.
        members = frozenset(block.snapshot.members) if block.snapshot is not None else members
        members = _after_events(members, block.events)
    return members


def _after_events(members: frozenset[str], events: Iterable[BlockEvent]) -> frozenset[str]:
    found = set(members)
    sum_up(found, {}, events)
    return frozenset(found)
