"""What one node sends in a form that cannot be read is asked of all: one that lies could hide an event so.

A block vouches for the hashes of its events, and a hash for all an event says: whoever gives an event that has this
hash gives the event. Only where every node that has the block gives the same, it is the event that cannot be read, and
not a node that is unwell: then it is poison. A node that cannot be asked is waited for, though not for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from evermark.errors import DeniedError, EvermarkError, FormatError, GapError, NotFoundError
from evermark.sources.blocks.chain import Block, BlockEvent, Undecoded, UnreadableError
from evermark.sources.blocks.client import TRANSIENT, Beyond, Node, NodeClient
from evermark.sources.blocks.plans import Stale
from evermark.sources.blocks.target import Pace

log = structlog.get_logger(__name__)


def waited_enough(stale: Stale | None, pace: Pace) -> bool:
    """Whether nodes that could not be asked for an unreadable event had their time."""
    return stale is not None and stale.unreadable and stale.lasted_s >= pace.unreadable_s


def read_by_any(
    client: NodeClient,
    stream: str,
    blocks: Sequence[Block],
    waited: Callable[[], bool],
    taken: frozenset[str] = frozenset(),
) -> tuple[Block, ...]:
    """The blocks, with every event that one of the nodes gives readable; what is left unreadable is poison. Events that
    were `taken` before need not be read.

    Raises `UnreadableError` while a node that may have the event cannot be asked, unless that was `waited` for.
    """
    events = ((event, block.number) for block in blocks for event in block.events)
    odd = {it.hash: number for it, number in events if isinstance(it, Undecoded) and it.hash not in taken}
    if not odd or len(client.nodes) == 1:
        return tuple(blocks)
    found: dict[str, BlockEvent] = {}
    silent: list[EvermarkError] = []
    for node in client.in_order():
        left = {name: number for name, number in odd.items() if name not in found}
        if not left:
            break
        error = _ask(client, node, stream, left, found)
        if error is not None:
            silent.append(error)
    if found:
        log.warning("blocks_read_elsewhere", stream=stream, events=len(found), first=next(iter(found)))
    left = {name: number for name, number in odd.items() if name not in found}
    if left and silent and not waited():
        name, number = next(iter(left.items()))
        raise UnreadableError(
            f"stream {stream}, block {number}: event {name[:16]}… cannot be read, and not every node could be asked for"
            f" it: {silent[0].message}",
            block=number,
            hint="start the node that does not answer, or take it out of the source's `nodes`",
        )
    return tuple(replace(it, events=tuple(found.get(e.hash, e) for e in it.events)) for it in blocks)


def _ask(
    client: NodeClient, node: Node, stream: str, left: dict[str, int], found: dict[str, BlockEvent]
) -> EvermarkError | None:
    """Put into `found` what the node gives readable; why it may have more to say another time."""
    unseen = set(left)
    try:
        for event in client.events(node, stream, sorted(set(left.values()))):
            unseen.discard(event.hash)
            if event.hash in left and not isinstance(event, Undecoded):
                found[event.hash] = event
    except (NotFoundError, Beyond):
        return None  # it has no such stream, or not so much of it
    except (*TRANSIENT, FormatError, GapError, DeniedError) as error:
        return error
    if unseen:
        return GapError(f"{node.url} gives other blocks than these", hint="its history is another one, or it lies")
    return None
