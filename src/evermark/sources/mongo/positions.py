"""Positions of a MongoDB source: a cluster time, and an ordinal among the events of that cluster time. Pure.

A change stream gives its events in the order of their cluster times. Events of one transaction have one cluster time,
and always come in the same order; so do events that several shards made at the same time. Reading goes on at a position
by a stream that begins at its cluster time, and leaves out the events before its ordinal.

Rows of copies stand behind all events of a cluster time, in front of the next: they have ordinals that no event has.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from evermark.errors import FormatError

_TEXT = re.compile(r"([0-9a-f]{16}):([0-9a-f]{8}):([0-9a-f]{2})")
# A resume token begins with its cluster time: the byte that says so, then eight bytes.
_TOKEN = re.compile(r"82([0-9A-Fa-f]{16})")
COPIED = 0x8000_0000  # the first ordinal of copied rows
_ORDINALS = 1 << 32


class Position(NamedTuple):
    time: int  # seconds in the high half, the increment in the low one
    ordinal: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        time, ordinal, _ = _parts(text)
        return cls(time, ordinal)

    def text(self, partitions: int) -> str:
        """As checkpoints and the log have it: with the number of partitions that share the documents."""
        return f"{self.time:016x}:{self.ordinal:08x}:{partitions:02x}"

    @property
    def seconds(self) -> int:
        return self.time >> 32

    @property
    def closed(self) -> int:
        """The last cluster time of which all events stand before this position."""
        return self.time if self.ordinal >= COPIED else self.time - 1

    @property
    def opened_at(self) -> int:
        """Where a stream is opened that is read from here on. Inside a cluster time that is just before it: of the time
        where it begins, which may be one to come, an answer without events says nothing. Behind all of its events
        nothing more of it is waited for, and the oplog need not reach back further."""
        return self.time - (0 < self.ordinal < COPIED)

    def after(self, rows: int) -> Position:
        return Position(self.time, self.ordinal + rows)


def room_for(rows: int, time: int, horizon: Position) -> Position:
    """Where so many copied rows stand that show this cluster time: not before the horizon, behind a time's events."""
    at = max(Position(time, COPIED), Position(horizon.time, max(horizon.ordinal, COPIED)))
    return at if at.ordinal + rows < _ORDINALS else Position(at.time + 1, COPIED)


def partitions_in(text: str) -> int:
    """How many partitions shared the documents when this position was written."""
    return _parts(text)[2]


def _parts(text: str) -> tuple[int, int, int]:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise FormatError(
            f"{text[:80]!r} is no position of a MongoDB source",
            hint="the checkpoint belongs to another kind of source: give the source another name, or, if it never had"
            " an event, run `evermark checkpoint reset --from oldest`",
        )
    return int(found[1], 16), int(found[2], 16), int(found[3], 16)


def time_of_token(token: str) -> int | None:
    """The cluster time of a resume token; None for a token of a form we do not know."""
    found = _TOKEN.match(token)
    return int(found[1], 16) if found is not None else None
