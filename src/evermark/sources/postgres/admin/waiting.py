"""Waiting for other people's transactions, with a word on whose they are; never on what they run: it may be secret."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from evermark.errors import BusyError, EvermarkError
from evermark.secrets import Hidden
from evermark.sources.postgres.connect import Link, connect

T = TypeVar("T")
Say = Callable[[str], None]

LOCK_TIMEOUT_S = 1.0  # how long we wait for a lock: every later request for it waits behind ours
SAY_AFTER_S = 2.0
SAY_EVERY_S = 10.0
_LOOK_EVERY_S = 0.3
_QUEUE_AGAIN_S = 15.0  # after this time the lock is asked for again, though it is still held
_NAMED_MAX = 3

_HOLDERS = """
select b.pid, l.virtualtransaction, extract(epoch from clock_timestamp() - a.xact_start)::float8,
       a.usename::text, a.datname::text, a.state
from (select distinct unnest(pg_blocking_pids(%s)) as pid) b
left join pg_stat_activity a on a.pid = b.pid
left join pg_locks l on l.pid = b.pid and l.locktype = 'virtualxid' and l.mode = 'ExclusiveLock'
order by 3 desc nulls last
"""
_PREPARED = """
select gid, extract(epoch from clock_timestamp() - prepared)::float8, owner::text, database::text
from pg_prepared_xacts order by prepared
"""
_STILL_OPEN = "select exists (select from pg_locks where virtualtransaction = any(%s))"


@dataclass(frozen=True)
class Holder:
    """A transaction that stands in our way."""

    said: str
    end: str  # what ends it
    virtual: str | None = None  # its number in pg_locks; none: prepared, or gone


class Waiting:
    """All the waiting of one command: `wait_s` is for all of it together. `say` gets a line now and then."""

    def __init__(self, dsn: Hidden, pid: int, wait_s: float, say: Say) -> None:
        self._dsn, self._pid, self._say = dsn, pid, say
        self._wait_s = wait_s
        self._began = time.monotonic()
        self._holders: list[Holder] = []

    def left_s(self) -> float:
        return self._wait_s - (time.monotonic() - self._began)

    def for_lock(self, what: str, step: Callable[[], T]) -> T:
        """Do a step that needs a lock. The lock is asked for briefly, again and again; in between, no session waits."""
        with self._watched(what):
            while True:
                try:
                    return step()
                except BusyError as error:
                    if self.left_s() <= 0:
                        raise self._given_up(what) from error
                self._until_gone()

    def for_transactions(self, what: str, step: Callable[[int], T]) -> T:
        """Do a step that waits for open transactions itself and blocks no session, for at most so many ms."""
        with self._watched(what):
            try:
                return step(max(1000, int(self.left_s() * 1000)))
            except BusyError as error:
                raise (self._given_up(what) if self.left_s() <= 1 else error) from error

    def _given_up(self, what: str) -> BusyError:
        longer = "wait longer with --wait, for example --wait 1h"
        waited = time.monotonic() - self._began
        if not self._holders:
            return BusyError(f"waited {waited:.0f} s to {what}, in vain", hint=f"try again, or {longer}")
        return BusyError(
            f"waited {waited:.0f} s to {what}; still open: {_listed(self._holders)}",
            hint=f"let it end, or end it where it was begun or with: {self._holders[0].end} Or {longer}",
        )

    def _until_gone(self) -> None:
        """Until the transactions that stood in our way are gone, without standing in the way of others."""
        names = [holder.virtual for holder in self._holders if holder.virtual is not None]
        again_at = time.monotonic() + min(max(0.0, self.left_s()), _QUEUE_AGAIN_S)
        time.sleep(_LOOK_EVERY_S)
        if names:
            with suppress(EvermarkError), connect(self._dsn) as link:  # the next try says what is wrong
                while time.monotonic() < again_at and link.one(_STILL_OPEN, (names,), doing="looking") == (True,):
                    time.sleep(_LOOK_EVERY_S)

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        done = threading.Event()
        self._holders = []
        thread = threading.Thread(target=self._watch, args=(what, done), name="waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _watch(self, what: str, done: threading.Event) -> None:
        """Looks from a connection of its own, which is opened only when there is something to wait for."""
        if done.wait(_LOOK_EVERY_S):
            return
        began, said_at = time.monotonic(), float("-inf")
        # After an error it is not known who waits; that it waits is said at its end.
        with suppress(EvermarkError), connect(self._dsn) as link:
            while not done.wait(_LOOK_EVERY_S):
                self._holders = holders(link, self._pid) or self._holders
                now = time.monotonic()
                if self._holders and now - began >= SAY_AFTER_S and now - said_at >= SAY_EVERY_S:
                    said_at = now
                    left = max(0.0, self.left_s())
                    self._say(f"waiting to {what}, for {left:.0f} s more at most; open: {_listed(self._holders)}")


def holders(link: Link, pid: int) -> list[Holder]:
    """Whose transactions the server process `pid` waits for just now."""
    found: list[Holder] = []
    for other, virtual, age_s, role, database, state in link.rows(_HOLDERS, (pid,), doing="looking what is in the way"):
        if other == 0:  # a prepared transaction has no process; which one it is, the server does not tell
            rows = link.rows(_PREPARED, doing="looking at prepared transactions")
            for gid, prepared_s, owner, its_database in rows:
                rollback = "rollback prepared '" + gid.replace("'", "''") + "';"
                said = _said(f"prepared transaction {gid!r}", owner, its_database, "", prepared_s)
                found.append(Holder(said, rollback))
        else:
            said = _said(f"process {other}", role, database, state, age_s)
            found.append(Holder(said, f"select pg_terminate_backend({other});", virtual))
    return found


def _said(who: str, role: str | None, database: str | None, state: str | None, age_s: float | None) -> str:
    parts = [f"{who} of role {role or '?'}" + (f" in {database}" if database else "")]
    parts += [state] if state else []
    parts += [f"open for {age_s:.0f} s"] if age_s is not None else []
    return ", ".join(parts)


def _listed(found: list[Holder]) -> str:
    more = f"; and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return "; ".join(holder.said for holder in found[:_NAMED_MAX]) + more
