"""The live tail: new batches of the log, read once, for all clients that follow it.

A `Hub` reads on behind `log_head`, has each wish matched once, renders each event once, and keeps the last megabytes of
that in a ring. A `Client` takes its part of the ring. A client that is too slow for the ring, or comes back with an old
id, reads the log until it meets the ring again, together with others that stand where it stands
(`catching_up.py`); so nothing is kept for it but its place. Everything here runs in one event loop; the log is read in
threads, a few at a time.

A file of the log that cannot be read holds up one partition, right before it, and the clients that stand there: these
read the log of the others for themselves, try the file again now and then, and meet the ring when it is back or was
given up. The hub itself passes over it, so that new clients, which stand behind it, are live. Where the log merely
does not answer, or its disk refuses it, the hub waits, too, in that partition alone, and live clients wait with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from evermark.delivery.decide.retry import STUCK_REST_S
from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.tail.catching_up import Reading, SharedReadings, end_of_reading
from evermark.delivery.tail.follow import end_of, started_at
from evermark.delivery.tail.place import (
    Places,
    Point,
    Resync,
    Stuck,
    gone,
    is_done,
    is_level,
    knows_later,
    moved,
    new_troubles,
    now,
    require_few,
    resumed,
    told_of,
    told_up_to,
)
from evermark.delivery.tail.ports import TailLog, TailReport
from evermark.delivery.tail.sse import ending, events, heartbeat, opening, resync_event, stuck_event
from evermark.delivery.tail.wish import BySpark, Matched, Wish, Wishes, matched_one
from evermark.error_policy import is_stuck
from evermark.errors import BusyError, EvermarkError
from evermark.log.pieces import LogPiece

T = TypeVar("T")

TICK_S = 5.0
# A body is about twice as large as its row in the log: so much is read for a client that is sent one chunk at a time.
_GROWTH = 2
LINGER_S = 30.0  # a hub without clients stays so long: they may be about to come back
_CHUNK_BYTES = 200  # of a chunk beside its events
_LEFT_S = 30.0  # nobody stands any more where the log could not be read, if it was not tried again for so long
# Where clients stand is up to their ids, so of one file there may be as many marks as clients.
_HALTS_MAX = 10_000
_SAID_AFTER_S = 5.0  # a log that does not answer for a moment is not worth a word
_TELL_S_MIN = 0.5  # all clients are woken when a mark may be tried again, not for each of them

Mark = tuple[SourcePartition, Cursor]


@dataclass(frozen=True)
class TailLimits:
    poll_s: float = 0.25  # batches of other instances are found by looking; of this one, its lanes tell
    heartbeat_s: float = 15.0
    retry_s: float = 1.0
    join_s: float = 10.0  # a new client is told to come back if the hub does not get to its place
    rows: int = 1_000  # of a piece of the log
    rows_bytes: int = 4 * 1024 * 1024
    chunk_bytes: int = 64 * 1024  # about so much is sent to a client at a time
    ring_bytes: int = 16 * 1024 * 1024
    ring_chunks: int = 10_000
    # The more clients there are the more is sent at a time: a request to the network costs more than the bytes.
    rest_s_per_client: float = 0.0001
    rest_s: float = 0.25
    # The next piece waits for most clients to have the last one, but not for the slow ones.
    pace_s: float = 0.5
    scanned_rows: int = 20_000  # by one turn of a client that reads the log
    shared_bytes: int = 8 * 1024 * 1024  # of what was read for clients that are behind, kept for others
    # After a reading for clients that are behind nothing is read for them for as long as it took, and at most so long:
    # threads that compute make the event loop, with all the others in it, wait.
    breath_s: float = 0.1


@dataclass(frozen=True)
class Chunk:
    """Some events of the log, and where a client stands that has taken them."""

    blocks: Sequence[bytes]
    wanted: Mapping[Wish, Sequence[int]] | None  # None: everybody is told
    after: Places
    size: int


@dataclass(frozen=True)
class Part:
    """A client's part of some chunks."""

    text: bytes
    events: int
    next: int  # the number of the chunk that follows
    after: Places


@dataclass
class _Kept:
    """A wish that some clients have, and the part that the last of them took: the others take the same."""

    users: int = 0
    began: int = -1
    part: Part | None = None


class Ring:
    """The last chunks, by number. A bounded amount, whether clients have taken them or not."""

    def __init__(self, places: Places, limits: TailLimits) -> None:
        self._chunks: deque[Chunk] = deque()
        self._bytes = 0
        self._limits = limits
        self.first = 0
        self.places = places  # at the end
        self._kept: dict[Wish, _Kept] = {}

    @property
    def end(self) -> int:
        return self.first + len(self._chunks)

    @property
    def wishes(self) -> tuple[Wish, ...]:
        return tuple(self._kept)

    def want(self, wish: Wish) -> None:
        self._kept.setdefault(wish, _Kept()).users += 1

    def unwant(self, wish: Wish) -> None:
        self._kept[wish].users -= 1
        if not self._kept[wish].users:
            del self._kept[wish]

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._bytes += chunk.size
        self.places = chunk.after
        most = self._limits
        while len(self._chunks) > 1 and (self._bytes > most.ring_bytes or len(self._chunks) > most.ring_chunks):
            self._bytes -= self._chunks.popleft().size
            self.first += 1

    def part(self, wish: Wish, number: int) -> Part | None:
        """A client's part of the chunks from `number` on, which is not the end; None: the ring does not have it."""
        if number < self.first:
            return None
        kept = self._kept[wish]
        if kept.began == number and kept.part is not None and (kept.part.next == self.end or kept.part.text):
            return kept.part
        found: list[bytes] = []
        size, events_, chunk = 0, 0, None
        while number + len(found) < self.end:
            chunk_ = self._chunks[number + len(found) - self.first]
            numbers = range(len(chunk_.blocks)) if chunk_.wanted is None else chunk_.wanted.get(wish)
            if numbers is None:  # it could not be matched, or nobody had this wish when it was
                break
            chunk = chunk_
            found.append(b"".join(chunk.blocks[n] for n in numbers))
            size, events_ = size + len(found[-1]), events_ + len(numbers)
            if size >= self._limits.chunk_bytes:
                break
        if chunk is None:
            return None
        part = Part(b"".join(found), events_, number + len(found), chunk.after)
        kept.began, kept.part = (number, part) if kept.users > 1 else (-1, None)
        return part


def chunks_of(piece: LogPiece, place: SourcePartition, places: Places, matched: Matched, bytes_max: int) -> list[Chunk]:
    """A piece of the log as chunks. Only what some wish is met by is rendered, and once."""
    rows = piece.rows
    mine = [found for found in matched.rows.values() if len(found)]
    wanted = np.unique(np.concatenate(mine)) if mine else np.empty(0, np.int64)
    blocks = events(rows.take(wanted) if len(wanted) else rows.slice(0, 0), place, places, historical=False)
    ends, size = [], 0
    for number, block in enumerate(blocks):
        size += len(block)
        if size >= bytes_max or number == len(blocks) - 1:
            ends.append(number + 1)
            size = 0
    made: list[Chunk] = []
    start, at = 0, {wish: np.searchsorted(wanted, found) for wish, found in matched.rows.items()}
    for end in ends or [0]:
        last = end == len(blocks)
        reached = Cursor(piece.batch, piece.through) if last else _cursor_at(piece, int(wanted[end - 1]))
        inside = {wish: (found[(found >= start) & (found < end)] - start).tolist() for wish, found in at.items()}
        some = blocks[start:end]
        made.append(Chunk(some, inside, moved(places, place, reached), sum(map(len, some)) + _CHUNK_BYTES))
        start = end
    return made


def _cursor_at(piece: LogPiece, row: int) -> Cursor:
    """Where a client is that is done with a row. A batch of which nothing follows is done."""
    batches = piece.rows.column("batch")
    batch = batches[row].as_py()
    if row + 1 < piece.rows.num_rows and batches[row + 1].as_py() != batch:
        return Cursor(batch)
    return Cursor(batch - 1, piece.rows.column("position")[row].as_py())


@dataclass(frozen=True)
class _Halt:
    """Why the log cannot be read on from a mark, and until when it is not tried again."""

    error: EvermarkError
    since: float
    until: float
    is_said: bool  # to clients, and in health


@dataclass(frozen=True)
class _Left:
    """What the log has beside the chunks that were made of it."""

    more: bool
    failed: Mapping[SourcePartition, EvermarkError]  # where it could not be read


@dataclass(eq=False)
class Hub:
    """The tail of some sources. Runs while it has clients, and a little longer."""

    sources: frozenset[str]
    log: TailLog
    report: TailReport
    by_spark: BySpark
    threads: Executor  # of the hub itself
    others: Executor  # of clients that read the log for themselves: however many, they hold up none that is live
    asking: Executor  # of readings that wait for Spark: they hold up none that does not need it
    limits: TailLimits = TailLimits()
    clock: Callable[[], float] = time.monotonic
    ring: Ring = field(init=False)
    closing: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._news: list[asyncio.Future[None]] = []
        self._woken = asyncio.Event()
        self._level = asyncio.Event()
        self._behind = 0  # how many clients have not taken all of the ring
        self.clients: set[Client] = set()
        self._joining = 0  # clients that are about to be there: State may be slow to answer them
        self._matchers: tuple[tuple[Wish, ...], Wishes] = ((), Wishes(()))
        self.readings = SharedReadings(self.limits.shared_bytes)
        self._reading = asyncio.Lock()
        self._halts: dict[Mark, _Halt] = {}
        self._halted_at: Counter[SourcePartition] = Counter()
        self._said: set[SourcePartition] = set()
        self._telling: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Begin at the end of the log."""
        places = now(*await self.read(lambda: end_of(self.log, self.sources)))
        require_few(places.keys())
        self.ring = Ring(places, self.limits)

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self.close()  # however it ended: clients connect again, to a hub that runs
            for mark in list(self._halts):
                self._went_on(mark)

    async def _run(self) -> None:
        ticked = lonely = self.clock()
        while not self.closing:
            self._woken.clear()
            try:
                more = await self._read_on()
            except Exception as error:  # noqa: BLE001 - it is said, and tried again: clients wait, and lose nothing
                self.report.failed(error)
                more = False
                await asyncio.sleep(self.limits.retry_s)
            if self.clock() - ticked >= TICK_S:
                ticked = self.clock()
                self.tell()
                self._forget_left()
            lonely = self.clock() if self.clients or self._joining else lonely
            if self.clock() - lonely > LINGER_S:
                return
            if not more:
                await _within(self._woken.wait(), self.limits.poll_s)

    def wake(self) -> None:
        self._woken.set()

    # where the log cannot be read

    def _halted(self, place: SourcePartition, cursor: Cursor, error: EvermarkError) -> None:
        now_s, old = self.clock(), self._halts.get((place, cursor))
        if old is None:
            self._halted_at[place] += 1
            if len(self._halts) >= _HALTS_MAX:
                self._went_on(next(iter(self._halts)))
        since = now_s if old is None else old.since
        # What may answer again by itself is tried soon, and less often the longer it lasts: a try may take long.
        rest_s = STUCK_REST_S if is_stuck(error) else min(STUCK_REST_S, max(self.limits.retry_s, now_s - since))
        is_said = is_stuck(error) or now_s - since >= _SAID_AFTER_S
        self._halts[place, cursor] = _Halt(error, since, now_s + rest_s, is_said)
        self._tell_in(rest_s)
        if is_said:
            self._said.add(place)
            self.report.stuck(place, error, self.sources)

    def _tell_in(self, rest_s: float) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(rest_s, self._tell_rested)

    def _tell_rested(self) -> None:
        self._telling = None
        self.tell()
        now_s = self.clock()
        if rests := [halt.until - now_s for halt in self._halts.values() if halt.until > now_s]:
            self._tell_in(max(_TELL_S_MIN, min(rests)))

    def _went_on(self, mark: Mark) -> None:
        if self._halts.pop(mark, None) is None:
            return
        place = mark[0]
        self._halted_at[place] -= 1
        if not self._halted_at[place]:
            del self._halted_at[place]
            if place in self._said:
                self._said.remove(place)
                self.report.unstuck(place, self.sources)

    def _forget_left(self) -> None:
        left = [mark for mark, halt in self._halts.items() if self.clock() - halt.until > _LEFT_S]
        for mark in left:
            self._went_on(mark)

    def _halts_at(self, places: Places) -> list[tuple[SourcePartition, _Halt]]:
        """Where a client at these places stands where the log could not be read. Of a new partition the places need not
        tell: there it stands at the beginning."""
        marks = ((place, self._halts.get((place, places.get(place, Point()).cursor))) for place in self._halted_at)
        return [(place, halt) for place, halt in marks if halt is not None]

    def resting(self, places: Places) -> frozenset[SourcePartition]:
        """Which partitions are not tried again just now for a client at these places."""
        now_s = self.clock()
        return frozenset(place for place, halt in self._halts_at(places) if halt.until > now_s)

    def stuck_at(self, places: Places) -> list[Stuck]:
        """Where a client at these places does not go on, for a while or until a person mends the log."""
        return [Stuck(place, halt.error.message) for place, halt in self._halts_at(places) if halt.is_said]

    def _held_up(self) -> Places:
        """Where the hub itself does not go on."""
        ring = self.ring.places
        return {place: ring.get(place, Point()) for place, _ in self._halts_at(ring)}

    def has_read(self, places: Places, found: Reading) -> None:
        """What a reading that began at these places says of where the log can be read."""
        for place, point in found.places.items():
            before = places.get(place, Point()).cursor
            if point.cursor != before:
                self._went_on((place, before))
        for place, error in found.stuck.items():
            self._halted(place, found.places.get(place, Point()).cursor, error)

    def close(self) -> None:
        self.closing = True
        self._woken.set()
        self._level.set()
        self.tell()

    def tell(self) -> None:
        waiting, self._news = self._news, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def news(self, client: Client) -> None:
        """Until there may be something new for a client."""
        one: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news.append(one)
        client.waits = one
        await one

    async def read(self, call: Callable[[], T]) -> T:
        """In one of the threads that clients share."""
        return await asyncio.get_running_loop().run_in_executor(self.others, call)

    async def ask(self, call: Callable[[], T]) -> T:
        """In one of the threads that wait for Spark. Nothing is computed here meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.asking, call)

    async def read_gently(self, call: Callable[[], T]) -> T:
        """The same, one after another, and half of the time at most."""
        await self._reading.acquire()
        began = self.clock()
        try:
            return await self.read(call)
        finally:
            took_s = min(self.limits.breath_s, self.clock() - began)
            asyncio.get_running_loop().call_later(took_s, self._reading.release)

    async def _read_on(self) -> bool:
        """Put what is new into the ring, and let clients take it. Whether there may be more at once."""
        wishes, places, limits = self.ring.wishes, self.ring.places, self.limits
        loop = asyncio.get_running_loop()
        made, left = await loop.run_in_executor(self.threads, self._made, wishes, places, self.resting(places))
        for chunk in made:
            self.ring.add(chunk)
        for place, _ in self._halts_at(places):
            before = places.get(place, Point()).cursor
            if place not in left.failed and self.ring.places.get(place, Point()).cursor != before:
                self._went_on((place, before))
        for place, error in left.failed.items():
            self._halted(place, places.get(place, Point()).cursor, error)
        if made:
            self._behind = sum(client.is_live for client in self.clients)
            self._level.clear()
            self.tell()
            await asyncio.sleep(min(limits.rest_s, limits.rest_s_per_client * len(self.clients)))
            if self._behind * 2 > len(self.clients):
                await _within(self._level.wait(), limits.pace_s)
        return left.more

    def took_all(self) -> None:
        """A client has nothing left to take."""
        self._behind -= 1
        if self._behind * 2 <= len(self.clients):
            self._level.set()

    def _made(
        self, wishes: tuple[Wish, ...], places: Places, resting: frozenset[SourcePartition]
    ) -> tuple[list[Chunk], _Left]:
        """In a thread: the next piece of each partition that has any, as chunks."""
        made: list[Chunk] = []
        failed: dict[SourcePartition, EvermarkError] = {}
        heads, found = end_of(self.log, self.sources)
        if fresh := new_troubles(places, found):
            places = told_of(places, fresh, found)
            for resync in fresh:
                self.report.resync(resync)
            blocks = [resync_event(resync, places) for resync in fresh]
            made.append(Chunk(blocks, None, places, sum(map(len, blocks))))
        more = False
        for place, head in sorted(heads.items()):
            cursor = places.get(place, Point()).cursor
            if cursor.batch >= head or place in resting:
                continue
            try:
                piece = self.log.piece(place, cursor, head, self.limits.rows, self.limits.rows_bytes)
            except EvermarkError as error:
                failed[place] = error
                if is_stuck(error):  # a chunk that was matched for nobody: clients read the log from here on
                    places = moved(places, place, Cursor(head))
                    made.append(Chunk([], {}, places, _CHUNK_BYTES))
                continue
            made += chunks_of(piece, place, places, self._ready(wishes).matched(piece.rows), self.limits.chunk_bytes)
            places = made[-1].after
            more = more or piece.batch < head
        return made, _Left(more, failed)

    def _ready(self, wishes: tuple[Wish, ...]) -> Wishes:
        if self._matchers[0] != wishes:
            self._matchers = wishes, Wishes(wishes)
        return self._matchers[1]

    # clients

    async def client(self, wish: Wish, asked: Places | None, start: str = "now") -> Client:
        """A client that goes on from the places of an id, or begins at a start: now, beginning or a time."""
        self._joining += 1
        try:
            return await self._joined(wish, asked, start)
        finally:
            self._joining -= 1

    async def _joined(self, wish: Wish, asked: Places | None, start: str) -> Client:
        limits = self.limits
        heads, troubles = await self.read(lambda: end_of(self.log, self.sources))
        end = now(heads, troubles)
        require_few(end.keys())
        told: list[Resync] = []
        if asked is not None:
            if knows_later(asked, troubles):  # another instance may have heard of a gap before this one
                troubles = await self.read(lambda: self.log.troubles(afresh=True))
            places, told = resumed(asked, end, troubles)
        else:
            places = await self.read(lambda: started_at(self.log, end, start))
        # Another instance may have been ahead of this one: here, too, the log is read up to where the client is.
        deadline = self.clock() + limits.join_s
        while not is_done(self.ring.places, {**places, **self._held_up()}):
            self.wake()
            await asyncio.sleep(limits.retry_s / 100)
            if self.closing or self.clock() > deadline:
                raise BusyError("the live tail cannot be read on just now", hint="connect again in a moment")
        if asked is None and start == "now":  # where the hub waits, the client waits with it, and is live elsewhere
            places = {**places, **self._held_up()}
        return Client(self, wish, places, told)


class Client:
    """One client. `pieces` is what it is sent; its sender waits until the client has taken a piece."""

    def __init__(self, hub: Hub, wish: Wish, places: Places, told: list[Resync]) -> None:
        self._hub, self.wish, self.sources = hub, wish, hub.sources
        self._places = places
        self._told = told
        self._next: int | None = None  # chunk of the ring; None: it reads the log
        self._level = True
        self._sent_at = hub.clock()
        self._stuck: dict[SourcePartition, tuple[Cursor, Stuck]] = {}  # what it was told of partitions that stand still
        self.waits: asyncio.Future[None] | None = None
        self.gone = False
        self._join()
        hub.ring.want(wish)
        hub.clients.add(self)
        hub.report.clients(1)

    @property
    def is_live(self) -> bool:
        return self._next is not None

    def _join(self) -> None:
        """Go on with the ring, if the client stands where the ring ends."""
        if is_level(self._places, self._hub.ring.places) and not self.wish.needs_spark:
            self._next = self._hub.ring.end

    def hang_up(self) -> None:
        """The client is gone: nothing is waited for any more."""
        self.gone = True
        if self.waits is not None and not self.waits.done():
            self.waits.set_result(None)

    def close(self) -> None:
        if self in self._hub.clients:
            self._hub.clients.remove(self)
            self._hub.ring.unwant(self.wish)
            self._hub.report.clients(-1)

    async def pieces(self) -> AsyncIterator[bytes]:
        hub = self._hub
        yield opening(self._places)
        for resync in self._told:
            hub.report.resync(resync)
            yield resync_event(resync, self._places)
        while not self.gone and not hub.closing:
            text = self._standing()
            if not text:
                text = await self._from_log() if self._next is None else self._from_ring(self._next)
            if text:
                self._sent_at = hub.clock()
                yield text
            elif hub.clock() - self._sent_at >= hub.limits.heartbeat_s:
                self._sent_at = hub.clock()
                yield heartbeat(self._places)
            elif text is None:
                if not self._level:
                    self._level = True
                    hub.took_all()
                await hub.news(self)
        if hub.closing:
            yield ending()

    def _standing(self) -> bytes | None:
        """What the client has to be told of partitions that stand still where it stands, or no longer do."""
        told: list[bytes] = []
        for place, (cursor, stuck) in list(self._stuck.items()):
            if self._places.get(place, Point()).cursor != cursor:
                del self._stuck[place]
                told.append(stuck_event(stuck, self._places, over=True))
        for stuck in self._hub.stuck_at(self._places):
            if stuck.place not in self._stuck:
                self._stuck[stuck.place] = self._places.get(stuck.place, Point()).cursor, stuck
                told.append(stuck_event(stuck, self._places))
        return b"".join(told)

    def _from_ring(self, number: int) -> bytes | None:
        """The next part; None: there is none yet."""
        ring = self._hub.ring
        if number == ring.end:
            return None
        self._level = False
        part = ring.part(self.wish, number)
        if part is None:
            self._next = None
            if number < ring.first:  # else only this chunk was not matched for it
                self._hub.report.fell_back()
            return b""
        self._next, self._places = part.next, part.after
        self._hub.report.sent(part.events)
        return part.text

    async def _from_log(self) -> bytes | None:
        """The same for a client that is not where the ring begins: read from the log, until it meets the ring's end."""
        hub = self._hub
        self._join()
        before, resting = self._places, hub.resting(self._places)
        if self.is_live or not can_read(before, hub.ring.places, resting):
            return None if self._next is None else b""
        # What rests is part of the key: a reading that passed over a partition is not for those who may read it.
        key = self.wish, frozenset(before.items()), resting
        try:
            found = await hub.readings.get(key, partial(self._read_for_all, resting))
        except EvermarkError as error:
            hub.report.failed(error)
            await asyncio.sleep(hub.limits.retry_s)
            return b""
        for lost in found.resyncs:
            hub.report.resync(lost)
        hub.report.sent(found.events)
        self._places = found.places
        if found.meets is not None and not self.wish.needs_spark:
            self._next = found.meets
        elif found.places == before:  # a reading that is kept is there at once: the loop must go round for the others
            await asyncio.sleep(0)
        return found.text

    async def _read_for_all(self, resting: frozenset[SourcePartition]) -> Reading:
        """For all clients of this wish that stand at this place."""
        hub, wish, places = self._hub, self.wish, self._places
        end, number = hub.ring.places, hub.ring.end
        call = partial(read_between, hub, wish, places, end, number, resting)
        found = None if wish.needs_spark else await hub.read_gently(partial(_if_sure, partial(call, _in_doubt)))
        if found is None:
            found = await hub.ask(partial(call, hub.by_spark))
        hub.has_read(places, found)
        return found


class _DoubtError(Exception):
    """Only Spark can say which events of a piece match."""


def _in_doubt(_place: SourcePartition, _piece: LogPiece, _wish: Wish) -> set[tuple[int, str]]:
    raise _DoubtError


def _if_sure(call: Callable[[], Reading]) -> Reading | None:
    try:
        return call()
    except _DoubtError:
        return None


def can_read(places: Places, end: Places, resting: frozenset[SourcePartition]) -> bool:
    """Whether there is more to read, or to be told, for a client at these places."""
    mine = ((place, places.get(place, Point()), last) for place, last in end.items())
    return any(
        at.resync < last.resync or (at.cursor < last.cursor and place not in resting) for place, at, last in mine
    )


def read_between(
    hub: Hub,
    wish: Wish,
    places: Places,
    end: Places,
    number: int,
    resting: frozenset[SourcePartition],
    by_spark: BySpark,
) -> Reading:
    """In a thread: events for a client between two places, not many. `number`: of the chunk that follows the end.

    Where the log cannot be read, that is part of what is found: the other partitions are read on.
    """
    scanned = size = count = 0
    log, limits = hub.log, hub.limits
    places, lost = told_up_to(places, end, log.troubles())
    found = [resync_event(resync, places) for resync in lost]
    stuck: dict[SourcePartition, EvermarkError] = {}
    for place, last in sorted(end.items()):
        cursor = places.get(place, Point()).cursor
        if place in resting:
            continue
        while cursor < last.cursor and scanned < limits.scanned_rows and size * _GROWTH < limits.chunk_bytes:
            to = last.cursor.batch + (1 if last.cursor.through else 0)
            try:
                first = log.first_batch(place)
                if missing := gone(place, cursor, first, to):
                    cursor = Cursor((first or to + 1) - 1)
                    places = moved(places, place, cursor)
                    lost.append(missing)
                    found.append(resync_event(missing, places))
                    continue
                piece = _until(log.piece(place, cursor, to, limits.rows, limits.chunk_bytes // _GROWTH), last.cursor)
            except EvermarkError as error:
                stuck[place] = error
                break
            rows = matched_one(_ready_alone(wish), wish, place, piece, by_spark)
            mine = piece.rows.take(rows)
            texts = events(mine, place, places, historical=True) if len(rows) else []
            sizes, batches = list(map(len, texts)), mine.column("batch").to_pylist()
            kept = end_of_reading(sizes, batches, limits.chunk_bytes - size)
            cursor = Cursor(piece.batch, piece.through) if kept == len(texts) else _cursor_at(piece, rows[kept - 1])
            found += texts[:kept]
            scanned, count, size = scanned + piece.rows.num_rows, count + kept, size + sum(sizes[:kept])
            places = moved(places, place, cursor)
    return Reading(b"".join(found), places, count, tuple(lost), number if is_level(places, end) else None, stuck)


@lru_cache(maxsize=64)
def _ready_alone(wish: Wish) -> Wishes:
    return Wishes([wish])


def _until(piece: LogPiece, end: Cursor) -> LogPiece:
    """A piece without what is behind a place, which may be inside a batch."""
    if Cursor(piece.batch, piece.through) <= end:
        return piece
    batches, positions = piece.rows.column("batch").to_pylist(), piece.rows.column("position").to_pylist()
    inside = [Cursor(batch - 1, position) <= end for batch, position in zip(batches, positions, strict=True)]
    return LogPiece(piece.rows.slice(0, sum(inside)), end.batch, end.through, piece.paths)


async def _within(wait: Awaitable[object], timeout_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(wait, timeout_s)
