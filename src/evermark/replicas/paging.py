"""What a node sends to a peer that says what it holds: pages by (origin, seq), with what they cover said out loud."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evermark.errors import GapError
from evermark.replicas.ranges import NOTHING, Held, Range, Ranges, lacking


class SnapshotRequired(GapError):
    """A peer asks for events that were collected: it has to take a snapshot, and never silently starts later."""


@dataclass(frozen=True)
class Stretch:
    """Events of one origin to read: those with `start` ≤ seq ≤ `end`."""

    origin: str
    start: int
    end: int


@dataclass(frozen=True)
class Coverage:
    """What an answer says beside its events, by origin.

    `covered`: every number in here is in the answer, or was with the asker before. `lacks`: the answerer has not got
    these itself. A number below `head` that is in neither comes with the next page.
    """

    covered: Held = field(default_factory=dict)
    lacks: Held = field(default_factory=dict)
    more: bool = False


def wanted(table: str, mine: Held, floors: Mapping[str, int], theirs: Held) -> dict[str, Ranges]:
    """What the peer lacks of what this node holds, by origin in order; refused when some of it was collected here."""
    found = lacking(theirs, mine)
    for origin, ranges in found.items():
        floor = floors.get(origin, 0)
        if ranges.parts[0][0] <= floor:
            raise SnapshotRequired(
                f"snapshot required: {table} of {origin} from {ranges.parts[0][0]} is asked for, and is collected here "
                f"up to {floor}",
                hint="take a snapshot; `evermark replica sync` does",
            )
    return dict(sorted(found.items()))


def stretches(found: Held, limit: int) -> list[Stretch]:
    """The next page of at most `limit` events, by (origin, seq): never by time, which events do not arrive in."""
    page: list[Stretch] = []
    for origin, ranges in sorted(found.items()):
        for start, end in ranges:
            if limit <= 0:
                return page
            last = min(end, start + limit - 1)
            page.append(Stretch(origin, start, last))
            limit -= last - start + 1
    return page


def coverage(found: Held, page: list[Stretch], mine: Held) -> Coverage:
    sent: dict[str, list[Range]] = {}
    for stretch in page:
        sent.setdefault(stretch.origin, []).append((stretch.start, stretch.end))
    covered = {origin: Ranges.merged(parts) for origin, parts in sent.items()}
    more = any(ranges - covered.get(origin, NOTHING) for origin, ranges in found.items())
    lacks = {origin: ranges.missing for origin, ranges in mine.items() if ranges.missing}
    return Coverage(covered, lacks, more)
