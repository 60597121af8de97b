"""Who is in a stream, as the nodes say it: the snapshot of an answer, and the joins and leaves that follow in it.

Never from a gap: what lies before the latest snapshot is summed up in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evermark.sources.blocks.chain import Block, BlockEvent, Cookie, EventKind, Undecoded
from evermark.sources.blocks.client import Node

_REMEMBERED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Known:
    """Members after all blocks before the cookie."""

    cookie: Cookie
    members: frozenset[str]


class Membership:
    """Asks for the whole once, and then for what changed. A bounded number of streams is remembered."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def of(self, node: Node, stream: str, readable: Callable[[Sequence[Block]], Sequence[Block]]) -> frozenset[str]:
        """As this node says; `readable` asks the others for what it gives in a form that cannot be read: it may be a
        join."""
        known = self._known.pop(stream, None)
        while True:
            answer = node.view(stream, known.cookie if known is not None else None)
            known = _Known(answer.cookie, _sealed(known, readable(answer.blocks)))
            if not answer.more:
                break
        self._known[stream] = known
        if len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
        return _applied(known.members, answer.pool)


def _sealed(known: _Known | None, blocks: Iterable[Block]) -> frozenset[str]:
    members = known.members if known is not None else frozenset()
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
