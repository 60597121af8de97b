"""Leases in State, by the clock of its Postgres; and what State knows of leases that are kept elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from evermark.cluster import liveness
from evermark.cluster.base import Holder, Lease, LeaseRow
from evermark.cluster.fence import stale
from evermark.cluster.liveness import Held, IsGone, epoch_for
from evermark.errors import BusyError
from evermark.state.connection import Connection, State

# A row of epoch 0 without a holder: so that there is always a row to lock.
_BEGIN = """
insert into leases (name, epoch, expires_at) values (%s, 0, '-infinity') on conflict (name) do nothing
"""

# The clock is read after the lock was given, not when the statement began to wait for it. An expiry of -infinity has
# no Python value; a released lease is told by its missing instance.
_LOCK = """
with locked as materialized (select * from leases where name = %s for update)
select instance, host, boot, pid, started, epoch, greatest(expires_at, 'epoch'), clock_timestamp() from locked
"""

_LOOK = """
select name, instance, host, boot, pid, started, epoch, greatest(expires_at, 'epoch'), clock_timestamp()
from leases where name = any(%s)
"""

_EPOCHS = "select name, epoch from leases where name = any(%s)"

_OURS = """
select name from leases join unnest(%s::text[], %s::bigint[]) as given (name, epoch) using (name, epoch)
where instance is not null
"""

_CHECKED = """
update leases l set checked_epoch = l.epoch from unnest(%s::text[], %s::bigint[]) as given (name, epoch)
where l.name = given.name and l.epoch = given.epoch
"""

_DIVIDE = """
insert into leases (name, epoch, expires_at) select unnest(%(missing)s::text[]), %(epoch)s, '-infinity'
on conflict (name) do nothing
"""

_RAISE = "update leases set epoch = %s, instance = null, expires_at = '-infinity' where name = %s"

_TAKE = """
update leases
set instance = %(instance)s, host = %(host)s, boot = %(boot)s, pid = %(pid)s, started = %(started)s,
    epoch = %(epoch)s, expires_at = clock_timestamp() + make_interval(secs => %(ttl_s)s), last_instance = %(instance)s
where name = %(name)s
"""

_GIVEN = "leases l join unnest(%s::text[], %s::bigint[]) as given (name, epoch) using (name, epoch)"
# Locked in one order by all: so nobody waits for each other.
_RENEW = f"""
with mine as materialized (
    select l.name from {_GIVEN} where l.instance is not null order by l.name for no key update of l {{how}}
)
update leases l set expires_at = clock_timestamp() + make_interval(secs => %s) from mine where l.name = mine.name
returning l.name, l.epoch
"""
_RENEW_WAITING = _RENEW.format(how="")
# Of many leases nearly all are renewed: the statement returns the others.
_RENEW_FREE = f"""
with renewed as ({_RENEW.format(how="skip locked")})
select name, epoch from unnest(%s::text[], %s::bigint[]) as given (name, epoch)
except select name, epoch from renewed
"""
_STILL_OURS = f"select l.name, l.epoch from {_GIVEN} where l.instance is not null"
_LOCKED_SHARE = 0.1  # of a lease's time, how long one that is locked is waited for
_LOCK_TIMEOUT = "select set_config('lock_timeout', %s, true)"

# `for update` first, so that a release waits for the fenced transactions that are still running.
_RELEASE = """
with locked as materialized (select name from leases where name = %s and epoch = %s for update)
update leases l set instance = null, expires_at = '-infinity' from locked where l.name = locked.name
"""

# Released leases expire at -infinity, which has no Python value.
_HOLDERS = """
select name, epoch, instance, host, boot, pid, started, greatest(expires_at, 'epoch'), expires_at > clock_timestamp(),
       last_instance, checked_epoch
from leases where epoch > 0 order by name
"""


class PostgresLeases:
    """A `LeaseStore`. Rows stay after a release, so that no epoch is ever given out twice."""

    def __init__(self, state: State, *, is_gone: IsGone = liveness.is_gone) -> None:
        self._state = state
        self._is_gone = is_gone

    def acquire(self, name: str, holder: Holder, ttl_s: float) -> Lease | None:
        with self._state.transaction() as conn:
            conn.execute(_BEGIN, (name,))
            held, now = _locked(conn, name)
            epoch = epoch_for(held, holder, now, self._is_gone)
            if epoch is None:
                return None
            taken = {"name": name, "epoch": epoch, "ttl_s": ttl_s} | vars(holder)
            conn.execute(_TAKE, taken)
            return Lease(name, epoch)

    def acquire_all(self, names: Sequence[str], holder: Holder, ttl_s: float) -> list[Lease]:
        """Only leases that look free are locked: a lock waits for the fenced transactions of its holder."""
        likely = sorted(self.free(names, holder))
        if not likely:
            return []
        with self._state.transaction() as conn:
            found: dict[str, int] = {}
            for name in likely:  # in one order for all: so nobody waits for each other
                conn.execute(_BEGIN, (name,))
                held, now = _locked(conn, name)
                epoch = epoch_for(held, holder, now, self._is_gone)
                if epoch is not None:
                    found[name] = held.epoch
            epoch = 1 + max(found.values(), default=0)
            for name in found:
                conn.execute(_TAKE, {"name": name, "epoch": epoch, "ttl_s": ttl_s} | vars(holder))
        return [Lease(name, epoch) for name in found]

    def free(self, names: Sequence[str], holder: Holder) -> list[str]:
        with self._state.connection() as conn:
            rows = conn.execute(_LOOK, (list(names),)).fetchall()
        found = {name: _held(rest) for name, *rest in rows}
        taken = {n for n, (held, now) in found.items() if epoch_for(held, holder, now, self._is_gone) is None}
        return [name for name in names if name not in taken]

    def divide(self, first: str, others: Sequence[str], holder: Holder) -> bool:
        with self._state.transaction() as conn:
            missing = parts_missing(conn, others)
            if not missing:
                return True
            is_divided = len(missing) < len(others)
            conn.execute(_BEGIN, (first,))
            held, now = _locked(conn, first)
            if not is_divided and epoch_for(held, holder, now, self._is_gone) is None:
                return False
            epoch = held.epoch + 1  # the holder of the lease for all of them can write to none of them
            note_parts(conn, missing, epoch)
            if not is_divided:
                conn.execute(_RAISE, (epoch, first))
            return True

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        with self._state.connection() as conn:
            renewed = {Lease(*row) for row in conn.execute(_RENEW_WAITING, (*_columns(leases), ttl_s))}
        for lease in leases:
            if lease not in renewed:
                raise stale(lease.name, lease.epoch)
        return 0.0

    def renew_all(self, leases: Sequence[Lease], ttl_s: float) -> tuple[set[Lease], set[Lease]]:
        """The leases that are still ours: renewed; and not renewed, as another transaction has them locked for long.
        A locked lease must not cost the others their time.
        """
        with self._state.connection() as conn:
            given = _columns(leases)
            others = {Lease(*row) for row in conn.execute(_RENEW_FREE, (*given, ttl_s, *given))}
            renewed = set(leases) - others
            locked = {Lease(*row) for row in conn.execute(_STILL_OURS, _columns(list(others)))} if others else set()
        if not locked:
            return renewed, locked
        try:
            with self._state.transaction() as conn:  # a standby that looks has one locked for a moment
                conn.execute(_LOCK_TIMEOUT, (f"{round(1000 * ttl_s * _LOCKED_SHARE)}ms",))
                late = conn.execute(_RENEW_WAITING, (*_columns(sorted(locked, key=_by_name)), ttl_s))
                renewed |= {Lease(*row) for row in late}
        except BusyError:
            pass
        return renewed, locked - renewed

    def release(self, *leases: Lease) -> None:
        with self._state.transaction() as conn:
            released(conn, leases)

    def require(self, lease: Lease) -> None:
        with self._state.connection() as conn:
            require(conn, [lease])

    def note_checked(self, leases: Sequence[Lease]) -> None:
        note_checked(self._state, leases)

    def rows(self) -> dict[str, LeaseRow]:
        return lease_rows(self._state, is_gone=self._is_gone)


# What State knows of leases, wherever they are kept: the fence reads it.


def epochs_noted(conn: Connection, names: Sequence[str]) -> dict[str, int]:
    return dict(conn.execute(_EPOCHS, (list(names),)).fetchall())


def note_holder(conn: Connection, lease: Lease, holder: Holder, ttl_s: float) -> bool:
    """False: another has a higher epoch already. Waits for the fenced transactions of the former holder."""
    if locked(conn, lease.name).epoch >= lease.epoch:
        return False
    conn.execute(_TAKE, vars(lease) | {"ttl_s": ttl_s} | vars(holder))
    return True


def locked(conn: Connection, name: str) -> Held:
    conn.execute(_BEGIN, (name,))
    return _locked(conn, name)[0]


def parts_missing(conn: Connection, others: Sequence[str]) -> list[str]:
    return sorted(set(others) - epochs_noted(conn, others).keys())


def note_parts(conn: Connection, missing: Sequence[str], epoch: int) -> None:
    conn.execute(_DIVIDE, {"missing": list(missing), "epoch": epoch})


def released(conn: Connection, leases: Sequence[Lease]) -> None:
    for lease in sorted(leases, key=lambda each: each.name):
        conn.execute(_RELEASE, (lease.name, lease.epoch))


def require(conn: Connection, leases: Sequence[Lease]) -> None:
    """Raises `StaleError` when one of them is no longer ours."""
    given = [lease.name for lease in leases], [lease.epoch for lease in leases]
    ours = {name for (name,) in conn.execute(_OURS, given)}
    for lease in leases:
        if lease.name not in ours:
            raise stale(lease.name, lease.epoch)


def note_checked(state: State, leases: Sequence[Lease]) -> None:
    with state.connection() as conn:
        conn.execute(_CHECKED, ([lease.name for lease in leases], [lease.epoch for lease in leases]))


def _columns(leases: Sequence[Lease]) -> tuple[list[str], list[int]]:
    return [lease.name for lease in leases], [lease.epoch for lease in leases]


def _by_name(lease: Lease) -> str:
    return lease.name


def _locked(conn: Connection, name: str) -> tuple[Held, datetime]:
    row = conn.execute(_LOCK, (name,)).fetchone()
    assert row is not None  # noqa: S101 - inserted before, and never deleted
    return _held(row)


def _held(row: Sequence[Any]) -> tuple[Held, datetime]:
    instance, host, boot, pid, started, epoch, expires_at, now = row
    holder = None if instance is None else Holder(instance, host, boot, pid, started)
    return Held(holder, epoch, expires_at), now


def lease_rows(state: State, *, is_gone: IsGone = liveness.is_gone) -> dict[str, LeaseRow]:
    """Every lease that was ever given out, by name."""
    with state.connection() as conn:
        rows = conn.execute(_HOLDERS).fetchall()
    found, is_gone = {}, cache(is_gone)  # of many leases few have different holders
    for name, epoch, instance, host, boot, pid, started, expires_at, unexpired, last, checked in rows:
        holder = None if instance is None else Holder(instance, host, boot, pid, started)
        held = holder is not None and unexpired and not is_gone(holder)
        found[name] = LeaseRow(name, epoch, holder, expires_at if holder else None, held, last, checked == epoch)
    return found
