"""Which block streams have news that the log does not have, by what one node lists. Nothing is planned or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from evermark.errors import DeniedError, EvermarkError, FormatError, GapError, UnreachableError
from evermark.sources.base import Untaken
from evermark.sources.blocks.client import TRANSIENT, Listing, Node, NodeClient
from evermark.sources.blocks.plan import partition_of, way_to
from evermark.sources.blocks.plans import Plans
from evermark.sources.blocks.position import Position
from evermark.sources.blocks.target import Pace

_CONNECT_S_MAX = 2.0
_READ_S_MAX = 2.0
_PAGES_MAX = 5


def brief(pace: Pace) -> Pace:
    """Whoever only looks does not wait long for a node: another one is asked."""
    return replace(pace, connect_s=min(pace.connect_s, _CONNECT_S_MAX), read_s=min(pace.read_s, _READ_S_MAX))


def untaken(plans: Plans, client: NodeClient, partitions: int, after: Mapping[int, str]) -> dict[int, Untaken]:
    """A stream has news from the moment its node says it was touched until the tick that took it was confirmed. What
    the reader will pass over, since nobody wants it, is among them for the moment until it has.
    """
    passed = {partition: _passed(plans, partition, text) for partition, text in after.items()}
    waiting: dict[int, float] = {}
    for listing in _listings(client, min(passed.values(), default=0)) if passed else ():
        for row in listing.rows:
            partition = partition_of(row.stream, partitions)
            if partition in passed and row.touched > passed[partition]:
                waiting.setdefault(partition, max(0.0, (listing.now_us - row.touched) / 1e6))
        if set(waiting) == set(passed):
            break
    found = {partition: Untaken(_beyond(after[partition]), oldest_s) for partition, oldest_s in waiting.items()}
    for partition in set(passed) - set(waiting):
        if plans.unfinished(partition):  # it had more than a batch was to hold
            found[partition] = Untaken(_beyond(after[partition]))
    return found


def _passed(plans: Plans, partition: int, after: str) -> int:
    """How far the listing was looked through for all that the log has."""
    standing = plans.standing(partition)
    try:
        way = way_to(plans.ticks(partition), standing.confirmed, Position.parse(after).tick)
    except GapError:
        way = []  # whoever reads begins anew there, and says so
    return way[-1].touched if way else standing.touched


def _beyond(after: str) -> str:
    return str(Position(Position.parse(after).tick + 1))


def _listings(client: NodeClient, touched: int) -> Iterator[Listing]:
    """The pages of one node's listing, in the order in which streams were touched; a few at most."""
    errors: list[EvermarkError] = []
    for node in client.in_order():
        try:
            listing = node.listing(touched, 0)
        except (*TRANSIENT, FormatError, DeniedError) as error:
            errors.append(error)  # another one may be well
            continue
        client.answered(node)
        yield listing
        yield from _more(node, listing)
        return
    raise min(errors, key=lambda error: (not isinstance(error, TRANSIENT), isinstance(error, UnreachableError)))


def _more(node: Node, listing: Listing) -> Iterator[Listing]:
    for _ in range(_PAGES_MAX - 1):
        if not listing.rows:
            return
        listing = node.listing(listing.touched, 0)
        yield listing
