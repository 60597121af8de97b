"""A node's upkeep: the members of its cluster, peers that are given up, and events that no peer needs any more."""

from __future__ import annotations

from collections.abc import Iterable

from evermark.errors import NotFoundError
from evermark.replicas import members as membership
from evermark.replicas.base import Collected
from evermark.replicas.local_node import LocalNode
from evermark.replicas.members import Floors, Member
from evermark.replicas.ranges import Ranges


class Upkeep:
    def __init__(self, node: LocalNode) -> None:
        self._node, self._store = node, node.store

    def add_member(self, name: str) -> None:
        known = self._store.members()
        known.setdefault(name, Member(name))
        self._store.save_members(known, self._store.evicted())

    def remove_member(self, name: str) -> bool:
        """Give up a peer; returns whether it was ever met. A peer that was met is evicted, and others must know it."""
        member = self._store.members().get(name)
        if member is not None and member.said is not None:
            self.evict([name])
            return True
        self._store.forget_member(name)
        return False

    def evict(self, names: Iterable[str] = ()) -> frozenset[str]:
        """Give up members that were silent for too long, as long as more than half of all are heard; and those named
        by a person. The origins that were given up."""
        known, now = self._store.members(), self._node.now_ms()
        quiet = membership.silent(known.values(), now, self._node.limits.dead_ms)
        if 2 * (len(known) + 1 - len(quiet)) <= len(known) + 1:
            quiet = frozenset()
        for name in names:
            said = known[name].said if name in known else None
            if said is None:
                raise NotFoundError(f"{name} was never met", hint="take it out with `evermark replica remove`")
            quiet |= {said.origin}
        new = quiet - self._store.evicted()
        self._store.save_members(known, self._store.evicted() | new)
        return new

    def give_up(self, table: str, origin: str, numbers: Ranges) -> Ranges:
        """Wait no more for numbers that nobody holds, as after a restore; what was given up. `ConflictError` where a
        member may still have them."""
        self._node.table(table)
        own, members = self._node.origin(), self._store.members().values()
        mine, evicted = self._store.held(table), self._store.evicted()
        found = membership.may_give_up(table, own, origin, numbers, mine, members, evicted)
        self._store.give_up(table, origin, found)
        return found

    def count_as_collected(self, table: str) -> Collected:
        """Go on without events that were deleted by hand: members that lack them take a snapshot."""
        self._node.table(table)
        return self._node.patiently(lambda: self._store.count_as_collected(table))

    def floors(self, table: str) -> Floors:
        said = self._store.said()
        known = self._store.members()
        known = {name: membership.settled(member, said.held) for name, member in known.items()}
        return membership.floors(
            table,
            self._node.name,
            said.held[table],
            said.clocks[table],
            known.values(),
            self._store.evicted(),
            self._store.lost(table),
        )

    def collect(self) -> dict[str, Collected]:
        """Delete what every member has, and what is old enough."""
        self.evict()
        found, limits = {}, self._node.limits
        for table in self._store.tables():
            keep_ms = limits.retention_by_table_ms.get(table, limits.retention_ms) + limits.safety_ms
            floors = self.floors(table)
            found[table] = self._store.collect(
                table, floors.by_origin, floors.clock, self._node.now_ms() - keep_ms, limits.collect_batch
            )
        return found
