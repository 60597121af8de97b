"""Finding the rows that differ by digests of key ranges: equal ranges are never looked into.

One side cuts its keys into ranges, and both say the digest of each; a range that differs is cut again, by the side that
has more rows in it, until it has so few that their digests are compared one by one. Ten rows of a million cost some
kilobytes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from evermark.errors import FormatError

FANOUT = 128
LEAF_ROWS = 64
SPANS_MAX = 4096  # asked for at once

# From and up to, both as record ids in byte order; None is open. The lower end is included, the upper is not.
Span = tuple[str | None, str | None]
RowDigest = tuple[str, bytes]


@dataclass(frozen=True)
class Digest:
    rows: int
    value: bytes


@dataclass(frozen=True)
class Difference:
    record_id: str
    here: bool  # the row is here
    there: bool


class Side(Protocol):
    """One of the two tables that are compared."""

    def digests(self, spans: Sequence[Span]) -> list[Digest]: ...

    def rows(self, spans: Sequence[Span]) -> list[list[RowDigest]]:
        """Of spans with few rows."""
        ...

    def cuts(self, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        """Keys that cut each span into about equal pieces, in order, without the span's own ends."""
        ...


def digest_of(rows: Iterable[RowDigest]) -> Digest:
    count, summed = 0, hashlib.blake2b(digest_size=16)
    for _, value in rows:
        count += 1
        summed.update(value)
    return Digest(count, summed.digest())


def compared(mine: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> list[Difference]:
    return [
        Difference(record, record in mine, record in theirs)
        for record in sorted({*mine, *theirs})
        if mine.get(record) != theirs.get(record)
    ]


def differing(here: Side, there: Side, limit: int) -> tuple[list[Difference], bool]:
    """The rows that differ, at most `limit` of them, and whether those are all."""
    found: list[Difference] = []
    (keys,) = here.cuts([(None, None)], FANOUT)
    waiting: list[Span] = list(itertools.pairwise([None, *keys, None]))
    while waiting and len(found) <= limit:
        spans, waiting = waiting[:SPANS_MAX], waiting[SPANS_MAX:]
        leaves: list[Span] = []
        mine_cuts: list[Span] = []
        their_cuts: list[Span] = []
        for span, mine, theirs in zip(spans, here.digests(spans), there.digests(spans), strict=True):
            if mine == theirs:
                continue
            if max(mine.rows, theirs.rows) <= LEAF_ROWS:
                leaves.append(span)
            else:
                (mine_cuts if mine.rows >= theirs.rows else their_cuts).append(span)
        if leaves:
            for mine_rows, their_rows in zip(here.rows(leaves), there.rows(leaves), strict=True):
                found += compared(dict(mine_rows), dict(their_rows))
        waiting = [*_cut(here, mine_cuts), *_cut(there, their_cuts), *waiting]
    return found[:limit], len(found) <= limit and not waiting


def _is_cut(start: str | None, keys: Sequence[str], end: str | None) -> bool:
    """Whether each piece is smaller than the whole. Texts are in the order of their bytes."""
    ends = [*([] if start is None else [start]), *keys, *([] if end is None else [end])]
    return bool(keys) and all(one < other for one, other in itertools.pairwise(ends))


def _cut(side: Side, spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for (start, end), keys in zip(spans, side.cuts(spans, FANOUT) if spans else (), strict=True):
        if not _is_cut(start, keys, end):
            said = "keys that should cut a range of rows into smaller ones do not"
            raise FormatError(said, hint="rows went meanwhile: ask again; or the peer is damaged")
        found += itertools.pairwise([start, *keys, end])
    return found
