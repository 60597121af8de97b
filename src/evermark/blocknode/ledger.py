"""The writing side of a node, within one transaction of its one writer.

Every operation decides first and writes then, so that a refused operation leaves nothing behind in the transaction it
shares with others. `flush` ends the work of a transaction, `forget` drops what was remembered of a failed one.
"""

from __future__ import annotations

import heapq
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evermark.blocknode.bodies import CreateAsked, text_of
from evermark.blocknode.decisions import Pool, next_touched, seal_in_us, snapshot_due
from evermark.blocknode.refusal import Code, Refused, stream_not_found
from evermark.blocknode.settings import NodeSettings
from evermark.sources.blocks.chain import (
    START,
    Block,
    BlockEvent,
    Cookie,
    EventKind,
    Snapshot,
    StreamKind,
    block_hash,
    canonical,
    make_block,
)

HEADS_MAX = 10_000
UNLISTED = 0  # a place in the listing that no reader gets to see
_SEALED_AT_ONCE_MAX = 500
_PURGED_AT_ONCE = 2000
_STAYS = -1  # in its place


@dataclass(slots=True)
class Head:
    """The end of a stream in use, as the writer remembers it."""

    sid: int
    stream: str
    kind: StreamKind
    creator: str
    incarnation: str
    next_number: int
    last_hash: str
    last_at_us: int
    snapshot_number: int
    snapshot_bytes: int
    pool: Pool
    members: int
    touched: int
    due_gen: int = -1  # the generation of its minipool whose sealing is in the heap

    @property
    def cookie(self) -> Cookie:
        return Cookie(self.next_number, self.last_hash)

    def place(self, number: int) -> int:
        return self.sid << 32 | number

    @property
    def pooled(self) -> tuple[int, int]:
        """The first place of the minipool, and the place after its last."""
        return self.place(0), self.place(self.pool.count)


@dataclass(frozen=True, slots=True)
class Added:
    hash: str
    minipool_gen: int | None  # of the minipool it came into; None for a duplicate
    duplicate: bool


_HEAD = """select sid, kind, creator, incarnation, next_number, last_hash, last_at_us, snapshot_number, snapshot_bytes,
pool_count, pool_bytes, pool_since_us, members, touched from streams where stream = ? and not deleted"""
_FLUSH = """update streams set next_number = ?, last_hash = ?, last_at_us = ?, snapshot_number = ?, snapshot_bytes = ?,
pool_count = ?, pool_bytes = ?, pool_since_us = ?, members = ?, touched = ? where sid = ?"""
_CREATE = """insert into streams (stream, kind, creator, incarnation, asked, next_number, last_hash, last_at_us,
snapshot_number, snapshot_bytes, members, touched) values (?, ?, ?, ?, ?, 1, ?, ?, 0, 0, ?, ?)"""


@dataclass(frozen=True)
class Clocks:
    """Stored times are of the wall clock; waiting is measured by a clock that is never set."""

    wall_us: Callable[[], int] = lambda: time.time_ns() // 1000
    steady_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000


class Ledger:
    def __init__(self, connection: sqlite3.Connection, settings: NodeSettings, clocks: Clocks) -> None:
        self._db = connection
        self._clocks = clocks
        self._settings = settings
        self._seals = settings.follow is None
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self._changed: dict[str, int | None] = {}  # in this transaction; with its place in the listing, if given
        self._due: list[tuple[int, str, int]] = []  # a heap: steady time, stream, generation of the minipool
        self._last_touched = 0
        self._passed = 0  # the greatest `touched` that a reader of the listing may have seen
        self.purging = True
        self.forget()

    def forget(self) -> None:
        """Begin anew from the file: the transaction under way was rolled back."""
        self._heads.clear()
        self._changed.clear()
        (last,) = self._db.execute("select max(touched) from streams").fetchone()
        self._passed = last or 0
        self._last_touched = max(self._last_touched, self._passed)
        self._due = []
        pooled = "select stream from streams where pool_count > 0"
        for (stream,) in self._db.execute(pooled).fetchall() if self._seals else []:
            self._remember_due(self._head(stream))
        self._heads.clear()

    @property
    def seal_in_s(self) -> float | None:
        """In how long the next minipool is to be sealed."""
        return max(0.0, (self._due[0][0] - self._clocks.steady_us()) / 1e6) if self._due else None

    def flush(self) -> list[str]:
        """Write down the heads that changed, in the order they did; the names of their streams."""
        changed, self._changed = self._changed, {}
        for stream, touched in changed.items():
            head = self._heads.get(stream)
            if head is not None:
                pool = (head.pool.count, head.pool.bytes, head.pool.since_us)
                chain = (head.next_number, head.last_hash, head.last_at_us, head.snapshot_number, head.snapshot_bytes)
                head.touched = head.touched if touched == _STAYS else self._touch(touched)
                self._db.execute(_FLUSH, (*chain, *pool, head.members, head.touched, head.sid))
                self._remember_due(head)
        self._passed = self._last_touched
        while len(self._heads) > HEADS_MAX:
            self._heads.popitem(last=False)
        return list(changed)

    def create(self, stream: str, asked: CreateAsked, incarnation: str) -> tuple[bool, Cookie]:
        """Whether the stream was made just now, and its cookie."""
        row = self._db.execute("select asked from streams where stream = ? and not deleted", [stream]).fetchone()
        snapshot = Snapshot(asked.kind, asked.creator, incarnation, tuple(sorted(asked.members)), asked.settings)
        if row is None:
            block = make_block(stream, START, self._clocks.wall_us(), (), snapshot)
            return True, self._begin(block, touched=None).cookie
        if row[0] != _asked(snapshot):
            hint = "it differs in kind, creator, members or settings: choose another id, or delete it"
            raise Refused(Code.STREAM_EXISTS, f"the stream {stream} exists already", hint)
        return False, self._head(stream).cookie

    def _begin(self, block: Block, touched: int | None) -> Head:
        """A stream from its first block on; a former stream of its name was deleted before."""
        snapshot = block.snapshot
        if snapshot is None:
            raise ValueError("block 0 has no snapshot")
        body = text_of(block.wire())
        self._db.execute("delete from streams where stream = ? and deleted", [block.stream])
        about = (block.stream, str(snapshot.kind), snapshot.creator, snapshot.incarnation, _asked(snapshot))
        chain = (block.hash, block.at_us, len(snapshot.members))
        self._db.execute(_CREATE, (*about, *chain, self._touch(touched)))
        head = self._head(block.stream)
        self._db.execute("insert into blocks values (?, ?, 1, ?)", (head.place(0), block.hash, body))
        self._db.executemany("insert into members values (?, ?)", [(head.sid, name) for name in snapshot.members])
        settings = [(head.sid, *it) for it in snapshot.settings.items()]
        self._db.executemany("insert into settings values (?, ?, ?)", settings)
        self._changed[block.stream] = touched
        return head

    def add(self, stream: str, events: Sequence[tuple[BlockEvent, bytes]]) -> list[Added]:
        now_us = self._clocks.wall_us()
        head = self._head(stream)
        self._check_controls(head, [event for event, _ in events])
        answers = []
        for event, text in events:
            if not self._first_time(head, event.hash):
                answers.append(Added(event.hash, None, duplicate=True))
                continue
            answers.append(Added(event.hash, head.next_number, duplicate=False))
            self._into_pool(head, event, text, now_us)
            if seal_in_us(head.pool, now_us, self._settings) == 0:
                self._seal(head, now_us)
        return answers

    def seal_due(self) -> int:
        """Seal the minipools whose time has come; how many."""
        sealed = 0
        now_us = self._clocks.steady_us()
        while self._due and self._due[0][0] <= now_us and sealed < _SEALED_AT_ONCE_MAX:
            _, stream, generation = heapq.heappop(self._due)
            head = self._find(stream)
            if head is not None and head.next_number == generation and head.pool.count:
                self._seal(head, self._clocks.wall_us())
                sealed += 1
        return sealed

    def delete(self, stream: str, touched: int | None = None) -> None:
        """The stream is gone at once; its rows are removed bit by bit."""
        head = self._head(stream)
        gone = "update streams set deleted = 1, pool_count = 0, touched = ? where sid = ?"
        self._db.execute(gone, (self._touch(touched), head.sid))
        self._db.execute("insert into dropped values (?)", [head.sid])
        self._heads.pop(stream, None)
        self._changed[stream] = touched
        self.purging = True

    def purge(self) -> None:
        """Remove some rows of deleted streams. `purging` says whether there are more."""
        row = self._db.execute("select sid from dropped limit 1").fetchone()
        self.purging = row is not None
        if row is None:
            return
        (sid,) = row
        removed = 0
        for table in ("blocks", "pool"):
            some = f"select place from {table} where place between ? and ? limit {_PURGED_AT_ONCE}"
            within = (sid << 32, (sid + 1 << 32) - 1)
            removed += self._db.execute(f"delete from {table} where place in ({some})", within).rowcount
        for table, key in (("seen", "hash"), ("members", "member"), ("settings", "name")):
            some = f"select {key} from {table} where sid = ? limit {_PURGED_AT_ONCE}"
            removed += self._db.execute(f"delete from {table} where sid = ? and {key} in ({some})", (sid, sid)).rowcount
        if removed == 0:
            self._db.execute("delete from dropped where sid = ?", [sid])

    # A follower copies instead of sealing.

    def cookie(self, stream: str) -> Cookie | None:
        head = self._find(stream)
        return head.cookie if head is not None else None

    def copy(self, stream: str, blocks: Sequence[Block], pool: Sequence[BlockEvent], touched: int | None) -> None:
        """Append blocks that were verified to follow this copy, and replace the minipool. Without `touched` more parts
        follow: the stream's place in the listing stays as it is."""
        if blocks and blocks[0].number == 0:
            self._begin(blocks[0], UNLISTED)
            blocks = blocks[1:]
        head = self._head(stream)
        if blocks and (blocks[0].number, blocks[0].previous) != (head.next_number, head.last_hash):
            raise ValueError(f"block {blocks[0].number} of {stream} does not follow this copy")
        self._clear_pool(head)
        for block in blocks:
            for event in block.events:
                self._first_time(head, event.hash)
                self._apply(head, event)
            self._append(head, block.hash, block.at_us, block.snapshot is not None, text_of(block.wire()))
        for event in pool:
            self._first_time(head, event.hash)
            self._into_pool(head, event, text_of(event.wire()), self._clocks.wall_us())
        self._changed[stream] = _STAYS if touched is None else touched

    def note(self, name: str, value: str) -> None:
        self._db.execute("insert or replace into meta values (?, ?)", (name, value))

    def owe(self, stream: str, reason: str | None) -> None:
        """Remember that this stream could not be copied; None: it was copied, after all."""
        self._db.execute("delete from owed where stream = ?", [stream])
        if reason is not None:
            self._db.execute("insert into owed values (?, ?)", (stream, reason))

    def _find(self, stream: str) -> Head | None:
        head = self._heads.get(stream)
        if head is not None:
            self._heads.move_to_end(stream)
            return head
        row = self._db.execute(_HEAD, [stream]).fetchone()
        if row is None:
            return None
        sid, kind, creator, incarnation, number, last_hash, at_us, snapshot, size, *pool, members, touched = row
        about = (sid, stream, StreamKind(kind), creator, incarnation)
        head = Head(*about, number, last_hash, at_us, snapshot, size, Pool(*pool), members, touched)
        self._heads[stream] = head
        return head

    def _head(self, stream: str) -> Head:
        head = self._find(stream)
        if head is None:
            raise stream_not_found(stream)
        return head

    def _touch(self, given: int | None) -> int:
        """The number of a change. Copies have the number that the followed node gave, so that a reader can go on at
        either node; but a number that a reader may have passed would hide the change for ever."""
        if given == UNLISTED:
            return UNLISTED
        if given is None:
            self._last_touched = next_touched(self._last_touched, self._clocks.wall_us())
            return self._last_touched
        number = given if given > self._passed else self._passed + 1
        self._last_touched = max(self._last_touched, number)
        return number

    def _first_time(self, head: Head, event_hash: str) -> bool:
        row = (head.sid, bytes.fromhex(event_hash))
        return self._db.execute("insert into seen values (?, ?) on conflict do nothing", row).rowcount == 1

    def _check_controls(self, head: Head, events: Sequence[BlockEvent]) -> None:
        if all(event.kind is EventKind.MESSAGE for event in events):
            return
        joins = sum(event.kind is EventKind.JOIN for event in events)
        leaves = sum(event.kind is EventKind.LEAVE for event in events)
        if (joins or leaves) and head.kind is not StreamKind.CHANNEL:
            hint = "only channels have joins and leaves; create another stream instead"
            raise Refused(Code.MEMBERS_FIXED, f"the members of a stream of kind {head.kind} are fixed", hint)
        if joins and head.members + joins > self._settings.members_max:
            said = f"{head.stream} may have {self._settings.members_max} members"
            raise Refused(Code.TOO_MANY, said, "let a member leave first")
        names = {name for event in events for name, value in event.settings.items() if value is not None}
        if names:
            rows = self._db.execute("select name from settings where sid = ?", [head.sid])
            if len(names.union(name for (name,) in rows)) > self._settings.settings_max:
                said = f"{head.stream} may have {self._settings.settings_max} settings"
                raise Refused(Code.TOO_MANY, said, "remove one: set it to null")

    def _apply(self, head: Head, event: BlockEvent) -> None:
        if event.kind is EventKind.JOIN:
            added = "insert into members values (?, ?) on conflict do nothing"
            head.members += self._db.execute(added, (head.sid, event.member)).rowcount
        elif event.kind is EventKind.LEAVE:
            removed = "delete from members where sid = ? and member = ?"
            head.members -= self._db.execute(removed, (head.sid, event.member)).rowcount
        for name, value in event.settings.items():
            self._db.execute("delete from settings where sid = ? and name = ?", (head.sid, name))
            if value is not None:
                self._db.execute("insert into settings values (?, ?, ?)", (head.sid, name, value))

    def _into_pool(self, head: Head, event: BlockEvent, text: bytes, now_us: int) -> None:
        pool = head.pool
        self._db.execute("insert into pool values (?, ?, ?)", (head.place(pool.count), event.hash, text))
        self._apply(head, event)
        head.pool = Pool(pool.count + 1, pool.bytes + len(text), pool.since_us if pool.count else now_us)
        self._changed.setdefault(head.stream, None)

    def _seal(self, head: Head, now_us: int) -> None:
        """All of the minipool becomes the next block."""
        pooled = "select hash, body from pool where place >= ? and place < ? order by place"
        rows = self._db.execute(pooled, head.pooled).fetchall()
        at_us = max(now_us, head.last_at_us)
        snapshot = None
        if snapshot_due(head.next_number, head.snapshot_number, head.snapshot_bytes, self._settings):
            snapshot = self._snapshot(head)
        hashes = tuple(event_hash for event_hash, _ in rows)
        made = block_hash(head.stream, head.next_number, head.last_hash, at_us, hashes, snapshot)
        block = Block(head.stream, head.next_number, head.last_hash, made, at_us, hashes, snapshot, ())
        texts = b",".join(text for _, text in rows)
        body = b'{"header":' + text_of(block.header()) + b',"events":[' + texts + b"]}"
        self._clear_pool(head)
        self._append(head, made, at_us, snapshot is not None, body)
        self._changed.setdefault(head.stream, None)

    def _snapshot(self, head: Head) -> Snapshot:
        members = self._db.execute("select member from members where sid = ? order by member", [head.sid]).fetchall()
        settings = self._db.execute("select name, value from settings where sid = ?", [head.sid]).fetchall()
        names = tuple(name for (name,) in members)
        return Snapshot(head.kind, head.creator, head.incarnation, names, dict(settings))

    def _append(self, head: Head, made: str, at_us: int, has_snapshot: bool, body: bytes) -> None:
        row = (head.place(head.next_number), made, has_snapshot, body)
        self._db.execute("insert into blocks values (?, ?, ?, ?)", row)
        if has_snapshot:
            head.snapshot_number, head.snapshot_bytes = head.next_number, 0
        else:  # a large snapshot does not make the next one due
            head.snapshot_bytes += len(body)
        head.next_number, head.last_hash, head.last_at_us = head.next_number + 1, made, at_us

    def _clear_pool(self, head: Head) -> None:
        self._db.execute("delete from pool where place >= ? and place < ?", head.pooled)
        head.pool = Pool()

    def _remember_due(self, head: Head) -> None:
        wait_us = seal_in_us(head.pool, self._clocks.wall_us(), self._settings)
        if wait_us is not None and head.due_gen != head.next_number and self._seals:
            head.due_gen = head.next_number
            heapq.heappush(self._due, (self._clocks.steady_us() + wait_us, head.stream, head.next_number))


def _asked(snapshot: Snapshot) -> str:
    """The request that a stream was created with, from its first snapshot: the same text for the same stream."""
    said = snapshot.wire()
    return canonical([said["kind"], said["creator"], said["members"], said["settings"]]).decode()
