"""Who is in a stream, as the nodes say it: the snapshot of an answer, and the joins and leaves that follow in it.

Never from a gap: what lies before the latest snapshot is summed up in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evermark.errors import DeniedError, FormatError, GapError
from evermark.sources.blocks.chain import Block, BlockEvent, Cookie, EventKind, Undecoded
from evermark.sources.blocks.client import Node, NodeClient
from evermark.sources.blocks.plans import Stale
from evermark.sources.blocks.resume import Known
from evermark.sources.blocks.target import BlocksTarget
from evermark.sources.blocks.unreadable import read_by_any, waited_enough

_REMEMBERED_MAX = 10_000

Readable = Callable[[Sequence[Block]], Sequence[Block]]


@dataclass(frozen=True, slots=True)
class _Known:
    """Members after all blocks before the cookie."""

    cookie: Cookie
    members: frozenset[str]


class Membership:
    """Asks for the whole once, and then for what changed. A bounded number of streams is remembered."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def of(self, node: Node, stream: str, readable: Readable) -> frozenset[str]:
        """As this node says; `readable` asks the others for what it gives in a form that cannot be read: it may be a
        join."""
        known = self._known.pop(stream, None)
        while True:
            answer = node.view(stream, known.cookie if known is not None else None)
            before = known.members if known is not None else frozenset[str]()
            known = _Known(answer.cookie, _sealed(before, readable(answer.blocks)))
            if not answer.more:
                break
        self._known[stream] = known
        if len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
        return _applied(known.members, answer.pool)


class Members:
    """Who is in streams, and whether they are wanted: what the node that is asked hides, or lies about, the others
    say."""

    def __init__(self, place: BlocksTarget, client: NodeClient) -> None:
        self._place, self._client = place, client
        self._remembered = Membership()

    def want(self, node: Node, stream: str, kind: str, gap: Stale | None, since: int = 0) -> bool:
        def members() -> frozenset[str]:
            readable = self._reading(stream, gap, since)
            try:
                return self._remembered.of(node, stream, readable)
            except (FormatError, GapError, DeniedError):
                if len(self._client.nodes) == 1:
                    raise
                return self._client.anyone(lambda other: Membership().of(other, stream, readable))

        return self._place.wanted.wants(stream, kind, members)

    def of(self, node: Node, stream: str, gap: Stale | None) -> tuple[str, ...]:
        return tuple(sorted(Membership().of(node, stream, self._reading(stream, gap))))

    def at(self, node: Node, stream: str, taken: Known, gap: Stale | None) -> frozenset[str] | None:
        return members_at(node, stream, taken, self._reading(stream, gap))

    def readable(
        self,
        stream: str,
        blocks: Sequence[Block],
        gap: Stale | None,
        taken: frozenset[str] = frozenset(),
        since: int = 0,
    ) -> tuple[Block, ...]:
        """Blocks before `since` were taken: what is hidden in them is asked for, and nobody is waited for again."""
        old, new = ([block for block in blocks if (block.number < since) is past] for past in (True, False))
        read = read_by_any(self._client, stream, old, lambda: True, taken)
        return read + read_by_any(self._client, stream, new, lambda: waited_enough(gap, self._place.pace), taken)

    def _reading(self, stream: str, gap: Stale | None, since: int = 0) -> Readable:
        return lambda blocks: self.readable(stream, blocks, gap, since=since)


def members_at(node: Node, stream: str, taken: Known, readable: Readable) -> frozenset[str] | None:
    """Who is in a stream exactly where it was taken up to; None if the node has less, another chain, or only a later
    snapshot."""
    gen, members = taken.cookie.minipool_gen, frozenset[str]()
    cookie: Cookie | None = None
    while True:
        answer = node.view(stream, cookie)
        if cookie is None and answer.snapshot >= gen:
            return None
        blocks = readable([block for block in answer.blocks if block.number <= gen])
        members = _sealed(members, (block for block in blocks if block.number < gen))
        if any(block.number == gen - 1 and block.cookie != taken.cookie for block in blocks):
            return None
        beyond = [event for block in blocks if block.number == gen for event in block.events]
        if answer.cookie.minipool_gen > gen or not answer.more:
            break
        cookie = answer.cookie
    if answer.cookie.minipool_gen < gen:
        return None
    # What was taken from the minipool may stand in its block by now, with events behind it that were not.
    pool = beyond if answer.cookie.minipool_gen > gen else answer.pool
    return _applied(members, [event for event in pool if event.hash in taken.pool])


def _sealed(members: frozenset[str], blocks: Iterable[Block]) -> frozenset[str]:
    for block in blocks:
        # A snapshot sums up its own block too: applying that block's events once more changes nothing.
        members = frozenset(block.snapshot.members) if block.snapshot is not None else members
        members = _applied(members, block.events)
    return members


def _applied(members: frozenset[str], events: Iterable[BlockEvent]) -> frozenset[str]:
    found = set(members)
    for event in events:
        if isinstance(event, Undecoded):
            continue
        if event.kind is EventKind.JOIN:
            found.add(event.member)
        elif event.kind is EventKind.LEAVE:
            found.discard(event.member)
    return frozenset(found)
