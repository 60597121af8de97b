"""The port to the plan and the state of block streams: kept in State (state.py), or in a test's memory.

Two owners may add ticks at the same time: no number is given out twice. Only one of them gets its batches into the log,
so only one confirms. A confirmed tick is removed; confirming it once more changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from evermark.errors import EvermarkError, IdentityError
from evermark.sources.blocks.chain import UnreadableError
from evermark.sources.blocks.decide.resume import StreamState
from evermark.sources.blocks.decide.ticks import Item, Move, Tick

_FORK = "fork: "
UNREADABLE = "unreadable: "


@dataclass(frozen=True)
class PlanState:
    """How far the plan of a partition is."""

    confirmed: int = 0  # the boundary up to which ticks are logged and applied to the streams' state
    last_tick: int = 0  # the greatest number given out
    touched: int = 0  # how far the nodes' listing was read
    choice: str = ""  # by which version of the choice of streams
    cold_before: int = 0  # streams last touched before this wait for their next event
    forgot_us: int = 0  # until then states were removed whose events the log may still hold
    # Whether there may be ticks, stale streams and unfinished ones: of an idle source nothing else need be asked.
    has_ticks: bool = True
    has_stale: bool = True
    has_unfinished: bool = True


@dataclass(frozen=True)
class Stale:
    """A stream whose next blocks could not be had when they were last tried."""

    block: int
    reason: str
    due: bool
    tick: int = 0  # the last one given out when the stream was marked: later ticks were made with the mark in view
    mark: int = 0  # a different number at each try
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
    def state(self, partition: int) -> PlanState: ...
    def begin(self, partition: int, cold_before: int) -> None: ...
    def ticks(self, partition: int) -> list[Tick]: ...
    def items(self, partition: int, ends: int) -> list[Item]: ...
    def moves(self, partition: int, ends: Sequence[int]) -> dict[str, Move]:
        """The states of streams after these ticks, in order; streams without a part in them are left out."""
        ...

    def known(self, streams: Sequence[str]) -> dict[str, Move]:
        """The confirmed states of these streams: their events are in the log."""
        ...

    def witness(self, stream: str) -> StreamState | None:
        """How far the stream was once taken, whether the log still has it or not: its chain can be compared."""
        ...

    def unfinished(self, partition: int) -> list[str]:
        """Streams of which a node had more than was confirmed."""
        ...

    def repeats(self, partition: int, starts: int) -> bool:
        """Whether a tick that starts there may hold events that the log has."""
        ...

    def add(self, partition: int, tick: Tick, items: Sequence[Item]) -> int:
        """Write a tick down and return its number; `tick.ends` is ignored."""
        ...

    def note_listed(self, partition: int, confirmed: int, touched: int, choice: str) -> None:
        """The listing was read up to `touched`, and nothing in it was to be taken."""
        ...

    def void(self, partition: int, starts: int) -> None:
        """Ticks that start there or later are not begun any more; slices of them stay readable."""
        ...

    def confirm(self, partition: int, to: int) -> None:
        """Apply the ticks up to `to`. Streams that they move are stale no longer, unless they were marked later."""
        ...

    def adopt(self, partition: int, tick: int, now_us: int) -> None:
        """Begin anew at a tick that the log has and no plan leads to: states of streams are kept as witnesses only.

        If `tick` is behind the confirmed boundary, a root is put there and nothing else changes until a tick that
        follows the root is confirmed: the caller may have lost its lease.
        """
        ...

    def stale(self, partition: int) -> dict[str, Stale]: ...
    def mark_stale(self, partition: int, stream: str, block: int, reason: str) -> None:
        """`lasted_s` counts from the first mark, and anew once the stream becomes unreadable or ceases to be."""
        ...

    def unmark_stale(self, stream: str, seen: Stale) -> None:
        """Nothing unless the mark is still the one that was seen."""
        ...

    def accept_fork(self, partition: int, stream: str) -> None:
        """A person says that the nodes' history of a stale stream is right, whatever was taken of it before."""
        ...

    def known_nodes(self, partitions: int) -> frozenset[str]: ...
    def remember_nodes(self, partitions: int, nodes: Sequence[str]) -> None: ...
    def forget(self, partition: int, older_s: float, chosen: Callable[[str, str], bool], now_us: int) -> int:
        """Remove the states of streams that are not chosen and did not change for so long; how many."""
        ...

    def close(self) -> None: ...
