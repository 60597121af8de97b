"""Reading from far behind: how much at a time, and in how many pieces side by side. Pure.

Nobody knows how many changes a stretch of the oplog has before they are read. So a batch is a stretch of time, which
grows or shrinks by how long the one before it took; its rows go to files as they come, however many they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from evermark.sources.mongo.positions import Position

PIECES_MAX = 4
_PIECE_S_MIN = 2
_SPAN_S, _SPAN_S_MIN, _SPAN_S_MAX = 8, 2, 30 * 86_400
_QUICK_S, _SLOW_S = 2.0, 20.0


@dataclass
class Pace:
    """How many seconds of the oplog the next batch has."""

    _span_s: int = _SPAN_S
    _asked_at: float | None = None

    def span_s(self, now: float) -> int:
        """Asked for each batch, when the one before it was taken."""
        took_s = now - self._asked_at if self._asked_at is not None else _QUICK_S
        self._asked_at = now
        if took_s < _QUICK_S:
            self._span_s = min(2 * self._span_s, _SPAN_S_MAX)
        elif took_s > _SLOW_S:
            self._span_s = max(self._span_s // 2, _SPAN_S_MIN)
        return self._span_s


def cuts(start: Position, end: Position) -> list[Position]:
    """Where a stretch is cut: between cluster times, so that no transaction is in two pieces."""
    seconds = end.seconds - start.seconds
    pieces = min(PIECES_MAX, seconds // _PIECE_S_MIN)
    return [Position(start.seconds + seconds * number // pieces << 32) for number in range(1, pieces)]
