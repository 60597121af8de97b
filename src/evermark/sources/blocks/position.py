"""Positions of a block source.

A position is `{tick:012d}:{item:05d}:{block:012d}:{ordinal:06d}`: 38 characters whose string order is the order of
events. A tick is one batch of the plan; within it come the plan's items, the blocks of one stream, the events of one
block. A boundary between batches has zeros after its tick. Since a block's number stands in it, a long gap can be cut
anywhere without knowing how many events its blocks hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evermark.errors import FormatError

ITEMS_MAX = 100_000
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
