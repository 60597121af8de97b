"""A hole in a source, from finding it to having closed it. Pure.

Steps: opened → closed → done. *Opened*: known, and recorded before anything is touched. *Closed*: every event the log
lacked is in it, durably, and the checkpoint is where reading goes on. *Done*: the source reads from there. A crash
leads back to the last step recorded; doing a step twice is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from evermark.errors import EvermarkError, GapError, IdentityError

TRIES_MAX = 3
TRIES_WITHIN = timedelta(hours=1)
PLAYBOOK_HINT = (
    "docs/playbook.md, `A slot is lost again and again`: raise max_slot_wal_keep_size, or end the transaction that"
    " holds the slot back; then `evermark source recover` starts one more try"
)


class Step(StrEnum):
    OPENED = "opened"
    CLOSED = "closed"
    DONE = "done"
    FAILED = "failed"


class Choice(StrEnum):
    REPAIR = "repair"  # take what the log lacks, then go on
    SKIP = "skip"  # go on from now; what lies between is lost, and said to be


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


def may_open(error: EvermarkError) -> bool:
    """Whether a failure is a hole that can be closed without asking anybody. Another server is not: a person must."""
    return isinstance(error, GapError) and not isinstance(error, IdentityError)


def exhausted(past: Sequence[Recovery], now: datetime) -> bool:
    """Whether there were so many tries of late that another would be no better. A person's word counts anew."""
    tries = 0
    for recovery in sorted(past, key=lambda r: r.id, reverse=True):
        if now - recovery.changed_at > TRIES_WITHIN:
            continue
        if recovery.by_person:
            break
        tries += max(1, recovery.tries)
    return tries >= TRIES_MAX


def given_up(error: str) -> GapError:
    return GapError(
        f"the hole could not be closed in {TRIES_MAX} tries within the hour, at last with: {error[:500]}",
        hint=PLAYBOOK_HINT,
    )
