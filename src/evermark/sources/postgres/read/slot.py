"""One replication slot, and everything done with it.

A batch `[start, end)` takes a transaction, whole, iff its commit record lies in it. `end` is any WAL position up to the
flush position; beyond it, commits that a crash may undo would be read. Reading peeks and changes nothing; only
`confirm` moves the slot, and only to what was checkpointed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg import sql

from evermark.errors import BusyError, EvermarkError, GapError, IdentityError, UnreachableError
from evermark.event import Seen
from evermark.event_file import Rows
from evermark.sources.base import Limit, Slice
from evermark.sources.postgres.connect import Link, borrow, connect, give_back, server_encoding
from evermark.sources.postgres.failures import RECOVER_HINT, python_encoding, translate, where
from evermark.sources.postgres.lsn import Position, lsn_text
from evermark.sources.postgres.outbox import filled
from evermark.sources.postgres.read.capture import Capture
from evermark.sources.postgres.read.chunks import BIG_BYTES, chunked, in_order, peek_query, unpack
from evermark.sources.postgres.read.feed import SlotFeed
from evermark.sources.postgres.read.pace import Confirming, Offering, Verdict
from evermark.sources.postgres.survey import Survey, require_sound, trouble

READ_WORK_MEM = "256MB"
BUSY_WAIT_S = 30.0
PUBLICATION_CHECK_S = 10.0
SNAPSHOT_BYTES = 16 * 1024 * 1024
SNAPSHOT_EVERY_S = 10.0
# Least WAL of an outbox row: makes a bound on rows of a bound on bytes, since rows cannot be counted unread.
ROW_WAL_BYTES = 256

_END_READER = """
select pg_terminate_backend(active_pid, 1000) from pg_replication_slots where slot_name = %s and active_pid is not null
"""


class SlotReader:
    """One reader: a slot has one at a time. Not picklable; made anew in each process from its place."""

    def __init__(self, capture: Capture, big_bytes: int = BIG_BYTES, session: Mapping[str, str] | None = None) -> None:
        """`session`: settings of the connection that asks and probes."""
        self._capture, self._session = capture, dict(session or {})
        self._target = capture.target
        self._big_bytes = big_bytes
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._incarnation_checked = False
        self._offering = Offering()
        self._confirming = Confirming()
        self._held_back: Position | None = None
        self._checked_at = float("-inf")
        self._snapshot_at: float | None = float("-inf")  # none: the server or our rights do not allow it

    def earliest(self) -> str:
        """Where the slot stands: nothing before it can be read any more."""
        survey = self.look()
        require_sound(survey, self._target, None)
        if survey.slot is None or survey.slot.confirmed_lsn is None:
            raise GapError(f"slot {self._target.slot} has no position", hint=RECOVER_HINT)
        return survey.incarnation.at(survey.slot.confirmed_lsn)

    def check(self, resume: str | None, seen: Seen | None) -> None:
        position = Position.parse(resume) if resume is not None else None
        survey = self.look()
        if position is not None and seen is not None and survey.incarnation == position.incarnation:
            self._capture.require_known(self.run_query, seen)
        require_sound(survey, self._target, position)

    def offer(self, start: Position, limit: Limit) -> str | None:
        """How far the next batch may go; None when there is nothing worth reading yet."""
        bytes_max = max(1, min(limit.bytes_max, limit.rows_max * ROW_WAL_BYTES))
        flush = self._flush_lsn(start)
        verdict = self._offering.judge(start.lsn, flush, time.monotonic())
        if verdict is Verdict.PROBE:
            began = time.monotonic()
            verdict = Verdict.OFFER if self._holds_changes(start, flush) else Verdict.WAIT
            self._offering.probed(flush, verdict is Verdict.OFFER, time.monotonic() - began, time.monotonic())
        return start.incarnation.at(min(flush, start.lsn + bytes_max)) if verdict is Verdict.OFFER else None

    def pause_s(self) -> float:
        """How long to wait before the next `offer`."""
        return self._offering.pause_s(time.monotonic())

    def read(self, piece: Slice) -> Iterator[Rows]:
        start, end = Position.parse(piece.start), Position.parse(piece.end)
        if start.incarnation != end.incarnation or end.lsn < start.lsn:
            raise IdentityError(f"slice {piece.start} to {piece.end} is no range of one history", hint="report this")
        link = borrow(self._target.dsn, work_mem=READ_WORK_MEM)
        whole = False
        try:
            yield from self._read(link, start, end)
            whole = True
        except psycopg.Error as error:
            raise self._explain(error, start) from error
        finally:
            # A COPY left half read makes its connection unusable, and its peek keeps the slot.
            if whole:
                give_back(link)
            else:
                _abandon(link)

    def _read(self, link: Link, start: Position, end: Position) -> Iterator[Rows]:
        encoding = python_encoding(server_encoding(link.connection))
        decoder = self._capture.decoder(self.run_query, start, end, encoding)
        upto = end.lsn + (1 if end.ordinal else 0)
        options = self._capture.options
        query = peek_query(self._target.slot, self._target.publication, upto, options, big_bytes=self._big_bytes)
        for lengths, data in chunked(in_order(unpack(self._copy(link, query)))):
            yield from decoder.batches(lengths, data)
        # Judged last, when nothing can change any more what was read: a slot moved on, a publication changed or a
        # warning means that rows are missing, and the slice must fail.
        link.refuse_warnings("decoding")
        require_sound(self._capture.look(link), self._target, start)

    def _copy(self, link: Link, query: sql.Composed) -> Iterator[bytes | bytearray | memoryview]:
        """The COPY's messages; waits while a killed reader's peek still holds the slot."""
        give_up_at = time.monotonic() + BUSY_WAIT_S
        pause_s = 0.05
        while True:
            try:
                with link.connection.cursor().copy(query) as copy:
                    yield from copy
            except pg.ObjectInUse as error:
                # Raised before the first message: nothing has been given out yet.
                if time.monotonic() >= give_up_at:
                    raise translate(error, link.dsn, f"reading slot {self._target.slot}") from error
            else:
                return
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(1.0, pause_s * 2)

    def _explain(self, error: psycopg.Error, start: Position) -> EvermarkError:
        """Why a read failed. The slot's own state is asked first; the SQLSTATE speaks second."""
        try:
            found = trouble(self.look(), self._target, start)
        except EvermarkError as unable:
            found = unable if isinstance(unable, UnreachableError) else None
        return found or translate(error, self._target.dsn.open(), f"reading slot {self._target.slot}")

    def follow(self, start: str, wake: Callable[[], None]) -> SlotFeed:
        """Have the slot's events sent. A reader that still holds the slot, though it has lost its lease, is ended."""
        position = Position.parse(start)
        with self._lock:
            if self._held_back is not None:
                self.advance(self._held_back)
        give_up_at = time.monotonic() + BUSY_WAIT_S
        while True:
            try:
                return SlotFeed(
                    self._capture, self.run_query, position, wake, self._require_slot, self._fed_and_confirmed
                )
            except BusyError:
                if time.monotonic() >= give_up_at:
                    raise
            self.run_query(_END_READER, (self._target.slot,), doing=f"ending the reader of slot {self._target.slot}")
            time.sleep(0.05)

    def _require_slot(self, position: Position) -> None:
        survey = self.look()
        require_sound(survey, self._target, position)
        restart = survey.slot.restart_lsn if survey.slot is not None else None
        if restart is not None and position.lsn - restart > SNAPSHOT_BYTES:
            self._log_snapshot(time.monotonic())

    def _fed_and_confirmed(self, position: Position) -> None:
        with self._lock:
            self._held_back = None
            self._confirming.done(position.lsn, 0.0, time.monotonic())
            self._capture.confirmed(self.run_query, position)

    def confirm(self, end: str) -> None:
        """Move the slot to `end`, unless that is not worth its cost yet (advancing reads the WAL again)."""
        target = Position.parse(end)
        with self._lock:
            if self._held_back is None or target.lsn > self._held_back.lsn:
                self._held_back = target
            if self._confirming.due(target.lsn, time.monotonic()):
                self.advance(target)
                self._capture.confirmed(self.run_query, target)

    def advance(self, target: Position) -> None:
        """Let the server forget everything before `target`."""
        began = time.monotonic()
        self._flush_lsn(target)  # refuses another incarnation
        at = lsn_text(target.lsn - self._capture.margin)
        try:
            moved = self.run_query(
                "select (pg_replication_slot_advance(slot_name, %s::pg_lsn)).end_lsn,"
                " pg_wal_lsn_diff(%s::pg_lsn, restart_lsn)::bigint"
                " from pg_replication_slots where slot_name = %s and confirmed_flush_lsn < %s::pg_lsn",
                (at, at, self._target.slot, at),
                doing=f"advancing slot {self._target.slot}",
            )
        except BusyError:
            return  # a reader has it; the next confirm does this one's work
        now = time.monotonic()
        self._confirming.done(target.lsn, now - began, now)
        if moved is not None and moved[1] is not None and moved[1] > SNAPSHOT_BYTES:
            self._log_snapshot(now)

    def _log_snapshot(self, now: float) -> None:
        """Without a snapshot in the WAL an idle server's slot cannot let go of old segments (from version 16 on)."""
        if self._snapshot_at is None or now - self._snapshot_at < SNAPSHOT_EVERY_S:
            return
        self._snapshot_at = now
        try:
            self.run_query("select pg_log_standby_snapshot()", doing="logging a snapshot")
        except UnreachableError:
            raise
        except EvermarkError:
            self._snapshot_at = None

    def close(self) -> None:
        """Confirm what was held back, and let go of the connection."""
        with self._lock:
            try:
                if self._held_back is not None and self._confirming.pending is not None:
                    self.advance(self._held_back)
            finally:
                self.forget()

    def forget(self) -> None:
        """Let go of the connection; what was held back is void."""
        with self._lock:
            if self._link is not None:
                self._drop(self._link)

    def require_unchanged(self, start: Position) -> None:
        now = time.monotonic()
        if now - self._checked_at >= PUBLICATION_CHECK_S:
            require_sound(self.look(), self._target, start)
            self._checked_at = now

    def _flush_lsn(self, start: Position) -> int:
        """How far the WAL is durable; refuses a server that is not the one `start` belongs to."""
        with self._dropped_after(UnreachableError) as link:
            if not self._incarnation_checked:
                survey = self.look()
                if survey.incarnation != start.incarnation:
                    found = trouble(survey, self._target, start)
                    raise found or IdentityError(f"Postgres at {survey.where} is not the one we left")
                self._incarnation_checked = True
            # On this very connection: a new one could be another server's.
            flush = int(link.one("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn", doing="asking for the WAL")[0])
        if flush < start.lsn:
            found = trouble(self.look(), self._target, start)
            raise found or IdentityError(f"Postgres at {where(link.dsn)} is behind our checkpoint")
        return flush

    def holds_changes(self, start: Position) -> bool:
        """Whether anything of ours is known to wait from `start` on: not while another session reads the slot."""
        return self._holds_changes(start, self._flush_lsn(start), while_read=False)

    def _holds_changes(self, start: Position, upto: int, *, while_read: bool = True) -> bool:
        """Whether any transaction with an event of ours commits in `[start, upto)`."""
        query = filled(self._capture.probe, self._target)
        link = self._control()
        try:
            found = link.connection.execute(query, (lsn_text(upto), start.lsn.to_bytes(8, "big"))).fetchone()
        except pg.ObjectInUse:
            return while_read  # another session reads the slot; `read` waits for it, or says so
        except psycopg.Error as error:
            self._drop(link)
            raise self._explain(error, start) from error
        link.refuse_warnings("probing")
        return bool(found and found[0])

    def look(self) -> Survey:
        with self._dropped_after(EvermarkError) as link:
            return self._capture.look(link)

    def run_query(self, query: str, args: tuple[object, ...] = (), *, doing: str) -> tuple[Any, ...] | None:
        with self._dropped_after(UnreachableError) as link:
            return link.row(query, args, doing=doing)

    @contextmanager
    def _dropped_after(self, error: type[EvermarkError]) -> Iterator[Link]:
        with self._lock:
            link = self._control()
            try:
                yield link
            except error:
                self._drop(link)
                raise

    def _control(self) -> Link:
        with self._lock:
            if self._link is None or self._link.connection.closed:
                self._link = connect(self._target.dsn, **self._session)
                self._incarnation_checked = False
                self._capture.connected()
            return self._link

    def _drop(self, link: Link) -> None:
        link.close()
        if self._link is link:
            self._link = None


def _abandon(link: Link) -> None:
    with suppress(psycopg.Error):  # the connection may be gone already
        if not link.connection.closed:
            link.connection.cancel_safe(timeout=5.0)
    link.close()
