"""The port that keeps replays. `replay.plan` decides.

Contract of `ReplayStore` (checked by `ReplayContract` over every backend):

- Every call that writes takes a lease epoch, and is refused with `StaleError` when the epoch is old: `register` the
  epoch of the source's lease, for ingest finds control events; all others the epoch of the `deliver` lease.
- `register` is idempotent by the control event's id: one event asks once, however often it is found.
- `settle` is one transaction: the mark moves by compare-and-set, together with the parked events. A target
  that is not where the work began, or was ended meanwhile, raises `ConflictError`, and nothing is written.
- A replay's row is never removed: it is the answer to "was this done?".
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from string import ascii_lowercase, digits
from typing import Protocol

from evermark.delivery.replay.plan import Replay, Replayed, ReplayState, Request, Target, TargetState
from evermark.delivery.replay.timeslice import TimeSlice
from evermark.errors import ConflictError, NotFoundError

CLEARED_AT_ONCE_MAX = 1_000
LIST_MAX = 10_000


class ReplayStore(Protocol):
    def register(self, request: Request, epoch: int, *, partition: int = 0) -> bool:
        """A control event asked; False when it had been registered before."""

    def request(self, request: Request, epoch: int) -> str:
        """A person asks; returns the new replay's id."""

    def cancel(self, replay: str, epoch: int) -> bool:
        """A person ends it; its parked rows are dropped and counted. False when it was over already."""

    def open(self) -> list[Replay]:
        """Waiting and running replays with their targets, in the order of the requests: all of them, for one that is
        left out would not run before an earlier one is over, which may be somebody else's."""

    def newest(self, limit: int) -> list[Replay]: ...

    def one(self, replay: str) -> Replay: ...

    def open_sources(self) -> set[str]:
        """Sources with a replay that is not over: their log must keep all events."""

    def start(self, replay: str, heads: Mapping[int, int], rows: int, targets: Sequence[Target], epoch: int) -> None:
        """From waiting to running, with everything that is fixed by its start."""

    def note_waiting(self, replay: str, reason: str, epoch: int) -> None:
        """Why it cannot start; its start ends that. Does nothing if it is not waiting any more."""

    def settle(self, begun: Target, piece: TimeSlice, step: Replayed, pace: float, now: datetime, epoch: int) -> Target:
        """Close one step of a target; returns it as it then is. `pace`: how many times as long it might have taken."""

    def pass_by(self, begun: Target, epoch: int) -> Target:
        """Nothing is left in its window: the target is done."""

    def note_stuck(self, target: Target, since: datetime, epoch: int) -> None:
        """Nothing of the target could be delivered since then: its subscription is not served, or one before it was
        given up. Does nothing if it is stuck already, or ended."""

    def end_target(self, replay: str, subscription: str, reason: str, epoch: int) -> None: ...

    def end(self, replay: str, state: ReplayState, reason: str, epoch: int) -> None: ...

    def finish(self, replay: str, epoch: int) -> bool:
        """Done, if no target of it runs any more."""

    def parked_now(self, subscription: str) -> int:
        """How many rows replays have parked for it."""

    def uncleared(self) -> list[Replay]:
        """Ended replays whose request the source still shows; the first of them, if they are many."""

    def cleared(self, replay: str, epoch: int) -> None: ...


def new_replay_id() -> str:
    return "".join(secrets.choice(ascii_lowercase + digits) for _ in range(12))


def require_begun(begun: Target, found: Target | None) -> Target:
    """The target, if it is exactly where the work began."""
    if found is None or found.state is not TargetState.RUNNING or found.mark != begun.mark:
        raise moved(begun)
    return found


def moved(begun: Target) -> ConflictError:
    return ConflictError(
        f"replay {begun.replay} for {begun.subscription!r} is not where this work began",
        hint="it was cancelled, or another worker did this work meanwhile; it is not repeated",
    )


def not_waiting(replay: str) -> ConflictError:
    return ConflictError(f"replay {replay} is not waiting any more", hint="it was cancelled, or has started")


def unknown(replay: str) -> NotFoundError:
    return NotFoundError(f"no replay has the id {replay[:80]!r}", hint="`evermark replay list` shows those there are")
