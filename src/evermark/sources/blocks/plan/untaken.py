"""Which block streams have news that the log does not have, as one node lists them. Nothing is planned or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from evermark.errors import GapError
from evermark.sources.base import Untaken
from evermark.sources.blocks.decide.ticks import Position, partition_of, way_to
from evermark.sources.blocks.nodes.client import Listing, NodeClient
from evermark.sources.blocks.store.base import Plans, PlanState
from evermark.sources.blocks.target import Pace

_CONNECT_S_MAX = 2.0
_READ_S_MAX = 2.0
_PAGES_MAX = 5


def brief(pace: Pace) -> Pace:
    """Health does not wait long for a node: another one is asked."""
    return replace(pace, connect_s=min(pace.connect_s, _CONNECT_S_MAX), read_s=min(pace.read_s, _READ_S_MAX))


def untaken(plans: Plans, client: NodeClient, partitions: int, after: Mapping[int, str]) -> dict[int, Untaken]:
    """A stream has news from the moment its node says it was touched until the tick that took it was confirmed. Streams
    that are not chosen are among them until the reader has passed them over.
    """
    states = {partition: plans.state(partition) for partition in after}
    passed = {partition: _passed(plans, partition, states[partition], text) for partition, text in after.items()}
    waiting: dict[int, float] = {}
    for listing in _listings(client, min(passed.values())) if passed else ():
        for row in listing.rows:
            partition = partition_of(row.stream, partitions)
            if partition in passed and row.touched > passed[partition]:
                waiting.setdefault(partition, max(0.0, (listing.now_us - row.touched) / 1e6))
        if set(waiting) == set(passed):
            break
    unlisted = set(passed) - set(waiting)
    may_be_left = [partition for partition in unlisted if states[partition].has_unfinished]
    left_over = {partition: None for partition in may_be_left if plans.unfinished(partition)}  # more than a batch held
    found: dict[int, float | None] = {**waiting, **left_over}
    beyond = {partition: str(Position(Position.parse(after[partition]).tick + 1)) for partition in found}
    return {partition: Untaken(beyond[partition], oldest_s) for partition, oldest_s in found.items()}


def _passed(plans: Plans, partition: int, state: PlanState, after: str) -> int:
    """How far the listing was read for everything that the log has."""
    try:
        way = way_to(plans.ticks(partition) if state.has_ticks else [], state.confirmed, Position.parse(after).tick)
    except GapError:
        way = []  # the owner begins anew there, and says so
    return way[-1].touched if way else state.touched


def _listings(client: NodeClient, touched: int) -> Iterator[Listing]:
    """The first pages of one node's listing, in the order in which streams were touched."""
    node, listing = client.first_well(lambda node: (node, node.listing(touched, 0)))
    yield listing
    for _ in range(_PAGES_MAX - 1):
        if not listing.rows:
            return
        listing = node.listing(listing.touched, 0)
        yield listing
