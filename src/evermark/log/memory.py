"""An append log in memory, with the durability of the real one: what was not synced may vanish with the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evermark import failpoint
from evermark.log.append import require_tail
from evermark.log.base import Append, Tail


class MemoryLog:
    """`AppendLog` in memory. `crash` is the power cut; `commits` is what a reader of the log would see."""

    def __init__(self) -> None:
        self.commits: list[Append] = []
        self._tails: dict[int, Tail] = {}
        self._durable: tuple[int, dict[int, Tail]] = (0, {})

    def tail(self, partition: int) -> Tail:
        return self._tails.get(partition, Tail(0, 0, None))

    def fence(self, partition: int, epoch: int) -> Tail:
        tail = self.tail(partition)
        require_tail((tail.epoch, tail.batch), Append(partition, tail.batch + 1, epoch, "", "", ()), "memory")
        self._tails[partition] = replace(tail, epoch=epoch)
        return self._tails[partition]

    def fence_all(self, partitions: Sequence[int], epoch: int) -> dict[int, Tail]:
        return {partition: self.fence(partition, epoch) for partition in partitions}

    def commit(self, append: Append) -> None:
        tail = self.tail(append.partition)
        if (tail.epoch, tail.batch) == (append.epoch, append.batch) and append in self.commits:
            return
        require_tail((tail.epoch, tail.batch), append, "memory")
        self.commits.append(append)
        self._tails[append.partition] = Tail(append.batch, append.epoch, append.end, append.rows)
        failpoint.hit("log.committed")

    def sync(self) -> int:
        self._durable = (len(self.commits), dict(self._tails))
        return len(self.commits)

    def crash(self) -> None:
        """Back to what was synced."""
        count, tails = self._durable
        del self.commits[count:]
        self._tails = dict(tails)
