"""An event that one node sends in a form that cannot be read is asked of all nodes: a node that lies could hide it so.

A block vouches for the hashes of its events, and a hash for everything an event says: a node that gives an event with
this hash gives the event. If every node that has the block gives the event unreadable, the event is at fault and not a
node: then it is poison. Nodes that cannot be asked are waited for, though not for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from evermark.errors import EvermarkError, GapError, NotFoundError
from evermark.sources.blocks.chain import Block, BlockEvent, Undecoded, UnreadableError
from evermark.sources.blocks.nodes.client import UNWELL, Node, NodeClient, NoSuchBlockError
from evermark.sources.blocks.store.base import Stale
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
    """The blocks, with every event that any node gives readable; events that stay unreadable are poison. Events that
    were `taken` before need not be read.

    Raises `UnreadableError` while a node that may have the event cannot be asked, unless `waited` says: long enough.
    """
    events = ((event, block.number) for block in blocks for event in block.events)
    odd = {it.hash: number for it, number in events if isinstance(it, Undecoded) and it.hash not in taken}
    if not odd or len(client.nodes) == 1:
        return tuple(blocks)
    found: dict[str, BlockEvent] = {}
    silent: list[EvermarkError] = []
    left = odd
    for node in client.in_order():
        if left:
            error = _ask(client, node, stream, left, found)
            silent += [error] if error is not None else []
            left = {name: number for name, number in odd.items() if name not in found}
    if found:
        log.warning("blocks_read_elsewhere", stream=stream, events=len(found), first=next(iter(found)))
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
    """Put the events that the node gives readable into `found`; why the node may have more to say another time."""
    unseen = set(left)
    try:
        for event in client.events(node, stream, sorted(set(left.values()))):
            unseen.discard(event.hash)
            if event.hash in left and not isinstance(event, Undecoded):
                found[event.hash] = event
    except (NotFoundError, NoSuchBlockError):
        return None
    except (*UNWELL, GapError) as error:
        return error
    if unseen:
        return GapError(f"{node.url} gives other blocks than these", hint="its history is another one, or it lies")
    return None
