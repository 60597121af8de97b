"""The reading side of a node: each answer is read from one consistent state of the file, as JSON text."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from evermark.blocknode.bodies import text_of
from evermark.blocknode.database import Database
from evermark.blocknode.decisions import Answer, Range, continuation, judge_range
from evermark.blocknode.refusal import Code, Refused, bad_request, behind, busy, stream_not_found
from evermark.blocknode.settings import READS_WAITING_MAX, NodeSettings
from evermark.sources.blocks.chain import Cookie, StreamKind

_T = TypeVar("_T")
_THREADS = 4


@dataclass(frozen=True, slots=True)
class ReaderPosition:
    """How far a client is in a stream: it has all blocks before the cookie, and `seen` events of the minipool."""

    cookie: Cookie
    seen: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """The answer to a client. `more`: there is more than one answer holds; ask again from `position`."""

    stream: str
    kind: str
    reset: bool
    blocks: list[bytes]
    minipool: list[bytes]
    position: ReaderPosition
    more: bool

    @property
    def news(self) -> bool:
        return self.reset or bool(self.blocks or self.minipool)

    @property
    def size(self) -> int:
        return sum(map(len, self.blocks)) + sum(map(len, self.minipool))

    def text(self) -> bytes:
        about = {"stream": self.stream, "kind": self.kind, "reset": self.reset, "cookie": self.position.cookie.wire()}
        parts = (b',"blocks":[', b",".join(self.blocks), b'],"minipool":[', b",".join(self.minipool), b"]}")
        return text_of(about | {"more": self.more})[:-1] + b"".join(parts)


@dataclass(frozen=True, slots=True)
class Page:
    """Blocks [start, end), of a range that may go further."""

    stream: str
    blocks: list[bytes]
    start: int
    end: int

    def text(self) -> bytes:
        about = text_of({"stream": self.stream, "from": self.start, "next": self.end})[:-1]
        return about + b',"blocks":[' + b",".join(self.blocks) + b"]}"


class Answers:
    """One method for each question, on a connection that sees one state of the file."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings

    def view(
        self, db: sqlite3.Connection, stream: str, after: ReaderPosition | None, *, snapshots_back: int = 0
    ) -> View:
        """Blocks and minipool after the position, or since the latest snapshot; `snapshots_back`: an older one."""
        row = self._stream(db, stream)
        sid, kind, next_number, last_hash, start, pool_count = row
        cookie = after.cookie if after is not None else None
        hash_before = None
        if cookie is not None and 0 < cookie.minipool_gen <= next_number:
            before = [sid << 32 | cookie.minipool_gen - 1]
            hash_before = db.execute("select hash from blocks where place = ?", before).fetchone()[0]
        answer = continuation(cookie, next_number, hash_before, self._settings.resume_blocks)
        if answer is Answer.CONTINUE and after is not None:
            return self._continue(db, stream, row, after)
        for _ in range(snapshots_back):
            older = "select max(place) from blocks where place >= ? and place < ? and snapshot"
            (place,) = db.execute(older, (sid << 32, sid << 32 | start)).fetchone()
            start = start if place is None else place & 0xFFFFFFFF
        blocks = [body for body, _ in _stored(db, "blocks", sid, start, next_number)]
        pool = [body for body, _ in _stored(db, "pool", sid, 0, pool_count)]
        return View(stream, kind, True, blocks, pool, ReaderPosition(Cookie(next_number, last_hash), pool_count), False)

    def _continue(self, db: sqlite3.Connection, stream: str, row: tuple[Any, ...], after: ReaderPosition) -> View:
        sid, kind, next_number, _, _, pool_count = row
        cookie, seen = after.cookie, after.seen
        found = self._page(db, sid, cookie.minipool_gen, next_number)
        if found:
            cookie, seen = Cookie(cookie.minipool_gen + len(found), found[-1][1]), 0
        more = cookie.minipool_gen < next_number
        pool = [] if more else [body for body, _ in _stored(db, "pool", sid, seen, pool_count)]
        blocks = [body for body, _ in found]
        return View(stream, kind, False, blocks, pool, ReaderPosition(cookie, seen + len(pool)), more)

    def page(self, db: sqlite3.Connection, stream: str, start: int, end: int) -> Page:
        """Blocks from `start` on: up to `end`, or up to what one answer holds."""
        sid, _, next_number, *_ = self._stream(db, stream)
        judged = judge_range(start, end, next_number, follows=self._settings.follow is not None)
        if judged is Range.BEHIND:
            raise behind(stream)
        if judged is not Range.GOOD:
            code = Code.RANGE_EMPTY if judged is Range.EMPTY else Code.RANGE_IMPOSSIBLE
            said = f"[{start}, {end}) of stream {stream} is {judged}: its next block will be {next_number}"
            raise Refused(code, said, "ask for the stream, and compare its first block with yours")
        blocks = [body for body, _ in self._page(db, sid, start, min(end, next_number))]
        return Page(stream, blocks, start, start + len(blocks))

    def _page(self, db: sqlite3.Connection, sid: int, start: int, end: int) -> list[tuple[bytes, str]]:
        """The first blocks of [start, end), as many as one answer holds, each with its hash."""
        found: list[tuple[bytes, str]] = []
        size = 0
        for body, made in _stored(db, "blocks", sid, start, min(end, start + self._settings.page_blocks)):
            found.append((body, made))
            size += len(body)
            if size >= self._settings.page_bytes:
                break
        return found

    def listing(
        self, db: sqlite3.Connection, touched_after: int, limit: int, kind: StreamKind | None = None
    ) -> list[dict[str, Any]]:
        """Streams in the order of their last change; the limit does not cut between streams that share a number."""
        if limit < 1:
            raise bad_request("limit is below 1")
        columns = ("stream", "kind", "minipool_gen", "touched", "deleted")
        wanted = "touched > :after" + (" and kind = :kind" if kind is not None else "")
        last = f"select touched from streams where {wanted} order by touched limit 1 offset :limit - 1"
        asked = f"""select stream, kind, next_number, touched, deleted from streams
            where {wanted} and touched <= coalesce(({last}), 9223372036854775807) order by touched, stream"""
        rows = db.execute(asked, {"after": touched_after, "limit": limit, "kind": kind}).fetchall()
        return [dict(zip(columns, (*row[:4], bool(row[4])), strict=True)) for row in rows]

    def noted(self, db: sqlite3.Connection, name: str) -> str | None:
        row = db.execute("select value from meta where name = ?", [name]).fetchone()
        return None if row is None else str(row[0])

    def owes(self, db: sqlite3.Connection) -> int:
        """How many streams this node could not copy: its listing may lack changes of these. 0 if it follows none."""
        if self._settings.follow is None:
            return 0
        return int(db.execute("select count(*) from owed").fetchone()[0])

    def owed(self, db: sqlite3.Connection, after: str, limit: int) -> list[str]:
        asked = "select stream from owed where stream > ? order by stream limit ?"
        return [stream for (stream,) in db.execute(asked, [after, limit])]

    def owed_of(self, db: sqlite3.Connection, streams: Sequence[str]) -> set[str]:
        return {stream for stream in streams if db.execute("select 1 from owed where stream = ?", [stream]).fetchone()}

    def _stream(self, db: sqlite3.Connection, stream: str) -> tuple[Any, ...]:
        asked = """select sid, kind, next_number, last_hash, snapshot_number, pool_count, deleted
            from streams where stream = ?"""
        row = db.execute(asked, [stream]).fetchone()
        if row is None and self._settings.follow is not None:
            raise behind(stream)
        if row is None or row[6]:
            raise stream_not_found(stream)
        return tuple(row[:6])


def _stored(db: sqlite3.Connection, table: str, sid: int, start: int, end: int) -> sqlite3.Cursor:
    """The bodies and hashes of a stream's blocks or pooled events, by their numbers."""
    within = (sid << 32 | start, sid << 32 | end)
    return db.execute(f"select body, hash from {table} where place >= ? and place < ? order by place", within)


class Reader(Answers):
    """A few threads, a connection each; `run` calls an answer in one of them, on one state of the file."""

    def __init__(self, database: Database, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="blocknode-reader")
        self._connections: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for _ in range(_THREADS):
            self._connections.put(database.reader())
        self._waiting = 0

    async def run(self, call: Callable[[sqlite3.Connection], _T], *, waits: bool = False) -> _T:
        """Refused when too many calls wait, unless the caller `waits`, however long."""
        if self._waiting >= READS_WAITING_MAX and not waits:
            raise busy("too many requests wait for an answer already")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._consistent, call)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for _ in range(_THREADS):
            self._connections.get_nowait().close()

    def _consistent(self, call: Callable[[sqlite3.Connection], _T]) -> _T:
        connection = self._connections.get()
        try:
            connection.execute("begin")
            try:
                return call(connection)
            finally:
                connection.execute("commit")
        finally:
            self._connections.put(connection)
