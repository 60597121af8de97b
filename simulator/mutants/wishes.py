"""Bugs of what people ask for while delivery is under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

from evermark.delivery.decide import registration
from evermark.delivery.decide.registration import Registration
from evermark.delivery.model import Cursor, CursorVector, Subscription, SubscriptionSpec
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.store.memory import MemoryDelivery
from simulator.mutants.mutant import Mutant

_added = registration.added
_rotate = MemoryDelivery.rotate
_resume = MemoryDelivery.resume
_made = LiveGroup.__init__


def _add_one_batch_late(*given: Any) -> Registration:
    plan = _added(*given)
    late = {n: {place: Cursor(at.batch + 1) for place, at in begun.items()} for n, begun in plan.begun.items()}
    return replace(plan, begun=late)


def _add_as_old_member(*given: Any) -> Registration:
    plan = _added(*given)
    old = {name: (spec, replace(record, joined_version=0)) for name, (spec, record) in plan.added.items()}
    return replace(plan, added=old)


def _forget_but_rows(self: MemoryDelivery, names: frozenset[str]) -> None:
    for name in names:
        del self.tables.known[name]
        self._cursors.pop(name, None)


def _rotate_from_now(self: MemoryDelivery, subscription: str, *rest: Any) -> None:
    _rotate(self, subscription, *rest)
    if subscription in self._cursors:
        self._cursors[subscription] = dict(self._group.cursors)


def _rotated_at_once(spec: SubscriptionSpec, secret: str, until: datetime | None, now: datetime) -> SubscriptionSpec:
    return replace(spec, secrets=(secret,), secrets_until=())


def _resume_from_now(self: MemoryDelivery, subscription: str, epoch: int) -> None:
    _resume(self, subscription, epoch)
    if subscription in self._cursors:
        self._cursors[subscription] = dict(self._group.cursors)


class _FirstLook:
    """A store that shows each subscription as it was when it was first looked at."""

    def __init__(self, store: DeliveryStore) -> None:
        self._store = store
        self._first: dict[int, Subscription] = {}

    def subscriptions(self) -> dict[str, Subscription]:
        known = self._store.subscriptions()
        return {name: self._first.setdefault(found.generation, found) for name, found in known.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _goes_by_first_look(self: LiveGroup, store: DeliveryStore, *rest: Any, **named: Any) -> None:
    _made(self, cast(Any, _FirstLook(store)), *rest, **named)


def _as_first_seen(self: Follower, subscriptions: Sequence[Subscription]) -> list[tuple[Subscription, CursorVector]]:
    return [(one, self.store.cursors(one.name)) for one in subscriptions]


WISHES: tuple[Mutant, ...] = (
    Mutant(
        "turn-by-former-wish",
        "a turn of the follower goes by what was asked for before it looked at the log",
        ((Follower, "_current", _as_first_seen),),
        100,
    ),
    Mutant(
        "added-one-batch-late",
        "a subscription that is added begins a batch after its start",
        ((registration, "added", _add_one_batch_late),),
    ),
    Mutant(
        "added-into-a-batch",
        "one that was made anew is taken for its former self by the batch under way",
        ((registration, "added", _add_as_old_member),),
        300,
    ),
    Mutant(
        "removed-rows-kept",
        "what is parked for a removed subscription stays",
        ((MemoryDelivery, "_forget", _forget_but_rows),),
    ),
    Mutant(
        "change-unheard",
        "the group goes by what was asked for when delivery began",
        ((LiveGroup, "__init__", _goes_by_first_look),),
        200,
    ),
    Mutant(
        "rotated-from-now",
        "a new secret moves the cursor to the group's",
        ((MemoryDelivery, "rotate", _rotate_from_now),),
    ),
    Mutant("rotated-at-once", "a new secret ends the former ones", ((registration, "rotated", _rotated_at_once),)),
    Mutant(
        "resumed-from-now",
        "one that is resumed goes on where the group is",
        ((MemoryDelivery, "resume", _resume_from_now),),
    ),
    Mutant(
        "file-changed-by-api",
        "what the file made may be changed and removed by anybody",
        ((registration, "require_ours", lambda spec, done: None),),
        120,
    ),
)
