"""Memberships, session keys and the keys asked for, in State. Fenced, as all of delivery."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from evermark.cluster.fence import DELIVER_LEASE, fence, fenced
from evermark.delivery.bots.keys import require_keys, require_room, unknown_key
from evermark.delivery.bots.membership import require_learned
from evermark.delivery.limits import KEY_ASKED_EVERY, KEY_ASKED_EVERY_MAX, RELEASED_MAX, WAITING_MAX
from evermark.delivery.model import KeyWanted, Membership, MembershipDelta, SessionKey, Stay, Surplus
from evermark.delivery.store import bot_queries as queries
from evermark.delivery.store.postgres_parked import lock_every_session, lock_sessions, storable
from evermark.state import counters
from evermark.state.connection import Connection, State

PUBLISHED_MAX = 20_000  # sessions of one device that a task is told of
PAGE_MAX = 1_000


class PostgresBots:
    """A `BotStore`."""

    def __init__(self, state: State, lease: str = DELIVER_LEASE) -> None:
        self._state = state
        self._lease = lease

    # membership

    def learned(self, source: str, user: str) -> Membership:
        stays: dict[str, tuple[Stay, ...]] = defaultdict(tuple)
        with self._state.transaction() as conn:
            conn.execute("set transaction isolation level repeatable read")  # one moment for both
            to = dict(conn.execute(queries.LEARNED, (source, user)).fetchall())
            rows = conn.execute(queries.STAYS, (source, user)).fetchall()
        for stream, begin_batch, begin_position, end_batch, end_position, inbox in rows:
            end = None if end_batch is None else (end_batch, end_position)
            stays[stream] += (Stay((begin_batch, begin_position), end, inbox),)
        return Membership(to, dict(stays))

    def learn(self, source: str, partition: int, lessons: Sequence[MembershipDelta], epoch: int) -> None:
        users = sorted(lesson.user for lesson in lessons)
        stays = [
            (one.user, stream, *stay.begin, *(stay.end or (None, None)), stay.inbox)
            for one in lessons
            for stream, times in one.stays.items()
            for stay in times
        ]
        with fenced(self._state, self._lease, epoch) as conn:
            at = dict(conn.execute(queries.LEARNED_LOCKED, (source, partition, users)).fetchall())
            require_learned(lessons, at)
            batches = [[one.user for one in lessons], [one.done_to for one in lessons]]
            conn.execute(queries.SET_LEARNED, (source, partition, *batches))
            if stays:
                conn.execute(queries.SET_STAYS, (source, *map(list, zip(*stays, strict=True))))

    def forget_users(self, epoch: int) -> int:
        with fenced(self._state, self._lease, epoch) as conn:
            conn.execute(queries.FORGET_STAYS)
            row = conn.execute(queries.FORGET_LEARNED).fetchone()
            return int(row[0]) if row else 0

    # session keys

    def publish(self, device: str, keys: Mapping[str, str], now: datetime, epoch: int) -> int:
        require_keys(device, keys)
        sessions = sorted(keys)
        given = {"device": device, "sessions": sessions, "now": now, "limit": RELEASED_MAX}
        with fenced(self._state, self._lease, epoch) as conn:
            lock_sessions(conn, [(device, session) for session in sessions])
            row = conn.execute(queries.KEY_COUNTS, (sessions, device)).fetchone()
            require_room(device, row[0] + len(keys) - row[1] if row else len(keys))
            conn.execute(queries.PUT_KEYS, (device, now, sessions, [keys[session] for session in sessions]))
            some = released = conn.execute(queries.RELEASE_SESSIONS, given).rowcount
        while some == RELEASED_MAX:
            with fenced(self._state, self._lease, epoch) as conn:
                some = conn.execute(queries.RELEASE_SESSIONS, given).rowcount
            released += some
        return released

    def withdraw(self, device: str, session: str, now: datetime, epoch: int) -> int:
        given = {"device": storable(device), "session": storable(session), "now": now, "epoch": epoch}
        with fenced(self._state, self._lease, epoch) as conn:
            lock_sessions(conn, [(device, session)])
            if conn.execute(queries.WITHDRAW_KEY, given).rowcount == 0:
                raise unknown_key(session)
            return conn.execute(queries.HOLD_SESSION, given).rowcount

    def session_key(self, device: str, session: str) -> SessionKey:
        with self._state.connection() as conn:
            row = conn.execute(queries.KEY, (storable(device), storable(session))).fetchone()
        if row is None:
            raise unknown_key(session)
        return SessionKey(*row)

    def session_keys(self, device: str, *, after: str = "", limit: int = 100) -> list[SessionKey]:
        given = (storable(device), storable(after), max(0, min(limit, PAGE_MAX)))
        with self._state.connection() as conn:
            return [SessionKey(*row) for row in conn.execute(queries.KEY_PAGE, given)]

    def sessions_clear(self, subscriptions: Collection[str], replay_id: str = "") -> dict[str, frozenset[str]]:
        given = {"names": sorted(subscriptions), "replay_id": replay_id, "most": PUBLISHED_MAX}
        with self._state.connection() as conn:
            return {name: frozenset(sessions or ()) for name, sessions in conn.execute(queries.CLEAR, given)}

    def stopped(self, subscriptions: Collection[str]) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        with self._state.connection() as conn:
            for name, stream in conn.execute(queries.STOPPED, (sorted(subscriptions),)):
                found[name].add(stream)
        return {name: frozenset(streams) for name, streams in found.items()}

    def release_keyed(self, now: datetime, epoch: int, limit: int = RELEASED_MAX) -> int:
        with self._state.transaction() as conn:
            if conn.execute(queries.IS_ANY_OF_SESSION).fetchone() == (False,):
                return 0
            fence(conn, self._lease, epoch)
            # Without the locks of sessions: a key that is published just now is seen by the next sweep at the latest.
            released = conn.execute(queries.RELEASE_KEYED, {"now": now, "limit": limit}).rowcount
            if released < limit:
                conn.execute(queries.HOLD_KEYLESS, {"now": now, "epoch": epoch, "limit": limit})
            return released

    def surplus(self, keep: int = WAITING_MAX) -> list[Surplus]:
        with self._state.connection() as conn:
            return [Surplus(*row) for row in conn.execute(queries.SURPLUS, {"keep": keep})]

    def expire_surplus(self, surplus: Surplus, now: datetime, epoch: int, limit: int = 1000) -> int:
        given = {**asdict(surplus), "now": now, "epoch": epoch, "limit": limit}
        with fenced(self._state, self._lease, epoch) as conn:
            expired = conn.execute(queries.EXPIRE_SURPLUS, given).rowcount
            counters.count(conn, "expired", {surplus.subscription: expired})
        return expired

    def keys_wanted(self, now: datetime, limit: int, epoch: int) -> list[KeyWanted]:
        given = {"now": now, "limit": limit, "every": KEY_ASKED_EVERY, "most": KEY_ASKED_EVERY_MAX}
        with self._state.transaction() as conn:
            if conn.execute(queries.IS_ANY_WAITING).fetchone() == (False,):
                return []
            fence(conn, self._lease, epoch)
            found = [KeyWanted(*row) for row in conn.execute(queries.WANTED, given)]
            if found:
                names, sessions = [one.subscription for one in found], [one.session for one in found]
                conn.execute(queries.ASKED, (now, names, sessions))
            conn.execute(queries.FORGET_ASKS, (now - 2 * KEY_ASKED_EVERY_MAX,))
            return found


def decide_anew_who_waits(conn: Connection, names: Collection[str], now: datetime, epoch: int) -> None:
    """These bots have another device since this transaction: whether their parked events wait for a key is decided
    anew. To be called where nothing can be parked for them until it ends. Of more events than one transaction may
    touch the sweep decides: none of them is sent without a key, and none is overtaken.
    """
    if names:
        given = {"names": sorted(names), "now": now, "epoch": epoch, "limit": RELEASED_MAX}
        lock_every_session(conn)
        conn.execute(queries.HOLD_KEYLESS_OF, given)
        conn.execute(queries.RELEASE_KEYED_OF, given)


def bot_users(state: State, source: str) -> frozenset[str]:
    """The users that bots speak for in a source: streams they are members of, and their inboxes, matter."""
    with state.connection() as conn:
        return frozenset(user for user, _ in conn.execute(queries.USERS, (source,)))


def bot_inboxes(state: State, source: str) -> frozenset[str]:
    """The streams that bots of a source named as their inboxes."""
    with state.connection() as conn:
        return frozenset(inbox for _, inbox in conn.execute(queries.USERS, (source,)) if inbox)


def bot_users_version(state: State, source: str) -> str:
    """A text that changes whenever `bot_users` or `bot_inboxes` does; empty: there are no bots."""
    with state.connection() as conn:
        row = conn.execute(queries.USERS_VERSION, (source,)).fetchone()
        return str(row[0]) if row else ""
