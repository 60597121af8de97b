"""The delivery store in this process: for tests and simulations. Shipped, and held to the same contract."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.base import (
    CursorVector,
    Group,
    MadeBy,
    Outcome,
    Reached,
    SourcePartition,
    Subscription,
    SubscriptionSpec,
    SubscriptionState,
)
from evermark.delivery.bots.memory import MemoryBots
from evermark.delivery.decide import group as decide
from evermark.delivery.decide import registration
from evermark.delivery.decide.cursors import require_cursor
from evermark.delivery.decide.group import Jitter, SubscriptionRecord, Work
from evermark.delivery.decide.retry import LIMITS, EndpointLimits


class MemoryDelivery(MemoryBots):
    """A `DeliveryStore` and a `BotStore`, fenced by `leases`."""

    def __init__(
        self,
        leases: MemoryLeases,
        lease: str = DELIVER_LEASE,
        jitter: Jitter = random.random,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        limits: EndpointLimits = LIMITS,
    ) -> None:
        super().__init__(leases, lease, jitter)
        self._clock = clock
        self._limits = limits
        self._group = Group(0, frozenset(), {})
        self._cursors: dict[str, dict[SourcePartition, int]] = {}
        self._inside: dict[
            tuple[str, SourcePartition], str
        ] = {}  # by reader and place: how far it is in the batch after
        self._generation = 0
        self._since: dict[int, datetime] = {}

    def register(
        self, specs: Sequence[SubscriptionSpec], made_by: MadeBy, starts: Mapping[str, CursorVector], epoch: int
    ) -> None:
        with self._fenced(epoch):
            plan = registration.registered(specs, made_by, starts, self._known, self._group)
            self._forget(plan.removed)
            others = registration.with_other_devices(self._known, plan.kept)
            moved = [name for name, (spec, _) in plan.kept.items() if spec.url != self._known[name][0].url]
            self._known.update(plan.kept)
            for name in moved:
                self._try_all_now(name)
            self._with_other_devices(others, self._clock(), epoch)
            for name, (spec, standing) in plan.added.items():
                self._known[name] = (spec, replace(standing, generation=self._next_generation()))
            for name, vector in plan.begun.items():
                self._set_cursors(name, vector)
            self._group = plan.group

    def _next_generation(self) -> int:
        self._generation += 1
        self._since[self._generation] = self._clock()
        return self._generation

    def subscriptions(self) -> dict[str, Subscription]:
        with self._lock:
            return {name: self.subscription(name) for name in sorted(self._known)}

    def outside(self) -> dict[str, Subscription]:
        states = (SubscriptionState.BEHIND, SubscriptionState.SUSPENDED)
        return {name: found for name, found in self.subscriptions().items() if found.state in states}

    def subscription(self, name: str) -> Subscription:
        with self._lock:
            s = self._standing(name)
            spec = registration.current(self._known[name][0], self._clock())
            since = self._since.get(s.generation)
            return Subscription(spec, s.state, s.reason, s.failures, s.next_attempt_at, s.generation, since)

    def add(self, spec: SubscriptionSpec, start: CursorVector | None, epoch: int) -> None:
        with self._fenced(epoch):
            owner = self._known[spec.name][0].made_by if spec.name in self._known else None
            plan = registration.added(spec, start, owner, self._group.version, self._group.cursors)
            self._known[spec.name] = (plan.spec, replace(plan.standing, generation=self._next_generation()))
            if plan.begun is not None:
                self._set_cursors(spec.name, plan.begun)
            else:
                members = self._group.members | {spec.name}
                self._group = replace(self._group, version=plan.version, members=members)

    def change(self, subscription: str, changes: Mapping[str, object], epoch: int) -> None:
        with self._fenced(epoch):
            standing = self._standing(subscription)
            before = self._known[subscription][0].device
            url = self._known[subscription][0].url
            self._known[subscription] = registration.changed(self._known[subscription][0], standing, changes)
            if self._known[subscription][0].url != url:
                self._try_all_now(subscription)
            if self._device(subscription) != before:
                self._with_other_devices([subscription], self._clock(), epoch)

    def rotate(self, subscription: str, secret: str, until: datetime | None, now: datetime, epoch: int) -> None:
        with self._fenced(epoch):
            standing = self._standing(subscription)
            spec = registration.rotated(self._known[subscription][0], secret, until, now)
            self._known[subscription] = (spec, standing)

    def retire(self, subscription: str, epoch: int) -> None:
        with self._fenced(epoch):
            standing = self._standing(subscription)
            self._known[subscription] = (registration.retired(self._known[subscription][0]), standing)

    def remove(self, subscription: str, epoch: int) -> None:
        with self._fenced(epoch):
            standing = self._standing(subscription)
            registration.require_ours(self._known[subscription][0], "removed")
            self._forget(frozenset({subscription}))
            if standing.is_member:
                members = self._group.members - {subscription}
                self._group = replace(self._group, version=self._group.version + 1, members=members)

    def suspend(self, subscription: str, reason: str, epoch: int) -> None:
        with self._fenced(epoch):
            standing = self._standing(subscription)
            self._take_out(standing, decide.paused(standing, reason))

    def disable(self, subscription: str, reason: str, epoch: int, *, generation: int | None = None) -> None:
        with self._fenced(epoch):
            known = self._known.get(subscription)
            if known is not None and generation in (None, known[1].generation):
                self._take_out(known[1], decide.disabled(known[1], reason))

    def retried(
        self, subscription: str, outcome: Outcome, now: datetime, epoch: int, *, generation: int | None = None
    ) -> None:
        with self._fenced(epoch):
            known = self._known.get(subscription)
            if known is not None and generation in (None, known[1].generation):
                after = decide.after_retries(known[1], outcome, now, self._jitter, self._limits)
                if after.is_member:
                    self._set_standing(after)
                else:
                    self._take_out(known[1], after)

    def resume(self, subscription: str, epoch: int) -> None:
        with self._fenced(epoch):
            self._set_standing(decide.resumed(self._standing(subscription)))
            self._try_all_now(subscription)

    def group(self) -> Group:
        with self._lock:
            return self._group

    def cursors(self, subscription: str) -> CursorVector:
        with self._lock:
            return dict(self._cursors.get(subscription, {}))

    def cursors_outside(self) -> dict[str, CursorVector]:
        with self._lock:
            return {n: self.cursors(n) for n, (_, s) in sorted(self._known.items()) if not s.is_member}

    def inside(self, subscriptions: Sequence[str]) -> dict[str, dict[SourcePartition, Reached]]:
        found: dict[str, dict[SourcePartition, Reached]] = {}
        with self._lock:
            for (name, place), through in self._inside.items():
                if name in subscriptions:
                    found.setdefault(name, {})[place] = Reached(self._cursors[name][place], through)
        return found

    def open_partition(self, place: SourcePartition, batch: int, epoch: int) -> None:
        with self._fenced(epoch):
            self._group = replace(self._group, cursors={place: batch, **self._group.cursors})
            for name in self.cursors_outside():
                self._cursors.setdefault(name, {}).setdefault(place, 0)

    def settle_group(
        self,
        place: SourcePartition,
        begun_at: int,
        done_to: int,
        members: frozenset[str],
        outcomes: Sequence[Outcome],
        now: datetime,
        epoch: int,
        *,
        version: int | None = None,
    ) -> Group:
        work = Work(place, begun_at, done_to, members, version)
        with self._fenced(epoch):
            standings = {name: self._standing(name) for name in self._group.members}
            counts = {one.subscription: self._parked_by(one.subscription) for one in outcomes if one.parked}
            settled = decide.settle(self._group, work, outcomes, standings, counts, now, self._jitter, self._limits)
            for standing in settled.stayed:
                self._set_standing(standing)
            for departure in settled.departures:
                self._set_standing(departure.standing)
                self._set_cursors(departure.standing.name, departure.cursors)
                self._set_inside(departure.standing.name, place, departure.through)
            for name, events in settled.parked.items():
                self._park(name, events, now)
            self._counted["expired"].update(settled.expired)
            self._group = settled.group
            return settled.group

    def settle_subscription(
        self,
        subscription: str,
        place: SourcePartition,
        begun_at: int,
        done_to: int,
        outcome: Outcome,
        now: datetime,
        epoch: int,
        *,
        generation: int | None = None,
        begun_through: str = "",
        done_through: str = "",
    ) -> bool:
        begun, done = Reached(begun_at, begun_through), Reached(done_to, done_through)
        with self._fenced(epoch):
            known = self._known.get(subscription)
            standing = decide.require_outside(subscription, known[1] if known else None, generation)
            cursors = self._cursors.get(subscription, {})
            stands = Reached(cursors[place], self._inside.get((subscription, place), "")) if place in cursors else None
            require_cursor(repr(subscription), place, stands, begun, done)
            parked_now = self._parked_by(subscription)
            step = decide.after_outcome(standing, outcome, parked_now, now, self._jitter, self._limits)
            self._set_standing(step.standing)
            if step.passes:
                cursors[place] = done.batch
                self._set_inside(subscription, place, done.through)
                self._park(subscription, step.parked, now)
                self._counted["expired"][subscription] += step.expired
            return step.passes

    def join(self, subscription: str, epoch: int) -> bool:
        with self._fenced(epoch):
            if subscription not in self._known:
                return False
            if subscription in self._group.members:
                return True
            standing = self._standing(subscription)
            if not decide.may_join(standing, self._cursors.get(subscription, {}), self._group):
                return False
            member, self._group = decide.joined(standing, self._group)
            self._set_standing(member)
            self._set_cursors(subscription, None)
            return True

    def _forget(self, names: frozenset[str]) -> None:
        for name in names:
            del self._known[name]
            self._set_cursors(name, None)
        self._rows = {i: row for i, row in self._rows.items() if row.subscription not in names}
        self._forget_asks(names)

    def _take_out(self, before: SubscriptionRecord, after: SubscriptionRecord) -> None:
        self._set_standing(after)
        if before.is_member:
            self._set_cursors(before.name, self._group.cursors)
            members = self._group.members - {before.name}
            self._group = replace(self._group, version=self._group.version + 1, members=members)

    def _set_cursors(self, name: str, cursors: CursorVector | None) -> None:
        """It stands there, and inside no batch; None: it has no cursors of its own."""
        self._inside = {at: through for at, through in self._inside.items() if at[0] != name}
        if cursors is None:
            self._cursors.pop(name, None)
        else:
            self._cursors[name] = dict(cursors)

    def _set_inside(self, name: str, place: SourcePartition, through: str) -> None:
        self._inside.pop((name, place), None)
        if through:
            self._inside[name, place] = through

    def _set_standing(self, standing: SubscriptionRecord) -> None:
        self._known[standing.name] = (self._known[standing.name][0], standing)
