"""The delivery store in this process: for tests and simulations. Shipped, and held to the same contract."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from evermark.cluster.fence import deliver_lease
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide import group as decide
from evermark.delivery.decide import registration, shards
from evermark.delivery.decide.group import Jitter, SubscriptionRecord
from evermark.delivery.decide.retry import LIMITS, EndpointLimits
from evermark.delivery.model import (
    BEGINNING,
    Cursor,
    CursorVector,
    Group,
    GroupWork,
    MadeBy,
    Outcome,
    SourcePartition,
    Subscription,
    SubscriptionSpec,
    SubscriptionState,
)
from evermark.delivery.store.memory_bots import MemoryBots
from evermark.delivery.store.memory_parked import MemoryParked, MemoryTables
from evermark.errors import NotFoundError


class MemoryDelivery:
    """A `DeliveryStore`, fenced by `leases`, for the owner of one shard."""

    def __init__(
        self,
        leases: MemoryLeases,
        jitter: Jitter = random.random,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        limits: EndpointLimits = LIMITS,
    ) -> None:
        self.shard = shards.FIRST
        self.tables = MemoryTables(leases)
        self.parked = MemoryParked(self.tables, jitter)
        self.bots = MemoryBots(self.tables)
        self.on_try_now: Callable[[str], None] = lambda _subscription: None  # set by the replays beside it
        self.jitter = jitter
        self._clock = clock
        self._limits = limits

    def of_shard(self, shard: int) -> MemoryDelivery:
        other = copy.copy(self)  # over the same tables
        other.shard = shard
        other.bots = self.bots.under(deliver_lease(shard))
        return other

    def spread(self, shards_wanted: int, epoch: int) -> None:
        tables = self.tables
        with self._fenced(epoch):
            placed = {name: (record, tables.shard_at[name]) for name, (_, record) in tables.known.items()}
            after = shards.spread(placed, self.cursors_outside(), tables.groups, shards_wanted)
            for name, (record, shard) in after.moved.items():
                tables.known[name] = (tables.known[name][0], record)
                tables.shard_at[name] = shard
            tables.cursors.update({name: dict(vector) for name, vector in after.left.items()})
            tables.groups = dict(after.groups)

    def register(
        self, specs: Sequence[SubscriptionSpec], made_by: MadeBy, starts: Mapping[str, CursorVector], epoch: int
    ) -> None:
        tables = self.tables
        with self._fenced(epoch):
            registration.require_names(specs, made_by, tables.known)
            at = {spec.name: shards.shard_of(spec.name, len(tables.groups)) for spec in specs} | tables.shard_at
            for shard, group in sorted(tables.groups.items()):
                known = {name: found for name, found in tables.known.items() if at[name] == shard}
                named = [spec for spec in specs if at[spec.name] == shard]
                self._carry_out(registration.registered(named, made_by, starts, known, group), shard, epoch)

    def _carry_out(self, plan: registration.Registration, shard: int, epoch: int) -> None:
        self._forget(plan.removed)
        others = registration.with_other_devices(self.tables.known, plan.kept)
        moved = [name for name, (spec, _) in plan.kept.items() if spec.url != self.tables.known[name][0].url]
        self.tables.known.update(plan.kept)
        for name in moved:
            self._try_all_now(name)
        self.bots.decide_anew_who_waits(others, self._clock(), epoch)
        self._add(plan, shard)

    def _add(self, plan: registration.Registration, shard: int) -> None:
        tables = self.tables
        for name, (spec, record) in plan.added.items():
            tables.generation += 1
            tables.since[tables.generation] = self._clock()
            tables.known[name] = (spec, replace(record, generation=tables.generation))
            tables.shard_at[name] = shard
        tables.cursors.update({name: dict(vector) for name, vector in plan.begun.items()})
        tables.groups[shard] = plan.group

    def subscriptions(self) -> dict[str, Subscription]:
        with self.tables.lock:
            return {name: self.subscription(name) for name in sorted(self.tables.known)}

    def outside(self) -> dict[str, Subscription]:
        states = (SubscriptionState.BEHIND, SubscriptionState.SUSPENDED)
        at = self.tables.shard_at
        known = self.subscriptions()
        return {name: one for name, one in known.items() if one.state in states and at.get(name) == self.shard}

    def subscription(self, name: str) -> Subscription:
        with self.tables.lock:
            spec, record = self.tables.found(name)
            return registration.shown(spec, record, self.tables.since.get(record.generation), self._clock())

    def add(self, spec: SubscriptionSpec, start: CursorVector | None, epoch: int) -> None:
        with self._fenced(epoch):
            owner = self.tables.known[spec.name][0].made_by if spec.name in self.tables.known else None
            shard = shards.shard_of(spec.name, len(self.tables.groups))
            self._add(registration.added(spec, start, owner, self.tables.groups[shard]), shard)

    def change(self, subscription: str, changes: Mapping[str, object], epoch: int) -> None:
        with self._fenced(epoch):
            spec, record = self.tables.found(subscription)
            wanted, _ = self.tables.known[subscription] = registration.changed(spec, record, changes)
            if wanted.url != spec.url:
                self._try_all_now(subscription)
            if wanted.device != spec.device:
                self.bots.decide_anew_who_waits([subscription], self._clock(), epoch)

    def rotate(self, subscription: str, secret: str, until: datetime | None, now: datetime, epoch: int) -> None:
        with self._fenced(epoch):
            spec, record = self.tables.found(subscription)
            self.tables.known[subscription] = (registration.rotated(spec, secret, until, now), record)

    def retire(self, subscription: str, epoch: int) -> None:
        with self._fenced(epoch):
            spec, record = self.tables.found(subscription)
            self.tables.known[subscription] = (registration.retired(spec), record)

    def remove(self, subscription: str, epoch: int) -> None:
        with self._fenced(epoch):
            spec, record = self.tables.found(subscription)
            registration.require_ours(spec, "removed")
            if record.is_member:
                self._leave(subscription)
            self._forget(frozenset({subscription}))

    def suspend(self, subscription: str, reason: str, epoch: int) -> None:
        with self._fenced(epoch):
            _, record = self.tables.found(subscription)
            self._set_record(decide.paused(record, reason))

    def disable(self, subscription: str, reason: str, epoch: int, *, generation: int | None = None) -> None:
        with self._fenced(epoch):
            known = self.tables.known.get(subscription)
            if known is not None and generation in (None, known[1].generation):
                self._set_record(decide.disabled(known[1], reason))

    def retried(
        self, subscription: str, outcome: Outcome, now: datetime, epoch: int, *, generation: int | None = None
    ) -> None:
        with self._fenced(epoch):
            known = self.tables.known.get(subscription)
            if known is not None and generation in (None, known[1].generation):
                self._set_record(decide.after_retries(known[1], outcome, now, self.jitter, self._limits))

    def resume(self, subscription: str, epoch: int) -> None:
        with self._fenced(epoch):
            self._set_record(decide.resumed(self.tables.found(subscription)[1]))
            self._try_all_now(subscription)

    def counted(self, name: str) -> dict[str, int]:
        with self.tables.lock:
            return {label: number for label, number in self.tables.counted[name].items() if number}

    def group(self) -> Group:
        with self.tables.lock:
            return self._group

    def groups(self) -> dict[int, Group]:
        with self.tables.lock:
            return dict(self.tables.groups)

    def cursors(self, subscription: str) -> CursorVector:
        with self.tables.lock:
            return dict(self._cursors.get(subscription, {}))

    def cursors_outside(self) -> dict[str, CursorVector]:
        with self.tables.lock:
            return {n: self.cursors(n) for n, (_, s) in sorted(self.tables.known.items()) if not s.is_member}

    def open_partition(self, place: SourcePartition, batch: int, epoch: int) -> None:
        with self._fenced(epoch):
            self._group = replace(self._group, cursors={place: Cursor(batch), **self._group.cursors})
            for name in self.cursors_outside():
                if self.tables.shard_at[name] == self.shard:
                    self._cursors.setdefault(name, {}).setdefault(place, BEGINNING)

    def settle_group(self, work: GroupWork, outcomes: Sequence[Outcome], now: datetime, epoch: int) -> None:
        with self._fenced(epoch):
            records = {name: self.tables.known[name][1] for name in self._group.members}
            counts = {one.subscription: self.parked.counted_for(one.subscription) for one in outcomes if one.parked}
            settled = decide.settle(self._group, work, outcomes, records, counts, now, self.jitter, self._limits)
            self._group = settled.group
            for record in settled.records:
                self._set_record(record)
            self._cursors.update({name: dict(cursors) for name, cursors in settled.left.items()})
            for name, events in settled.parked.items():
                self.parked.park(name, events, now)
            self.tables.counted["expired"].update(settled.expired)

    def settle_subscription(
        self,
        subscription: str,
        place: SourcePartition,
        begun: Cursor,
        done: Cursor,
        outcome: Outcome,
        now: datetime,
        epoch: int,
        *,
        generation: int | None = None,
    ) -> bool:
        with self._fenced(epoch):
            known = self.tables.known.get(subscription)
            record = decide.require_outside(subscription, known[1] if known else None, generation)
            cursors = self._cursors.get(subscription, {})
            decide.require_cursor(repr(subscription), place, cursors.get(place), begun, done)
            parked_now = self.parked.counted_for(subscription)
            step = decide.after_outcome(record, outcome, parked_now, now, self.jitter, self._limits)
            self._set_record(step.record)
            if step.passes:
                cursors[place] = done
                self.parked.park(subscription, step.parked, now)
                self.tables.counted["expired"][subscription] += step.expired
            return step.passes

    def join(self, subscription: str, epoch: int) -> bool:
        with self._fenced(epoch):
            if self.tables.shard_at.get(subscription) != self.shard:
                return False
            if subscription in self._group.members:
                return True
            record = self.tables.known[subscription][1]
            if not decide.may_join(record, self._cursors.get(subscription, {}), self._group):
                return False
            member, self._group = decide.joined(record, self._group)
            self._set_record(member)
            del self._cursors[subscription]
            return True

    def _forget(self, names: frozenset[str]) -> None:
        for name in names:
            del self.tables.known[name], self.tables.shard_at[name]
            self._cursors.pop(name, None)
        self.tables.rows = {i: row for i, row in self.tables.rows.items() if row.subscription not in names}
        self.bots.forget_asks(names)

    def _try_all_now(self, subscription: str) -> None:
        self.on_try_now(subscription)
        self.parked.end_rests(subscription)

    def _set_record(self, record: SubscriptionRecord) -> None:
        """A subscription that is no longer live leaves the group where the group stands."""
        self.tables.known[record.name] = (self.tables.known[record.name][0], record)
        group = self.tables.groups[self.tables.shard_at[record.name]]
        if record.name in group.members and not record.is_member:
            self._cursors[record.name] = dict(group.cursors)
            self._leave(record.name)

    def _leave(self, name: str) -> None:
        shard = self.tables.shard_at[name]
        group = self.tables.groups[shard]
        self.tables.groups[shard] = replace(group, version=group.version + 1, members=group.members - {name})

    @contextmanager
    def _fenced(self, epoch: int) -> Iterator[None]:
        with self.tables.fenced(epoch, deliver_lease(self.shard)):
            yield

    @property
    def _group(self) -> Group:
        if self.shard not in self.tables.groups:
            raise NotFoundError(f"there is no shard {self.shard}")
        return self.tables.groups[self.shard]

    @_group.setter
    def _group(self, group: Group) -> None:
        self.tables.groups[self.shard] = group

    @property
    def _cursors(self) -> dict[str, dict[SourcePartition, Cursor]]:
        return self.tables.cursors
