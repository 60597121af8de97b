"""Which deliveries were handled already, in a SQLite file: kept over restarts, shared by the workers of one machine.

States, bounds and fairness are those of `DedupCache`. What differs:

- Times are the machine's clock, for they outlive a process. A clock set back or forth counts as time passed.
- Every call is one short write transaction. Who cannot get the file within `busy_timeout_s` gets a `DedupError`.
- What a handler ended with and could not be written down is owed: the next call of this process writes it first.
- No connection is open across a fork, where SQLite's locks would be lost: it is closed before, and opened again when
  needed. One connection serves all threads of a process, one after another, as SQLite would have them write anyway.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from evermark_receiver.dedup import OVERFLOW, SWEEP_ENTRIES_MAX, TTL_S, Claim, DedupError, State, hashed
from evermark_receiver.sqlite_file import check_file, explained, open_file


class SqliteDedup:
    """Remembers ids in the file `path`, made if it is missing; it must be on a local disk.

    - `max_entries`, `max_streams`, `max_total`, `max_in_progress`, `ttl_s`: as in `DedupCache`, all workers together.
    - `progress_ttl_s` has to be longer than your slowest handler: after it, another worker may take the event.
    - `busy_timeout_s` is how long a call waits for other workers.
    - `fsync`: what was handled survives a power cut. Without it, what was handled in the seconds before one may be
      forgotten. A process that is killed forgets nothing either way.

    `evicted`, `expired` and `abandoned` count what this object did. An unusable file is a `DedupError` at once.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_entries: int = 200_000,
        max_streams: int = 1_000,
        max_total: int = 1_000_000,
        max_in_progress: int = 10_000,
        ttl_s: float = TTL_S,
        progress_ttl_s: float = 300.0,
        busy_timeout_s: float = 5.0,
        fsync: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if min(max_entries, max_streams, max_total, max_in_progress) < 1 or not min(ttl_s, progress_ttl_s) > 0:
            raise ValueError("the bounds of a SqliteDedup are at least 1, and its times above 0")
        if not 0 < busy_timeout_s <= 3600:
            raise ValueError("busy_timeout_s is above 0 and at most an hour")
        self.path = Path(path).absolute()
        self.max_entries = max_entries
        self.max_streams = max_streams
        self.max_total = max_total
        self.max_in_progress = max_in_progress
        self.ttl_s = ttl_s
        self.progress_ttl_s = progress_ttl_s
        self.busy_timeout_s = busy_timeout_s
        self.fsync = fsync
        self.evicted = 0
        self.expired = 0
        self.abandoned = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._owed: dict[Claim, bool] = {}
        _alive.add(self)
        # An unusable file is found now, not with the first event.
        check_file(self.path, self.busy_timeout_s)
        with self._transaction():
            pass
        # Servers load an application, then fork their workers, some of them behind Python's back.
        self.close()

    def claim(self, stream: tuple[str, str], delivery_id: str) -> Claim:
        """Ask for an id. Only the claim that says UNSEEN may handle it."""
        place, identity = hashed(stream, delivery_id)
        with self._transaction() as db:
            now = self._clock()
            self._sweep(db, now)
            if self._is_done(db, identity, now):
                return Claim(State.DONE)
            self.abandoned += db.execute(
                "DELETE FROM in_progress WHERE abs(? - since) >= ?", (now, self.progress_ttl_s)
            ).rowcount
            if _one(db, "SELECT count(*) FROM in_progress WHERE identity = ?", identity):
                return Claim(State.IN_PROGRESS)
            if _one(db, "SELECT count(*) FROM in_progress") >= self.max_in_progress:
                return Claim(State.IN_PROGRESS)
            token = secrets.randbits(63)
            db.execute("INSERT INTO in_progress (identity, token, since) VALUES (?, ?, ?)", (identity, token, now))
            return Claim(State.UNSEEN, place, identity, token)

    def done(self, claim: Claim) -> None:
        """The handler succeeded: remember it, even if this claim was taken for abandoned meanwhile."""
        self._end(claim, succeeded=True)

    def release(self, claim: Claim) -> None:
        """The handler failed: forget it, unless another claim has it by now."""
        self._end(claim, succeeded=False)

    def state(self, stream: tuple[str, str], delivery_id: str) -> State:
        _, identity = hashed(stream, delivery_id)
        with self._transaction() as db:
            now = self._clock()
            if self._is_done(db, identity, now):
                return State.DONE
            held = _one(
                db,
                "SELECT count(*) FROM in_progress WHERE identity = ? AND abs(? - since) < ?",
                *(identity, now, self.progress_ttl_s),
            )
            return State.IN_PROGRESS if held else State.UNSEEN

    def __len__(self) -> int:
        """How many ids are remembered as done."""
        with self._transaction() as db:
            return _one(db, "SELECT coalesce(sum(held), 0) FROM streams")

    @property
    def streams(self) -> int:
        """How many streams have a place of their own."""
        with self._transaction() as db:
            return _one(db, "SELECT count(*) FROM streams WHERE place != ?", OVERFLOW)

    @property
    def in_progress(self) -> int:
        with self._transaction() as db:
            return _one(db, "SELECT count(*) FROM in_progress")

    def close(self) -> None:
        """Write what is owed, and close the file. A later call opens it again."""
        try:
            if self._owed:
                with self._transaction():
                    pass
        finally:
            with self._lock:
                self._disconnect()

    def before_fork(self) -> None:
        """Wait for the running transaction, and close: a child that inherits a connection has none of its locks."""
        self._lock.acquire()
        self._disconnect()

    def after_fork(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SqliteDedup({str(self.path)!r})"

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The file for oneself, with nothing owed. Whatever goes wrong, nothing of this transaction remains."""
        deadline = time.monotonic() + self.busy_timeout_s
        if not self._lock.acquire(timeout=self.busy_timeout_s):
            raise DedupError(f"{self.path}: other threads of this process wait for it since {self.busy_timeout_s:g} s")
        try:
            owed = list(self._owed.items())
            if self._db is None:
                self._db = open_file(self.path, deadline)
            # Only a success is worth waiting for the disk: who loses a claim in a power cut loses its handler too.
            durable = self.fsync and any(succeeded for _, succeeded in owed)
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute(f"PRAGMA busy_timeout = {max(0, round((deadline - time.monotonic()) * 1000))}")
            self._db.execute("BEGIN IMMEDIATE")
            for claim, succeeded in owed:
                self._write_outcome(self._db, claim, succeeded)
            yield self._db
            self._db.execute("COMMIT")
            for claim, _ in owed:
                self._owed.pop(claim, None)
        except sqlite3.Error as error:
            self._disconnect()
            raise DedupError(f"{self.path}: {explained(error)}") from error
        except BaseException:
            self._disconnect()
            raise
        finally:
            self._lock.release()

    def _end(self, claim: Claim, *, succeeded: bool) -> None:
        if claim.state is not State.UNSEEN:
            return
        self._owed[claim] = succeeded
        with self._transaction():
            pass  # it writes what is owed

    def _write_outcome(self, db: sqlite3.Connection, claim: Claim, succeeded: bool) -> None:
        if not succeeded:
            db.execute("DELETE FROM in_progress WHERE identity = ? AND token = ?", (claim.identity, claim.token))
            return
        db.execute("DELETE FROM in_progress WHERE identity = ?", (claim.identity,))
        now = self._clock()
        if not self._is_done(db, claim.identity, now):
            self._remember(db, claim.stream, claim.identity, now)

    def _is_done(self, db: sqlite3.Connection, identity: bytes, now: float) -> bool:
        sql = "SELECT count(*) FROM done WHERE identity = ? AND abs(? - at) < ?"
        return _one(db, sql, identity, now, self.ttl_s) > 0

    def _remember(self, db: sqlite3.Connection, place: bytes, identity: bytes, now: float) -> None:
        # An expired entry that no sweep met yet would keep its old turn.
        db.execute("DELETE FROM done WHERE identity = ?", (identity,))
        if not _one(db, "SELECT count(*) FROM streams WHERE place = ?", place):
            if _one(db, "SELECT count(*) FROM streams WHERE place != ?", OVERFLOW) >= self.max_streams:
                place = OVERFLOW
            db.execute("INSERT INTO streams (place, held) VALUES (?, 0) ON CONFLICT DO NOTHING", (place,))
        (stream,) = db.execute("SELECT number FROM streams WHERE place = ?", (place,)).fetchone()
        turn = db.execute("INSERT INTO done (stream, identity, at) VALUES (?, ?, ?)", (stream, identity, now)).lastrowid
        held = _one(db, "SELECT held FROM streams WHERE number = ?", stream)
        if held > self.max_entries:
            self._evict(db, stream, held - self.max_entries, turn)
        elif (excess := _one(db, "SELECT sum(held) FROM streams") - self.max_total) > 0:
            largest = _one(db, "SELECT number FROM streams ORDER BY held DESC, number = ? LIMIT 1", stream)
            self._evict(db, largest, excess, turn)

    def _evict(self, db: sqlite3.Connection, stream: int, count: int, before: int | None) -> None:
        """The oldest ids of a stream. A bound that was lowered is reached over many calls, not in one long one."""
        oldest = "SELECT turn FROM done WHERE stream = ? AND turn < ? ORDER BY turn LIMIT ?"
        gone = db.execute(f"DELETE FROM done WHERE turn IN ({oldest})", (stream, before, min(count, SWEEP_ENTRIES_MAX)))
        self.evicted += gone.rowcount

    def _sweep(self, db: sqlite3.Connection, now: float) -> None:
        """Drop what expired among the oldest. Ids expire in the order of their turns, unless the clock was set."""
        oldest = "SELECT turn, at FROM done ORDER BY turn LIMIT ?"
        gone = db.execute(
            f"DELETE FROM done WHERE turn IN (SELECT turn FROM ({oldest}) WHERE abs(? - at) >= ?)",
            (SWEEP_ENTRIES_MAX, now, self.ttl_s),
        )
        self.expired += gone.rowcount

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()


def _one(db: sqlite3.Connection, sql: str, *values: object) -> int:
    found: int = db.execute(sql, values).fetchone()[0]
    return found


_alive: weakref.WeakSet[SqliteDedup] = weakref.WeakSet()
_forking = threading.Lock()
_held: list[SqliteDedup] = []


def _before_fork() -> None:
    _forking.acquire()
    for dedup in list(_alive):
        dedup.before_fork()
        _held.append(dedup)


def _after_fork() -> None:
    while _held:
        _held.pop().after_fork()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
