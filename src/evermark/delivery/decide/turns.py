"""Which subscriptions outside the group are served next, and together with which others. Pure.

Slow or failing subscriptions share turns only with others of the same class; each class has one turn running at a time.
Every other subscription has a turn of its own, a few at once, which lasts until another subscription waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from evermark.delivery.model import Subscription

# A turn that others wait for, and a piece of work in it, end after this.
TURN_S = 10.0
ALONE_AT_ONCE = 6
SHARED_MAX = 16
# Of subscriptions whose receiver is most likely well: thousands may have left together when this process was held up.
SHARED_WELL_MAX = 128


class TurnClass(Enum):
    NONE = "none"
    FAILING = "failing"
    LATE = "late"  # just left the group, which would have had to wait: slow, or caught by a stall of ours
    SLOW = "slow"
    NEAR = "near"  # quick, and about to join together: the group waits once


@dataclass(frozen=True)
class Turn:
    turn_class: TurnClass
    subscriptions: tuple[Subscription, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.subscriptions)


def next_turns(
    waiting: Iterable[Subscription],
    company_of: Callable[[Subscription], TurnClass],
    serving: Sequence[TurnClass],
    alone_at_once: int = ALONE_AT_ONCE,
) -> tuple[list[Turn], bool]:
    """The turns that begin now, and whether a subscription has to wait for a turn of its own.

    `waiting`: due subscriptions that are not being served, the longest wait first. `serving`: the classes of the
    subscriptions being served.
    """
    by_company: dict[TurnClass, list[Subscription]] = {}
    for one in waiting:
        by_company.setdefault(company_of(one), []).append(one)
    alone = by_company.pop(TurnClass.NONE, [])
    free_kinds = [kind for kind in by_company if kind not in serving]
    turns = [Turn(kind, tuple(by_company[kind][: _shared_max(kind)])) for kind in free_kinds]
    free = max(0, alone_at_once - serving.count(TurnClass.NONE))
    return turns + [Turn(TurnClass.NONE, (one,)) for one in alone[:free]], len(alone) > free


def _shared_max(kind: TurnClass) -> int:
    return SHARED_WELL_MAX if kind in (TurnClass.LATE, TurnClass.NEAR) else SHARED_MAX


def drawn(now: datetime, name: str) -> str:
    """Decides whose parked deliveries come first where not all can: the lesser hash of the time and the name."""
    return hashlib.md5(f"{now.isoformat()}{name}".encode(), usedforsecurity=False).hexdigest()


def goes_on(turn: Turn, took_s: float, *, queued: bool) -> bool:
    """Whether a turn whose work went well takes up the next piece, or ends."""
    return turn.turn_class is TurnClass.NONE and not (queued and took_s >= TURN_S)
