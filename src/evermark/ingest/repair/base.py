"""A gap in a source, from finding it to having closed it. Pure.

Steps: opened → closed → done. *Opened*: known, and recorded before anything is touched. *Closed*: every event the log
lacked is in it, durably, and the checkpoint is where reading goes on. *Done*: the source reads from there. A crash
leads back to the last step recorded; doing a step twice is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from evermark.errors import BusyError, DeniedError, EvermarkError, GapError, IdentityError, SetupError

TRIES_MAX = 3
TEXT_MAX = 2000
KEPT_MAX = 100
TRIES_WITHIN = timedelta(hours=1)


class Step(StrEnum):
    OPENED = "opened"
    CLOSED = "closed"
    DONE = "done"
    FAILED = "failed"


class Choice(StrEnum):
    REPAIR = "repair"  # take the events that the log lacks, then go on
    SKIP = "skip"  # go on from now; events in between are lost, and reported


@dataclass(frozen=True)
class Recovery:
    id: int
    source: str
    partition: int
    choice: Choice
    by_person: bool
    reason: str
    left_at: str
    step: Step
    position: str | None
    tries: int
    taken: int
    error: str
    opened_at: datetime
    changed_at: datetime


class RecoveryStore(Protocol):
    """Recoveries of one deployment. Everything that writes takes the epoch of the source's lease, and is refused with
    `StaleError` when it is old. A partition has at most one unfinished recovery.
    """

    def current(self, source: str, partition: int) -> Recovery | None:
        """The recovery that is not finished."""

    def past(self, source: str) -> list[Recovery]:
        """The newest first, at most `KEPT_MAX`."""

    def open(
        self, source: str, partition: int, reason: str, left_at: str, epoch: int, chosen: Choice | None = None
    ) -> Recovery:
        """An open recovery stays; but what a person has `chosen` replaces its choice, unless the gap is closed."""

    def move(self, recovery: Recovery, step: Step, epoch: int, *, error: str = "", tried: bool = False) -> None:
        """To another step. A finished recovery does not change."""

    def taking(self, recovery: Recovery, logged: int, rows: int, epoch: int) -> None:
        """The batch behind batch `logged`, the last in the log, will have so many events. What was noted before is
        counted as taken if its batch is in the log, and else forgotten.
        """

    def close_gap(self, recovery: Recovery, position: str, epoch: int) -> None:
        """To the step `closed`: what was noted last is taken, too. Refused with `BusyError` if a person has chosen
        otherwise meanwhile.
        """


def may_open(error: EvermarkError) -> bool:
    """Whether a failure is a gap that can be closed without a person. Another server is no such gap."""
    return isinstance(error, GapError) and not isinstance(error, IdentityError)


def exhausted(past: Sequence[Recovery], now: datetime) -> bool:
    """Whether there were so many tries of late that another would be no better. A person's choice resets them."""
    tries = 0
    for recovery in sorted(past, key=lambda r: r.id, reverse=True):
        if now - recovery.changed_at > TRIES_WITHIN:
            continue
        if recovery.by_person:
            break
        tries += max(1, recovery.tries)
    return tries >= TRIES_MAX


def chosen_otherwise(recovery: Recovery) -> BusyError:
    return BusyError(
        f"recovery {recovery.id} of {recovery.source} was changed while it was carried out",
        hint="it begins again, as chosen",
    )


def given_up(error: EvermarkError) -> GapError:
    """Where something is not set up, or not allowed, the last error alone says what helps."""
    said = f"the gap could not be closed in {TRIES_MAX} tries within the hour, at last with: {error.message[:500]}"
    if isinstance(error, (SetupError, DeniedError)) and error.hint:
        return GapError(said, hint=f"{error.hint}. Then `evermark source recover` starts one more try")
    return for_a_person(said)


def found_again(error: str) -> GapError:
    return for_a_person(f"{TRIES_MAX} gaps were closed or tried within the hour, and here is another: {error[:500]}")


def for_a_person(said: str) -> GapError:
    return GapError(
        said,
        hint="docs/playbook.md, `A slot is lost again and again`, has the causes: often max_slot_wal_keep_size, or a"
        " transaction that holds the slot back; for MongoDB docs/mongo.md, `When the oplog does not reach back`. Then"
        " `evermark source recover` starts one more try",
    )
