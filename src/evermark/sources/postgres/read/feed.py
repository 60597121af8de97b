"""One slot's events as the server sends them: streaming replication, without a question for each batch.

A thread owns the connection. It receives messages into a bounded buffer, and tells the server how far events are
confirmed: on a timer, also in the middle of a transaction and while the buffer is full, because a server that hears
nothing ends the connection and would begin a large transaction anew. The loop that reads takes whole transactions; one
that is larger than the buffer is given out in pieces as it comes, and ends with its commit.

A server that is asked to start before the slot's own position starts at that position, and says nothing: so the slot is
looked at after the start. It is looked at again before each confirmation: rows left out by a changed publication, or a
slot moved by somebody, are noticed while the server can still be asked for them.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import psycopg
from psycopg import pq

from evermark.errors import EvermarkError, GapError
from evermark.event_file import Rows
from evermark.sources.base import Fed, Feed
from evermark.sources.postgres.failures import RECOVER_HINT, python_encoding, translate, where
from evermark.sources.postgres.lsn import Position, lsn_text
from evermark.sources.postgres.read.capture import Capture, RunQuery
from evermark.sources.postgres.slots import walsender

# As much is received ahead; a transaction larger than the second is given out in pieces.
BUFFER_BYTES = 16 * 1024 * 1024
PIECE_BYTES = 8 * 1024 * 1024
# The server ends a connection that is silent for `wal_sender_timeout`, a minute unless it was changed.
STATUS_EVERY_S = 1.0
CONFIRM_EVERY_S = 1.0
# WAL that holds nothing of ours is passed this often, so that the slot moves on; by a new feed at once: the lane may be
# a short one, and WAL that is never passed is kept for ever.
IDLE_EVERY_S = 10.0
_LAST_LSN = (1 << 64) - 1
_PG_EPOCH_S = 946_684_800
_WAL, _KEEPALIVE = b"wk"
_LIMITS = _BEGIN, _COMMIT, _MESSAGE = b"BCM"
_WAL_HEADER = 25


class SlotFeed(Feed):
    """`look` raises when the slot cannot give what follows a position; `confirmed` is told of each confirmation."""

    def __init__(
        self,
        capture: Capture,
        run_query: RunQuery,
        start: Position,
        wake: Callable[[], None],
        look: Callable[[Position], None],
        confirmed: Callable[[Position], None],
    ) -> None:
        self._capture = capture
        self._target = target = capture.target
        self._start = start
        self._wake = wake
        self._look = look
        self._on_confirmed = confirmed
        self._changed = threading.Condition()
        self._messages: list[bytes] = []  # each with the header of its WAL data
        self._bytes = 0
        self._whole = 0  # how many of the messages make whole transactions
        self._open = False  # in the middle of a transaction
        self._end = start.lsn  # of the last whole transaction received, or idle WAL
        self._taken = start.lsn
        self._idle_at = time.monotonic() - IDLE_EVERY_S
        self._error: EvermarkError | None = None
        self._warnings: list[str] = []
        self._confirmed = start.lsn
        self._confirmed_at = time.monotonic()
        self._held_back: Position | None = None
        self._closed = False
        dsn = target.dsn.open()
        self._dsn = dsn
        self._session = walsender(target)
        self._connection = self._session.pgconn
        self._connection.nonblocking = 0
        self._connection.notice_handler = self._noticed
        try:
            self._begin()
            look(start)
            encoding = python_encoding((self._connection.parameter_status(b"server_encoding") or b"UTF8").decode())
            self._decoder = capture.decoder(run_query, start, Position(start.incarnation, _LAST_LSN), encoding)
        except BaseException:
            self._session.close()
            raise
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"feed {target.slot}", daemon=True)
        self._thread.start()

    def next(self) -> Fed | None:
        """Whole transactions that have arrived, or a large one as it arrives; None: there is nothing to take."""
        with self._changed:
            if self._error is not None and not self._whole:
                raise self._error
            if self._whole or (self._open and self._bytes >= PIECE_BYTES):
                return _FedTransactions(self)
            if self._is_idle():
                self._idle_at, self._taken = time.monotonic(), self._end
                return _FedNothing(self._start.incarnation.at(self._end))
        if self._held_back is not None:
            self.confirm(str(self._held_back))
        return None

    def _is_idle(self) -> bool:
        """Whether there is WAL to be passed. Call it under the lock."""
        idle = not self._open and not self._messages and self._end > self._taken
        return idle and time.monotonic() - self._idle_at >= IDLE_EVERY_S

    def confirm(self, end: str) -> None:
        """Everything before `end` is checkpointed. The server is told now and then."""
        position = Position.parse(end)
        if time.monotonic() - self._confirmed_at < CONFIRM_EVERY_S:
            self._held_back = position
            return
        self._confirmed_at, self._held_back = time.monotonic(), None
        self._look(position)
        if self._warnings:
            said = "; ".join(self._warnings)
            raise GapError(f"decoding at {where(self._dsn)}: the server warned: {said}", hint=RECOVER_HINT)
        with self._changed:
            self._confirmed = max(self._confirmed, position.lsn)
        self._poke()
        self._on_confirmed(position)

    def close(self) -> None:
        self._closed = True
        self._poke()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def pieces(self) -> Iterator[Rows]:
        """The rows of the transactions at hand, up to a commit."""
        ended = False
        while not ended:
            messages, ended = self._pop()
            lengths = np.fromiter(map(len, messages), np.int64, len(messages))
            yield from self._decoder.batches(lengths, b"".join(messages), _WAL_HEADER)

    def taken_to(self) -> str:
        return self._start.incarnation.at(self._taken)

    def _pop(self) -> tuple[list[bytes], bool]:
        """Messages up to the last commit that is here, or some of a large transaction; whether a commit ends them."""
        with self._changed:
            while not self._whole and self._bytes < PIECE_BYTES:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            ended = self._whole > 0
            count = self._whole or len(self._messages)
            messages, self._messages = self._messages[:count], self._messages[count:]
            self._bytes -= sum(map(len, messages))
            self._whole = 0
            if ended:
                self._taken = self._end
        self._poke()
        return messages, ended

    # the thread that owns the connection

    def _run(self) -> None:
        try:
            while not self._closed:
                self._receive()
        except EvermarkError as error:
            self._fail(error)
        except psycopg.Error as error:
            self._fail(translate(error, self._dsn, f"reading slot {self._target.slot}"))
        except Exception as error:  # noqa: BLE001 - told to the loop that reads
            self._fail(EvermarkError(f"reading slot {self._target.slot}: {type(error).__name__}: {error}"[:500]))
        finally:
            with suppress(psycopg.Error):
                self._send_status()
            self._session.close()

    def _receive(self) -> None:
        sent_at = time.monotonic()
        self._send_status()
        while not self._closed and time.monotonic() - sent_at < STATUS_EVERY_S:
            with self._changed:
                has_room = self._bytes < BUFFER_BYTES
            waits_for = [self._wake_read, *([self._connection.socket] if has_room else [])]
            left_s = max(0.0, STATUS_EVERY_S - (time.monotonic() - sent_at))
            ready, _, _ = select.select(waits_for, [], [], left_s)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._send_status()
            if self._connection.socket in ready:
                self._connection.consume_input()
                self._take_in()

    def _take_in(self) -> None:
        """All that has arrived, as far as there is room."""
        get, wants_answer, size = self._connection.get_copy_data, False, 0
        with self._changed:  # once for all of it: most messages are rows, and there are many
            messages, room = self._messages, BUFFER_BYTES - self._bytes
            already = len(messages)
            while room > 0:
                size, data = get(1)
                if size <= 0:
                    break
                message = bytes(data)
                if message[0] == _KEEPALIVE:
                    wants_answer = self._kept_alive(message) or wants_answer
                    continue
                messages.append(message)
                room -= size
                if message[_WAL_HEADER] in _LIMITS:
                    self._limit(message)
            self._bytes, came = BUFFER_BYTES - room, len(messages) > already
            news = (came and (self._whole > 0 or self._bytes >= PIECE_BYTES)) or self._is_idle()
            if news:
                self._changed.notify_all()
        if news:
            self._wake()
        if size < 0:
            self._raise_end()
        if wants_answer:
            self._send_status()

    def _kept_alive(self, data: bytes) -> bool:
        """Whether the server wants an answer."""
        (end, _, wants_answer) = struct.unpack_from(">QQB", data, 1)
        if not self._open and not self._messages:
            self._end = max(self._end, end)
        return bool(wants_answer)

    def _limit(self, message: bytes) -> None:
        """The last message begins or ends something."""
        kind = message[_WAL_HEADER]
        if kind == _BEGIN:
            self._open = True
        elif kind == _COMMIT:
            self._open = False
            self._whole = len(self._messages)
            (self._end,) = struct.unpack_from(">Q", message, _WAL_HEADER + 10)
        elif kind == _MESSAGE and not self._open:
            # A logical message outside any transaction is whole by itself. It tells where its record ends.
            self._whole = len(self._messages)
            (self._end,) = struct.unpack_from(">Q", message, _WAL_HEADER + 2)

    def _send_status(self) -> None:
        now = int((time.time() - _PG_EPOCH_S) * 1_000_000)
        at = self._confirmed - self._capture.margin
        self._connection.put_copy_data(struct.pack(">cQQQQB", b"r", at, at, at, now, 0))
        self._connection.flush()

    def _raise_end(self) -> None:
        result = self._connection.get_result()
        said = result.error_message if result is not None else self._connection.error_message
        raise psycopg.OperationalError(said.decode("utf-8", "replace").strip() or "the server ended the connection")

    def _fail(self, error: EvermarkError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._wake()

    def _noticed(self, result: pq.abc.PGresult) -> None:
        severity = result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED)
        if severity == b"WARNING":
            said = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b""
            self._warnings.append(said.decode("utf-8", "replace")[:300])

    def _poke(self) -> None:
        os.write(self._wake_write, b".")

    def _begin(self) -> None:
        slot, publication = self._target.slot.replace('"', '""'), self._target.publication.replace('"', '""')
        names = publication.replace("'", "''")
        options = "".join(f", {name} '{value}'" for name, value in self._capture.options.items())
        command = (
            f'START_REPLICATION SLOT "{slot}" LOGICAL {lsn_text(self._start.lsn - self._capture.margin)}'
            f" (proto_version '1', publication_names '\"{names}\"'{options})"
        )
        result = self._connection.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            error = psycopg.errors.error_from_result(result)
            raise translate(error, self._dsn, f"streaming slot {self._target.slot}") from error


class _FedTransactions(Fed):
    def __init__(self, feed: SlotFeed) -> None:
        self._feed = feed

    def batches(self) -> Iterator[Rows]:
        return self._feed.pieces()

    def end(self) -> str:
        return self._feed.taken_to()


class _FedNothing(Fed):
    def __init__(self, end: str) -> None:
        self._end = end

    def batches(self) -> Iterator[Rows]:
        return iter(())

    def end(self) -> str:
        return self._end
