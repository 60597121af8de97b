"""When the checkpoints of an owner are saved, and what becomes of them while their store is away.

A checkpoint may wait: the log itself knows where it ends, and a checkpoint that is behind costs nothing but that the
source keeps its events a little longer. So the source is confirmed up to the last *saved* checkpoint, and never
further. While the store is away one checkpoint for each partition waits in memory, and batches are taken as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from evermark.breaker import Breaker, BreakerState
from evermark.checkpoints.base import Checkpoint
from evermark.errors import BusyError, DeniedError, EvermarkError, UnreachableError

# Where no event came, a position that only moved is saved this soon, whatever the interval is.
MOVED_S = 5.0
AWAY = (UnreachableError, BusyError, DeniedError)

T = TypeVar("T")


@dataclass(frozen=True)
class SavePolicy:
    """At the latest every `interval_s` or `event_count` events, whichever comes first. The default: every batch."""

    interval_s: float = 0.0
    event_count: int = 1
    last_s: float = 5.0  # how long saving may take when reading ends

    def due(self, waited_s: float, events: int) -> bool:
        if events >= self.event_count:
            return True
        return waited_s >= (self.interval_s if events else min(self.interval_s, MOVED_S))


class SavingObserver:
    """Told how saving goes. Nothing in here may block for long, or raise."""

    def saved(self, partition: int, took_s: float) -> None: ...

    def away(self, partition: int, error: EvermarkError, breaker: BreakerState) -> None:
        """The store did not take a checkpoint; it is tried again."""

    def back(self) -> None:
        """The store takes checkpoints again."""


@dataclass
class _Waiting:
    checkpoint: Checkpoint
    since: float
    events: int = 0


@dataclass(eq=False)
class CheckpointSaver:
    """The checkpoints of one owner on their way to the store. Used by one thread for each partition."""

    save: Callable[[int, Checkpoint], None]  # calls `saved`
    policy: SavePolicy
    breaker: Breaker
    clock: Callable[[], float]
    observer: SavingObserver
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _unconfirmed: dict[int, str] = field(default_factory=dict)  # positions that are saved
    _is_away: bool = False

    def saved(self, partition: int, position: str, took_s: float = 0.0) -> None:
        """A checkpoint is in the store, however it came there."""
        self._waiting.pop(partition, None)
        self._unconfirmed[partition] = position
        self.breaker.succeeded()
        self.observer.saved(partition, took_s)
        if self._is_away:
            self._is_away = False
            self.observer.back()

    def ask(self, partition: int, look: Callable[[], T]) -> T:
        """Read from the store, through the breaker. Raises one of `AWAY`; at once, without asking, while it is open.

        `partition`: for which it is asked. That the store can be read does not close the breaker: a save does.
        """
        if wait_s := self.breaker.wait_s(self.clock()):
            raise BusyError(
                f"the store of checkpoints did not answer {self.breaker.failures} times in a row, and is left alone",
                hint=f"it is asked again in {wait_s:.0f} s by itself",
            )
        try:
            return look()
        except AWAY as error:
            self._failed(partition, error)
            raise

    def save_first(self, partition: int, checkpoint: Checkpoint, *, is_away: bool) -> None:
        """Save where reading begins, whatever the policy says; later, if the store does not take it, or was just found
        to be away.
        """
        now = self.clock()
        self._waiting[partition] = _Waiting(checkpoint, now)
        if not is_away and not self.breaker.wait_s(now):
            self._try(partition)

    def offer(self, partition: int, checkpoint: Checkpoint, events: int) -> None:
        """Save it now if that is due, or later. Raises what shows that we are no longer the owner."""
        now = self.clock()
        waiting = self._waiting.setdefault(partition, _Waiting(checkpoint, now))
        waiting.checkpoint, waiting.events = checkpoint, waiting.events + events
        self._save_if_due(partition, now)

    def save_due(self, partition: int) -> None:
        """Save what has waited for long enough. Raises what shows that we are no longer the owner."""
        if partition in self._waiting:
            self._save_if_due(partition, self.clock())

    def save_rest(self, partitions: Iterable[int]) -> None:
        """Reading ends: save all that waits, even if the store was away a moment ago, within the time there is, and
        up to the first that the store does not take: each may take seconds to fail.
        """
        deadline = self.clock() + self.policy.last_s
        for partition in partitions:
            if partition in self._waiting and (self.clock() >= deadline or not self._try(partition)):
                return

    def forget(self, partition: int) -> None:
        """Its reading begins anew, perhaps elsewhere: what waited belongs to the past."""
        self._waiting.pop(partition, None)
        self._unconfirmed.pop(partition, None)

    def to_confirm(self, partition: int) -> str | None:
        """The position of the last save, once."""
        return self._unconfirmed.pop(partition, None)

    def _save_if_due(self, partition: int, now: float) -> None:
        waiting = self._waiting[partition]
        if self.policy.due(now - waiting.since, waiting.events) and not self.breaker.wait_s(now):
            self._try(partition)

    def _try(self, partition: int) -> bool:
        try:
            self.save(partition, self._waiting[partition].checkpoint)
        except AWAY as error:
            self._failed(partition, error)
            return False
        return True

    def _failed(self, partition: int, error: EvermarkError) -> None:
        now = self.clock()
        self.breaker.failed(now)
        self._is_away = True
        self.observer.away(partition, error, self.breaker.state(now))
