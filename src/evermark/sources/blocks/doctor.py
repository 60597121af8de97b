"""What is well with the nodes of a block source and with its streams, and what is not. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from evermark.errors import EvermarkError
from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.blocks.client import Family, Node
from evermark.sources.blocks.plans import Plans, Stale
from evermark.sources.blocks.target import BlocksTarget

_NAMED_MAX = 20
_NODE_HINT = "start it, or take it out of the source's `nodes`"


def asked(place: BlocksTarget) -> dict[str, Family | EvermarkError]:
    """Who each node says it is, or why it does not."""
    found: dict[str, Family | EvermarkError] = {}
    for url in place.nodes:
        node = Node(url, place.token, place.pace)
        try:
            found[url] = node.family()
        except EvermarkError as error:
            found[url] = error
        finally:
            node.close()
    return found


def judged(found: Mapping[str, Family | EvermarkError]) -> Iterator[Finding]:
    """What the nodes said. Pure."""
    alive = any(isinstance(said, Family) for said in found.values())
    for url, said in found.items():
        if isinstance(said, Family):
            role = "takes events" if said.leader is None else f"copies node {said.leader}"
            yield ok("node", f"{url} is node {said.node}, and {role}")
        elif alive:
            yield warning("node", said.message, said.hint or _NODE_HINT)
        else:
            yield wrong("node", said.message, said.hint or _NODE_HINT)
    families = [said for said in found.values() if isinstance(said, Family)]
    leaders = {said.node if said.leader is None else said.leader for said in families}
    if len(leaders) > 1:
        yield wrong("family", f"the nodes are of {len(leaders)} families: only one of them can be read", _NODE_HINT)


def judged_streams(plans: Plans, place: BlocksTarget) -> Iterator[Finding]:
    """What State says of its streams."""
    stale: dict[str, Stale] = {}
    for partition in range(place.partitions):
        stale |= plans.stale(partition)
    if not stale:
        yield ok("streams", "no stream is stale")
    for stream in sorted(stale)[:_NAMED_MAX]:
        mend = _NODE_HINT if stale[stream].unreadable else _WAIT
        if stale[stream].fork:
            mend = f"evermark source recover {place.source} --accept-fork {stream}"
        yield wrong("streams", f"{stream} is stale at block {stale[stream].block}: {stale[stream].reason}", mend)
    if len(stale) > _NAMED_MAX:
        yield wrong("streams", f"{len(stale) - _NAMED_MAX} more streams are stale", _WAIT)


_WAIT = "it is tried again by itself, against all nodes; add a node that has these blocks"
