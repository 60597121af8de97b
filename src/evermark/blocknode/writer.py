"""The one writer of a node: many requests, one transaction, one sync of the disk.

While the disk is syncing, requests queue up; the next transaction takes them all. A request is answered when the
transaction that holds its change is on the disk.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from evermark.blocknode.ledger import Ledger
from evermark.blocknode.refusal import Code, Refused, busy, stopping
from evermark.blocknode.settings import WRITES_WAITING_MAX
from evermark.observe.logging import get_logger

_T = TypeVar("_T")
_AT_ONCE_MAX = 256
_IDLE_S = 60.0
_TRIM_EVERY = 1000
_LOG_FRAMES_MAX = 16_000
_STOP_WAIT_S = 10.0

Work = Callable[[Ledger], Any]


@dataclass
class Counts:
    commits: int = 0
    writes: int = 0
    sealed: int = 0


class Writer:
    """`changed` is called in the event loop with the streams that a transaction changed, `broken` when the disk failed
    in a way that leaves its content unknown: then nothing is written any more."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        ledger: Ledger,
        *,
        changed: Callable[[list[str]], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self.counts = Counts()
        self.full = False
        self._db, self._ledger = connection, ledger
        self._changed, self._broken = changed, broken
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[Work, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._open = True
        self._log = get_logger(part="blocknode")
        self._thread = threading.Thread(target=self._run, name="blocknode-writer", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[Ledger], _T]) -> _T:
        """Do the work in the next transaction, and return when it is on the disk. Call it in the event loop."""
        if not self._open:
            raise stopping()
        if self._queue.qsize() >= WRITES_WAITING_MAX:
            raise busy("too many writes wait already")
        done: asyncio.Future[_T] = self._loop.create_future()
        self._queue.put((work, done))
        return await done

    async def close(self) -> None:
        """Do the queued work, then stop."""
        self._open = False
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_WAIT_S)

    def _run(self) -> None:
        while True:
            try:
                asked, more = self._take()
                if not asked and not more:
                    return
                self._commit(asked)
            except BaseException as error:  # noqa: BLE001 - a writer that died must not look alive
                self._open = False
                self._loop.call_soon_threadsafe(self._broken, error)
                self._refuse_all()
                return
            if not more:
                return

    def _take(self) -> tuple[list[tuple[Work, asyncio.Future[Any]]], bool]:
        """The work of one transaction, and whether there is more to come. Waits for work, or for a minipool to seal."""
        asked: list[tuple[Work, asyncio.Future[Any]]] = []
        try:
            item = self._queue.get(timeout=self._wait_s())
            while item is not None:
                asked.append(item)
                if len(asked) >= _AT_ONCE_MAX:
                    return asked, True
                item = self._queue.get_nowait()
        except queue.Empty:
            return asked, True
        return asked, False

    def _wait_s(self) -> float:
        if self.full:
            return 1.0
        if self._ledger.purging:
            return 0.05
        seal_in_s = self._ledger.seal_in_s
        return _IDLE_S if seal_in_s is None else min(_IDLE_S, seal_in_s)

    def _commit(self, asked: list[tuple[Work, asyncio.Future[Any]]]) -> None:
        answers: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        try:
            self._db.execute("begin immediate")
            for work, done in asked:
                try:
                    answers.append((done, work(self._ledger), None))
                except Refused as refused:
                    answers.append((done, None, refused))
            sealed = self._ledger.seal_due()
            if not asked and self._ledger.purging:
                self._ledger.purge()
            changed = self._ledger.flush()
            self._db.execute("commit")
        except Exception as error:
            if self._db.in_transaction:
                self._db.execute("rollback")
            refusal = self._failed(error)
            self._settle([(done, None, refusal) for _, done in asked], [])
            if isinstance(error, sqlite3.Error) and refusal.code not in {Code.DISK_FULL, Code.BUSY}:
                raise
            self._ledger.forget()
            return
        self.full = False
        self.counts.commits += bool(asked or sealed)
        self.counts.sealed += sealed
        self.counts.writes += len(asked)
        self._settle(answers, changed)
        if asked and self.counts.commits % _TRIM_EVERY == 0:
            self._trim()

    def _trim(self) -> None:
        """Overlapping readers could keep SQLite from beginning its log anew for ever: then it waits for them.

        Where the disk is too full for that, it is left for next time: the log has every commit.
        """
        try:
            _, frames, _ = self._db.execute("pragma wal_checkpoint(passive)").fetchone()
            if frames > _LOG_FRAMES_MAX:
                self._db.execute("pragma wal_checkpoint(restart)").fetchone()
        except sqlite3.Error as error:
            if _code(error) not in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY}:
                raise
            self._log.warning("the write-ahead log cannot be trimmed just now; it has every commit", error=error)

    def _failed(self, error: Exception) -> Refused:
        """Nothing of this transaction was kept: all its requests get this refusal."""
        if isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_FULL:
            if not self.full:
                self._log.error("the disk is full; nothing that was accepted is lost", error=error)
            self.full = True
            hint = "free some space; then it goes on by itself"
            return Refused(Code.DISK_FULL, "no space left for the node's data", hint)
        if isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_BUSY:
            self._log.error("another program holds the node's file: writes wait for it", error=error)
            return busy("another program holds the node's file")
        self._log.error("a transaction failed", error=error)
        return Refused(Code.FAILED, "this write failed, and left nothing behind", "the log says why")

    def _settle(self, answers: list[tuple[asyncio.Future[Any], Any, Exception | None]], changed: list[str]) -> None:
        def tell() -> None:
            for done, answer, error in answers:
                if error is not None and not done.done():
                    done.set_exception(error)
                elif not done.done():
                    done.set_result(answer)
            if changed:
                self._changed(changed)

        if answers or changed:
            self._loop.call_soon_threadsafe(tell)

    def _refuse_all(self) -> None:
        left = []
        while not self._queue.empty():  # this thread alone takes from it
            left.append(self._queue.get())
        self._settle([(item[1], None, stopping()) for item in left if item is not None], [])


def _code(error: sqlite3.Error) -> int:
    """What kind of error, without the particulars; errors that this program made have none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
