"""The rule that keeps an event's id once in the log.

A slice that is read may hold events the log already has, for two reasons: a crash came after a batch was committed and
before its end was checkpointed (`repeats_to`), or the source itself may give an event again at a later position
(`Source.may_repeat_from`). Where either is possible, the ids in the log from that position on are looked up before the
slice is written, and its events with such an id are dropped and counted. Everywhere else nothing is looked up:
positions only grow, so an event cannot come twice. A gap is closed by the same rule over the whole log: what the
source has under an id of the log is left out (`evermark.spark.repair`).

`RecentIds` is an aid beside that rule: it knows ids that were logged a moment ago, and drops an event that a source
gives again against its word. The log stays the truth; what the cache has forgotten, the rule still knows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from evermark.event_file import Rows, WrittenEvents, as_batches


class LoggedIds(Protocol):
    def ids_from(self, partition: int, position: str) -> pa.Array:
        """The ids of the partition's events at this position and after it."""


def repeats_to(position: str | None, logged_to: str | None) -> str | None:
    """Up to which position the log holds events that reading on at `position` gives again; None: it holds none.

    `logged_to` is the greatest position in the log's last batch.
    """
    return logged_to if position is not None and logged_to is not None and position <= logged_to else None


def looked_up_from(start: str, may_repeat_from: str, repeats_to: str | None) -> str | None:
    """From which position on the ids of the log are looked up for a slice that begins at `start`; None: none is."""
    if may_repeat_from < start:
        return may_repeat_from
    return start if repeats_to is not None and start <= repeats_to else None


_FEW_ROWS = 1000  # up to here a look at each id is quicker than a table of all known ids


@dataclass(frozen=True)
class RecentLimits:
    size_max: int = 10_000
    ttl_s: float = 180.0


class RecentIds:
    """The ids of events that were logged of late: so many at most, and each for so long. Used by one thread at a time.

    Ids of a batch that is being written are `read`; they count once the batch is in the log, and `logged`.
    """

    def __init__(self, limits: RecentLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        # By partition: ids of a source need not differ between its partitions.
        self._logged_at: OrderedDict[tuple[int, str], float] = OrderedDict()
        self._read: dict[int, deque[str]] = {}

    def __len__(self) -> int:
        self._forget()
        return len(self._logged_at)

    def left_of(self, partition: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The partition's batch without the events that are known."""
        if not len(self):
            return batch
        ids = batch.column("event_id")
        if batch.num_rows <= _FEW_ROWS:
            fresh = pa.array([(partition, each) not in self._logged_at for each in ids.to_pylist()], pa.bool_())
        else:
            mine = [each for of, each in self._logged_at if of == partition]
            fresh = pc.invert(pc.is_in(ids, value_set=pa.array(mine, ids.type)))
        return batch.filter(fresh)

    def forget_read(self) -> None:
        """Another batch begins: what was read of the last one, and not logged, is read again."""
        self._read.clear()

    def read(self, partition: int, ids: pa.Array) -> None:
        last = ids.slice(max(0, len(ids) - self._limits.size_max)).to_pylist()  # more than that would not be kept
        self._read.setdefault(partition, deque(maxlen=self._limits.size_max)).extend(last)

    def logged(self, partition: int) -> None:
        """To be called once the batch is in the log, durably: before that its events may still be lost."""
        now = self._clock()
        for each in self._read.pop(partition, ()):
            self._logged_at.pop((partition, each), None)
            self._logged_at[partition, each] = now
        self._forget()

    def clear(self) -> None:
        self._read.clear()
        self._logged_at.clear()

    def _forget(self) -> None:
        oldest = self._clock() - self._limits.ttl_s
        while self._logged_at:
            first = next(iter(self._logged_at))
            if len(self._logged_at) <= self._limits.size_max and self._logged_at[first] > oldest:
                return
            del self._logged_at[first]


class Deduplicated:
    """The rows of one slice without the events that the log has; `dropped` counts these events.

    Events that stand in a file are given on unseen, unless the log may hold some of them: no source gives such a file
    twice, as it may an event that it has forgotten.
    """

    def __init__(
        self,
        batches: Iterator[Rows],
        logged: LoggedIds,
        partition: int,
        looked_up_from: str | None,
        recent: RecentIds | None = None,
    ) -> None:
        self._batches = batches
        self._partition = partition
        self._recent = recent
        self._known = logged.ids_from(partition, looked_up_from) if looked_up_from is not None else None
        self.dropped = 0

    def __iter__(self) -> Iterator[Rows]:
        for batch in self._batches if self._known is None else as_batches(self._batches):
            if isinstance(batch, WrittenEvents):
                yield batch
                continue
            kept = batch
            if self._known is not None:
                kept = kept.filter(pc.invert(pc.is_in(kept.column("event_id"), value_set=self._known)))
            if self._recent is not None:
                kept = self._recent.left_of(self._partition, kept)
                self._recent.read(self._partition, kept.column("event_id"))
            self.dropped += batch.num_rows - kept.num_rows
            yield kept
