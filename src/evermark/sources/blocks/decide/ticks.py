"""The plan: what each batch holds, written down before the batch is read. Pure.

A tick is one batch of the plan. It leads from one boundary (`starts`) to the next (`ends`). Ticks form a tree: numbers
are never used twice, and two owners may each make a tick that starts where the log ends. The state of the streams at a
boundary is the confirmed state plus the ticks on the path to the boundary, so that an owner that lost its lease can
neither take away nor change the ticks that its successor reads.

A log that was set back, and an owner that lost its lease, look the same: both resume at a boundary before the confirmed
one. A root is put there, at which no stream has a state; whether the ticks that follow the root count is decided by
which batches get into the log.

A position is `{tick:012d}:{item:05d}:{block:012d}:{ordinal:06d}`: 38 characters whose string order is the order of
events. Within a tick come the plan's items, the blocks of one stream, the events of one block. A boundary has zeros
after its tick. Since positions hold the block's number, a long gap can be cut anywhere without knowing how many events
its blocks hold.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evermark.errors import FormatError, GapError
from evermark.sources.base import Slice
from evermark.sources.blocks.chain import BlockEvent, EventKind, Undecoded
from evermark.sources.blocks.decide.resume import StreamState

Pin = tuple[int, str]  # a block's number, and the hash of the block before it
Carried = tuple[int, int, dict[str, Any]]  # block, ordinal, and an event or a row of ours as JSON

ITEMS_MAX = 100_000
_SLICE_WEIGHT = 2000  # blocks, or tens of carried events, that are worth a task: about half a second
_REQUEST_WEIGHT = 80  # blocks that are decoded while one request is answered
_WIDTHS = (12, 5, 12, 6)
_CHARS = sum(_WIDTHS) + len(_WIDTHS) - 1
_POSITION = re.compile(":".join(rf"(\d{{{width}}})" for width in _WIDTHS), re.ASCII)


@dataclass(frozen=True, order=True, slots=True)
class Position:
    tick: int
    item: int = 0
    block: int = 0
    ordinal: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        match = _POSITION.fullmatch(text)
        if match is None:
            raise FormatError(
                f"{text[:80]!r} is not a position of a block source",
                hint="the checkpoint belongs to another source, or is damaged: see `evermark checkpoint list`",
            )
        return cls(*(int(part) for part in match.groups()))

    def __str__(self) -> str:
        text = f"{self.tick:012d}:{self.item:05d}:{self.block:012d}:{self.ordinal:06d}"
        if len(text) != _CHARS:
            raise FormatError(
                f"block {self.block} with event {self.ordinal} has no position: its numbers are too large",
                hint="a node that makes such blocks is not supported",
            )
        return text


EARLIEST = str(Position(0))


@dataclass(frozen=True)
class Move:
    """The state of a stream after a tick. Without `known` the stream was deleted, or its state is given up because the
    stream is not chosen any more (`forgotten`). `more`: the node has more of the stream than the tick takes."""

    kind: str
    known: StreamState | None
    more: bool = False
    forgotten: bool = False


@dataclass(frozen=True)
class Item:
    """One stream's part of a tick: blocks to fetch between pins, or events that the plan carries."""

    stream: str
    pins: tuple[Pin, ...] = ()
    leave_out: frozenset[str] = frozenset()  # hashes of events that were taken from the minipool before
    carried: tuple[Carried, ...] = ()
    repeats: bool = False  # the log may have some of these events
    move: Move | None = None  # on a stream's last item


@dataclass(frozen=True)
class Tick:
    starts: int
    ends: int
    touched: int  # how far the nodes' listing was read
    choice: str = ""  # the version of the choice of streams
    void: bool = False

    @property
    def label(self) -> int:
        """The tick in the positions of its events: not before where it starts, and before where it ends."""
        return self.ends - 1

    @property
    def root(self) -> bool:
        """The tick holds nothing: reading begins at this boundary, and no stream has a state."""
        return self.starts == self.ends


def placed(
    block: int, events: Iterable[BlockEvent], leave_out: frozenset[str], repeats: bool
) -> Iterator[tuple[int, BlockEvent, bool]]:
    """The events of a block that are taken, with their ordinals; True: the row says that a member joined or left.

    Such rows are made while a stream is taken again, also for events that are left out: the log drops the joins and
    leaves that it still has, so that the remaining rows do not tell the members.
    """
    ordinal = 1 if block == 0 else 0  # the row about how the stream was made comes before the first block's events
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
    """The ticks that lead from the confirmed boundary to the boundary `to`, in order."""
    by_end = {tick.ends: tick for tick in ticks if not tick.root}
    found: list[Tick] = []
    at = to
    while at > confirmed:
        tick = by_end.get(at)
        if tick is None:
            raise GapError(
                f"no plan leads to tick {to}: the state of this source is older than its log",
                hint="was State restored from a backup? the next start takes the events that the log lacks",
            )
        found.append(tick)
        at = tick.starts
    if at < confirmed:
        raise GapError(
            f"tick {to} was left behind: reading has gone on to tick {confirmed} on another path",
            hint="another instance has taken over, or the checkpoint was set back: start again from the checkpoint",
        )
    return found[::-1]


def way_to(ticks: Sequence[Tick], confirmed: int, to: int) -> list[Tick]:
    """The ticks that lead to `to`: from the confirmed boundary, or a root and the ticks that follow it."""
    by_end = {tick.ends: tick for tick in ticks}
    at = to
    while at != confirmed and at in by_end:
        if by_end[at].root:
            return [by_end[at], *path(ticks, at, to)]
        at = by_end[at].starts
    return path(ticks, confirmed, to)


@dataclass(frozen=True)
class Part:
    """A piece of an item that can be read by itself: all that the item carries, or the blocks between two pins."""

    item: int
    first: Pin = (0, "")
    last: Pin = (0, "")
    cut: int = 0  # the block in the position it begins at
    weight: int = 0


def parts(items: Sequence[Item]) -> list[Part]:
    """The same parts for the same items, in every process."""
    found: list[Part] = []
    for at, item in enumerate(items):
        for nth, first in enumerate(item.pins[:-1]):
            last = item.pins[nth + 1]
            found.append(Part(at, first, last, first[0] if nth else 0, last[0] - first[0] + _REQUEST_WEIGHT))
        if not item.pins:
            found.append(Part(at, weight=len(item.carried) // 10))
    return found


def cut_evenly(start: int, end: int, tasks: int, page_blocks: int) -> list[int]:
    """Where the blocks [start, end) are cut for so many tasks: whole pages apart; with `start` and `end`."""
    spacing = -(-(end - start) // (tasks * page_blocks)) * page_blocks
    return [*range(start, end, spacing), end]


def slices(partition: int, tick: Tick, items: Sequence[Item]) -> Iterator[Slice]:
    """Runs of parts, each worth a task; together they are the whole tick. Where the planner has cut a range a slice
    begins: the planner knew what the range costs."""
    all_parts = parts(items)
    cuts = [0]
    weight = 0
    for at, part in enumerate(all_parts):
        if part.cut or (weight and weight + part.weight > _SLICE_WEIGHT):
            cuts.append(at)
            weight = 0
        weight += part.weight
    edges = [str(Position(tick.label, all_parts[cut].item, all_parts[cut].cut)) for cut in cuts[1:]]
    starts = [str(Position(tick.starts)), *edges]
    ends = [*edges, str(Position(tick.ends))]
    for start, end, cut, to in zip(starts, ends, cuts, [*cuts[1:], len(all_parts)], strict=True):
        fetches = any(items[part.item].pins for part in all_parts[cut:to])
        detail = {"tick": str(tick.ends), "from": str(cut), "to": str(to), "fetches": str(int(fetches))}
        yield Slice(partition, start, end, detail)


def sharing(pieces: Sequence[Slice], partitions: int) -> list[Slice]:
    """The slices of a batch, each told how many tasks may ask the nodes at the same time: its share of the rate. Other
    partitions may have as many."""
    tasks = max(1, sum(piece.detail["fetches"] == "1" for piece in pieces) * partitions)
    return [replace(piece, detail={**piece.detail, "tasks": str(tasks)}) for piece in pieces]
