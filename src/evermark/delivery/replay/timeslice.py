"""Cutting a window of time into slices of about so many rows, by the statistics of the log's files. Pure.

Slices follow each other without a gap and never overlap, even if compaction changes the files in between: a slice is a
range of (event_time, event_id), and the files only say how many rows to expect in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt

from evermark.log.read import FileRange

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)
# A remainder up to this share of a slice is added to it.
_REST_SHARE = 0.2

F64 = npt.NDArray[np.float64]


def micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _US


def moment_at(us: int) -> datetime:
    return _EPOCH + us * _US


@dataclass(frozen=True)
class Mark:
    """A place in the order of (event_time, event_id): before it are all events of earlier times, and events of `time`
    up to and with `event_id`. None: no event of `time`.
    """

    time: datetime
    event_id: str | None = None


@dataclass(frozen=True)
class TimeSlice:
    """The events after `mark` up to and with the time `to`, and the files that may hold them."""

    mark: Mark
    to: datetime
    paths: tuple[str, ...]
    rows: int  # an estimate, of all streams

    @property
    def end(self) -> Mark:
        """Where a reader stands that has passed the whole slice."""
        return Mark(self.to + _US)

    def share_before(self, mark: Mark) -> float:
        """How much of the slice is before `mark`, taken as evenly spread."""
        whole = max(1, micros(self.to) + 1 - micros(self.mark.time))
        return min(1.0, max(0.0, (micros(mark.time) - micros(self.mark.time)) / whole))


def readable(files: Sequence[FileRange], heads: Mapping[int, int]) -> list[FileRange]:
    """Files that may hold a row of a batch up to its partition's head."""
    return [
        f for f in files if any(f.batch_min <= heads.get(p, 0) for p in range(f.partition_min, f.partition_max + 1))
    ]


def exceeds(piece: TimeSlice, files: Sequence[FileRange], heads: Mapping[int, int]) -> bool:
    """Whether a file of the slice may hold a row beyond the heads; a file that was merged since may."""
    known = {f.path: f for f in files}
    mine = [known.get(path) for path in piece.paths]
    return any(
        f is None or any(f.batch_max > heads.get(p, 0) for p in range(f.partition_min, f.partition_max + 1))
        for f in mine
    )


def with_rest(rows: int) -> int:
    """How many rows a slice of about `rows` may hold, by the statistics of the files."""
    return rows + max(1, int(rows * _REST_SHARE))


def next_slice(mark: Mark, until: datetime, files: Sequence[FileRange], rows: int) -> TimeSlice | None:
    """The slice after `mark` that should hold about `rows` rows, at least one instant; None: nothing is left.

    `until` is included. A slice may hold more than asked for: events can share one instant, or be bunched in a file.
    """
    if mark.time > until:
        return None
    near = [f for f in files if _may_hold(f, mark.time, until)]
    if not near:
        return None
    spread = _Spread(near, mark.time, until)
    first, last = micros(mark.time), micros(until)
    if spread.rows_to(last) > with_rest(rows):
        low, high = first, last
        while low < high:
            middle = (low + high) // 2
            if spread.rows_to(middle) >= rows:
                high = middle
            else:
                low = middle + 1
        last = low
    to = moment_at(last)
    held = [f for f in near if _may_hold(f, mark.time, to)]
    return TimeSlice(mark, to, tuple(f.path for f in held), max(1, round(spread.rows_to(last))))


def rows_between(since: datetime, until: datetime, files: Sequence[FileRange]) -> int:
    """An estimate of the rows in a window, both ends included."""
    near = [f for f in files if _may_hold(f, since, until)]
    return round(_Spread(near, since, until).rows_to(micros(until))) if near else 0


def _may_hold(file: FileRange, since: datetime, until: datetime) -> bool:
    """Whether a file may hold an event with `since` ≤ event_time ≤ `until`; without statistics it may hold any."""
    if file.event_time_max is not None and file.event_time_max < since:
        return False
    return file.event_time_min is None or file.event_time_min <= until


class _Spread:
    """Rows of some files over time, each taken as evenly spread over its own range."""

    def __init__(self, files: Sequence[FileRange], since: datetime, until: datetime) -> None:
        lows = [micros(f.event_time_min) if f.event_time_min is not None else micros(since) for f in files]
        highs = [micros(f.event_time_max) if f.event_time_max is not None else micros(until) for f in files]
        self._low: F64 = np.array(lows, np.float64)
        self._width: F64 = np.maximum(1.0, np.array(highs, np.float64) + 1 - self._low)
        self._rows: F64 = np.array([f.rows for f in files], np.float64)
        self._before = self._rows_before(micros(since))

    def _rows_before(self, us: float) -> float:
        return float((self._rows * np.clip((us - self._low) / self._width, 0.0, 1.0)).sum())

    def rows_to(self, us: int) -> float:
        """Rows from the beginning up to and with an instant."""
        return self._rows_before(us + 1) - self._before
