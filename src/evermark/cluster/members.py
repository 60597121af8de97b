"""The instances of a deployment, as they announce themselves in State, by the clock of its Postgres."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from evermark.cluster import liveness
from evermark.cluster.base import Holder
from evermark.cluster.holding import LIMITS
from evermark.cluster.liveness import IsGone
from evermark.errors import NotFoundError
from evermark.state.connection import State

# An instance that was drained and started again is another process: it is not drained any more.
_BEAT = """
insert into instances (instance, host, boot, pid, started, version, leases, seen_at)
values (%(instance)s, %(host)s, %(boot)s, %(pid)s, %(started)s, %(version)s, %(leases)s, clock_timestamp())
on conflict (instance) do update set seen_at = excluded.seen_at, version = excluded.version,
    leases = case when instances.leases = excluded.leases then instances.leases else excluded.leases end,
    host = excluded.host, boot = excluded.boot, pid = excluded.pid, started = excluded.started,
    draining = instances.draining and instances.started = excluded.started
"""

_ALL = """
select instance, host, boot, pid, started, version, leases, draining, seen_at,
       seen_at > clock_timestamp() - make_interval(secs => %s)
from instances order by instance
"""

_DRAIN = "update instances set draining = true where instance = %s"
_LEAVE = "delete from instances where instance = %s and started = %s"
_FORGET = "delete from instances where seen_at < clock_timestamp() - make_interval(secs => %s)"
_FORGET_AFTER = 30  # times as long as a lease is good for: each start has another name, and all rows are read often


@dataclass(frozen=True)
class Member:
    """One instance. `lives`: it was heard of within the time a lease is good for, and its process is not gone."""

    holder: Holder
    version: str
    leases: frozenset[str]
    draining: bool
    seen_at: datetime
    lives: bool

    @property
    def name(self) -> str:
        return self.holder.instance


def member_of(instance: str) -> str:
    """The instance that a holder of leases belongs to: its lanes hold them as `<name>/<lane>`."""
    return instance.partition("/")[0]


class Members:
    def __init__(self, state: State, *, ttl_s: float = LIMITS.ttl_s, is_gone: IsGone = liveness.is_gone) -> None:
        self._state = state
        self._ttl_s = ttl_s
        self._is_gone = is_gone

    def beat(self, holder: Holder, version: str, leases: Collection[str]) -> None:
        """Say that this process lives, and which leases it can take."""
        given = vars(holder) | {"version": version, "leases": sorted(leases)}
        with self._state.transaction() as conn:
            conn.execute(_BEAT, given)
            conn.execute(_FORGET, (_FORGET_AFTER * self._ttl_s,))

    def all(self) -> dict[str, Member]:
        with self._state.connection() as conn:
            rows = conn.execute(_ALL, (self._ttl_s,)).fetchall()
        found = {}
        for name, host, boot, pid, started, version, leases, draining, seen_at, heard in rows:
            holder = Holder(name, host, boot, pid, started)
            lives = heard and not self._is_gone(holder)
            found[name] = Member(holder, version, frozenset(leases), draining, seen_at, lives)
        return found

    def drain(self, name: str) -> None:
        with self._state.connection() as conn:
            if conn.execute(_DRAIN, (name,)).rowcount != 1:
                raise NotFoundError(f"no instance is called {name[:80]!r}", hint="`evermark instance list` has them")

    def leave(self, holder: Holder) -> None:
        """It ends: nobody has to find out."""
        with self._state.connection() as conn:
            conn.execute(_LEAVE, (holder.instance, holder.started))
