"""What must hold of log, head, checkpoint and source, looked at after every effect that landed.

A violation ends the run where it happened. What must hold of deliveries is in `account`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.model import SourcePartition
from evermark.log.head import Head
from simulator.broken import require
from simulator.source import Made, SimLog


def require_epoch(leases: MemoryLeases, lease: str, epoch: int, what: str) -> None:
    held = leases._held.get(lease)
    current = held.epoch if held else 0
    require(epoch == current, f"{what} written with epoch {epoch} of {lease}; the current one is {current}")


def lease_of(leases: MemoryLeases, source: str, partition: int) -> str:
    """The lease of a partition: its own, if its source is divided."""
    own = source_lease(source, partition)
    return own if own in leases._held else source_lease(source)


class Truth:
    """Knows everything that was produced, and what of it is safe."""

    def __init__(
        self,
        logs: Mapping[str, SimLog],
        leases: MemoryLeases,
        checkpoints: MemoryCheckpoints,
        *,
        from_now: bool = False,
    ) -> None:
        self._logs = logs
        self._leases = leases
        self._checkpoints = checkpoints
        self._from_now = from_now
        self.began: dict[SourcePartition, str] = {}  # where it was first noted that reading begins
        self.never_owed = 0  # how many events stood before that
        self._lost: dict[SourcePartition, Checkpoint] = {}
        self.made: dict[SourcePartition, list[Made]] = defaultdict(list)  # without repeats
        self.begun: dict[SourcePartition, int] = {}  # the epoch of the last owner that began
        self._durable_ids: dict[str, set[str]] = defaultdict(set)
        self._durable_seen: dict[str, int] = defaultdict(int)
        self._safe: dict[SourcePartition, int] = defaultdict(int)  # how many of `made` were seen to be durable

    def after_commit(self, source: str, batch: int, partition: int, epoch: int) -> None:
        log, place = self._logs[source], SourcePartition(source, partition)
        require(epoch >= self.begun.get(place, 0), f"epoch {epoch} committed to {place} after a later owner began")
        mine = [a for a in log.commits if a.partition == partition]
        require([a.batch for a in mine] == list(range(1, len(mine) + 1)), f"{place}: batches are not dense")
        require(mine[-1].batch == batch, f"{place}: batch {batch} was not the last")
        ids = [row.event_id for append in mine for row in log.rows_of(append)]
        twice = [i for i, n in Counter(ids).items() if n > 1]
        require(not twice, f"{place}: in the log more than once: {twice[:3]}")
        expected = [made.event_id for made in self.made[place][: len(ids)]]
        require(ids == expected, f"{place}: batch {batch} does not follow in source order")

    def after_sync(self, source: str) -> None:
        log = self._logs[source]
        for append in log.commits[self._durable_seen[source] : log.durable_commits()]:
            self._durable_ids[source].update(row.event_id for row in log.rows_of(append))
        self._durable_seen[source] = log.durable_commits()

    def after_head(self, source: str, partition: int, head: Head) -> None:
        require_epoch(self._leases, lease_of(self._leases, source, partition), head.epoch, "a log head")
        durable = self._logs[source].durable_batch(partition)
        require(head.batch <= durable, f"head of {source}/{partition} at {head.batch}; durable is {durable}")
        place = SourcePartition(source, partition)
        if self._from_now and place not in self.began:
            self.began[place] = head.position
            owed = [made for made in self.made[place] if made.position >= head.position]
            self.never_owed += len(self.made[place]) - len(owed)
            self.made[place][:] = owed

    def after_checkpoint(self, source: str, partition: int, checkpoint: Checkpoint) -> None:
        require_epoch(self._leases, lease_of(self._leases, source, partition), checkpoint.epoch, "a checkpoint")
        place = SourcePartition(source, partition)
        made, safe = self.made[place], self._safe[place]
        while safe < len(made) and made[safe].position < checkpoint.position:
            require(
                made[safe].event_id in self._durable_ids[source],
                f"checkpoint of {place} at {checkpoint.position}, but {made[safe].event_id} is not durable",
            )
            safe += 1
        self._safe[place] = safe

    def after_confirm(self, source: str, partition: int, end: str) -> None:
        saved = self._checkpoints.list(source).get(partition)
        known = [one.position for one in (saved, self._lost.get(SourcePartition(source, partition))) if one is not None]
        require(
            bool(known) and end <= max(known),
            f"{source}/{partition} was confirmed to {end}; the checkpoint is {saved}",
        )

    def before_loss(self, place: SourcePartition) -> None:
        """Its checkpoint is about to be lost: what it said was passed may still be confirmed."""
        saved = self._checkpoints.list(place.source).get(place.partition)
        if saved is not None:
            self._lost[place] = saved
