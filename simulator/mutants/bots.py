"""Bugs of bots: what they are members of, and what waits for a session key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from evermark.delivery.bots.views import BotViews
from evermark.delivery.model import MembershipDelta, SourcePartition, Stay
from evermark.delivery.store.memory_bots import MemoryBots
from evermark.delivery.store.memory_parked import MemoryParked, MemoryTables
from simulator.mutants.mutant import Mutant
from simulator.scenario import STREAMS, session_of

_learn = MemoryBots.learn


def _all_published(self: MemoryBots, devices: Collection[str]) -> dict[str, frozenset[str]]:
    named = frozenset(session_of(p, stream, f"k{n}") for p in range(3) for stream in STREAMS for n in range(4))
    return dict.fromkeys(devices, named)


def _nobody_looks(self: BotViews, place: SourcePartition, users: set[str], *_: Any) -> set[str]:
    return users


def _learn_how_far_only(
    self: MemoryBots, source: str, partition: int, lessons: Sequence[MembershipDelta], epoch: int
) -> None:
    _learn(self, source, partition, [replace(one, stays={}) for one in lessons], epoch)


BOTS: tuple[Mutant, ...] = (
    Mutant(
        "members-unlearned",
        "a span is delivered to a bot before its joins and leaves were learned",
        ((BotViews, "_learn", _nobody_looks),),
    ),
    Mutant(
        "joined-for-the-batch",
        "a join counts for all of its batch",
        ((Stay, "covers", lambda _self, _at: True),),
    ),
    Mutant(
        "learned-not-kept",
        "how far was looked is kept, and what was found is not",
        ((MemoryBots, "learn", _learn_how_far_only),),
        120,
    ),
    Mutant(
        "sent-without-key",
        "sessions are taken for published that are not",
        ((MemoryBots, "_published", _all_published),),
    ),
    Mutant(
        "key-releases-nothing",
        "publishing a key leaves what waits for it where it is",
        ((MemoryBots, "_make_due", lambda *_: 0),),
    ),
    Mutant(
        "waits-by-an-old-look",
        "whether an event waits is decided by what was published before it was parked",
        ((MemoryTables, "lacks_key", lambda *_: True),),
        120,
    ),
    Mutant(
        "newer-not-held-behind",
        "events of a session with a key are sent although earlier ones are in the queue",
        ((MemoryBots, "_queued", lambda *_: {}),),
        120,
    ),
    Mutant(
        "session-overtaken",
        "parked events of a session overtake each other",
        ((MemoryParked, "_before_in_session", lambda *_: []),),
        300,
    ),
)
