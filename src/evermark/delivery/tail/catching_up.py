"""Clients of the live tail that are behind: one reading of the log for all that stand at the same place.

Thousands may fall behind together, and each would read the same events. A bounded amount of what was
read last is kept, for clients that come to that place a little later. Readings end at the same places wherever they
began (`end_of_reading`), so that clients that stood at different places soon stand at the same ones.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from evermark.delivery.model import SourcePartition
from evermark.delivery.tail.place import Places, Resync
from evermark.errors import EvermarkError

# What a reading takes in memory beside its text, with its key: measured with 2 to 100 places.
_READING_BYTES, _PLACE_BYTES = 1_000, 200


@dataclass(frozen=True)
class Reading:
    """Events for a client that is behind, and where it is then."""

    text: bytes
    places: Places
    events: int
    resyncs: tuple[Resync, ...]
    meets: int | None  # the number of the chunk with which the ring goes on there; None: it is not level with the ring
    # Partitions in which the log could not be read on there, and why.
    stuck: Mapping[SourcePartition, EvermarkError] = field(default_factory=dict)


class SharedReadings:
    """Used in one event loop."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[Hashable, Reading] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[Hashable, asyncio.Task[Reading]] = {}

    async def get(self, key: Hashable, read: Callable[[], Coroutine[Any, Any, Reading]]) -> Reading:
        """What was read from that place on; it is read if it is not known. A client that goes away ends no reading."""
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.ensure_future(read())
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    def _ended(self, key: Hashable, task: asyncio.Task[Reading]) -> None:
        del self._under_way[key]
        if task.cancelled() or task.exception() is not None:
            return
        found = task.result()
        if found.meets is not None or found.resyncs or found.stuck:
            return  # there is more behind it by now; what is gone may be more; and what is stuck may be back
        self._kept[key] = found
        self._bytes += _size(found)
        while self._bytes > self._bytes_max:
            _, old = self._kept.popitem(last=False)
            self._bytes -= _size(old)


def _size(kept: Reading) -> int:
    """Many have no text: clients that few events are for, or that stand still somewhere, have a reading a batch."""
    return len(kept.text) + _READING_BYTES + _PLACE_BYTES * len(kept.places)


def end_of_reading(sizes: Sequence[int], batches: Sequence[int], bytes_max: int) -> int:
    """How many of the first events are sent at a time: about so many bytes, at least one event.

    If it can be, a reading ends with a batch; of several with the batch whose number is divided by two most often,
    wherever the reading began.
    """
    full = (n for n, size in enumerate(accumulate(sizes), 1) if size >= bytes_max)
    count = next(full, len(sizes))
    if count == len(sizes):
        return count
    ends = [n for n in range(max(1, count // 2), count + 1) if batches[n] != batches[n - 1]]
    return max(ends, key=lambda n: (batches[n - 1] & -batches[n - 1], n), default=count)
