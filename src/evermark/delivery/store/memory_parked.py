"""The tables of the delivery store in this process, and parked deliveries in them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide import group as decide
from evermark.delivery.decide import registration
from evermark.delivery.decide.group import Jitter, SubscriptionRecord
from evermark.delivery.decide.turns import drawn
from evermark.delivery.limits import CLAIM_MAX, WAITING_MAX
from evermark.delivery.model import (
    Cursor,
    Group,
    HeldKey,
    Parked,
    ParkedEvent,
    ParkedRow,
    SessionKey,
    SourcePartition,
    SubscriptionSpec,
)


@dataclass(frozen=True)
class Row(ParkedRow):
    claimed_until: datetime | None = None
    claim_epoch: int = 0
    # A row put back untried rests, and keeps its time: the order of its session depends on it.
    rests_until: datetime | None = None
    # A person asked for it to be tried now; if that fails, it goes back to the time it had (None: it was dead).
    asked: bool = False
    scheduled_at: datetime | None = None

    @property
    def session_line(self) -> tuple[object, ...]:
        return self.subscription, self.event.replay_id, self.event.session

    @property
    def key_lines(self) -> set[tuple[object, ...]]:
        return {(self.subscription, self.event.replay_id, key) for key in self.event.held_keys}

    @property
    def due_at(self) -> datetime | None:
        at = self.next_attempt_at
        return at and max(at, self.rests_until or at)

    def is_due(self, now: datetime) -> bool:
        return self.due_at is not None and self.due_at <= now

    def is_free(self, now: datetime, epoch: int) -> bool:
        return self.claimed_until is None or self.claimed_until <= now or self.claim_epoch < epoch


class MemoryTables:
    """The tables that State has, behind one lock: all parts of a store in memory read and write these."""

    def __init__(self, leases: MemoryLeases) -> None:
        self._leases = leases
        self.lock = threading.RLock()
        self.known: dict[str, tuple[SubscriptionSpec, SubscriptionRecord]] = {}
        self.shard_at: dict[str, int] = {}
        self.groups: dict[int, Group] = {0: Group(0, frozenset(), {})}
        self.cursors: dict[str, dict[SourcePartition, Cursor]] = {}
        self.generation = 0
        self.since: dict[int, datetime] = {}
        self.rows: dict[int, Row] = {}  # of `enqueued_messages`
        self.keys: dict[tuple[str, str], SessionKey] = {}  # by device and session
        self.counted: dict[str, Counter[str]] = defaultdict(Counter)

    @contextmanager
    def fenced(self, epoch: int, lease: str = DELIVER_LEASE, own: str | None = None) -> Iterator[None]:
        with self.lock:
            self._leases.fence(lease, epoch, own)
            yield

    def found(self, name: str) -> tuple[SubscriptionSpec, SubscriptionRecord]:
        if name not in self.known:
            raise registration.unknown(name)
        return self.known[name]

    def device(self, subscription: str) -> str:
        return self.known[subscription][0].device

    def is_bot(self, subscription: str) -> bool:
        return subscription in self.known and self.known[subscription][0].bot is not None

    def lacks_key(self, subscription: str, session: str) -> bool:
        device = self.device(subscription)
        return bool(device) and (device, session) not in self.keys

    def delete(self, rows: Iterable[Row], counted_as: str) -> int:
        """Remove parked rows that are given up, and count them."""
        gone = [self.rows.pop(row.id) for row in list(rows)]
        self.counted[counted_as].update(row.subscription for row in gone)
        return len(gone)


class MemoryParked:
    """A `ParkedStore`."""

    def __init__(self, tables: MemoryTables, jitter: Jitter) -> None:
        self._tables = tables
        self._jitter = jitter
        self._id = 0

    def claim(
        self, now: datetime, limit: int, lease_s: float, epoch: int, *, without: Collection[str] = ()
    ) -> list[Parked]:
        with self._tables.fenced(epoch):
            due = [
                row
                for row in self._tables.rows.values()
                if row.subscription not in without
                and row.is_due(now)
                and row.is_free(now, epoch)
                and not (row.event.session and self._tables.lacks_key(row.subscription, row.event.session))
                and decide.drains(self._tables.known[row.subscription][1], now)
                and not self._is_held(row)
                and all(other.is_due(now) and other.is_free(now, epoch) for other in self._before_in_session(row))
            ]
            most = max(0, min(limit, CLAIM_MAX))
            got = self._shared([row for row in due if not row.event.replay_id], most, now)
            got |= self._shared([row for row in due if row.event.replay_id], most - len(got), now)
            until = now + timedelta(seconds=lease_s)
            claimed = []
            for row_id in sorted(got):
                row = replace(self._tables.rows[row_id], claimed_until=until, claim_epoch=epoch)
                self._tables.rows[row_id] = row
                generation = self._tables.known[row.subscription][1].generation
                claimed.append(Parked(row.id, row.subscription, row.event, row.attempts, until, generation))
            return claimed

    def _shared(self, due: Sequence[Row], most: int, now: datetime) -> set[int]:
        """The first rows of all subscriptions before the second rows of any; rows of a session without a gap."""
        ranked: list[tuple[int, str, int]] = []
        for name in {row.subscription for row in due}:
            mine = sorted((row.next_attempt_at or now, row.id) for row in due if row.subscription == name)
            ranked += [(nth, drawn(now, name), row_id) for nth, (_, row_id) in enumerate(mine)]
        got = {row_id for _, _, row_id in sorted(ranked)[:most]}
        ahead = {row_id: self._before_in_session(self._tables.rows[row_id]) for row_id in got}
        return {row_id for row_id, others in ahead.items() if all(other.id in got for other in others)}

    def delivered(self, ids: Sequence[int], epoch: int) -> None:
        with self._tables.fenced(epoch):
            for row_id in ids:
                self._tables.rows.pop(row_id, None)

    def reschedule(
        self, row: Parked, next_attempt_at: datetime | None, attempts: int, reason: str, status: int | None, epoch: int
    ) -> None:
        with self._tables.fenced(epoch):
            found = self._tables.rows.get(row.id)
            if found is None or (found.claimed_until, found.claim_epoch) != (row.claimed_until, epoch):
                return
            event = replace(found.event, reason=decide.shortened(reason), status=status)
            free = replace(found, event=event, claimed_until=None, claim_epoch=0, rests_until=next_attempt_at)
            if attempts > row.attempt:  # tried: it holds no other event back
                at, made = (found.scheduled_at, found.attempts) if found.asked else (next_attempt_at, attempts)
                free = replace(free, event=replace(event, session=""), attempts=made, next_attempt_at=at)
                free = replace(free, rests_until=None, asked=False, scheduled_at=None)
            self._tables.rows[row.id] = free

    def counts(self) -> dict[str, dict[str, int]]:
        with self._tables.lock:
            counts: dict[str, dict[str, int]] = {}
            for row in self._tables.rows.values():
                of = counts.setdefault(row.subscription, {"waiting": 0, "dead": 0})
                of["dead" if row.is_dead else "waiting"] += 1
            return counts

    def oldest(self) -> dict[str, datetime]:
        with self._tables.lock:
            since: dict[str, datetime] = {}
            for row in self._tables.rows.values():
                if not row.is_dead:
                    since[row.subscription] = min(since.get(row.subscription, row.created_at), row.created_at)
            return since

    def rows(
        self, subscription: str | None = None, *, dead: bool | None = None, after_id: int = 0, limit: int = 100
    ) -> list[ParkedRow]:
        with self._tables.lock:
            rows = [
                row
                for row_id, row in sorted(self._tables.rows.items())
                if row_id > after_id and subscription in (None, row.subscription) and dead in (None, row.is_dead)
            ]
        return [
            ParkedRow(r.id, r.subscription, r.event, r.attempts, r.due_at, r.created_at, r.waits)
            for r in rows[: max(0, min(limit, CLAIM_MAX))]
        ]

    def room(self, subscriptions: Sequence[str]) -> dict[str, int]:
        with self._tables.lock:
            known = [name for name in subscriptions if name in self._tables.known]
            return {name: self._tables.known[name][0].parked_max - self.counted_for(name) for name in known}

    def held_keys(
        self, subscriptions: Sequence[str], places: Collection[SourcePartition] | None = None, replay_id: str = ""
    ) -> dict[str, dict[HeldKey, int]]:
        held: dict[str, Counter[HeldKey]] = defaultdict(Counter)
        with self._tables.lock:
            for row in self._tables.rows.values():
                event = row.event
                mine = row.subscription in subscriptions and self._tables.known[row.subscription][0].ordered
                here = places is None or event.place in places
                if mine and here and event.held_keys and event.replay_id == replay_id:
                    held[row.subscription].update(event.held_keys)
        return {name: dict(keys) for name, keys in held.items()}

    def release(self, ids: Sequence[int], now: datetime, epoch: int) -> int:
        with self._tables.fenced(epoch):
            there = [row_id for row_id in set(ids) if row_id in self._tables.rows]
            for row_id in there:
                row = self._tables.rows[row_id]
                at = row.next_attempt_at
                if not row.waits:
                    self._tables.rows[row_id] = replace(row, next_attempt_at=min(now, at or now), rests_until=None)
                if not row.waits and not row.event.session and (at is None or at > now):
                    self._tables.rows[row_id] = replace(self._tables.rows[row_id], asked=True, scheduled_at=at)
            return len(there)

    def end_rests(self, subscription: str) -> None:
        """Rows that failures of the endpoint put off are tried now; a refused event keeps its schedule."""
        for row in list(self._tables.rows.values()):
            if row.subscription == subscription and row.rests_until is not None:
                self._tables.rows[row.id] = replace(row, rests_until=None)

    def drop(self, ids: Sequence[int], epoch: int) -> int:
        with self._tables.fenced(epoch):
            there = [self._tables.rows[row_id] for row_id in set(ids) if row_id in self._tables.rows]
            return self._tables.delete(there, "dropped")

    def expire(self, subscription: str, before: datetime, now: datetime, epoch: int, limit: int = 1000) -> int:
        with self._tables.fenced(epoch):
            mine = [row for row in self._tables.rows.values() if row.subscription == subscription]
            old = [row for row in mine if row.created_at < before and row.is_free(now, epoch)]
            return self._tables.delete(old[:limit], "expired")

    def park(self, subscription: str, events: Sequence[ParkedEvent], now: datetime) -> None:
        mine = [row.event for row in self._tables.rows.values() if row.subscription == subscription]
        known = {(event.event_id, event.replay_id) for event in mine}
        waits_s = self._tables.known[subscription][0].retry_waits_s
        for event in events:
            if (event.event_id, event.replay_id) in known:
                continue
            self._id += 1
            waits = bool(event.session) and self._tables.lacks_key(subscription, event.session)
            due = now if event.session else decide.first_attempt_at(event, now, self._jitter(), waits_s)
            self._tables.rows[self._id] = Row(
                id=self._id,
                subscription=subscription,
                event=replace(event, reason=decide.shortened(event.reason), retry_after_s=None),
                attempts=decide.attempts_made(event),
                next_attempt_at=None if waits else due,
                created_at=now,
                waits=waits,
            )
            known.add((event.event_id, event.replay_id))

    def _is_held(self, row: Row) -> bool:
        if not row.event.held_keys or not self._tables.known[row.subscription][0].ordered:
            return False
        return any(other.id < row.id and other.key_lines & row.key_lines for other in self._tables.rows.values())

    def counted_for(self, subscription: str) -> int:
        """How many parked rows of a subscription count for its `parked_max`."""
        own = [r for r in self._tables.rows.values() if r.subscription == subscription and not r.event.replay_id]
        leaving = Counter(row.event.stream for row in own if row.event.session and not row.waits)
        too_much = sum(max(0, number - WAITING_MAX) for number in leaving.values())
        if self._tables.is_bot(subscription):
            return too_much  # what a bot refused counts for its stream alone
        return sum(not row.event.session for row in own) + too_much

    def _before_in_session(self, row: Row) -> list[Row]:
        """The rows of its session that were parked earlier."""
        if not row.event.session:
            return []
        return [
            other
            for other in self._tables.rows.values()
            if other.id < row.id and other.session_line == row.session_line
        ]
