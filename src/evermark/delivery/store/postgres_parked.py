"""Parked deliveries in State: the table `enqueued_messages`. A row goes when its event was accepted or given up."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from evermark.cluster.fence import DELIVER_LEASE, fence, fenced
from evermark.delivery.decide.group import Jitter, attempts_made, first_attempt_at, shortened
from evermark.delivery.limits import CLAIM_MAX, RETRY_WAITS_S, WAITING_MAX
from evermark.delivery.model import HeldKey, Parked, ParkedEvent, ParkedRow, SourcePartition
from evermark.delivery.store import queries
from evermark.state import counters
from evermark.state.connection import Connection, State

SESSION_LOCKS = 256


class PostgresParked:
    """A `ParkedStore`."""

    def __init__(self, state: State) -> None:
        self._state = state

    def claim(
        self, now: datetime, limit: int, lease_s: float, epoch: int, *, without: Collection[str] = ()
    ) -> list[Parked]:
        given: dict[str, Any] = {
            "lease": DELIVER_LEASE,
            "now": now,
            "epoch": epoch,
            "limit": max(0, min(limit, CLAIM_MAX)),
            "claimed_until": now + timedelta(seconds=lease_s),
            "draw": now.isoformat(),
            "without": list(without),
        }
        with self._state.connection() as conn:
            if conn.execute(queries.IS_ANY_DUE, given).fetchone() == (True, False):
                return []
            with conn.transaction():
                fence(conn, DELIVER_LEASE, epoch)
                rows = conn.execute(queries.CLAIM, given | {"of_replays": False}).fetchall()
                left = given["limit"] - len(rows)
                if left > 0:
                    rows += conn.execute(queries.CLAIM, given | {"of_replays": True, "limit": left}).fetchall()
        return [
            Parked(row_id, subscription, _event(event), attempts, claimed_until, generation)
            for row_id, claimed_until, generation, subscription, attempts, *event in sorted(rows)
        ]

    def delivered(self, ids: Sequence[int], epoch: int) -> None:
        with fenced(self._state, DELIVER_LEASE, epoch) as conn:
            conn.execute(queries.DELIVERED, (sorted(ids),))

    def reschedule(
        self, row: Parked, next_attempt_at: datetime | None, attempts: int, reason: str, status: int | None, epoch: int
    ) -> None:
        given = {
            "at": next_attempt_at,
            "attempts": attempts,
            "reason": storable(shortened(reason)),
            "status": status,
            "tried": attempts > row.attempt,
            "id": row.id,
            "claimed_until": row.claimed_until,
            "epoch": epoch,
        }
        with fenced(self._state, DELIVER_LEASE, epoch) as conn:
            conn.execute(queries.RESCHEDULE, given)

    def counts(self) -> dict[str, dict[str, int]]:
        with self._state.connection() as conn:
            rows = conn.execute(queries.PARKED_COUNTS).fetchall()
        return {name: {"waiting": waiting, "dead": dead} for name, waiting, dead in rows}

    def oldest(self) -> dict[str, datetime]:
        with self._state.connection() as conn:
            return dict(conn.execute(queries.PARKED_SINCE).fetchall())

    def rows(
        self, subscription: str | None = None, *, dead: bool | None = None, after_id: int = 0, limit: int = 100
    ) -> list[ParkedRow]:
        given: dict[str, Any] = {"subscription": subscription, "dead": dead, "after_id": after_id}
        given["limit"] = max(0, min(limit, CLAIM_MAX))
        with self._state.connection() as conn:
            return [
                ParkedRow(row_id, name, _event(event), attempts, next_attempt_at, created_at, waits)
                for row_id, next_attempt_at, created_at, waits, name, attempts, *event in conn.execute(
                    queries.PARKED_ROWS, given
                )
            ]

    def room(self, subscriptions: Sequence[str]) -> dict[str, int]:
        with self._state.connection() as conn:
            most: dict[str, int] = dict(conn.execute(queries.PARKED_MAX, (list(subscriptions),)).fetchall())
            there = parked_by(conn, subscriptions)
        return {name: most[name] - there.get(name, 0) for name in most}

    def held_keys(
        self, subscriptions: Sequence[str], places: Collection[SourcePartition] | None = None, replay_id: str = ""
    ) -> dict[str, dict[HeldKey, int]]:
        given: dict[str, Any] = {"names": list(subscriptions), "replay_id": replay_id, "everywhere": places is None}
        given["sources"] = [place.source for place in places or ()]
        given["partitions"] = [place.partition for place in places or ()]
        held: dict[str, dict[HeldKey, int]] = defaultdict(dict)
        with self._state.connection() as conn:
            for subscription, source, partition, stream, key, rows in conn.execute(queries.HELD_KEYS, given):
                held[subscription][SourcePartition(source, partition), stream, key] = rows
        return dict(held)

    def release(self, ids: Sequence[int], now: datetime, epoch: int) -> int:
        with fenced(self._state, DELIVER_LEASE, epoch) as conn:
            return conn.execute(queries.RELEASE, {"now": now, "ids": sorted(ids)}).rowcount

    def drop(self, ids: Sequence[int], epoch: int) -> int:
        with fenced(self._state, DELIVER_LEASE, epoch) as conn:
            dropped: dict[str, int] = dict(conn.execute(queries.DROP, (sorted(ids),)).fetchall())
            counters.count(conn, "dropped", dropped)
        return sum(dropped.values())

    def expire(self, subscription: str, before: datetime, now: datetime, epoch: int, limit: int = 1000) -> int:
        given = {"subscription": subscription, "before": before, "now": now, "epoch": epoch, "limit": limit}
        with fenced(self._state, DELIVER_LEASE, epoch) as conn:
            expired = conn.execute(queries.EXPIRE, given).rowcount
            counters.count(conn, "expired", {subscription: expired})
        return expired


def park(conn: Connection, parked: Mapping[str, Sequence[ParkedEvent]], now: datetime, jitter: Jitter) -> None:
    """Set deliveries aside, per subscription, inside the caller's transaction."""
    names = sorted(name for name, events in parked.items() if events)
    if names:
        conn.execute(queries.LOCK_PARKED_FOR, (names,))
    waits = _waits(conn, parked)
    waits_s = _retry_waits_s(conn, names)
    rows = [
        (
            name,
            storable(event.event_id),
            event.replay_id,
            event.place.source,
            event.place.partition,
            event.batch,
            event.position,
            storable(event.stream),
            None if event.key is None else storable(event.key),
            None if event.previous_key is None else storable(event.previous_key),
            storable(event.event),
            storable(shortened(event.reason)),
            event.status,
            attempts_made(event),
            *_queued(event, (name, storable(event.session)) in waits, now, jitter, waits_s[name]),
        )
        for name in sorted(parked)
        for event in parked[name]
    ]
    if rows:
        conn.execute(queries.PARK, (now, *map(list, zip(*rows, strict=True))))


def _retry_waits_s(conn: Connection, subscriptions: Sequence[str]) -> dict[str, Sequence[float]]:
    if not subscriptions:
        return {}
    rows = conn.execute(queries.RETRY_WAITS, (list(subscriptions),)).fetchall()
    return {name: RETRY_WAITS_S if waits_s is None else waits_s for name, waits_s in rows}


def _queued(
    event: ParkedEvent, waits: bool, now: datetime, jitter: Jitter, waits_s: Sequence[float]
) -> tuple[datetime | None, str | None, bool]:
    """When the event is tried, for which session it queues, and whether it waits for its key."""
    if not event.session:
        return first_attempt_at(event, now, jitter(), waits_s), None, False
    return None if waits else now, storable(event.session), waits


def parked_by(conn: Connection, subscriptions: Sequence[str]) -> dict[str, int]:
    """How many parked rows of each subscription count for its `parked_max`."""
    names = sorted(set(subscriptions))
    return dict(conn.execute(queries.PARKED_BY, (WAITING_MAX, names)).fetchall()) if names else {}


def lock_sessions(conn: Connection, wanted: Iterable[tuple[str, str]]) -> None:
    """Lock these (device, session) until the transaction ends. Publishing a key and parking an event that
    needs it come one after the other: the second of them sees what the first did.
    """
    # A bounded number of locks, however many sessions there are; sessions that share a lock wait for each other.
    buckets = {zlib.crc32(f"{device}\x00{session}".encode()) % SESSION_LOCKS for device, session in wanted}
    if buckets:
        conn.execute(queries.LOCK_SESSIONS, (sorted(buckets),))


def lock_every_session(conn: Connection) -> None:
    """The same, with all sessions of all devices."""
    conn.execute(queries.LOCK_SESSIONS, (list(range(SESSION_LOCKS)),))


def _waits(conn: Connection, parked: Mapping[str, Sequence[ParkedEvent]]) -> set[tuple[str, str]]:
    """The (subscription, session) without a key, decided under the locks of all sessions that are parked for."""
    wanted = {(name, storable(e.session)) for name, events in parked.items() for e in events if e.session}
    if not wanted:
        return set()
    given = [list(column) for column in zip(*wanted, strict=True)]
    devices = conn.execute(queries.DEVICES, given).fetchall()
    lock_sessions(conn, devices)
    return set(conn.execute(queries.KEYLESS, given).fetchall())


def storable(text: str) -> str:
    """Postgres keeps neither the character NUL nor half a surrogate pair; a receiver's answer may hold both."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


def _event(row: Sequence[Any]) -> ParkedEvent:
    event_id, source, partition, *rest = row
    return ParkedEvent(event_id, SourcePartition(source, partition), *rest)
