"""Positions of a Postgres source.

A position is `{system id:016x}{timeline:08x}:{lsn:016x}:{ordinal:08x}`: 50 characters whose string order is the order
of events. The first 24 are the incarnation: a restored, cloned or promoted server has another one, and positions of
two incarnations cannot be compared. The LSN is that of the transaction's commit record (the Begin message's final
LSN); a boundary between batches is a position with ordinal 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from evermark.errors import FormatError

POSITION_WIDTH = 50
_POSITION = re.compile(r"([0-9a-f]{16})([0-9a-f]{8}):([0-9a-f]{16}):([0-9a-f]{8})", re.ASCII)
_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})", re.ASCII)

U8 = npt.NDArray[np.uint8]
# Byte value to its two hexadecimal digits, as one 16-bit unit.
HEX_PAIRS = np.frombuffer(b"".join(b"%02x" % i for i in range(256)), dtype=np.uint16)


def lsn_of(text: str) -> int:
    """`16/B374D848` as a number."""
    match = _LSN.fullmatch(text)
    if match is None:
        raise FormatError(f"{text!r} is not a WAL position", hint="it looks like 16/B374D848")
    return int(match[1], 16) << 32 | int(match[2], 16)


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


@dataclass(frozen=True, order=True)
class Incarnation:
    """Which server's history a position belongs to."""

    system_id: int
    timeline: int

    def at(self, lsn: int, ordinal: int = 0) -> str:
        return f"{self}:{lsn:016x}:{ordinal:08x}"

    def __str__(self) -> str:
        return f"{self.system_id:016x}{self.timeline:08x}"


@dataclass(frozen=True)
class Position:
    incarnation: Incarnation
    lsn: int
    ordinal: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        match = _POSITION.fullmatch(text)
        if match is None:
            raise FormatError(
                f"{text[:80]!r} is not a position of a Postgres source",
                hint="the checkpoint belongs to another source, or is damaged: see `evermark checkpoint list`",
            )
        return cls(Incarnation(int(match[1], 16), int(match[2], 16)), int(match[3], 16), int(match[4], 16))

    def __str__(self) -> str:
        return self.incarnation.at(self.lsn, self.ordinal)


@dataclass(frozen=True)
class WalPages:
    """How the server's WAL is cut into pages: from where a record ends, and its size, follows where it begins."""

    page: int = 8192
    segment: int = 16 * 1024 * 1024

    # The header of a segment's first page, and of the others.
    _FIRST = 40
    _OTHER = 24

    def before(self, ends: npt.NDArray[np.uint64], size: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Where records of `size` bytes begin that end at `ends`; both are multiples of eight, as records are."""
        first, other = self.page - self._FIRST, self.page - self._OTHER
        whole = self.segment // self.page * other - (self._FIRST - self._OTHER)
        segment, rest = np.divmod(ends.astype(np.int64), self.segment)
        page, at = np.divmod(rest, self.page)
        within = np.where(
            page == 0, np.maximum(at - self._FIRST, 0), first + (page - 1) * other + np.maximum(at - self._OTHER, 0)
        )
        segment, within = np.divmod(segment * whole + within - size, whole)
        page, at = np.divmod(within - first, other)
        begins = np.where(within < first, self._FIRST + within, (page + 1) * self.page + self._OTHER + at)
        found: npt.NDArray[np.uint64] = (segment * self.segment + begins).astype(np.uint64)
        return found


def hex_columns(values: npt.NDArray[np.generic], width: int) -> U8:
    """Unsigned numbers as rows of `width` hexadecimal digits."""
    unit = values.astype(f">u{width // 2}", copy=False)
    raw = np.ascontiguousarray(unit).view(np.uint8).reshape(len(values), width // 2)
    return HEX_PAIRS[raw].view(np.uint8).reshape(len(values), width)


def positions(incarnation: Incarnation, lsns: npt.NDArray[np.generic], ordinals: npt.NDArray[np.generic]) -> pa.Array:
    """One position for each row, without a Python loop."""
    rows = len(lsns)
    text = np.empty((rows, POSITION_WIDTH), dtype=np.uint8)
    text[:, :25] = np.frombuffer(f"{incarnation}:".encode(), dtype=np.uint8)
    text[:, 25:41] = hex_columns(lsns, 16)
    text[:, 41] = ord(":")
    text[:, 42:] = hex_columns(ordinals, 8)
    return fixed_strings(text)


def fixed_strings(text: U8) -> pa.Array:
    """Rows of equally many bytes as a string array."""
    rows, width = text.shape
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text))]
    return pa.Array.from_buffers(pa.string(), rows, buffers)
