"""Suspecting a gap, and judging how large one is. Pure.

Time alone proves nothing: an idle night is no gap. A jump in the times of events is a reason to ask the source for
evidence (`Source.check`: positions, tokens, the hash chain), before the batch behind the jump is taken. A gap is what
the source then says is missing, or says by itself; its size only decides whether live clients have to be told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the file's models name the limits, and read nothing
    from evermark.ingest.batch_taker import WrittenBatch


@dataclass(frozen=True)
class GapLimits:
    enabled: bool = True  # whether a jump is a reason to ask; gaps that a source reports by itself are always gaps
    max_gap_s: float = 300.0
    small_gap_s: float = 3600.0

    def is_large(self, last_event: datetime | None, now: datetime) -> bool:
        """Whether so much may have happened that consumers should take their state anew."""
        return last_event is not None and (now - last_event).total_seconds() > self.small_gap_s


@dataclass
class JumpWatch:
    """The times of the events of one source, by partition."""

    limits: GapLimits
    _last: dict[int, datetime] = field(default_factory=dict)

    def jump_s(self, written: WrittenBatch) -> float | None:
        """By how much a batch that is about to be taken jumps, if that is more than `max_gap`."""
        last, times = self._last.get(written.partition), event_times(written)
        if not self.limits.enabled or last is None or times is None:
            return None
        jump_s = (times[0] - last).total_seconds()
        return jump_s if jump_s > self.limits.max_gap_s else None

    def taken(self, batches: Iterable[WrittenBatch]) -> None:
        for each in batches:
            if (times := event_times(each)) is not None:
                self._last[each.partition] = max(times[1], self._last.get(each.partition, times[1]))


def event_times(written: WrittenBatch) -> tuple[datetime, datetime] | None:
    """The first and the last event time of a batch, by the statistics of its files."""
    ranges = [file.stats.get("event_time", (None, None)) for file in written.files]
    ends = [datetime.fromisoformat(end) for low, high, *_ in ranges for end in (low, high) if end is not None]
    return (min(ends), max(ends)) if ends else None
