"""Which nodes belong to the cluster, what each member has acknowledged, and what may therefore be collected.

A member says of itself: its origin, what it holds of each table, and its clock of each table. Members pass on what they
know of each other, so that A collects nothing that C lacks though the two never meet. Of two things said of one member
the later one counts: of a later birth, or of the same birth and a later tick.

An event is collected when every member holds it and it is old enough. A tombstone is collected when its event is, and
when no event below it can arrive any more: each member's clock has passed it, and we hold all that the member had held
when it said so. Members that were never heard hold everything back. A member that was silent for too long is evicted,
which counts only when every other member knows it: from then on no member takes events from it under its old origin, so
what the others hold of it is final. It comes back by a snapshot, under a new origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from evermark.errors import ConflictError, FormatError
from evermark.replicas.event import ORIGIN, born_ms, member_of
from evermark.replicas.ranges import NOTHING, Held, Ranges, held_as_json, held_from, union


@dataclass(frozen=True)
class Said:
    """What a member said of itself, at one moment."""

    origin: str
    tick: int
    held: Mapping[str, Held]  # by table
    clocks: Mapping[str, int]  # by table
    evicted: frozenset[str] = frozenset()  # origins that it knows as evicted

    @property
    def order(self) -> tuple[int, str, int]:
        return (born_ms(self.origin), self.origin, self.tick)

    def as_json(self) -> dict[str, Any]:
        return {
            "origin": self.origin,
            "tick": self.tick,
            "held": {table: held_as_json(held) for table, held in self.held.items()},
            "clocks": dict(self.clocks),
            "evicted": sorted(self.evicted),
        }

    @classmethod
    def from_json(cls, value: Any) -> Said:
        try:
            held = {str(table): held_from(each) for table, each in value["held"].items()}
            clocks = {str(table): int(reading) for table, reading in value["clocks"].items()}
            origin = str(value["origin"])
            said = cls(origin, int(value["tick"]), held, clocks, frozenset(map(str, value["evicted"])))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FormatError("what a member says of itself cannot be read", hint="it is of another version") from None
        if not ORIGIN.fullmatch(origin):
            raise FormatError(f"{origin[:80]!r} is no origin", hint="the peer is of another version, or damaged")
        return said


@dataclass(frozen=True)
class Member:
    """A member as this node knows it. `settled` is the last thing it said of which we hold everything."""

    name: str
    said: Said | None = None
    settled: Mapping[str, int] = field(default_factory=dict)  # by table: its clock when it said so
    heard_ms: int = 0  # by our clock, when it last said something new, to us or to another

    @property
    def origin(self) -> str | None:
        return None if self.said is None else self.said.origin


def heard(member: Member, said: Said, now_ms: int) -> Member:
    """The member after something was heard of it, from itself or from another member."""
    if member.said is not None and said.order <= member.said.order:
        return member
    changed = member.origin is not None and member.origin != said.origin
    return replace(member, said=said, settled={} if changed else member.settled, heard_ms=now_ms)


def settled(member: Member, mine: Mapping[str, Held]) -> Member:
    """The member after we have taken events: where we hold all that it held, its clock counts."""
    if member.said is None:
        return member
    found = dict(member.settled)
    for table, reading in member.said.clocks.items():
        held = mine.get(table, {})
        theirs = member.said.held.get(table, {})
        if all(held.get(origin, NOTHING).covers(ranges) for origin, ranges in theirs.items()):
            found[table] = max(reading, found.get(table, 0))
    return replace(member, settled=found)


def silent(members: Iterable[Member], now_ms: int, limit_ms: int) -> frozenset[str]:
    """Origins of members that were not heard of for so long that they are evicted."""
    return frozenset(
        member.said.origin for member in members if member.said is not None and now_ms - member.heard_ms > limit_ms
    )


@dataclass(frozen=True)
class Floors:
    """`by_origin`: the highest number that every member holds. `clock`: below it no event can arrive that we lack.
    `holding`: the members that hold everything back."""

    by_origin: Mapping[str, int]
    clock: int
    holding: tuple[str, ...] = ()


def may_give_up(
    table: str, me: str, origin: str, wanted: Ranges, mine: Held, members: Iterable[Member], evicted: frozenset[str]
) -> Ranges:
    """What of the `wanted` numbers nobody holds, so that collection need not wait. `ConflictError` where a member
    may still bring it. `me` is the origin that this node writes under."""
    if origin == me:
        raise ConflictError(f"{table}: {origin} is this node's own origin", hint="its numbers have no gaps")
    live = [member for member in members if member.origin is None or member.origin not in evicted]
    for member in live:
        evict = f"sync with {member.name} first; or give it up: evermark replica gc --evict {member.name}"
        if member.said is None or table not in member.said.held:
            raise ConflictError(f"{table}: {member.name} was never heard, and may have events of {origin}", hint=evict)
        if member.origin == origin:
            raise ConflictError(f"{table}: {member.name} writes under {origin}, and has its events", hint=evict)
        if wanted - member.said.held[table].get(origin, NOTHING) != wanted:
            raise ConflictError(f"{table}: {member.name} holds some of these events of {origin}", hint=evict)
    # Only what is a gap already: a number above all that are here may still be written by somebody.
    missing = mine.get(origin, NOTHING).missing
    return missing - (missing - wanted)


def floors(
    table: str,
    me: str,
    mine: Held,
    my_clock: int,
    members: Iterable[Member],
    evicted: frozenset[str],
    lost: Held | None = None,
) -> Floors:
    """How far this node may collect. `evicted` are the origins that it knows as evicted, `lost` are numbers that nobody
    holds (`may_give_up`)."""
    every = list(members)
    live = [member for member in every if member.origin is None or member.origin not in evicted]
    gone = {member.said.origin for member in every if member.said is not None and member not in live}
    known = {me, *(member.name for member in every)}
    holding = [member.name for member in live if member.said is None or table not in member.said.held]
    holding += [member_of(origin) for origin in mine if member_of(origin) not in known]
    for member in live:
        if member.said is not None and not gone <= member.said.evicted:
            holding.append(member.name)  # it may still take events from one that we have given up
    if holding:
        return Floors({}, 0, tuple(sorted(set(holding))))
    every_held = [mine, *(member.said.held[table] for member in live if member.said is not None)]
    without = lost or {}
    by_origin = {
        origin: min((held.get(origin, NOTHING) | without.get(origin, NOTHING)).contiguous for held in every_held)
        for origin in mine
    }
    clock = min([my_clock, *(member.settled.get(table, 0) for member in live)])
    return Floors(by_origin, clock)


def merged_held(sets: Iterable[Held]) -> dict[str, Ranges]:
    found: dict[str, Ranges] = {}
    for held in sets:
        found = union(found, held)
    return found
