"""Sets of numbers as ranges: which events of an origin a node holds, and which it still misses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evermark.errors import FormatError

Range = tuple[int, int]  # both ends included
RANGES_MAX = 1000  # of one origin: a set with more holes than that is refused, not kept


@dataclass(frozen=True)
class Ranges:
    """Numbers from 1 on; ranges are sorted, apart from each other, and not empty."""

    parts: tuple[Range, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Ranges:
        return cls.merged((number, number) for number in numbers)

    @classmethod
    def through(cls, last: int) -> Ranges:
        """1 to `last`."""
        return cls(((1, last),)) if last > 0 else cls()

    @classmethod
    def merged(cls, parts: Iterable[Range]) -> Ranges:
        found: list[Range] = []
        for start, end in sorted(part for part in parts if part[0] <= part[1]):
            if found and start <= found[-1][1] + 1:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
        return cls(tuple(found))

    @property
    def contiguous(self) -> int:
        """The checkpoint: the highest number with none missing up to it. 0: not even the first is there."""
        return self.parts[0][1] if self.parts and self.parts[0][0] == 1 else 0

    @property
    def highest(self) -> int:
        return self.parts[-1][1] if self.parts else 0

    @property
    def missing(self) -> Ranges:
        """What lies below the highest number and is not there."""
        return Ranges.through(self.highest) - self

    def __contains__(self, number: int) -> bool:
        return any(start <= number <= end for start, end in self.parts)

    def __iter__(self) -> Iterator[Range]:
        return iter(self.parts)

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges.merged((*self.parts, *other.parts))

    def __sub__(self, other: Ranges) -> Ranges:
        found: list[Range] = []
        for start, end in self.parts:
            for low, high in other.parts:
                if high < start or low > end:
                    continue
                if low > start:
                    found.append((start, low - 1))
                start = high + 1  # noqa: PLW2901 - what is left of the range, cut from its beginning
            if start <= end:
                found.append((start, end))
        return Ranges(tuple(found))

    def __and__(self, other: Ranges) -> Ranges:
        return self - (self - other)

    @property
    def count(self) -> int:
        return sum(end - start + 1 for start, end in self.parts)

    def covers(self, other: Ranges) -> bool:
        return not other - self

    def above(self, floor: int) -> Ranges:
        return self - Ranges.through(floor)


NOTHING = Ranges()
Held = Mapping[str, Ranges]  # by origin


def union(one: Held, other: Held) -> dict[str, Ranges]:
    return {origin: one.get(origin, NOTHING) | other.get(origin, NOTHING) for origin in {*one, *other}}


def lacking(have: Held, wanted: Held) -> dict[str, Ranges]:
    """What of `wanted` is not in `have`."""
    found = {origin: ranges - have.get(origin, NOTHING) for origin, ranges in wanted.items()}
    return {origin: ranges for origin, ranges in found.items() if ranges}


def gaps(held: Held, given_up: Held) -> dict[str, Ranges]:
    """Numbers below the highest of their origin that are not here, and that somebody may still bring."""
    return lacking(given_up, {origin: ranges.missing for origin, ranges in held.items()})


def held_as_json(held: Held) -> dict[str, list[list[int]]]:
    return {origin: [list(part) for part in ranges] for origin, ranges in sorted(held.items()) if ranges}


def ranges_from(value: Any) -> Ranges:
    """Ranges as a peer or a row wrote them. Anything else is refused."""
    if not isinstance(value, list) or len(value) > RANGES_MAX + 1:
        raise FormatError("ranges of numbers cannot be read", hint="the peer speaks another version, or is damaged")
    parts = []
    for part in value:
        if not (isinstance(part, list) and len(part) == 2 and all(type(n) is int for n in part)):
            raise FormatError("a range of numbers cannot be read", hint="the peer speaks another version")
        if not 1 <= part[0] <= part[1] < 2**62:
            raise FormatError(f"{part[0]}–{part[1]} is no range of numbers", hint="the peer is damaged")
        parts.append((part[0], part[1]))
    return Ranges.merged(parts)


def held_from(value: Any) -> dict[str, Ranges]:
    if not isinstance(value, dict):
        raise FormatError("what a peer holds cannot be read", hint="the peer speaks another version")
    return {str(origin): ranges_from(parts) for origin, parts in value.items()}
