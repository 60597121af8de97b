"""The delivery store in State. What is to be done is decided in `delivery/group.py`; here it is done, fenced."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from evermark.cluster.fence import DELIVER_LEASE, fence
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
from evermark.delivery.bots.base import WAITING_MAX
from evermark.delivery.bots.postgres import PostgresBots
from evermark.delivery.decide import group as decide
from evermark.delivery.decide import registration
from evermark.delivery.decide.cursors import require_cursor
from evermark.delivery.decide.group import Departure, Jitter, SubscriptionRecord, Work
from evermark.delivery.decide.retry import LIMITS, EndpointLimits
from evermark.delivery.replay import queries as replay_queries
from evermark.delivery.store import queries
from evermark.delivery.store.postgres_parked import park, storable
from evermark.delivery.store.spec_text import spec_from_json, spec_to_json
from evermark.errors import FormatError
from evermark.state import counters
from evermark.state.connection import Connection, State

_GROUP = ""  # the reader of the live group's cursors; no subscription may have this name


class PostgresDelivery(PostgresBots):
    """A `DeliveryStore` and a `BotStore`."""

    def __init__(
        self,
        state: State,
        lease: str = DELIVER_LEASE,
        jitter: Jitter = random.random,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        limits: EndpointLimits = LIMITS,
    ) -> None:
        super().__init__(state, jitter, lease)
        self._clock = clock
        self._limits = limits
        # What was parsed at the last look: subscriptions are read many times a second, and may be thousands.
        self._parsed: dict[str, SubscriptionSpec] = {}

    def register(
        self, specs: Sequence[SubscriptionSpec], made_by: MadeBy, starts: Mapping[str, CursorVector], epoch: int
    ) -> None:
        with self._state.transaction() as conn:
            group = self._lock_group(conn, epoch)
            rows = conn.execute(queries.SUBSCRIPTIONS_LOCKED).fetchall()
            known = {row[2]: (spec_from_json(row[0]), _standing(row[2:])) for row in rows}
            plan = registration.registered(specs, made_by, starts, known, group)
            removed = sorted(plan.removed)
            if removed:
                conn.execute(queries.REMOVE_CURSORS, (removed,))
                conn.execute(queries.REMOVE_SUBSCRIPTIONS, (removed,))
            for spec, _ in plan.kept.values():
                _set_spec(conn, spec)
                if spec.url != known[spec.name][0].url:
                    _try_all_now(conn, spec.name)
            self._with_other_devices(conn, registration.with_other_devices(known, plan.kept), self._clock(), epoch)
            _set_standings(conn, [after for name, (_, after) in plan.kept.items() if after != known[name][1]])
            for spec, added in plan.added.values():
                _add(conn, spec, added)
            _set_cursors(conn, plan.begun)
            self._set_version(conn, group, plan.group)

    def subscriptions(self) -> dict[str, Subscription]:
        found, self._parsed = self._subscriptions(queries.SUBSCRIPTIONS)
        return found

    def outside(self) -> dict[str, Subscription]:
        return self._subscriptions(queries.OUTSIDE)[0]

    def _subscriptions(self, query: str) -> tuple[dict[str, Subscription], dict[str, SubscriptionSpec]]:
        """What a query finds, and each spec by its text: parsing them takes longer than the query."""
        with self._state.connection() as conn:
            rows = conn.execute(query).fetchall()
        known, now = self._parsed, self._clock()
        specs = {row[0]: known.get(row[0]) or spec_from_json(row[0]) for row in rows}
        return {row[2]: _subscription(specs[row[0]], row, now) for row in rows}, specs

    def subscription(self, name: str) -> Subscription:
        with self._state.connection() as conn:
            row = conn.execute(queries.SUBSCRIPTION, (storable(name),)).fetchone()
        if row is None:
            raise registration.unknown(name)
        return _subscription(spec_from_json(row[0]), row, self._clock())

    def add(self, spec: SubscriptionSpec, start: CursorVector | None, epoch: int) -> None:
        with self._state.transaction() as conn:
            fence(conn, self._lease, epoch)
            conn.execute(queries.LOCK_GROUP)
            rows = conn.execute(queries.GROUP_CURSORS).fetchall()
            version = rows[0][0]
            cursors = {
                SourcePartition(source, partition): batch for _, source, partition, batch in rows if source is not None
            }
            owner = conn.execute(queries.MADE_BY, (storable(spec.name),)).fetchone()
            plan = registration.added(spec, start, MadeBy(owner[0]) if owner else None, version, cursors)
            _add(conn, plan.spec, plan.standing)
            if plan.begun is not None:
                _set_cursors(conn, {spec.name: plan.begun})
            if plan.version != version:
                conn.execute(queries.SET_GROUP_VERSION, (plan.version,))

    def change(self, subscription: str, changes: Mapping[str, object], epoch: int) -> None:
        with self._state.transaction() as conn:
            fence(conn, self._lease, epoch)
            if "bot" in changes:
                conn.execute(queries.LOCK_GROUP)  # nobody parks anything by the device it had
            spec, standing = _lock_subscription(conn, subscription)
            wanted, after = registration.changed(spec, standing, changes)
            _set_spec(conn, wanted)
            if wanted.device != spec.device:
                self._with_other_devices(conn, [subscription], self._clock(), epoch)
            if after != standing:
                _set_standings(conn, [after])
            if wanted.url != spec.url:
                _try_all_now(conn, subscription)

    def rotate(self, subscription: str, secret: str, until: datetime | None, now: datetime, epoch: int) -> None:
        with self._state.transaction() as conn:
            fence(conn, self._lease, epoch)
            spec, _ = _lock_subscription(conn, subscription)
            _set_spec(conn, registration.rotated(spec, secret, until, now))

    def retire(self, subscription: str, epoch: int) -> None:
        with self._state.transaction() as conn:
            fence(conn, self._lease, epoch)
            spec, _ = _lock_subscription(conn, subscription)
            _set_spec(conn, registration.retired(spec))

    def remove(self, subscription: str, epoch: int) -> None:
        with self._state.transaction() as conn:
            fence(conn, self._lease, epoch)
            conn.execute(queries.LOCK_GROUP)
            spec, standing = _lock_subscription(conn, subscription)
            registration.require_ours(spec, "removed")
            conn.execute(queries.REMOVE_CURSORS, ([subscription],))
            conn.execute(queries.REMOVE_SUBSCRIPTIONS, ([subscription],))
            if standing.is_member:
                conn.execute(queries.NEXT_GROUP_VERSION)

    def suspend(self, subscription: str, reason: str, epoch: int) -> None:
        with self._state.transaction() as conn:
            group = self._lock_group(conn, epoch)
            standing = _lock_standing(conn, subscription)
            _take_out(conn, group, standing, decide.paused(standing, reason))

    def disable(self, subscription: str, reason: str, epoch: int, *, generation: int | None = None) -> None:
        with self._state.transaction() as conn:
            group = self._lock_group(conn, epoch)
            row = conn.execute(queries.STANDING_LOCKED, (subscription,)).fetchone()
            standing = _standing(row) if row else None
            if standing is not None and generation in (None, standing.generation):
                _take_out(conn, group, standing, decide.disabled(standing, reason))

    def retried(
        self, subscription: str, outcome: Outcome, now: datetime, epoch: int, *, generation: int | None = None
    ) -> None:
        with self._state.transaction() as conn:
            group = self._lock_group(conn, epoch)
            row = conn.execute(queries.STANDING_LOCKED, (subscription,)).fetchone()
            standing = _standing(row) if row else None
            if standing is not None and generation in (None, standing.generation):
                after = decide.after_retries(standing, outcome, now, self._jitter, self._limits)
                if after.is_member:
                    _set_standings(conn, [after])
                else:
                    _take_out(conn, group, standing, after)

    def resume(self, subscription: str, epoch: int) -> None:
        with self._state.transaction() as conn:
            fence(conn, self._lease, epoch)
            _set_standings(conn, [decide.resumed(_lock_standing(conn, subscription))])
            _try_all_now(conn, subscription)

    def group(self) -> Group:
        with self._state.connection() as conn:
            return _group(conn)

    def cursors(self, subscription: str) -> CursorVector:
        with self._state.connection() as conn:
            return _cursors(conn, subscription)

    def cursors_outside(self) -> dict[str, CursorVector]:
        found: dict[str, dict[SourcePartition, int]] = defaultdict(dict)
        with self._state.connection() as conn:
            for name, source, partition, batch in conn.execute(queries.CURSORS_OUTSIDE):
                vector = found[name]
                if source is not None:
                    vector[SourcePartition(source, partition)] = batch
        return dict(found)

    def inside(self, subscriptions: Sequence[str]) -> dict[str, dict[SourcePartition, Reached]]:
        found: dict[str, dict[SourcePartition, Reached]] = defaultdict(dict)
        with self._state.connection() as conn:
            for name, source, partition, *at in conn.execute(queries.INSIDE, (list(subscriptions),)):
                found[name][SourcePartition(source, partition)] = Reached(*at)
        return dict(found)

    def room(self, subscriptions: Sequence[str]) -> dict[str, int]:
        with self._state.connection() as conn:
            most: dict[str, int] = dict(conn.execute(queries.PARKED_MAX, (list(subscriptions),)).fetchall())
            there = _parked_by(conn, subscriptions)
        return {name: max(0, most[name] - there.get(name, 0)) for name in most}

    def open_partition(self, place: SourcePartition, batch: int, epoch: int) -> None:
        with self._state.transaction() as conn:
            self._lock_group(conn, epoch)
            conn.execute(queries.OPEN_PLACE, (place.source, place.partition, batch))
            conn.execute(queries.OPEN_PLACE_OUTSIDE, (place.source, place.partition))

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
        with self._state.transaction() as conn:
            group = self._lock_group(conn, epoch)
            standings = {row[0]: _standing(row) for row in conn.execute(queries.MEMBERS)}
            counts = _parked_by(conn, [outcome.subscription for outcome in outcomes if outcome.parked])
            settled = decide.settle(group, work, outcomes, standings, counts, now, self._jitter, self._limits)
            departed: list[Departure] = list(settled.departures)
            _set_standings(conn, [*settled.stayed, *(d.standing for d in departed)])
            inside = {(d.standing.name, place): d.through for d in departed}
            _set_cursors(conn, {d.standing.name: d.cursors for d in departed}, inside)
            conn.execute(queries.MOVE_CURSOR, (done_to, "", _GROUP, place.source, place.partition))
            park(conn, settled.parked, now, self._jitter)
            counters.count(conn, "expired", settled.expired)
            self._set_version(conn, group, settled.group)
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
        with self._state.transaction() as conn:
            fence(conn, self._lease, epoch)
            row = conn.execute(queries.STANDING_LOCKED, (subscription,)).fetchone()
            standing = decide.require_outside(subscription, _standing(row) if row else None, generation)
            where = (subscription, place.source, place.partition)
            cursor = conn.execute(queries.CURSOR_LOCKED, where).fetchone()
            require_cursor(repr(subscription), place, Reached(*cursor) if cursor else None, begun, done)
            counts = _parked_by(conn, [subscription] if outcome.parked else [])
            step = decide.after_outcome(standing, outcome, counts.get(subscription, 0), now, self._jitter, self._limits)
            if step.standing != standing:
                _set_standings(conn, [step.standing])
            if step.passes:
                conn.execute(queries.MOVE_CURSOR, (done.batch, done.through, *where))
                park(conn, {subscription: step.parked}, now, self._jitter)
                counters.count(conn, "expired", {subscription: step.expired})
            return step.passes

    def join(self, subscription: str, epoch: int) -> bool:
        with self._state.transaction() as conn:
            group = self._lock_group(conn, epoch)
            row = conn.execute(queries.STANDING_LOCKED, (subscription,)).fetchone()
            if row is None:
                return False
            standing = _standing(row)
            if standing.is_member:
                return True
            if not decide.may_join(standing, _cursors(conn, subscription), group):
                return False
            member, after = decide.joined(standing, group)
            _set_standings(conn, [member])
            conn.execute(queries.REMOVE_CURSORS, ([subscription],))
            self._set_version(conn, group, after)
            return True

    def _lock_group(self, conn: Connection, epoch: int) -> Group:
        """The group as nobody else can change it until the transaction ends."""
        fence(conn, self._lease, epoch)
        conn.execute(queries.LOCK_GROUP)
        # Read by a statement of its own: the one that waited for the lock has seen an older moment.
        return _group(conn)

    def _set_version(self, conn: Connection, before: Group, after: Group) -> None:
        if after.version != before.version:
            conn.execute(queries.SET_GROUP_VERSION, (after.version,))


def _standing(row: Sequence[Any]) -> SubscriptionRecord:
    name, state, *rest = row
    return SubscriptionRecord(name, SubscriptionState(state), *rest)


def _lock_standing(conn: Connection, subscription: str) -> SubscriptionRecord:
    row = conn.execute(queries.STANDING_LOCKED, (storable(subscription),)).fetchone()
    if row is None:
        raise registration.unknown(subscription)
    return _standing(row)


def _lock_subscription(conn: Connection, subscription: str) -> tuple[SubscriptionSpec, SubscriptionRecord]:
    row = conn.execute(queries.SUBSCRIPTION_LOCKED, (storable(subscription),)).fetchone()
    if row is None:
        raise registration.unknown(subscription)
    return spec_from_json(row[0]), _standing(row[2:])


def _subscription(spec: SubscriptionSpec, row: Sequence[Any], now: datetime) -> Subscription:
    standing = _standing(row[2:])
    return Subscription(
        spec=registration.current(spec, now),
        state=standing.state,
        reason=standing.reason,
        failures=standing.failures,
        next_attempt_at=standing.next_attempt_at,
        generation=standing.generation,
        since=row[1],
    )


def _add(conn: Connection, spec: SubscriptionSpec, standing: SubscriptionRecord) -> None:
    given = (spec.name, spec.made_by, spec_to_json(spec), standing.state, standing.joined_version)
    conn.execute(queries.ADD_SUBSCRIPTION, given)


def _set_spec(conn: Connection, spec: SubscriptionSpec) -> None:
    text = spec_to_json(spec)
    conn.execute(queries.SET_SPEC, (text, spec.name, text))


def _take_out(conn: Connection, group: Group, before: SubscriptionRecord, after: SubscriptionRecord) -> None:
    """One that is no longer live leaves the group where the group stands."""
    _set_standings(conn, [after])
    if before.is_member:
        _set_cursors(conn, {before.name: group.cursors})
        conn.execute(queries.SET_GROUP_VERSION, (group.version + 1,))


def _try_all_now(conn: Connection, subscription: str) -> None:
    """What failures of the endpoint put off is put off no longer; a refused event keeps its schedule."""
    conn.execute(replay_queries.TRY_NOW, (subscription,))
    conn.execute(queries.END_RESTS, (subscription,))


def _set_standings(conn: Connection, standings: Sequence[SubscriptionRecord]) -> None:
    if standings:
        rows = [
            (s.name, s.state.value, storable(s.reason), s.failures, s.next_attempt_at, s.joined_version)
            for s in standings
        ]
        conn.execute(queries.SET_STANDINGS, list(map(list, zip(*rows, strict=True))))


def _set_cursors(
    conn: Connection,
    vectors: Mapping[str, CursorVector],
    inside: Mapping[tuple[str, SourcePartition], str] | None = None,
) -> None:
    rows = [
        (reader, place.source, place.partition, batch, (inside or {}).get((reader, place), ""))
        for reader, vector in vectors.items()
        for place, batch in vector.items()
    ]
    if rows:
        conn.execute(queries.SET_CURSORS, list(map(list, zip(*rows, strict=True))))


def _group(conn: Connection) -> Group:
    row = conn.execute(queries.GROUP).fetchone()
    if row is None:
        raise FormatError("state has no delivery group", hint="restore the state from a backup")
    version, members, sources, partitions, batches = row
    places = map(SourcePartition, sources, partitions)
    return Group(version, frozenset(members), dict(zip(places, batches, strict=True)))


def _cursors(conn: Connection, reader: str) -> CursorVector:
    rows = conn.execute(queries.CURSORS, (reader,)).fetchall() if reader != _GROUP else []
    return {SourcePartition(source, partition): batch for source, partition, batch in rows}


def _parked_by(conn: Connection, subscriptions: Sequence[str]) -> dict[str, int]:
    names = sorted(set(subscriptions))
    return dict(conn.execute(queries.PARKED_BY, (WAITING_MAX, names)).fetchall()) if names else {}
