"""Memberships, session keys and the keys asked for, in this process."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from evermark.cluster.fence import DELIVER_LEASE
from evermark.delivery.bots.keys import key_asked_next_at, require_keys, require_room, unknown_key
from evermark.delivery.bots.membership import require_learned
from evermark.delivery.limits import RELEASED_MAX, WAITING_MAX
from evermark.delivery.model import KeyWanted, Membership, MembershipDelta, SessionKey, Surplus
from evermark.delivery.store.memory_parked import MemoryTables, Row


class MemoryBots:
    """A `BotStore`."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self.lease = DELIVER_LEASE
        self._learned: dict[tuple[str, str], Membership] = {}
        self._asks: dict[tuple[str, str], tuple[datetime, int]] = {}

    def under(self, lease: str) -> MemoryBots:
        """The same, fenced by another lease."""
        other = copy.copy(self)
        other.lease = lease
        return other

    # membership

    def learned(self, source: str, user: str) -> Membership:
        with self._tables.lock:
            return self._learned.get((source, user), Membership())

    def learn(self, source: str, partition: int, lessons: Sequence[MembershipDelta], epoch: int) -> None:
        with self._tables.fenced(epoch, self.lease):
            known = {one.user: self._learned.get((source, one.user), Membership()) for one in lessons}
            require_learned(lessons, {user: found.to.get(partition, 0) for user, found in known.items()})
            for one in lessons:
                to, stays = known[one.user].to, known[one.user].stays
                self._learned[source, one.user] = Membership({**to, partition: one.done_to}, {**stays, **one.stays})

    def forget_users(self, epoch: int) -> int:
        with self._tables.fenced(epoch, self.lease):
            bots = [spec.bot for spec, _ in self._tables.known.values() if spec.bot is not None]
            gone = self._learned.keys() - {(bot.source, bot.user) for bot in bots}
            for one in gone:
                del self._learned[one]
            return len(gone)

    # session keys

    def publish(self, device: str, keys: Mapping[str, str], now: datetime, epoch: int) -> int:
        require_keys(device, keys)
        with self._tables.fenced(epoch, self.lease):
            mine = {session for of, session in self._tables.keys if of == device}
            require_room(device, len(mine | keys.keys()))
            for session, sealed in keys.items():
                self._tables.keys[device, session] = SessionKey(session, sealed, now)
            return self._make_due(now, lambda name, session: self._tables.device(name) == device and session in keys)

    def withdraw(self, device: str, session: str, now: datetime, epoch: int) -> int:
        with self._tables.fenced(epoch, self.lease):
            if self._tables.keys.pop((device, session), None) is None:
                raise unknown_key(session)
            return self._hold(now, epoch, lambda name, of: self._tables.device(name) == device and of == session)

    def session_key(self, device: str, session: str) -> SessionKey:
        with self._tables.lock:
            if (device, session) not in self._tables.keys:
                raise unknown_key(session)
            return self._tables.keys[device, session]

    def session_keys(self, device: str, *, after: str = "", limit: int = 100) -> list[SessionKey]:
        with self._tables.lock:
            mine = [key for (of, session), key in sorted(self._tables.keys.items()) if of == device and session > after]
        return mine[: max(0, limit)]

    def _published(self, devices: Collection[str]) -> dict[str, frozenset[str]]:
        keys = [(device, session) for device, session in self._tables.keys if device in devices]
        return {of: frozenset(session for device, session in keys if device == of) for of, _ in keys}

    def _queued(self, subscriptions: Collection[str], replay_id: str) -> Mapping[str, Collection[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for row in self._tables.rows.values():
            if row.subscription in subscriptions and row.event.replay_id == replay_id:
                found[row.subscription].add(row.event.session)
        return found

    def sessions_clear(self, subscriptions: Collection[str], replay_id: str = "") -> dict[str, frozenset[str]]:
        with self._tables.lock:
            devices = {name: self._tables.device(name) for name in subscriptions if name in self._tables.known}
            published = self._published(set(devices.values()))
            queued = self._queued(subscriptions, replay_id)
            return {n: published[of].difference(queued.get(n, ())) for n, of in devices.items() if of in published}

    def _hold(self, now: datetime, epoch: int, which: Callable[[str, str], bool]) -> int:
        """Rows of some subscriptions and sessions that were not tried yet and are not under way wait again."""
        held = [
            row
            for row in self._tables.rows.values()
            if row.event.session
            and not row.waits
            and row.is_free(now, epoch)
            and which(row.subscription, row.event.session)
        ]
        for row in held:
            self._tables.rows[row.id] = replace(row, waits=True, next_attempt_at=None)
        return len(held)

    def _make_due(self, now: datetime, which: Callable[[str, str], bool], limit: int | None = None) -> int:
        """Rows of some subscriptions and sessions that wait may be tried now; the first so many."""
        rows = [row for _, row in sorted(self._tables.rows.items())]
        some = [row for row in rows if row.waits and which(row.subscription, row.event.session)][:limit]
        for row in some:
            self._tables.rows[row.id] = replace(row, waits=False, next_attempt_at=now)
        return len(some)

    def decide_anew_who_waits(self, names: Collection[str], now: datetime, epoch: int) -> None:
        """These bots have another device now: whether their parked events wait for a key is decided anew."""
        lacks_key = self._tables.lacks_key
        self._hold(now, epoch, lambda name, session: name in names and lacks_key(name, session))
        self._make_due(now, lambda name, session: name in names and not lacks_key(name, session))

    def release_keyed(self, now: datetime, epoch: int, limit: int = RELEASED_MAX) -> int:
        with self._tables.fenced(epoch, self.lease):
            self._hold(now, epoch, self._tables.lacks_key)
            return self._make_due(now, lambda name, session: not self._tables.lacks_key(name, session), limit)

    def stopped(self, subscriptions: Collection[str]) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        with self._tables.lock:
            for (name, stream, waits), rows in self._by_stream().items():
                if not waits and name in subscriptions and len(rows) >= self._tables.known[name][0].parked_max:
                    found[name].add(stream)
        return {name: frozenset(streams) for name, streams in found.items()}

    def surplus(self, keep: int = WAITING_MAX) -> list[Surplus]:
        with self._tables.lock:
            by_stream = self._by_stream()
        return [
            Surplus(name, stream, rows[len(rows) - keep - 1].id, waits)
            for (name, stream, waits), rows in by_stream.items()
            if len(rows) > keep
        ]

    def expire_surplus(self, surplus: Surplus, now: datetime, epoch: int, limit: int = 1000) -> int:
        with self._tables.fenced(epoch, self.lease):
            rows = self._by_stream().get((surplus.subscription, surplus.stream, surplus.waits), [])
            old = [row for row in rows if row.id <= surplus.through and row.is_free(now, epoch)]
            return self._tables.delete(old[:limit], "expired")

    def _by_stream(self) -> dict[tuple[str, str, bool], list[Row]]:
        """First deliveries of bots by stream, the oldest first: deliveries that wait for keys, and deliveries that do
        not wait and are not on their way out because their key came."""
        found: dict[tuple[str, str, bool], list[Row]] = defaultdict(list)
        for _, row in sorted(self._tables.rows.items()):
            mine = row.waits or (not row.event.session and self._tables.is_bot(row.subscription))
            if mine and not row.event.replay_id:
                found[row.subscription, row.event.stream, row.waits].append(row)
        return found

    def keys_wanted(self, now: datetime, limit: int, epoch: int) -> list[KeyWanted]:
        with self._tables.fenced(epoch, self.lease):
            firsts: dict[tuple[str, str], Row] = {}
            for _, row in sorted(self._tables.rows.items()):
                if row.waits and self._tables.lacks_key(row.subscription, row.event.session):
                    firsts.setdefault((row.subscription, row.event.session), row)
            due: list[tuple[datetime | None, int, KeyWanted]] = []
            for (name, session), row in firsts.items():
                asked_at, asks = self._asks.get((name, session), (None, 0))
                if self._may_be_asked(name, now) and key_asked_next_at(asked_at, asks, now) <= now:
                    device, stream = self._tables.device(name), row.event.stream
                    due.append((asked_at, row.id, KeyWanted(name, device, session, stream, row.created_at, asks + 1)))
            due.sort(key=lambda one: (one[0] is not None, one[0] or now, one[1]))
            nth: Counter[tuple[str, str]] = Counter()

            def turn(told: KeyWanted) -> int:
                nth[told.subscription, told.stream] += 1
                return nth[told.subscription, told.stream]

            found = sorted((told for *_, told in due), key=turn)[: max(0, limit)]
            for told in found:
                self._asks[told.subscription, told.session] = (now, told.asks)
            return found

    def _may_be_asked(self, name: str, now: datetime) -> bool:
        spec, record = self._tables.known[name]
        # A bot that failed is asked when its time has come: events that wait for keys clear no failure.
        backs_off = record.failures and record.next_attempt_at is not None and record.next_attempt_at > now
        return bool(spec.device) and not record.is_stopped and not backs_off

    def forget_asks(self, names: Collection[str]) -> None:
        self._asks = {one: asked for one, asked in self._asks.items() if one[0] not in names}
