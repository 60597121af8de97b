"""What is known of bots, in memory: the twin of `store.py`, and what the simulator runs on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from evermark.cluster.memory import MemoryLeases
from evermark.delivery.base import SubscriptionState
from evermark.delivery.bots.base import (
    WAITING_MAX,
    BotSpec,
    KeyWanted,
    Membership,
    MembershipDelta,
    SessionKey,
    Surplus,
)
from evermark.delivery.bots.keys import next_ask_at, require_keys, require_learned, require_room, unknown_key
from evermark.delivery.decide.group import Jitter
from evermark.delivery.store.memory_parked import MemoryParkedRows, Row


class MemoryBots(MemoryParkedRows):
    """A `BotStore`, and the part of a `DeliveryStore` about parked deliveries."""

    def __init__(self, leases: MemoryLeases, lease: str, jitter: Jitter) -> None:
        super().__init__(leases, lease, jitter)
        self._learned: dict[tuple[str, str], Membership] = {}
        self._asks: dict[tuple[str, str], tuple[datetime, int]] = {}

    # membership

    def learned(self, source: str, user: str) -> Membership:
        with self._lock:
            return self._learned.get((source, user), Membership())

    def learn(self, source: str, partition: int, lessons: Sequence[MembershipDelta], epoch: int) -> None:
        with self._fenced(epoch):
            known = {one.user: self._learned.get((source, one.user), Membership()) for one in lessons}
            require_learned(lessons, {user: found.to.get(partition, 0) for user, found in known.items()})
            for one in lessons:
                found = known[one.user]
                self._learned[source, one.user] = Membership(
                    {**found.to, partition: one.done_to}, {**found.stays, **one.stays}
                )

    def forget_users(self, epoch: int) -> int:
        with self._fenced(epoch):
            spoken_for = {(wish.source, wish.user) for wish in self._bots().values()}
            gone = self._learned.keys() - spoken_for
            for one in gone:
                del self._learned[one]
            return len(gone)

    # session keys

    def publish(self, device: str, keys: Mapping[str, str], now: datetime, epoch: int) -> int:
        require_keys(device, keys)
        with self._fenced(epoch):
            mine = {session for of, session in self._keys if of == device}
            require_room(device, len(mine | keys.keys()))
            for session, sealed in keys.items():
                self._keys[device, session] = SessionKey(session, sealed, now)
            return self._make_due(now, lambda name, session: self._device(name) == device and session in keys)

    def withdraw(self, device: str, session: str, now: datetime, epoch: int) -> int:
        with self._fenced(epoch):
            if self._keys.pop((device, session), None) is None:
                raise unknown_key(session)
            return self._hold(now, epoch, lambda name, of: self._device(name) == device and of == session)

    def session_key(self, device: str, session: str) -> SessionKey:
        with self._lock:
            if (device, session) not in self._keys:
                raise unknown_key(session)
            return self._keys[device, session]

    def session_keys(self, device: str, *, after: str = "", limit: int = 100) -> list[SessionKey]:
        with self._lock:
            mine = [key for (of, session), key in sorted(self._keys.items()) if of == device and session > after]
        return mine[: max(0, limit)]

    def _published(self, devices: Collection[str]) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        with self._lock:
            for device, session in self._keys:
                if device in devices:
                    found[device].add(session)
        return {device: frozenset(sessions) for device, sessions in found.items()}

    def _queued(self, subscriptions: Collection[str], replay_id: str = "") -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        with self._lock:
            for row in self._rows.values():
                event = row.event
                mine = row.subscription in subscriptions and event.replay_id == replay_id
                if event.session and not row.waits and mine:
                    found[row.subscription].add(event.session)
        return {name: frozenset(sessions) for name, sessions in found.items()}

    def sessions_clear(self, subscriptions: Collection[str], replay_id: str = "") -> dict[str, frozenset[str]]:
        with self._lock:
            devices = {name: self._device(name) for name in subscriptions if name in self._known}
            published = self._published(set(devices.values()))
            queued = self._queued(subscriptions, replay_id)
            return {n: published[of] - queued.get(n, frozenset()) for n, of in devices.items() if of in published}

    def _hold(self, now: datetime, epoch: int, which: Callable[[str, str], bool]) -> int:
        """What was not tried yet and is under way with nobody, of some subscriptions and sessions, waits again."""
        held = [
            row
            for row in self._rows.values()
            if row.event.session
            and not row.waits
            and row.is_free(now, epoch)
            and which(row.subscription, row.event.session)
        ]
        for row in held:
            self._rows[row.id] = replace(row, waits=True, next_attempt_at=None)
        return len(held)

    def _with_other_devices(self, names: Collection[str], now: datetime, epoch: int) -> None:
        """These have another device now: what waits, and what does not, is decided anew."""
        self._hold(now, epoch, lambda name, session: name in names and self._lacks_key(name, session))
        self._make_due(now, lambda name, session: name in names and not self._lacks_key(name, session))

    def release_keyed(self, now: datetime, epoch: int) -> int:
        with self._fenced(epoch):
            return self._make_due(now, lambda name, session: not self._lacks_key(name, session))

    def waiting_beyond(self, keep: int = WAITING_MAX) -> list[Surplus]:
        by_stream: dict[tuple[str, str], list[int]] = defaultdict(list)
        with self._lock:
            for row_id, row in sorted(self._rows.items()):
                if row.waits and not row.event.replay_id:
                    by_stream[row.subscription, row.event.stream].append(row_id)
        return [Surplus(*of, ids[len(ids) - keep - 1]) for of, ids in by_stream.items() if len(ids) > keep]

    def expire_waiting(self, surplus: Surplus, epoch: int, limit: int = 1000) -> int:
        with self._fenced(epoch):
            old = [
                row_id
                for row_id, row in sorted(self._rows.items())
                if row_id <= surplus.through
                and row.waits
                and not row.event.replay_id
                and (row.subscription, row.event.stream) == (surplus.subscription, surplus.stream)
            ][:limit]
            for row_id in old:
                del self._rows[row_id]
            self._counted["expired"][surplus.subscription] += len(old)
            return len(old)

    def keys_wanted(self, now: datetime, limit: int, epoch: int) -> list[KeyWanted]:
        with self._fenced(epoch):
            firsts: dict[tuple[str, str], Row] = {}
            for _, row in sorted(self._rows.items()):
                if row.waits:
                    firsts.setdefault((row.subscription, row.event.session), row)
            due: list[tuple[datetime | None, int, KeyWanted]] = []
            for (name, session), row in firsts.items():
                asked_at, asks = self._asks.get((name, session), (None, 0))
                if self._may_be_asked(name, now) and next_ask_at(asked_at, asks, now) <= now:
                    told = KeyWanted(name, self._device(name), session, row.event.stream, row.created_at, asks + 1)
                    due.append((asked_at, row.id, told))
            due.sort(key=lambda one: (one[0] is not None, one[0] or now, one[1]))
            nth: Counter[tuple[str, str]] = Counter()
            turns: list[tuple[int, KeyWanted]] = []
            for _, _, told in due:
                nth[told.subscription, told.stream] += 1
                turns.append((nth[told.subscription, told.stream], told))
            turns.sort(key=lambda one: one[0])
            found = [told for _, told in turns[: max(0, limit)]]
            for told in found:
                self._asks[told.subscription, told.session] = (now, told.asks)
            return found

    def _may_be_asked(self, name: str, now: datetime) -> bool:
        standing = self._standing(name)
        again_at = standing.next_attempt_at
        tried_again = standing.state is SubscriptionState.SUSPENDED and again_at is not None
        good = standing.state in (SubscriptionState.LIVE, SubscriptionState.BEHIND) or tried_again
        # One that failed is asked when its time has come: what only waits for keys clears no failure.
        return good and (standing.failures == 0 or again_at is None or again_at <= now) and bool(self._device(name))

    def _bots(self) -> dict[str, BotSpec]:
        return {name: spec.bot for name, (spec, _) in self._known.items() if spec.bot is not None}

    def _forget_asks(self, names: Collection[str]) -> None:
        self._asks = {one: asked for one, asked in self._asks.items() if one[0] not in names}
