"""Sends one job: decides which event may go now, what follows from an answer, and when to stop.

Events wait in lines. Without bundles a line is one key, so that events of a key never overtake each other and keys
do not wait for each other; an event without a key is alone in its line, and keys between which a record moved share a
line (`ordering`). With bundles (`bundles`) a line is a share of these, and sends one bundle after another. A line is
either idle, ready (in `_ready`) or busy. Workers take the ready line whose next event comes first in the log: when the
time is over, the cursor stands at the first event that was not sent, and events behind it are sent again.

Rows are rendered in small pieces as they are needed: the loop is shared, and bodies are bigger than rows.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from heapq import heappop, heappush
from itertools import count
from typing import cast

import numpy as np
import pyarrow as pa

from evermark import failpoint
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.decide.retry import in_place_wait_s
from evermark.delivery.model import Fate, Outcome, ParkedEvent, SourcePartition
from evermark.delivery.webhook.base import Answer, Bodies, Job
from evermark.delivery.webhook.body import BUNDLE_BYTES_AROUND, Rendering, bundle, bundle_id, delivery_ids, render_sound
from evermark.delivery.webhook.bundles import BUNDLE_LANES_MAX, BUNDLE_MAX, PIECE_BYTES_MAX, Bundle, Bundles, Parcel
from evermark.delivery.webhook.client import Endpoint, HttpLoop
from evermark.delivery.webhook.ordering import keys_of
from evermark.delivery.webhook.parked_json import row_json, text_of, texts_of
from evermark.delivery.webhook.signing import Body
from evermark.delivery.webhook.tally import Tally

PIECE_ROWS = 512
# Rows that all jobs of a call together render ahead, about: thousands of jobs may want the same large rows.
AHEAD_ROWS_MAX = 65_536
FAILURE_GRACE_S = 1.0
HELD_PER_LINE_MAX = 1_000
CONCURRENCY_MAX = 1_000
_NO_TIME = "the time given to this work ran out"


class Dispatch:
    """One job, sent by up to `concurrency` workers in the loop of `http`. Made anywhere, run in that loop."""

    def __init__(self, job: Job, endpoint: Endpoint, http: HttpLoop, jobs: int = 1) -> None:
        spec = job.spec
        self._job, self._endpoint, self._http = job, endpoint, http
        self._deadline = 0.0
        self._how = Rendering(endpoint.style, job.historical, job.attempt, job.replay_id)
        self._size = job.events.num_rows
        self._bundle_max = min(max(1, spec.bundle), BUNDLE_MAX)
        self._concurrency = min(max(1, spec.concurrency), CONCURRENCY_MAX)
        workers = BUNDLE_LANES_MAX if self._bundle_max > 1 else self._concurrency
        self._jobs = max(1, jobs)  # jobs sent side by side
        self._piece_rows = PIECE_ROWS if self._bundle_max > 1 else max(1, min(PIECE_ROWS, AHEAD_ROWS_MAX // self._jobs))
        self._window = max(self._piece_rows, 2 * workers * self._bundle_max)
        self._parked_max = spec.parked_max if job.parked_room is None else job.parked_room
        # Of a bot one stream's refusals stop that stream, not the bot; a replay has a limit of its own.
        self._by_stream = spec.bot is not None and job.replay_id is None
        self._stopped = set(job.stopped) if self._by_stream else set()
        self._refused_of: Counter[str] = Counter()  # by stream
        self._roomless = 0  # first deliveries parked for a session key: they take no room
        bundled = self._bundle_max > 1
        self._bundles = (job.bundles or Bundles(job, endpoint.style).reader()) if bundled else None
        self._keys = self._bundles.keys if self._bundles is not None else keys_of(job.events)
        self._held: dict[int, str] = {}  # per key: the event it is held behind
        self._held_counts: dict[int, int] = self._held_before() if spec.ordered and job.held else {}
        self._held.update(dict.fromkeys(self._held_counts, "an earlier one of its key"))
        self._bad: dict[int, str] = {}  # rows that cannot be rendered, and why: parked when it is their turn

        self._next_row = 0
        self._waiting = 0
        self._body_bytes_max = 0  # of the bodies rendered so far
        self._lines: dict[int, deque[Parcel | Bundle]] = {}
        self._ready: list[tuple[int, int]] = []  # a heap of lines, each behind the row of its next event
        self._workers: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

        self.subscription = spec.name
        self.tally = Tally(job.events)
        self.fate: Fate | None = None
        self.reason = ""
        self.retry_after_s: float | None = None

    @property
    def host(self) -> tuple[str, int]:
        return self._endpoint.host

    @property
    def outcome(self) -> Outcome:
        """Of the rows that are neither accepted nor parked."""
        reason, wait = self.reason, self.retry_after_s
        return Outcome(self.subscription, self.fate or Fate.DONE, reason=reason, retry_after_s=wait)

    def _held_before(self) -> dict[int, int]:
        """The keys of the job that have parked events already, and how many."""
        keys, held = self._keys, self._job.held
        _, first_rows = np.unique(keys.of, return_index=True)
        numbered = [("key", first_rows.tolist(), keys.of[first_rows].tolist())]
        if keys.left:
            numbered.append(("previous_key", list(keys.left), list(keys.left.values())))
        found: dict[int, int] = {}
        for name, rows, numbers in numbered:
            some = self._job.events.select(["source", "stream", name]).take(pa.array(rows))
            lines = zip(*(texts_of(some.column(n)) for n in ("source", "stream", name)), strict=True)
            found |= {number: held[line] for number, line in zip(numbers, lines, strict=True) if line in held}
        return found

    async def run(self, deadline_s: float, grace_s: float | None) -> None:
        """Send until everything is sent, the endpoint fails, or the deadline comes."""
        self._deadline = asyncio.get_running_loop().time() + deadline_s
        if self._size == 1 and self._bundles is None:
            await self._run_alone(self._endpoint.timeout_s if grace_s is None else grace_s)
            return
        try:
            self._hire()
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._over.wait()
            except TimeoutError:
                self._stop(Fate.UNFINISHED, _NO_TIME)
            await self._wind_up(self._endpoint.timeout_s if grace_s is None else grace_s)
        finally:
            for worker in self._workers:
                worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        if self.fate is None and not self.tally.complete:
            self._stop(Fate.UNFINISHED, "not everything was sent")

    async def _run_alone(self, grace_s: float) -> None:
        """The same for one event: of thousands of jobs that have one each, none needs a worker of its own."""
        try:
            self._fill()
            async with asyncio.timeout_at(self._deadline + grace_s):
                await self._send([cast("Parcel", self._lines.popitem()[1].popleft())])
        except TimeoutError:
            self._stop(Fate.UNFINISHED, _NO_TIME)
        if self.fate is None and not self.tally.complete:
            self._stop(Fate.UNFINISHED, "not everything was sent")

    async def _wind_up(self, grace_s: float) -> None:
        """Wait for requests under way: after a failure a second at most, otherwise as long as was granted."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        failed = False
        while self._workers:
            if not failed and self.fate not in (None, Fate.UNFINISHED):
                failed, until = True, min(until, loop.time() + FAILURE_GRACE_S)
            if loop.time() >= until:
                return
            await asyncio.wait(self._workers, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)

    def _stop(self, fate: Fate, reason: str, retry_after_s: float | None = None) -> None:
        # Running out of time is the weakest reason: a failure that shows itself later replaces it.
        if self.fate in (None, Fate.UNFINISHED):
            self.fate, self.reason, self.retry_after_s = fate, reason, retry_after_s
        self._over.set()

    # workers

    def _hire(self) -> None:
        limit = 1 if self._job.probe and not self.tally.accepted else self._concurrency
        if self.fate is None and len(self._workers) < limit and self._something_ready():
            worker = asyncio.get_running_loop().create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._leave)
        elif not self._workers:
            self._over.set()

    def _leave(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and (problem := worker.exception()) is not None:
            self._stop(Fate.UNFINISHED, f"sending failed: {type(problem).__name__}")
        if not self._workers:
            self._hire()

    async def _work(self) -> None:
        while self.fate is None and self._something_ready():
            _, line = heappop(self._ready)
            queue = self._lines[line]
            one = queue.popleft()
            self._waiting -= len(one.rows) if isinstance(one, Bundle) else 1
            self._hire()
            await (self._send_bundle(one) if isinstance(one, Bundle) else self._send([one]))
            if queue:
                heappush(self._ready, (_first_row(queue[0]), line))
            else:
                del self._lines[line]

    # the next event

    def _something_ready(self) -> bool:
        while not self._ready and self._waiting < self._window:
            if self._bundles is not None and self._bundles.more:
                for one in self._bundles.next():
                    self._waiting += len(one.rows)
                    self._put(one.share, one)
                self._body_bytes_max = self._bundles.body_bytes_max
            elif self._bundles is None and self._next_row < self._size:
                self._fill()
            else:
                break
        return bool(self._ready)

    def _fill(self) -> None:
        """Render the next few rows and put them into their lines."""
        start, rows = self._next_row, self._piece_rows
        if (made := self._job.bodies) is not None:
            end = min(self._size, start + rows)
            bad = {row - start: why for row, why in made.bad.items() if start <= row < end}
            self._fill_with(Bodies(made.idents[start:end], made.bodies[start:end], bad))
            return
        piece = self._job.events.slice(start, rows)
        while rows > 1 and piece.nbytes > PIECE_BYTES_MAX // self._jobs:
            rows //= 2
            piece = piece.slice(0, rows)
        idents = delivery_ids(piece.column("event_id").to_pylist(), self._job.replay_id)
        column, bad = render_sound(piece, self._how)
        self._fill_with(Bodies(idents, column.to_pylist(), bad))

    def _fill_with(self, made: Bodies) -> None:
        start, end = self._next_row, self._next_row + len(made.bodies)
        self._next_row = end
        self._waiting += len(made.bodies)
        self._bad.update({start + row: reason for row, reason in made.bad.items()})
        self._body_bytes_max = max(self._body_bytes_max, *map(len, made.bodies))
        parcels = list(zip(range(start, end), made.idents, made.bodies, strict=True))
        for line, parcel in zip(self._keys.lines[start:end].tolist(), parcels, strict=True):
            self._put(line, parcel)

    def _put(self, line: int, one: Parcel | Bundle) -> None:
        queue = self._lines.get(line)
        if queue is None:
            self._lines[line] = deque([one])
            heappush(self._ready, (_first_row(one), line))
        else:
            queue.append(one)

    # one request and its answer

    async def _send(self, parcels: list[Parcel]) -> None:
        if self._is_anything_set_aside():
            parcels = [parcel for parcel in parcels if not self._set_aside(parcel)]
        if not parcels or self.fate is not None:
            return
        answer = await self._post(*self._request(parcels))
        if answer is not None and answer.verdict is Verdict.ACCEPTED:
            failpoint.hit("post.sent")
            self.tally.accept([parcel[0] for parcel in parcels])
        elif answer is not None:
            await self._refused(parcels, answer)

    async def _send_bundle(self, whole: Bundle) -> None:
        if whole.problem:
            self._bad[int(whole.rows[0])] = whole.problem
        if self._is_anything_set_aside():
            await self._send(whole.parcels())  # some of its events may have to be set aside
            return
        answer = await self._post(whole.ident, whole.body)
        if answer is not None and answer.verdict is Verdict.ACCEPTED:
            failpoint.hit("post.sent")
            self.tally.accept(whole.rows)
        elif answer is not None:
            await self._refused(whole.parcels(), answer)

    async def _refused(self, parcels: list[Parcel], answer: Answer) -> None:
        if answer.verdict is Verdict.REFUSED and len(parcels) > 1:
            half = len(parcels) // 2
            await self._send(parcels[:half])
            await self._send(parcels[half:])
        elif answer.verdict is Verdict.REFUSED:
            self._park(parcels[0], answer.reason, answer)
        elif answer.verdict is Verdict.GONE:
            self._stop(Fate.GONE, answer.reason)
        elif answer.ours:
            self._stop(Fate.UNFINISHED, answer.reason)
        else:
            self._stop(Fate.ENDPOINT_FAILED, answer.reason, answer.retry_after_s)

    def _request(self, parcels: list[Parcel]) -> tuple[str, bytes]:
        if self._bundle_max == 1:
            return parcels[0][1:]
        ids = self._job.events.column("event_id").take(pa.array([parcel[0] for parcel in parcels]))
        body = bundle([parcel[2] for parcel in parcels], self._how.style)
        return bundle_id(ids.to_pylist(), self._job.replay_id), body

    async def _post(self, ident: str, body: Body) -> Answer | None:
        """The receiver's answer; None when there was no time to ask."""
        for tries in count(1):
            if self._job.spec.rate_per_s > 0 and not await self._turn():
                return None
            answer = await self._endpoint.post(self._http, ident, body)
            if answer.verdict is Verdict.ACCEPTED:
                return answer
            wait = in_place_wait_s(answer.verdict, answer.status, answer.retry_after_s, tries)
            unlikely = self._job.probe and not self.tally.accepted and answer.verdict is Verdict.ENDPOINT
            if wait is None or unlikely or asyncio.get_running_loop().time() + wait >= self._deadline:
                return answer
            await asyncio.sleep(wait)
            if self.fate is not None:
                return answer
        raise AssertionError("unreachable: the tries end by themselves")

    async def _turn(self) -> bool:
        """Wait for this subscription's next request; False when that is after the deadline."""
        # A replay's rate is its own: it must not slow the first deliveries down.
        who = (self._job.spec.name, self._job.replay_id)
        if not await self._http.turn(who, self._job.spec.rate_per_s, self._deadline):
            self._stop(Fate.UNFINISHED, "its rate allows no more requests in the time given")
        return self.fate is None

    # setting aside

    def _is_anything_set_aside(self) -> bool:
        too_large = self._body_bytes_max + BUNDLE_BYTES_AROUND > self._job.spec.body_bytes_max
        return too_large or bool(self._held or self._bad or self._job.waits or self._stopped)

    def _set_aside(self, parcel: Parcel) -> bool:
        """Park an event that need not be tried: without its session key, too large, unrenderable, or behind its key."""
        row, _, body = parcel
        if (session := self._job.waits.get(row)) is not None:
            self._park(parcel, f"for the key of session {session}", session=session)
            return True
        if self._stopped and (stream := self._stream(row)) in self._stopped:
            self._park(parcel, f"stands behind others: too many events of {stream} are parked")
            return True
        if held := [key for key in self._keys.held_by(row) if key in self._held] if self._held else []:
            # Of two keys, behind the key with more events waiting.
            self._hold(parcel, max(held, key=lambda key: self._held_counts[key]))
            return True
        if (problem := self._bad.get(row)) is not None:
            self._park(parcel, f"unserialisable: {problem}")
            return True
        limit = self._job.spec.body_bytes_max
        if len(body) + (BUNDLE_BYTES_AROUND if self._bundle_max > 1 else 0) > limit:
            self._park(parcel, f"too large: {len(body)} bytes, the limit is {limit}")
            return True
        return False

    def _stream(self, row: int) -> str:
        return text_of(self._job.events.column("stream")[row]) or ""

    def _hold(self, parcel: Parcel, key: int) -> None:
        first = self._held[key]
        # The first parked event of a key is not held behind another.
        if self._held_counts[key] > HELD_PER_LINE_MAX and not self._by_stream:
            self._stop(Fate.FULL, f"more than {HELD_PER_LINE_MAX} events of one key are held behind {first}")
        else:
            self._park(parcel, f"held behind {first}")

    def _park(self, parcel: Parcel, reason: str, answer: Answer | None = None, session: str = "") -> None:
        if (session or self._by_stream) and not self._job.replay_id and self._parked_max >= 0:
            self._roomless += 1
        elif len(self.tally.parked) - self._roomless >= self._parked_max:
            self._stop(Fate.FULL, f"no room to park more; the last one: {reason}")
            return
        row, events = parcel[0], self._job.events
        ident, source, partition, batch, position = (
            events.column(name)[row].as_py() for name in ("event_id", "source", "partition", "batch", "position")
        )
        stream, key = (text_of(events.column(name)[row]) for name in ("stream", "key"))
        old_key = text_of(events.column("previous_key")[row]) if row in self._keys.left else None
        status, wait = (answer.status, answer.retry_after_s) if answer else (None, None)
        place, kept, replay_id = SourcePartition(source, partition), row_json(events, row), self._job.replay_id or ""
        event = ParkedEvent(
            ident, place, batch, position, stream or "", key, kept, reason, status, wait, replay_id, session, old_key
        )
        self.tally.park(row, event)
        if self._by_stream and not session:
            self._refused_of[event.stream] += 1
            if self._refused_of[event.stream] >= self._job.spec.parked_max:
                self._stopped.add(event.stream)
        self._bad.pop(row, None)
        if self._job.spec.ordered and event.held_keys:
            for number in self._keys.held_by(row):
                self._held.setdefault(number, ident)
                self._held_counts[number] = self._held_counts.get(number, 0) + 1


def _first_row(one: Parcel | Bundle) -> int:
    return int(one.rows[0]) if isinstance(one, Bundle) else one[0]
