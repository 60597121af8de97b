"""The delivery store in State. `decide.group` and `decide.registration` decide; here it is done, fenced."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from evermark.cluster.fence import deliver_lease, fenced
from evermark.delivery.decide import group as decide
from evermark.delivery.decide import registration, shards
from evermark.delivery.decide.group import Jitter, SubscriptionRecord
from evermark.delivery.decide.registration import Registration
from evermark.delivery.decide.retry import LIMITS, EndpointLimits
from evermark.delivery.limits import RETRY_WAITS_S
from evermark.delivery.model import (
    BotMode,
    BotSpec,
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
from evermark.delivery.store import queries
from evermark.delivery.store.postgres_bots import PostgresBots, decide_anew_who_waits
from evermark.delivery.store.postgres_parked import PostgresParked, park, parked_by, storable
from evermark.errors import BusyError, FormatError, NotFoundError
from evermark.state import counters
from evermark.state.connection import Connection, State

_GROUP = ""  # the reader of a live group's cursors; no subscription may have this name
_SPEC_FIELDS = {field.name for field in fields(SubscriptionSpec)}
_BOT_FIELDS = {field.name for field in fields(BotSpec)}


class PostgresDelivery:
    """A `DeliveryStore`, for the owner of one shard."""

    def __init__(
        self,
        state: State,
        jitter: Jitter = random.random,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        limits: EndpointLimits = LIMITS,
        shard: int = shards.FIRST,
    ) -> None:
        self._state = state
        self.shard = shard
        self._lease = deliver_lease(shard)
        self._jitter = jitter
        self._clock = clock
        self._limits = limits
        self.parked = PostgresParked(state)
        self.bots = PostgresBots(state, self._lease)
        # Subscriptions are read many times a second, may be thousands, and seldom change: the last look, with the
        # versions of its rows; and its specs by their text.
        self._seen: tuple[object, dict[str, Subscription]] = (None, {})
        self._parsed: dict[str, SubscriptionSpec] = {}

    def of_shard(self, shard: int) -> PostgresDelivery:
        return PostgresDelivery(self._state, self._jitter, self._clock, self._limits, shard)

    def spread(self, shards_wanted: int, epoch: int) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            conn.execute(queries.LOCK_GROUPS)
            groups = _groups(conn)
            placed = {row[1]: (_record(row[1:]), row[0]) for row in conn.execute(queries.PLACED_LOCKED)}
            after = shards.spread(placed, _outside(conn), groups, shards_wanted)
            for shard, group in after.groups.items():
                if shard in after.opened:
                    conn.execute(queries.OPEN_SHARD, (shard, group.version))
                    _set_cursors(conn, {_GROUP: group.cursors}, shard)
                else:
                    _set_version(conn, groups[shard], group, shard)
            _set_records(conn, [record for name, (record, _) in after.moved.items() if record != placed[name][0]])
            _set_cursors(conn, after.left)
            moved = [list(after.moved), [shard for _, shard in after.moved.values()]]
            conn.execute(queries.SET_SHARDS, moved)
            conn.execute(queries.CLOSE_SHARDS, {"shards": shards_wanted})

    def register(
        self, specs: Sequence[SubscriptionSpec], made_by: MadeBy, starts: Mapping[str, CursorVector], epoch: int
    ) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            conn.execute(queries.LOCK_GROUPS)
            groups = _groups(conn)
            rows = conn.execute(queries.SUBSCRIPTIONS_LOCKED).fetchall()
            all_known = {row[2]: (spec_from_json(row[1]), _record(row[2:])) for row in rows}
            registration.require_names(specs, made_by, all_known)
            at = {row[2]: row[0] for row in rows}
            at |= {spec.name: shards.shard_of(spec.name, len(groups)) for spec in specs if spec.name not in at}
            for shard, group in groups.items():
                known = {name: found for name, found in all_known.items() if at[name] == shard}
                named = [spec for spec in specs if at[spec.name] == shard]
                plan = registration.registered(named, made_by, starts, known, group)
                self._carry_out(conn, plan, known, group, shard, epoch)

    def _carry_out(
        self, conn: Connection, plan: Registration, known: registration.Known, group: Group, shard: int, epoch: int
    ) -> None:
        removed = sorted(plan.removed)
        if removed:
            conn.execute(queries.REMOVE_CURSORS, (removed,))
            conn.execute(queries.REMOVE_SUBSCRIPTIONS, (removed,))
        for spec, _ in plan.kept.values():
            _set_spec(conn, spec)
            if spec.url != known[spec.name][0].url:
                _try_all_now(conn, spec.name)
        decide_anew_who_waits(conn, registration.with_other_devices(known, plan.kept), self._clock(), epoch)
        _set_records(conn, [after for name, (_, after) in plan.kept.items() if after != known[name][1]])
        _add(conn, group, plan, shard)

    def subscriptions(self) -> dict[str, Subscription]:
        seen, found = self._seen
        with self._state.connection() as conn:
            # Before the rows: if they change in between, the next look finds other versions.
            versions = conn.execute(queries.VERSIONS).fetchone()
        if versions != seen:
            found, self._parsed = self._subscriptions(queries.SUBSCRIPTIONS)
            # A secret may end by itself.
            self._seen = (None if any(one.spec.secrets_until for one in found.values()) else versions, found)
        return dict(found)

    def outside(self) -> dict[str, Subscription]:
        return self._subscriptions(queries.OUTSIDE, self.shard)[0]

    def _subscriptions(self, query: str, *given: int) -> tuple[dict[str, Subscription], dict[str, SubscriptionSpec]]:
        """The subscriptions a query finds, and each spec by its text: parsing specs takes longer than the query."""
        with self._state.connection() as conn:
            rows = conn.execute(query, given).fetchall()
        known, now = self._parsed, self._clock()
        specs = {row[0]: known.get(row[0]) or spec_from_json(row[0]) for row in rows}
        found = {row[2]: registration.shown(specs[row[0]], _record(row[2:]), row[1], now) for row in rows}
        return found, specs

    def subscription(self, name: str) -> Subscription:
        with self._state.connection() as conn:
            row = conn.execute(queries.SUBSCRIPTION, (storable(name),)).fetchone()
        if row is None:
            raise registration.unknown(name)
        return registration.shown(spec_from_json(row[0]), _record(row[2:]), row[1], self._clock())

    def add(self, spec: SubscriptionSpec, start: CursorVector | None, epoch: int) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            shard = _lock_group_to_be(conn, spec.name)
            rows = conn.execute(queries.GROUP_CURSORS, (shard,)).fetchall()
            cursors = {SourcePartition(*at): Cursor(batch) for _, *at, batch in rows if batch is not None}
            group = Group(rows[0][0], frozenset(), cursors)  # the members do not matter here, and may be thousands
            owner = conn.execute(queries.MADE_BY, (storable(spec.name),)).fetchone()
            _add(conn, group, registration.added(spec, start, MadeBy(owner[0]) if owner else None, group), shard)

    def change(self, subscription: str, changes: Mapping[str, object], epoch: int) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            if "bot" in changes:
                _lock_group_of(conn, subscription)  # no event is parked under its former device
            spec, record = _lock_subscription(conn, subscription)
            wanted, after = registration.changed(spec, record, changes)
            _set_spec(conn, wanted)
            if wanted.device != spec.device:
                decide_anew_who_waits(conn, [subscription], self._clock(), epoch)
            if after != record:
                _set_records(conn, [after])
            if wanted.url != spec.url:
                _try_all_now(conn, subscription)

    def rotate(self, subscription: str, secret: str, until: datetime | None, now: datetime, epoch: int) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            spec, _ = _lock_subscription(conn, subscription)
            _set_spec(conn, registration.rotated(spec, secret, until, now))

    def retire(self, subscription: str, epoch: int) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            spec, _ = _lock_subscription(conn, subscription)
            _set_spec(conn, registration.retired(spec))

    def remove(self, subscription: str, epoch: int) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            shard = _lock_group_of(conn, subscription)
            spec, record = _lock_subscription(conn, subscription)
            registration.require_ours(spec, "removed")
            conn.execute(queries.REMOVE_CURSORS, ([subscription],))
            conn.execute(queries.REMOVE_SUBSCRIPTIONS, ([subscription],))
            if record.is_member:
                conn.execute(queries.NEXT_GROUP_VERSION, (shard,))

    def suspend(self, subscription: str, reason: str, epoch: int) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            shard = _lock_group_of(conn, subscription)
            _, record = _lock_subscription(conn, subscription)
            _set_record(conn, shard, record, decide.paused(record, reason))

    def disable(self, subscription: str, reason: str, epoch: int, *, generation: int | None = None) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            shard = _lock_group_of(conn, subscription)
            record = lock_record(conn, subscription)
            if record is not None and generation in (None, record.generation):
                _set_record(conn, shard, record, decide.disabled(record, reason))

    def retried(
        self, subscription: str, outcome: Outcome, now: datetime, epoch: int, *, generation: int | None = None
    ) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            shard = _lock_group_of(conn, subscription)
            record = lock_record(conn, subscription)
            if record is not None and generation in (None, record.generation):
                after = decide.after_retries(record, outcome, now, self._jitter, self._limits)
                _set_record(conn, shard, record, after)

    def resume(self, subscription: str, epoch: int) -> None:
        with fenced(self._state, self._lease, epoch) as conn:
            _, record = _lock_subscription(conn, subscription)
            _set_records(conn, [decide.resumed(record)])
            _try_all_now(conn, subscription)

    def counted(self, name: str) -> dict[str, int]:
        return counters.read(self._state, name)

    def group(self) -> Group:
        with self._state.connection() as conn:
            return _group(conn, self.shard)

    def groups(self) -> dict[int, Group]:
        with self._state.connection() as conn:
            return _groups(conn)

    def cursors(self, subscription: str) -> CursorVector:
        with self._state.connection() as conn:
            return _cursors(conn, subscription)

    def cursors_outside(self) -> dict[str, CursorVector]:
        with self._state.connection() as conn:
            return _outside(conn)

    def open_partition(self, place: SourcePartition, batch: int, epoch: int) -> None:
        with self._locked_group(epoch) as (conn, _):
            conn.execute(queries.OPEN_PLACE, (self.shard, place.source, place.partition, batch))
            conn.execute(queries.OPEN_PLACE_OUTSIDE, (place.source, place.partition, self.shard))

    def settle_group(self, work: GroupWork, outcomes: Sequence[Outcome], now: datetime, epoch: int) -> None:
        if decide.only_moves(work, outcomes) and self._move_group(work, epoch):
            return
        with self._locked_group(epoch) as (conn, group):
            records = {row[0]: _record(row) for row in conn.execute(queries.MEMBERS, (self.shard,))}
            counts = parked_by(conn, [outcome.subscription for outcome in outcomes if outcome.parked])
            settled = decide.settle(group, work, outcomes, records, counts, now, self._jitter, self._limits)
            _set_records(conn, settled.records)
            _set_cursors(conn, {_GROUP: {work.place: work.done}, **settled.left}, self.shard)
            park(conn, settled.parked, now, self._jitter)
            counters.count(conn, "expired", settled.expired)
            _set_version(conn, group, settled.group, self.shard)

    def _move_group(self, work: GroupWork, epoch: int) -> bool:
        """The same in one statement, where nothing changes but the cursor; False, and nothing done, where more may."""
        fenced = {"lease": self._lease, "own_lease": self._lease, "lease_epoch": epoch, "shard": self.shard}
        at = {"begun": work.begun.batch, "done": work.done.batch, "members": len(work.members), "version": work.version}
        with self._state.connection() as conn:
            return conn.execute(queries.MOVE_GROUP, {**fenced, **vars(work.place), **at}).rowcount == 1

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
        with fenced(self._state, self._lease, epoch) as conn:
            record = decide.require_outside(subscription, lock_record(conn, subscription), generation)
            at = conn.execute(queries.CURSOR_LOCKED, (subscription, place.source, place.partition)).fetchone()
            decide.require_cursor(repr(subscription), place, Cursor(*at) if at else None, begun, done)
            counts = parked_by(conn, [subscription] if outcome.parked else [])
            step = decide.after_outcome(record, outcome, counts.get(subscription, 0), now, self._jitter, self._limits)
            if step.record != record:
                _set_records(conn, [step.record])
            if step.passes:
                _set_cursors(conn, {subscription: {place: done}})
                park(conn, {subscription: step.parked}, now, self._jitter)
                counters.count(conn, "expired", {subscription: step.expired})
            return step.passes

    def join(self, subscription: str, epoch: int) -> bool:
        with self._locked_group(epoch) as (conn, group):
            record = lock_record(conn, subscription)
            if record is None or _shard_of(conn, subscription) != self.shard:
                return False
            if record.is_member:
                return True
            if not decide.may_join(record, _cursors(conn, subscription), group):
                return False
            member, after = decide.joined(record, group)
            _set_records(conn, [member])
            conn.execute(queries.REMOVE_CURSORS, ([subscription],))
            _set_version(conn, group, after, self.shard)
            return True

    @contextmanager
    def _locked_group(self, epoch: int) -> Iterator[tuple[Connection, Group]]:
        """A fenced transaction, and the group, locked until it ends."""
        with fenced(self._state, self._lease, epoch) as conn:
            conn.execute(queries.LOCK_GROUP, (self.shard,))
            # Read by a statement of its own: the statement that waited for the lock has seen an older moment.
            yield conn, _group(conn, self.shard)


def _record(row: Sequence[Any]) -> SubscriptionRecord:
    name, state, *rest = row
    return SubscriptionRecord(name, SubscriptionState(state), *rest)


def _shard_of(conn: Connection, subscription: str) -> int | None:
    row = conn.execute(queries.SHARD_OF, (storable(subscription),)).fetchone()
    return None if row is None else int(row[0])


def _lock_group_of(conn: Connection, subscription: str) -> int:
    """Lock the group of the shard that a subscription is in until the transaction ends; the first one's for none."""
    shard = _shard_of(conn, subscription) or shards.FIRST
    conn.execute(queries.LOCK_GROUP, (shard,))
    if (_shard_of(conn, subscription) or shards.FIRST) != shard:
        raise _moved(subscription)
    return shard


def _lock_group_to_be(conn: Connection, subscription: str) -> int:
    """The same for a subscription that is to be added."""
    shard = shards.shard_of(subscription, _count(conn))
    conn.execute(queries.LOCK_GROUP, (shard,))
    if shards.shard_of(subscription, _count(conn)) != shard:
        raise _moved(subscription)
    return shard


def _moved(subscription: str) -> BusyError:
    """Locking the other group, too, could wait for a transaction that locks the groups in order."""
    return BusyError(f"{subscription!r} was just moved to another shard of delivery", hint="try again in a moment")


def _count(conn: Connection) -> int:
    row = conn.execute(queries.SHARDS).fetchone()
    return max(1, int(row[0])) if row else 1


def lock_record(conn: Connection, subscription: str) -> SubscriptionRecord | None:
    """The record of a subscription, locked until the transaction ends; None: there is none."""
    row = conn.execute(queries.RECORD_LOCKED, (storable(subscription),)).fetchone()
    return _record(row) if row is not None else None


def _lock_subscription(conn: Connection, subscription: str) -> tuple[SubscriptionSpec, SubscriptionRecord]:
    row = conn.execute(queries.SUBSCRIPTION_LOCKED, (storable(subscription),)).fetchone()
    if row is None:
        raise registration.unknown(subscription)
    return spec_from_json(row[0]), _record(row[2:])


def _add(conn: Connection, group: Group, plan: Registration, shard: int) -> None:
    for spec, record in plan.added.values():
        given = (spec.name, spec.made_by, spec_to_json(spec), record.state, record.joined_version, shard)
        conn.execute(queries.ADD_SUBSCRIPTION, given)
    _set_cursors(conn, plan.begun)
    _set_version(conn, group, plan.group, shard)


def _set_spec(conn: Connection, spec: SubscriptionSpec) -> None:
    text = spec_to_json(spec)
    conn.execute(queries.SET_SPEC, (text, spec.name, text))


def _set_version(conn: Connection, before: Group, after: Group, shard: int) -> None:
    if after.version != before.version:
        conn.execute(queries.SET_GROUP_VERSION, (after.version, shard))


def _set_record(conn: Connection, shard: int, before: SubscriptionRecord, after: SubscriptionRecord) -> None:
    """A subscription that is no longer live leaves the group, which is locked, where the group stands."""
    _set_records(conn, [after])
    if before.is_member and not after.is_member:
        _set_cursors(conn, {before.name: _group(conn, shard).cursors})
        conn.execute(queries.NEXT_GROUP_VERSION, (shard,))


def _try_all_now(conn: Connection, subscription: str) -> None:
    """Rows and replays that failures of the endpoint put off are tried now; a refused event keeps its schedule."""
    conn.execute(queries.TRY_REPLAYS_NOW, (subscription,))
    conn.execute(queries.END_RESTS, (subscription,))


def _set_records(conn: Connection, records: Sequence[SubscriptionRecord]) -> None:
    if records:
        rows = [(r.name, r.state, storable(r.reason), r.failures, r.next_attempt_at, r.joined_version) for r in records]
        conn.execute(queries.SET_RECORDS, list(map(list, zip(*rows, strict=True))))


def _set_cursors(conn: Connection, vectors: Mapping[str, CursorVector], shard: int = 0) -> None:
    """`shard`: of the group, if its cursors are among them."""
    rows = [
        (reader, shard if reader == _GROUP else 0, place.source, place.partition, cursor.batch, cursor.through)
        for reader, vector in vectors.items()
        for place, cursor in vector.items()
    ]
    if rows:
        conn.execute(queries.SET_CURSORS, list(map(list, zip(*rows, strict=True))))


def _group(conn: Connection, shard: int) -> Group:
    row = conn.execute(queries.GROUP, (shard,)).fetchone()
    if row is None and shard != shards.FIRST:
        raise NotFoundError(f"there is no shard {shard}", hint="`spark.lanes` of the instance that delivers says so")
    if row is None:
        raise FormatError("state has no delivery group", hint="restore the state from a backup")
    return _group_of(row)


def _groups(conn: Connection) -> dict[int, Group]:
    return {row[0]: _group_of(row) for row in conn.execute(queries.GROUPS)}


def _group_of(row: Sequence[Any]) -> Group:
    _, version, members, sources, partitions, batches = row
    places = map(SourcePartition, sources, partitions)
    return Group(version, frozenset(members), dict(zip(places, map(Cursor, batches), strict=True)))


def _outside(conn: Connection) -> dict[str, CursorVector]:
    found: dict[str, dict[SourcePartition, Cursor]] = defaultdict(dict)
    for name, source, partition, *at in conn.execute(queries.CURSORS_OUTSIDE):
        vector = found[name]
        if source is not None:
            vector[SourcePartition(source, partition)] = Cursor(*at)
    return dict(found)


def _cursors(conn: Connection, reader: str) -> CursorVector:
    rows = conn.execute(queries.CURSORS, (reader,)).fetchall() if reader != _GROUP else []
    return {SourcePartition(source, partition): Cursor(*at) for source, partition, *at in rows}


def spec_to_json(spec: SubscriptionSpec) -> str:
    given = asdict(spec)
    if spec.bot is None:
        del given["bot"]
    if spec.retry_waits_s == RETRY_WAITS_S:
        del given["retry_waits_s"]  # a program from before it was a setting reads the rest
    return storable(json.dumps(given, ensure_ascii=False))


def spec_from_json(text: str) -> SubscriptionSpec:
    given: dict[str, Any] = json.loads(text)
    bot: dict[str, Any] = given.pop("bot", None) or {}
    unknown = sorted((given.keys() - _SPEC_FIELDS) | (bot.keys() - _BOT_FIELDS))
    if unknown:
        raise FormatError(
            f"subscription {given.get('name')!r} has settings this program does not know: {', '.join(unknown)}",
            hint="a newer Evermark wrote it: upgrade this installation",
        )
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    wish = BotSpec(**{**bot, "mode": BotMode(bot["mode"])}) if bot else None
    return SubscriptionSpec(**{**given, **lists, "made_by": MadeBy(given["made_by"]), "bot": wish})
