"""The plan: what each batch holds, written down before the batch is begun. Pure.

A tick leads from one boundary (`starts`) to the next (`ends`). Ticks form a tree: numbers are never used twice, and two
owners may each make a tick that starts where the log ends. Whatever is known at a boundary is what was confirmed plus
the ticks on the path to it, so that an owner who comes late can neither take away nor change what another one reads.

A log that was set back, and an owner who comes late, look the same: both go on at a boundary that was left behind.
There a root is put, at which nothing is known; whether what follows it counts is decided by what gets into the log.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evermark.errors import GapError
from evermark.sources.base import Slice
from evermark.sources.blocks.chain import BlockEvent, EventKind, Undecoded
from evermark.sources.blocks.position import Position
from evermark.sources.blocks.resume import Known

Pin = tuple[int, str]  # a block's number, and the hash of the one before it
Carried = tuple[int, int, dict[str, Any]]  # block, ordinal, event or row of ours as it goes over the wire

SLICE_WEIGHT = 250  # blocks, or tens of carried events, that are worth a task of their own


@dataclass(frozen=True)
class Move:
    """Where a stream stands after a tick; without `known` it is gone, or forgotten because nobody wants it any more."""

    kind: str
    known: Known | None
    more: bool = False
    forgotten: bool = False


@dataclass(frozen=True)
class Item:
    """One stream's part of a tick: blocks to fetch between pins, or events that are carried along."""

    stream: str
    pins: tuple[Pin, ...] = ()
    leave_out: frozenset[str] = frozenset()
    carried: tuple[Carried, ...] = ()
    repeats: bool = False
    move: Move | None = None  # on a stream's last item


@dataclass(frozen=True)
class Tick:
    starts: int
    ends: int
    touched: int
    wanted: str = ""
    void: bool = False

    @property
    def label(self) -> int:
        """The tick in the positions of its events: not before where it starts, and before where it ends."""
        return self.ends - 1

    @property
    def root(self) -> bool:
        """It leads nowhere: reading begins at this boundary with nothing known."""
        return self.starts == self.ends


def first_ordinal(block: int) -> int:
    """Where a block's events begin: in front of the first block's stands how the stream was made."""
    return 1 if block == 0 else 0


def placed(
    block: int, events: Iterable[BlockEvent], leave_out: frozenset[str], repeats: bool
) -> Iterator[tuple[int, BlockEvent, bool]]:
    """The events of a block that are taken, with their ordinals; True: it is only told of.

    Where a stream is taken again, joins and leaves are told of one by one, those too that are left out: of the events
    themselves the log drops those it still has, so that what is left of them says nothing about who is a member.
    """
    ordinal = first_ordinal(block)
    for event in events:
        if repeats and not isinstance(event, Undecoded) and event.kind in {EventKind.JOIN, EventKind.LEAVE}:
            yield ordinal, event, True
            ordinal += 1
        if event.hash not in leave_out:
            yield ordinal, event, False
        ordinal += 1


def partition_of(stream: str, partitions: int) -> int:
    return zlib.crc32(stream.encode()) % partitions


def path(ticks: Iterable[Tick], confirmed: int, to: int) -> list[Tick]:
    """The ticks that lead from what was confirmed to the boundary `to`, in order."""
    by_end = {tick.ends: tick for tick in ticks if not tick.root}
    found: list[Tick] = []
    at = to
    while at > confirmed:
        tick = by_end.get(at)
        if tick is None:
            raise GapError(
                f"no plan leads to tick {to}: the state of this source is older than its log",
                hint="was State restored from a backup? the next start takes up what the log lacks",
            )
        found.append(tick)
        at = tick.starts
    if at < confirmed:
        raise GapError(
            f"tick {to} was left behind: reading has gone on to tick {confirmed} on another way",
            hint="another instance has taken over, or the checkpoint was set back: start again from the checkpoint",
        )
    return found[::-1]


def way_to(ticks: Sequence[Tick], confirmed: int, to: int) -> list[Tick]:
    """How `to` is reached: the ticks from what was confirmed, or a root and the ticks that follow it."""
    by_end = {tick.ends: tick for tick in ticks}
    at = to
    while at != confirmed and at in by_end:
        if by_end[at].root:
            return [by_end[at], *path(ticks, at, to)]
        at = by_end[at].starts
    return path(ticks, confirmed, to)


@dataclass(frozen=True)
class Part:
    """What can be read apart: all an item carries, or what lies between two of its pins."""

    item: int
    first: Pin = (0, "")
    last: Pin = (0, "")
    cut: int = 0  # the block in the position it begins at
    weight: int = 0


def parts(items: Sequence[Item]) -> list[Part]:
    """The same for the same items, everywhere."""
    found: list[Part] = []
    for at, item in enumerate(items):
        for nth, first in enumerate(item.pins[:-1]):
            last = item.pins[nth + 1]
            found.append(Part(at, first, last, first[0] if nth else 0, last[0] - first[0]))
        if not item.pins:
            found.append(Part(at, weight=len(item.carried) // 10))
    return found


def slices(partition: int, tick: Tick, items: Sequence[Item]) -> Iterator[Slice]:
    """Runs of parts, each worth a task; together they are the whole tick."""
    all_parts = parts(items)
    cuts = [0]
    weight = 0
    for at, part in enumerate(all_parts):
        if weight and weight + part.weight > SLICE_WEIGHT:
            cuts.append(at)
            weight = 0
        weight += part.weight
    edges = [_begins(tick, all_parts[cut]) for cut in cuts[1:]]
    starts = [str(Position(tick.starts)), *edges]
    ends = [*edges, str(Position(tick.ends))]
    for start, end, cut, to in zip(starts, ends, cuts, [*cuts[1:], len(all_parts)], strict=True):
        yield Slice(partition, start, end, {"tick": str(tick.ends), "from": str(cut), "to": str(to)})


def _begins(tick: Tick, part: Part) -> str:
    return str(Position(tick.label, part.item, part.cut))


def pin_numbers(start: int, end: int, spacing: int) -> list[int]:
    """Where a range is cut: its beginning, every `spacing` blocks, and its end."""
    return [*range(start, end, spacing), end]
