"""Where plans and the state of block streams are kept: State (store.py), or a test's memory.

What two owners may do at the same time: both may add ticks (no number is given out twice), and only one of them will
have its batches in the log, so only one confirms. A tick that was confirmed is gone; confirming it once more changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from evermark.errors import EvermarkError, IdentityError
from evermark.sources.blocks.chain import UnreadableError
from evermark.sources.blocks.plan import Item, Move, Tick
from evermark.sources.blocks.resume import Known

_FORK = "fork: "
UNREADABLE = "unreadable: "


@dataclass(frozen=True)
class PlanState:
    """What is known of a partition as a whole."""

    confirmed: int = 0
    last_tick: int = 0
    touched: int = 0
    wanted: str = ""
    cold_before: int = 0
    forgot_us: int = 0


@dataclass(frozen=True)
class Stale:
    """A gap that could not be filled when it was last tried."""

    block: int
    reason: str
    due: bool
    tick: int = 0  # the last one that was given out when it was tried: later ones are made by somebody who knows of it
    mark: int = 0  # another one each time it is tried
    lasted_s: float = 0.0  # for how long it has been unreadable; or stale for any other reason

    @property
    def fork(self) -> bool:
        """Whether a person has to look: no node will ever have what follows."""
        return self.reason.startswith(_FORK)

    @property
    def unreadable(self) -> bool:
        """Whether the block is there, with an event that no node gives in a form that can be read."""
        return self.reason.startswith(UNREADABLE)


def stale_reason(error: EvermarkError) -> str:
    if isinstance(error, UnreadableError):
        return f"{UNREADABLE}{error.message}"
    return f"{_FORK}{error.message}" if isinstance(error, IdentityError) else error.message


class Plans(Protocol):
    def standing(self, partition: int) -> PlanState: ...
    def begin(self, partition: int, cold_before: int) -> None: ...
    def ticks(self, partition: int) -> list[Tick]: ...
    def items(self, partition: int, ends: int) -> list[Item]: ...
    def moves(self, partition: int, ends: Sequence[int]) -> dict[str, Move]:
        """Where streams stand after these ticks, in order; streams they say nothing of are left out."""
        ...

    def known(self, streams: Sequence[str]) -> dict[str, Move]:
        """What was confirmed of these streams, and is in the log."""
        ...

    def witness(self, stream: str) -> Known | None:
        """How far the stream was once taken, whether the log still has it or not: its chain can be compared."""
        ...

    def unfinished(self, partition: int) -> list[str]:
        """Streams of which more was there than was confirmed."""
        ...

    def repeats(self, partition: int, starts: int) -> bool:
        """Whether a tick that starts there may give events that the log has."""
        ...

    def add(self, partition: int, tick: Tick, items: Sequence[Item]) -> int:
        """Write a tick down and return its number; `tick.ends` is not looked at."""
        ...

    def looked(self, partition: int, confirmed: int, touched: int, wanted: str) -> None:
        """The listing was looked through up to there, and nothing of it was to be taken."""
        ...

    def void(self, partition: int, starts: int) -> None:
        """Ticks that start there or later are not begun any more; those under way stay readable."""
        ...

    def confirm(self, partition: int, to: int) -> None:
        """Streams that these ticks move are stale no longer, unless they were marked after their tick was made."""
        ...

    def adopt(self, partition: int, tick: int, now_us: int) -> None:
        """Begin anew at a tick that the log has and no plan leads to; what is known of streams can only be witnessed.

        Where that is behind what was confirmed, a root is put there and nothing else changes before a tick that
        follows it is confirmed: whoever asks may be an owner of old.
        """
        ...

    def stale(self, partition: int) -> dict[str, Stale]: ...
    def mark_stale(self, partition: int, stream: str, block: int, reason: str) -> None:
        """How long it lasts is counted from the first mark, and anew once it becomes unreadable or ceases to be."""
        ...

    def unmark_stale(self, stream: str, seen: Stale) -> None:
        """Nothing unless the mark is the one that was seen."""
        ...

    def accept_fork(self, partition: int, stream: str) -> None:
        """A person's word: what the nodes have of a stale stream now is right, whatever was taken of it before."""
        ...

    def family(self, partitions: int) -> frozenset[str]: ...
    def learn(self, partitions: int, nodes: Sequence[str]) -> None: ...
    def forget(self, partition: int, older_s: float, wanted: Callable[[str, str], bool], now_us: int) -> int:
        """Forget streams that nobody wants and that did not change for so long; how many."""
        ...

    def close(self) -> None: ...
