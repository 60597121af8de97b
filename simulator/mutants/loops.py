"""Bugs of the loops: of holding a lease, of owning a source, of owning delivery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evermark.cluster.holding import HeldLease
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.run.owner import DeliveryOwner
from evermark.errors import EvermarkError
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.owner import SourceOwner
from evermark.runtime import Steps, Wake
from simulator.mutants.mutant import Mutant

_LONG_S = 1e3
_read = SourceOwner._read
_follow = DeliveryOwner._follow
_repeated = DeliveryOwner._repeated


def _reads_on(
    self: SourceOwner, taker: BatchTaker, active: Sequence[int], ends: Sequence[Wake], cuts: Sequence[Wake]
) -> Any:
    ending, _lost, *others = cuts
    return _read(self, taker, active, ends, (ending, *others))


def _follows_on(self: DeliveryOwner, follower: Follower, ends: tuple[Wake, ...]) -> None:
    ended, stopping, _lost, *others = ends
    _follow(self, follower, (ended, stopping, *others))


_never_late = property(lambda self: self.runtime.monotonic() + _LONG_S)


def _never_ends(self: SourceOwner, wait_s: float, ending: Wake) -> Steps[None]:
    yield from ()


def _all_or_none(
    taker: BatchTaker, batches: Sequence[WrittenBatch], on_taken: Callable[[WrittenBatch], None], _feeds: object
) -> dict[int, EvermarkError]:
    try:
        for taken in batches:
            taker.take(taken)
            on_taken(taken)
            taker.confirm(taken.partition, taken.end)
    except EvermarkError as error:
        return {taken.partition: error for taken in batches}
    return {}


class _Kept:
    """An attribute that is reset at the second try."""

    def __get__(self, owner: DeliveryOwner, _: type) -> LiveGroup | None:
        found: LiveGroup | None = owner.__dict__.get("kept")
        return found

    def __set__(self, owner: DeliveryOwner, live: LiveGroup | None) -> None:
        tried = live is None and owner.__dict__.pop("fresh", False)
        if not tried:
            owner.__dict__.update(kept=live, fresh=live is not None)


def _without_queue(
    self: DeliveryOwner, name: str, step: Callable[[], object], every_s: float, ends: tuple[Wake, ...]
) -> Callable[[], None]:
    return _repeated(self, name, (lambda: None) if name == "queue" else step, every_s, ends)


LOOPS: tuple[Mutant, ...] = (
    Mutant(
        "read-without-lease",
        "an owner that lost its lease goes on reading",
        ((SourceOwner, "_read", _reads_on),),
    ),
    Mutant(
        "delivers-without-lease",
        "an owner that lost its lease goes on delivering",
        ((DeliveryOwner, "_follow", _follows_on),),
    ),
    Mutant(
        "missed-renewals-unnoticed",
        "a lease that cannot be renewed for longer than it lasts is taken for held",
        ((HeldLease, "lost_at", _never_late),),
    ),
    Mutant(
        "neighbours-fail-along",
        "a partition whose batch cannot be taken keeps the others from theirs",
        (("evermark.ingest.reading", "take_each", _all_or_none),),
    ),
    Mutant(
        "failed-for-good",
        "a partition that failed is not read again while the others are read",
        ((SourceOwner, "_end_after", _never_ends),),
    ),
    Mutant(
        "handed-over-after-the-end",
        "fresh batches are handed over while the end of delivery is waited for",
        ((DeliveryOwner, "_live", _Kept()),),
        200,
    ),
    Mutant("retries-skipped", "parked deliveries get no turn", ((DeliveryOwner, "_repeated", _without_queue),)),
)
