"""Which shard of delivery has which subscriptions. Pure: stores carry it out.

A shard is a live group with cursors of its own, owned under a lease of its own. Where a subscription belongs is said by
a hash of its name, so that another number of shards moves as few subscriptions as possible.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from evermark.delivery.decide.group import SubscriptionRecord, out_of_group
from evermark.delivery.model import BEGINNING, CursorVector, Group

FIRST = 0  # the shard that there always is; its owner also does everything that is not done for each shard
MOVED = "moves to another shard"

Placed = Mapping[str, tuple[SubscriptionRecord, int]]  # by name, with the shard it is in


@dataclass(frozen=True)
class Spread:
    """The groups as they are afterwards: a group that is missing here is removed."""

    groups: Mapping[int, Group]
    moved: Mapping[str, tuple[SubscriptionRecord, int]]
    left: Mapping[str, CursorVector]  # the cursors of moved subscriptions that are outside of any group now
    opened: frozenset[int]  # shards that are new


def shard_of(name: str, shards: int) -> int:
    """The shard whose hash together with the name is the highest: with one shard more, only its share moves."""
    return max(range(shards), key=lambda shard: (zlib.crc32(f"{shard} {name}".encode()), -shard))


def spread(placed: Placed, outside: Mapping[str, CursorVector], groups: Mapping[int, Group], shards: int) -> Spread:
    """Every subscription in the shard it belongs to, of this many shards. `outside` has the cursors of non-members.

    A new group stands where the first one does, so members of that one may join it at once. Any other member leaves its
    group where that stands, and joins the other when it has come level.
    """
    first = groups[FIRST]
    # No version comes back: work that began with a shard that is gone must not be settled in its successor.
    newest = max(group.version for group in groups.values())
    after = {shard: groups.get(shard) or Group(newest, frozenset(), first.cursors) for shard in range(shards)}
    moved: dict[str, tuple[SubscriptionRecord, int]] = {}
    left: dict[str, CursorVector] = {}
    changed: set[int] = set()
    for name, (record, shard) in sorted(placed.items()):
        to = shard_of(name, shards)
        if to == shard:
            continue
        if record.is_member:
            changed |= {shard, to}
            if shard in after:
                after[shard] = replace(after[shard], members=after[shard].members - {name})
            if groups[shard].cursors == after[to].cursors:
                after[to] = replace(after[to], members=after[to].members | {name})
                moved[name] = (replace(record, joined_version=after[to].version + 1), to)
                continue
        mine = groups[shard].cursors if record.is_member else outside.get(name, {})
        # A partition that only the other group has seen is backlog from its beginning.
        left[name] = {**dict.fromkeys(after[to].cursors, BEGINNING), **mine}
        moved[name] = (out_of_group(record, MOVED), to)
    for shard in changed & after.keys():
        after[shard] = replace(after[shard], version=after[shard].version + 1)
    if groups.keys() - after.keys():
        after[FIRST] = replace(after[FIRST], version=newest + 1)
    return Spread(after, moved, left, frozenset(after.keys() - groups.keys()))
