"""What `evermark doctor` says of the nodes and the streams of a block source. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from evermark.errors import EvermarkError
from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.blocks.nodes.client import Node, NodeInfo
from evermark.sources.blocks.store.base import Plans, Stale
from evermark.sources.blocks.target import BlocksTarget

_NAMED_MAX = 20
_NODE_HINT = "start it, or take it out of the source's `nodes`"
_WAIT = "it is tried again by itself, against all nodes; add a node that has these blocks"


def about_nodes(target: BlocksTarget) -> Iterator[Finding]:
    """Which node answers at each address, and whether all of them have the same streams."""
    found = {url: _asked(Node(url, target.token, target.pace)) for url in target.nodes}
    answered = [said for said in found.values() if isinstance(said, NodeInfo)]
    for url, said in found.items():
        if isinstance(said, NodeInfo):
            role = "takes events" if said.leader is None else f"copies node {said.leader}"
            yield ok("node", f"{url} is node {said.node}, and {role}")
        else:
            yield (warning if answered else wrong)("node", said.message, said.hint or _NODE_HINT)
    leaders = {said.node if said.leader is None else said.leader for said in answered}
    if len(leaders) > 1:
        yield wrong("family", f"the nodes are of {len(leaders)} families: only one of them can be read", _NODE_HINT)


def _asked(node: Node) -> NodeInfo | EvermarkError:
    try:
        return node.about()
    except EvermarkError as error:
        return error
    finally:
        node.close()


def about_streams(plans: Plans, target: BlocksTarget) -> Iterator[Finding]:
    """The stale streams, as State names them."""
    stale: dict[str, Stale] = {}
    for partition in range(target.partitions):
        stale |= plans.stale(partition)
    if not stale:
        yield ok("streams", "no stream is stale")
    for stream in sorted(stale)[:_NAMED_MAX]:
        hint = _NODE_HINT if stale[stream].unreadable else _WAIT
        if stale[stream].fork:
            hint = f"evermark source recover {target.source} --accept-fork {stream}"
        yield wrong("streams", f"{stream} is stale at block {stale[stream].block}: {stale[stream].reason}", hint)
    if len(stale) > _NAMED_MAX:
        yield wrong("streams", f"{len(stale) - _NAMED_MAX} more streams are stale", _WAIT)
