"""Reading from far behind: how much at a time, and in how many pieces side by side. Pure.

Nobody knows how many changes a stretch of the oplog has before they are read. So a batch is a stretch of time, which
grows or shrinks by how long the one before it took; its rows go to files as they come, however many they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from evermark.sources.mongo.positions import Position

PIECES_MAX = 4
_PIECE_S_MIN = 2
_SPAN_S, _SPAN_S_MIN, _SPAN_S_MAX = 8, 2, 600
_QUICK_S, _SLOW_S = 2.0, 20.0


@dataclass
class Pace:
    """How many seconds of the oplog the next batch has, while there is much to read.

    A change stream cannot be told where to end: it looks through the oplog for changes of ours until it has an answer
    full of them, or is at its end. Where they are few among many others each piece would look through all of it. So
    stretches are taken only after there was much, and for as long as they gain more time than they take.
    """

    _span_s: int = _SPAN_S
    _pays: bool = False
    _asked: tuple[float, int] | None = None  # when it was asked for the last time, and from which second on

    def begin(self) -> None:
        """There is much to read, and it is old."""
        self._pays, self._span_s, self._asked = True, _SPAN_S, None

    def span_s(self, start_s: int, now: float) -> int | None:
        """For the batch that begins in this second; None: it is better read as one piece."""
        if self._asked is not None:
            took_s, gained_s = now - self._asked[0], start_s - self._asked[1]
            if gained_s and took_s > gained_s:
                self._pays = False
            elif gained_s and took_s < _QUICK_S:
                self._span_s = min(2 * self._span_s, _SPAN_S_MAX)
            elif gained_s and took_s > _SLOW_S:
                self._span_s = max(self._span_s // 2, _SPAN_S_MIN)
        self._asked = (now, start_s)
        return self._span_s if self._pays else None


def cuts(start: Position, end: Position) -> list[Position]:
    """Where a stretch is cut: between cluster times, so that no transaction is in two pieces."""
    seconds = end.seconds - start.seconds
    pieces = min(PIECES_MAX, seconds // _PIECE_S_MIN)
    return [Position(start.seconds + seconds * number // pieces << 32) for number in range(1, pieces)]
