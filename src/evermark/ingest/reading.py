"""Reading a source, batch after batch: how far the next one goes, its pieces read and written, and the batch taken.

One piece is read where the loop stands. Several are read side by side, by tasks (`WritePieces`): reports of their files
come back, and only this loop commits them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evermark.error_policy import backoff_s
from evermark.errors import EngineError, EvermarkError, GapError
from evermark.event import Seen
from evermark.event_file import Rows
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch, take_each
from evermark.ingest.dedup import RecentIds, looked_up_from
from evermark.ingest.gaps import GapLimits, JumpWatch
from evermark.ingest.pieces import Piece, error_fields, pieces_of
from evermark.ingest.task_reports import WHOLE_SOURCE, Gathered, gather
from evermark.progress import PATIENT_S, Progress
from evermark.runtime import Pause, Runtime, Steps, Wake, any_set, run_through
from evermark.sources.base import Fed, Feed, Limit, Slice, Source

# A source may let `latest` block this long: a loop that is told to end hears it after that time.
WAIT_S_MAX = 1.0

# A batch of this many rows, or more, is followed by one that tasks read; one of fewer than the other, by one read here.
_BESIDE_ROWS = 20_000
_HERE_ROWS = 2_000

# After a batch of fewer rows the source is to send its events; after one of more it is asked again.
_FEED_ROWS = 2_000
_ASK_ROWS = 50_000
_FEED_WELL_S = 60.0
_ASK_EVERY_S = 0.1
_FEED_BACKOFF_MAX_S = 60.0

# Where sources are more than seats, a source waits in one if it had news within this time; others are asked at a pace.
SEATS = 64
_RECENT_S = 10.0
_LONG_IDLE_S = 60.0
_PACE_SHARE = 0.1
PACE_S_MAX = 5.0

# After a small batch: as long as this share of what it took, at most so long.
_REST_SHARE = 6.0
_REST_S_MAX = 0.08

# A file of the log may go to a bucket over a slow line.
_WRITTEN_BYTES_PER_S_MIN = 1024 * 1024


class Pieces(Protocol):
    """A source, and what reads its pieces into files of the log: `ReadFrom`, or the simulator's. Neither of the two
    methods raises: every failure is part of a report."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> Source: ...

    def written(self, piece: Piece, recent: RecentIds | None = None) -> dict[str, Any]: ...
    def written_fed(self, fed: Fed, piece: Piece, recent: RecentIds | None = None) -> dict[str, Any]: ...


WritePieces = Callable[[Sequence[Piece]], list[dict[str, Any]]]


@dataclass(frozen=True)
class ReadPlan:
    """From where each partition is read on, the last batch that the log has of it, and up to where the log may hold
    events that are read again; and how many rows their last batches had together, where the log says so.
    """

    starts: Mapping[int, str]
    batches: Mapping[int, int]
    repeats_to: Mapping[int, str | None]
    rows_logged: int | None = None


def reads_beside(pieces: int, rows_before: int | None, beside_before: bool) -> bool:
    """Whether the pieces of a batch are read side by side, by tasks. A job of Spark costs more than a few thousand rows
    do here, and how much there is to read is not known before it is read: so it is judged by the batch before.
    """
    if pieces < 2:
        return False
    return rows_before is None or rows_before >= (_HERE_ROWS if beside_before else _BESIDE_ROWS)


def rest_s(rows: int, took_s: float) -> float:
    """How long to let events gather after a batch. A batch of one event costs as much as one of fifty: a loop without
    rest would keep a processor busy with a few hundred events a second.
    """
    return min(_REST_SHARE * took_s, _REST_S_MAX) if 0 < rows < _FEED_ROWS else 0.0


@dataclass
class FeedChoice:
    """Whether a source is asked for its events or sends them. Pure, with the time as a value.

    Asking is quicker where there is much to read, and right after any doubt; a feed where there is little. How much
    there is when reading begins is not known: a feed shows it soon.
    """

    again_at: float = 0.0
    failures: int = 0

    def begins(self, rows_before: int | None, now: float) -> bool:
        return (rows_before is None or rows_before < _FEED_ROWS) and now >= self.again_at

    def ends(self, rows: int) -> bool:
        return rows >= _ASK_ROWS

    def failed(self, lasted_s: float, now: float) -> None:
        self.failures = 1 if lasted_s > _FEED_WELL_S else self.failures + 1
        self.again_at = now + backoff_s(self.failures, max_s=_FEED_BACKOFF_MAX_S)


def pace_s(idle_s: float) -> float:
    """How often a source is asked that cannot wait for something new: an event that comes is seen after a tenth of the
    time that nothing came, and after a few seconds at most.
    """
    return min(max(_ASK_EVERY_S, _PACE_SHARE * idle_s), PACE_S_MAX)


@dataclass(eq=False)
class Seats:
    """Sources of one process that may wait for something new, each in a thread: all of them where they are few; else
    only as many, of the sources that had something new a moment ago.
    """

    sources: int = 1
    _waiting: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def are_enough(self) -> bool:
        return self.sources <= SEATS

    def taken(self, idle_s: float) -> bool:
        """Whether there is a seat, which is then to be left."""
        if not self.are_enough() and idle_s > _RECENT_S:
            return False
        with self._lock:
            if self._waiting >= SEATS:
                return False
            self._waiting += 1
        return True

    def left(self) -> None:
        with self._lock:
            self._waiting -= 1


@dataclass(frozen=True)
class _Arriving:
    """`Fed` that may wait for the rest of a transaction, and is written meanwhile."""

    fed: Fed
    progress: Progress

    def batches(self) -> Iterator[Rows]:
        size = 0
        self.progress.alive(PATIENT_S)
        for batch in self.fed.batches():
            self.progress.alive()
            yield batch
            size += batch.nbytes
            self.progress.alive(PATIENT_S)
        self.progress.alive(size / _WRITTEN_BYTES_PER_S_MIN)

    def end(self) -> str:
        return self.fed.end()


@dataclass
class SourceReading:
    """`run` returns when one of its wakes is set, or something failed: the failures by partition.

    When one of `ends` is set, the batch under way is taken first: a large transaction may take longer to read than the
    time between two renewals of a lane, and would else be read again for ever. When one of `cuts` is set, the batch is
    left behind: another owner, or the same one after a repair, reads it again.
    """

    of: Pieces
    limit: Limit
    runtime: Runtime
    write_beside: WritePieces | None = None  # by tasks; None: all pieces are read here
    on_feed_ended: Callable[[EvermarkError], None] = lambda _: None  # or did not begin: the source is asked
    on_batch: Callable[[float], None] = lambda _: None  # how many seconds it took to take a batch
    recent: RecentIds | None = None
    gaps: GapLimits = field(default_factory=GapLimits)
    newest: Callable[[Sequence[int]], Mapping[int, Seen]] = lambda _: {}  # as `SourceTools.newest`
    on_jump: Callable[[int, float], None] = lambda _partition, _jump_s: None
    rows_before: int | None = None  # of the last batch; None: not known
    seats: Seats = field(default_factory=Seats)

    def __post_init__(self) -> None:
        self._jumps = JumpWatch(self.gaps)
        self._progress = Progress()  # the taker's, once there is one
        self._beside = False
        self._choice = FeedChoice()
        self._feeds: dict[int, Feed] = {}
        self._feeds_began = 0.0
        self._news = self.runtime.wake()
        # Of many that begin at once nobody knows which is busy: each is asked now, and then as one that was long idle.
        self._news_at = self.runtime.monotonic() - (0.0 if self.seats.are_enough() else _LONG_IDLE_S)
        self._ends: tuple[Wake, ...] = ()
        self._doubtful = False  # a feed ended: who answers now may be another place than the one we left

    def run(
        self,
        plan: ReadPlan,
        taker: BatchTaker,
        on_taken: Callable[[WrittenBatch], None],
        ends: Sequence[Wake],
        cuts: Sequence[Wake] = (),
    ) -> Mapping[int, EvermarkError]:
        return run_through(self.runtime, self.steps(plan, taker, on_taken, ends, cuts))

    def steps(
        self,
        plan: ReadPlan,
        taker: BatchTaker,
        on_taken: Callable[[WrittenBatch], None],
        ends: Sequence[Wake],
        cuts: Sequence[Wake] = (),
    ) -> Steps[Mapping[int, EvermarkError]]:
        """A loop that pauses where the source has nothing; while events come it keeps its thread."""
        self._plan, self._at, self._batches, self._ends = plan, dict(plan.starts), dict(plan.batches), (*ends, *cuts)
        self._progress = taker.progress
        try:
            self._choose(self.rows_before)
            while not any_set(self._ends):
                began = self.runtime.monotonic()
                self._go_on()
                if self.recent is not None:
                    self.recent.forget_read()
                try:
                    self._require_known()
                    rows = yield from self._fed() if self._feeds else self._asked()
                except EvermarkError as error:
                    return {WHOLE_SOURCE if error.partition is None else error.partition: error}
                if any_set(cuts):
                    return {}
                if not rows:
                    self._go_on()
                    if failed := taker.save_due(self._at, self._feeds):
                        return failed
                    self._choose(0)
                    continue
                gathered, written_at = gather(rows, taker.epoch), self.runtime.monotonic()
                self._progress.alive()
                self._ask_for_evidence(gathered)
                failed = {**gathered.failed, **take_each(taker, gathered.written, on_taken, self._feeds)}
                self._remember(each for each in gathered.written if each.partition not in failed)
                self._go_on()
                failed = failed or taker.save_due(self._at, self._feeds)
                if failed:
                    return failed
                for written in gathered.written:
                    self._at[written.partition] = written.end
                    self._batches[written.partition] += bool(written.files)
                self._progress.alive()
                # Rows of a copy say nothing of how much the source has to be asked for.
                count = sum(written.rows - written.ready for written in gathered.written)
                if any(written.rows for written in gathered.written):
                    self.on_batch(self.runtime.monotonic() - written_at)
                if any_set(self._ends):
                    self.rows_before = count
                    return {}
                self._choose(count)
                if self._feeds:
                    self.runtime.wait(rest_s(count, self.runtime.monotonic() - began), *self._ends)
            return {}
        finally:
            self._progress.alive()
            taker.save_rest(self._at)
            self._close_feeds()

    def _go_on(self) -> None:
        """A source that is asked may take its time: to find an end, to read up to there, to forget what was saved."""
        self._progress.alive(0.0 if self._feeds else PATIENT_S)

    def _ask_for_evidence(self, gathered: Gathered) -> None:
        """Before a batch behind a jump in time is taken: if something is missing there, the batch must wait for it."""
        for written in list(gathered.written):
            jump_s = self._jumps.jump_s(written)
            if jump_s is None:
                continue
            self.on_jump(written.partition, jump_s)
            try:
                newest = self.newest([written.partition])
                self.of.source.require_whole(written.partition, written.start, written.end, newest)
            except GapError as error:
                gathered.failed[written.partition] = error
                gathered.written.remove(written)
            except EvermarkError:
                pass  # it cannot be asked just now; reading itself will say so

    def _remember(self, batches: Iterable[WrittenBatch]) -> None:
        for taken in batches:
            self._jumps.taken([taken])
            if self.recent is not None:
                self.recent.logged(taken.partition)

    def _choose(self, rows: int | None) -> None:
        self.rows_before = rows
        if self._feeds:
            if rows is not None and self._choice.ends(rows):
                self._close_feeds()
        elif self._choice.begins(rows, self.runtime.monotonic()):
            self._follow()

    def _follow(self) -> None:
        self._feeds_began = self.runtime.monotonic()
        try:
            for partition, position in self._at.items():
                self._progress.alive()
                feed = self.of.source.follow(partition, position, self._news.set)
                if feed is None:
                    self._choice.again_at = float("inf")  # this source can only be asked
                    break
                self._feeds[partition] = feed
        except EvermarkError as error:
            self._feed_ended(error)
        if len(self._feeds) < len(self._at):
            self._close_feeds()

    def _feed_ended(self, error: EvermarkError) -> None:
        now = self.runtime.monotonic()
        self._choice.failed(now - self._feeds_began, now)
        self._doubtful = True
        self._close_feeds()
        self.on_feed_ended(error)

    def _require_known(self) -> None:
        """What ended a feed may have been a restored copy that took the place's address: it is never read unasked."""
        if self._doubtful:
            self._progress.alive(PATIENT_S)
            self.of.source.check(self._at, self.newest(list(self._at)))
            self._doubtful = False

    def _close_feeds(self) -> None:
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()

    def _fed(self) -> Steps[list[dict[str, Any]]]:
        """Reports of what the source has sent; none if nothing has come for a while."""
        self._news.clear()
        try:
            rows = [
                self.of.written_fed(
                    _Arriving(fed, self._progress), self._piece(partition, self._at[partition]), self.recent
                )
                for partition, feed in self._feeds.items()
                if (fed := feed.next()) is not None
            ]
        except EvermarkError as error:
            self._feed_ended(error)
            return []
        if not rows:
            yield Pause(WAIT_S_MAX, (self._news, *self._ends))
        return rows

    def _piece(self, partition: int, end: str) -> Piece:
        start, source = self._at[partition], self.of.source
        exclude = looked_up_from(start, source.may_repeat_from(partition, start), self._plan.repeats_to.get(partition))
        return Piece(Slice(partition, start, end), self._batches[partition] + 1, start, end, exclude)

    def _asked(self) -> Steps[list[dict[str, Any]]]:
        """A source that waits for something new needs a thread for it; others, and all where there is no place for
        one more, are asked now and then."""
        began = self.runtime.monotonic()
        idle_s = began - self._news_at
        waits = self.seats.taken(idle_s)
        try:
            wait_s = min(self.limit.wait_s, WAIT_S_MAX) if waits else 0.0
            ends = self._offered(self._at, replace(self.limit, wait_s=wait_s))
        finally:
            if waits:
                self.seats.left()
        if ends == self._at:
            asked_every_s = _ASK_EVERY_S if waits else pace_s(idle_s)
            yield Pause(max(0.0, asked_every_s - (self.runtime.monotonic() - began)), self._ends)
            return []
        self._news_at = self.runtime.monotonic()
        return self._rows(self._plan, self._at, ends, self._batches)

    def _offered(self, at: Mapping[int, str], limit: Limit) -> dict[int, str]:
        try:
            found = self.of.source.latest(at, limit)
        except EvermarkError:
            raise
        except Exception as error:
            raise EvermarkError(error_fields(error)["message"]) from error
        for partition, start in at.items():
            if found.get(partition, start) < start:
                raise GapError(
                    f"source {self.of.name} went back in partition {partition}:"
                    f" {found[partition]} comes before {start}",
                    hint="the source is not the one we left; see `evermark source recover`",
                )
        return {partition: found.get(partition, start) for partition, start in at.items()}

    def _rows(
        self, plan: ReadPlan, at: Mapping[int, str], ends: Mapping[int, str], batches: Mapping[int, int]
    ) -> list[dict[str, Any]]:
        pieces: list[Piece] = []
        rows: list[dict[str, Any]] = []
        for partition, end in sorted(ends.items()):
            if end == at[partition]:
                continue
            batch, repeats_to = batches[partition] + 1, plan.repeats_to.get(partition)
            try:
                mine = pieces_of(self.of.source, partition, at[partition], end, batch, repeats_to)
            except Exception as error:  # noqa: BLE001 - one partition's failure is not the others'
                rows.append({"partition": partition, "error": error_fields(error)})
                continue
            pieces += mine
            if not mine:  # nothing to read there: reading goes on behind it
                at_end = {"partition": partition, "batch": batch, "start": at[partition], "end": end}
                rows.append(at_end)
        # Reading that has just begun goes by what was taken before: a job of Spark may take seconds in a new process.
        rows_before = plan.rows_logged if self.rows_before is None else self.rows_before
        self._beside = reads_beside(len(pieces), rows_before, self._beside)
        if self._beside and self.write_beside is not None:
            written = self.write_beside(pieces)
            _require_all(pieces, written)
            return [*rows, *written]
        return [*rows, *(self.of.written(piece, self.recent) for piece in pieces)]


def _require_all(pieces: Sequence[Piece], reports: Iterable[Mapping[str, Any]]) -> None:
    """A batch goes to its end whatever was reported: without this, rows of a report that got lost would be passed over
    in silence."""
    missing = Counter(piece.slice.partition for piece in pieces)
    missing.subtract(row.get("partition", WHOLE_SOURCE) for row in reports)
    if any(missing.values()):
        raise EngineError(
            f"of {len(pieces)} tasks that read, the reports are missing, or came twice: {dict(missing)} by partition",
            hint="the batch is read again",
        )
