"""Reading batch after batch: when a source is asked and when it sends, when tasks read, and what a failure leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark import failpoint
from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.errors import EngineError, EvermarkError, GapError, IdentityError, UnreachableError
from evermark.event import Seen, taken_batch
from evermark.event_file import Rows
from evermark.ingest import reading as reading_module
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.pieces import Piece, ReadFrom
from evermark.ingest.reading import FeedChoice, ReadPlan, SourceReading, reads_beside, rest_s
from evermark.ingest.task_reports import WHOLE_SOURCE
from evermark.log.head import MemoryHeads
from evermark.log.memory import MemoryLog
from evermark.log.write import BatchWriter
from evermark.progress import PATIENT_S, Progress
from evermark.runtime import Threads, Wake
from evermark.sources.base import Fed, Feed, Limit, Slice, Source
from tests.unit.event_files import written_events


def position(n: int) -> str:
    return f"{n:06}"


def rows(partition: int, start: int, end: int) -> pa.RecordBatch:
    numbers = range(start, end)
    columns: dict[str, object] = {
        "event_id": [f"e{partition}-{n}" for n in numbers],
        "position": [position(n) for n in numbers],
        "stream": ["s"] * len(numbers),
        "op": ["insert"] * len(numbers),
    }
    return taken_batch(columns, len(numbers))


class NumberFeed:
    """Sends what there is, some at a time; fails once when told to."""

    def __init__(self, source: Numbers, partition: int, at: int) -> None:
        self.source, self.partition, self.at = source, partition, at
        self.confirmed: list[str] = []
        self.closed = False

    def next(self) -> Fed | None:
        if self.source.feed_fails:
            self.source.feed_fails = False
            raise UnreachableError("the connection broke")
        return _Numbers(self) if self.at < self.source.counts[self.partition] else None

    def confirm(self, end: str) -> None:
        self.confirmed.append(end)

    def close(self) -> None:
        self.closed = True


class _Numbers:
    def __init__(self, feed: NumberFeed) -> None:
        self.feed = feed

    def batches(self) -> Iterator[Rows]:
        start, self.feed.at = self.feed.at, self.feed.source.counts[self.feed.partition]
        self.feed.source.during()
        yield self.feed.source.given(rows(self.feed.partition, start, self.feed.at))

    def end(self) -> str:
        return position(self.feed.at)


class Numbers(Source):
    """Partitions of numbered events. `sends`: it can be followed."""

    def __init__(self, *counts: int, sends: bool = False) -> None:
        self.counts = list(counts)
        self.sends = sends
        self.asked = 0
        self.confirmed: list[tuple[int, str]] = []
        self.feeds: list[NumberFeed] = []
        self.feed_fails = False
        self.fails: Exception | None = None
        self.per_batch = 1_000_000
        self.during: Callable[[], object] = lambda: None  # called while a batch is read, or sent
        self.given: Callable[[pa.RecordBatch], Rows] = lambda some: some  # as a feed gives it

    def partitions(self) -> Sequence[int]:
        return range(len(self.counts))

    def earliest(self, partition: int) -> str:
        return position(0)

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return {p: position(min(self.counts[p], int(at) + self.per_batch)) for p, at in after.items()}

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        return [Slice(partition, start, end)]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        self.during()
        yield rows(piece.partition, int(piece.start), int(piece.end))

    def follow(self, partition: int, position: str, wake: Callable[[], None]) -> Feed | None:
        if not self.sends:
            return None
        self.feeds.append(NumberFeed(self, partition, int(position)))
        return self.feeds[-1]

    def confirm(self, partition: int, end: str) -> None:
        self.confirmed.append((partition, end))


class Read:
    """A reading over a log in memory whose files are real, until enough rows are taken."""

    def __init__(self, folder: Path, source: Numbers) -> None:
        self.source, self.folder = source, folder
        self.taken: list[WrittenBatch] = []
        self.beside: list[int] = []
        self.feeds_ended: list[EvermarkError] = []
        self.took_s: list[float] = []
        self.log = MemoryLog()
        self.runtime = Threads()
        self.progress = Progress()
        self.rows_logged: int | None = None
        self.of = ReadFrom("numbers", source, str(folder))
        self.reading = SourceReading(
            self.of,
            Limit(wait_s=0.0),
            self.runtime,
            self._write_beside,
            self.feeds_ended.append,
            self.took_s.append,
        )

    def _write_beside(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        self.beside.append(len(pieces))
        return [self.of.written(piece) for piece in pieces]

    def run(
        self, count: int, then: Callable[[], bool] = lambda: True, ends: Sequence[Wake] = (), cuts: Sequence[Wake] = ()
    ) -> Mapping[int, EvermarkError]:
        logged: Any = self  # nothing is asked of it: no batch may repeat another
        taker = BatchTaker("numbers", 1, self.source, self.log, logged, MemoryHeads(), MemoryCheckpoints())
        taker.progress = self.progress
        starts = {p: position(0) for p in self.source.partitions()}
        plan = ReadPlan(starts, dict.fromkeys(starts, 0), dict.fromkeys(starts), self.rows_logged)
        over, give_up_at = self.runtime.wake(), time.monotonic() + 20

        def end() -> None:
            while not (self.rows() >= count and then()) and time.monotonic() < give_up_at:
                if self.runtime.wait(0.002, over):
                    break
            over.set()

        ending = self.runtime.spawn("end", end)
        try:
            return self.reading.run(plan, taker, self.taken.append, [over, *ends], cuts)
        finally:
            over.set()
            ending.join()
            assert time.monotonic() < give_up_at, "it does not come to an end"

    def rows(self) -> int:
        return sum(taken.rows for taken in self.taken)

    def ids(self) -> list[str]:
        names = [file.path for taken in self.taken for file in taken.files]
        return [i for name in names for i in pq.read_table(self.folder / name)["event_id"].to_pylist()]


def test_a_source_that_can_send_is_not_asked(tmp_path: Path) -> None:
    """GIVEN a source that can send WHEN reading begins THEN it is followed at once, and confirmed there."""
    source = Numbers(3, sends=True)
    read = Read(tmp_path, source)

    def more() -> bool:
        if source.feeds and source.counts[0] < 8:
            asked.append(source.asked)
            source.counts[0] += 1
        return source.counts[0] >= 8 and read.rows() >= 8

    asked: list[int] = []
    assert read.run(3, more) == {}
    assert read.ids() == [f"e0-{n}" for n in range(8)]
    assert set(asked) == {0}, "it was asked though it sends"
    assert [taken.batch for taken in read.taken] == list(range(1, len(read.taken) + 1))
    assert len(read.took_s) == len(read.taken)
    assert source.confirmed == []
    assert source.feeds[0].confirmed[-1] == position(8)
    assert source.feeds[0].closed


def test_a_source_with_much_to_read_is_asked_until_it_is_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a feed that brings much WHEN there is more THEN the source is asked for it, and then followed again."""
    monkeypatch.setattr(reading_module, "_ASK_ROWS", 5)
    source = Numbers(5, sends=True)
    read = Read(tmp_path, source)

    def more() -> bool:
        source.counts[0] = 7
        return len(source.feeds) == 2 and read.rows() >= 7

    assert read.run(5, more) == {}
    assert read.ids() == [f"e0-{n}" for n in range(7)]
    assert source.asked >= 1
    assert all(feed.closed for feed in source.feeds)


def test_rows_that_were_ready_are_no_backlog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a feed that brings many rows in a file that is ready WHEN they are taken THEN it is followed as before."""
    monkeypatch.setattr(reading_module, "_ASK_ROWS", 5)
    made = tmp_path / "_copies"
    made.mkdir()
    source = Numbers(50, sends=True)
    source.given = lambda some: written_events(made, some, source="numbers")
    read = Read(tmp_path, source)

    def more() -> bool:
        if read.rows() == 50:
            source.given, source.counts[0] = (lambda some: some), 53
        return read.rows() >= 53

    assert read.run(50, more) == {}
    assert sorted(read.ids()) == sorted(f"e0-{n}" for n in range(53))
    assert (source.asked, len(source.feeds)) == (0, 1)
    assert len(read.took_s) == len(read.taken)


def test_reading_ends_at_once_though_nothing_comes(tmp_path: Path) -> None:
    """GIVEN a feed without news WHEN reading is to end THEN it does not wait for the next event."""
    source = Numbers(1, sends=True)
    read = Read(tmp_path, source)
    ended: list[float] = []

    def over() -> bool:
        if source.feeds:
            ended.append(time.monotonic())
        return bool(ended)

    assert read.run(1, over) == {}
    assert time.monotonic() - ended[0] < reading_module.WAIT_S_MAX / 2


@pytest.mark.parametrize("sends", [False, True], ids=["asked", "sends"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["ends", "cut"])
def test_the_batch_under_way_is_taken_before_reading_ends_unless_it_is_cut(
    tmp_path: Path, *, sends: bool, is_cut: bool
) -> None:
    """GIVEN a batch that is being read WHEN reading is to end THEN the batch is taken, the last one, and no feed is
    left open; WHEN it is cut THEN the batch is left behind."""
    read = Read(tmp_path, Numbers(3, sends=sends))
    ends, cuts = read.runtime.wake(), read.runtime.wake()
    read.source.during = (cuts if is_cut else ends).set
    assert read.run(9, ends=(ends,), cuts=(cuts,)) == {}
    assert read.ids() == ([] if is_cut else [f"e0-{n}" for n in range(3)])
    assert len(read.source.feeds) == sends and all(feed.closed for feed in read.source.feeds)


def test_a_feed_that_breaks_is_said_and_the_source_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a feed WHEN it fails THEN reading goes on at once by asking, and nothing is lost or read twice."""
    source = Numbers(3, sends=True)
    read = Read(tmp_path, source)

    def break_it() -> bool:
        if source.feeds and source.counts[0] == 3:
            source.feed_fails = True
            source.counts[0] = 6
        return read.rows() >= 6

    assert read.run(3, break_it) == {}
    assert read.ids() == [f"e0-{n}" for n in range(6)]
    assert [error.message for error in read.feeds_ended] == ["the connection broke"]
    assert source.feeds[0].closed
    assert source.confirmed[-1] == (0, position(6))


def test_another_place_that_answers_behind_a_broken_feed_is_not_read(tmp_path: Path) -> None:
    """GIVEN a feed that broke WHEN who answers then is not the place we left THEN it is said, and nothing is taken."""

    class Restored(Numbers):
        def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
            self.checked = (resume, newest)
            raise IdentityError("restored from a backup")

    source = Restored(3, sends=True)
    read = Read(tmp_path, source)
    seen = {0: Seen("e0-2", None, datetime.now(UTC))}
    read.reading.newest = lambda partitions: {p: seen[p] for p in partitions}

    def break_it() -> bool:
        source.feed_fails, source.counts[0] = True, 6
        return read.rows() > 3

    failed = read.run(3, break_it)
    assert [str(error) for error in failed.values()] == ["restored from a backup"]
    assert read.ids() == [f"e0-{n}" for n in range(3)]
    assert source.checked == ({0: position(3)}, seen)


def test_a_source_that_only_answers_is_not_asked_without_a_pause(tmp_path: Path) -> None:
    """GIVEN a source whose `latest` returns at once WHEN it has nothing new THEN it is asked ten times a second."""
    source = Numbers(1)
    ended = threading.Event()
    threading.Timer(1.0, ended.set).start()
    read = Read(tmp_path, source)
    assert read.run(1, ended.is_set) == {}
    assert 2 <= source.asked <= 15


def test_few_rows_of_several_partitions_are_read_here_and_many_by_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN two partitions WHEN a backlog is read THEN tasks do it, until there is little left."""
    monkeypatch.setattr(reading_module, "_BESIDE_ROWS", 20)
    monkeypatch.setattr(reading_module, "_HERE_ROWS", 10)
    source = Numbers(45, 45)
    source.per_batch = 20
    read = Read(tmp_path, source)
    assert read.run(90) == {}
    assert read.beside == [2, 2, 2]  # 40, 40 and 10 rows
    assert not reads_beside(2, 9, beside_before=True) and not reads_beside(2, 19, beside_before=False)
    assert not reads_beside(1, None, beside_before=True)


def test_who_begins_goes_by_what_the_log_took_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN two partitions whose last batches were small WHEN a new owner begins THEN it needs no job of Spark for its
    first batch; after a large one it does, and where nobody knows."""
    monkeypatch.setattr(reading_module, "_BESIDE_ROWS", 20)
    for rows_logged, beside in ((3, []), (20, [2]), (None, [2])):
        (tmp_path / str(rows_logged)).mkdir()
        read = Read(tmp_path / str(rows_logged), Numbers(3, 3))
        read.rows_logged = rows_logged
        assert read.run(6) == {}
        assert read.beside == beside


def test_one_partitions_failure_is_not_the_others(tmp_path: Path) -> None:
    """GIVEN two partitions WHEN a slice of one cannot be read THEN the other's batch is taken, and that is said."""

    class HalfBroken(Numbers):
        def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
            if piece.partition == 1:
                raise GapError("it is gone", hint="look")
            return super().read(piece)

    source = HalfBroken(5, 5)
    read = Read(tmp_path, source)
    failed = read.run(10)
    assert {p: (type(e), e.message) for p, e in failed.items()} == {1: (GapError, "it is gone")}
    assert read.ids() == [f"e0-{n}" for n in range(5)]


@pytest.mark.parametrize(
    ("error", "partition", "message"),
    [(GapError("gone"), None, "gone"), (ValueError("odd"), None, "ValueError: odd")],
)
def test_an_error_of_latest_is_the_whole_sources(
    tmp_path: Path, error: Exception, partition: int | None, message: str
) -> None:
    """Ours as it is; any other with its name."""
    source = Numbers(5)
    source.fails = error
    (failed,) = Read(tmp_path, source).run(1).items()
    assert (failed[0], failed[1].message) == (-1, message)


def test_a_source_that_goes_back_is_a_gap(tmp_path: Path) -> None:
    """GIVEN an end before where we stand WHEN it is offered THEN it is not the source we left."""
    source = Numbers(5)
    read = Read(tmp_path, source)

    def go_back() -> bool:
        source.counts[0] = 2
        return False

    (failed,) = read.run(5, go_back).values()
    assert isinstance(failed, GapError) and "went back in partition 0" in failed.message


def test_a_feed_that_fails_again_and_again_is_tried_ever_later() -> None:
    """GIVEN failures in a row WHEN each came soon THEN the pauses grow; after a long good time they begin anew."""
    choice = FeedChoice()
    pauses = []
    for _ in range(8):
        choice.failed(1.0, 100.0)
        pauses.append(choice.again_at - 100.0)
    assert pauses == sorted(pauses) and pauses[0] < 5 and pauses[-1] == 60.0
    assert not choice.begins(0, 101.0) and choice.begins(0, 160.0)
    choice.failed(61.0, 200.0)
    assert choice.again_at - 200.0 == pauses[0]
    assert choice.begins(None, 1000.0) and not choice.begins(2_000, 1000.0)
    assert choice.ends(50_000) and not choice.ends(49_999)


def test_events_gather_after_a_small_batch_and_never_for_long() -> None:
    """GIVEN a batch WHEN it was small THEN the loop rests in proportion; a large one, or none, is followed at once."""
    assert rest_s(0, 0.01) == rest_s(2_000, 0.01) == 0.0
    assert rest_s(1, 0.001) == pytest.approx(0.006)
    assert rest_s(1_999, 0.01) == pytest.approx(0.06)
    assert rest_s(1, 5.0) == 0.08


class Moments:
    """For how long a call that does not come back would be called idle an hour after it began, less a second."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seen: dict[str, set[bool]] = {}

    def note(self, what: str) -> None:
        self.seen.setdefault(what, set()).add(self._progress.idle_for(time.monotonic() + PATIENT_S - 60) > 0)


@pytest.mark.parametrize("sends", [False, True], ids=["asked", "sends"])
def test_only_calls_that_may_take_their_time_are_given_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    """GIVEN a source that is asked, or sends WHEN it looks for an end, reads, forgets or waits for the rest of a
    transaction THEN it may take long; WHEN a file that has arrived is written, or a batch committed THEN not."""
    source = Numbers(3, sends=sends)
    read = Read(tmp_path, source)
    moments = Moments(read.progress)

    def noting(of: Any, name: str, what: str) -> None:
        call = getattr(of, name)

        def noted(*given: Any, **named: Any) -> Any:
            moments.note(what)
            return call(*given, **named)

        monkeypatch.setattr(of, name, noted)

    noting(source, "latest", "asks")
    noting(source, "read", "reads")
    noting(source, "confirm", "forgets")
    noting(read.log, "commit", "commits")
    noting(failpoint, "hit", "hits")
    arrive = NumberFeed.next

    def arriving(feed: NumberFeed) -> Fed | None:
        moments.note("looks")
        return arrive(feed)

    monkeypatch.setattr(NumberFeed, "next", arriving)
    monkeypatch.setattr(BatchWriter, "write_all", _written(BatchWriter.write_all, moments))
    assert read.run(3) == {}
    if sends:
        assert moments.seen == {"looks": {True}, "written": {True}, "commits": {True}, "hits": {True}}
    else:
        assert moments.seen.pop("hits") == {False, True}  # of the file, which is read meanwhile; of the commit
        assert moments.seen == {
            "asks": {False},
            "reads": {False},
            "written": {False},
            "commits": {True},
            "forgets": {False},
        }


def _written(write_all: Any, moments: Moments) -> Any:
    def written(*given: Any) -> Any:
        file = write_all(*given)
        moments.note("written")
        return file

    return written


class Halved(Numbers):
    """Each batch is read in two pieces."""

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        middle = position((int(start) + int(end)) // 2)
        return [Slice(partition, start, middle), Slice(partition, middle, end)]


@pytest.mark.parametrize("lose", [lambda reports: reports[:-1], lambda reports: [*reports, reports[0]]])
def test_a_report_that_got_lost_or_came_twice_commits_nothing(
    tmp_path: Path, lose: Callable[[list[Any]], list[Any]]
) -> None:
    """GIVEN a batch of two pieces WHEN the tasks bring back one report, or three, THEN nothing is taken, and the source
    is not told that it may forget anything."""
    source = Halved(8)
    read = Read(tmp_path, source)
    read.rows_logged = 1_000_000  # as after a large batch: tasks read
    beside = read.reading.write_beside
    assert beside is not None
    read.reading.write_beside = lambda pieces: lose(beside(pieces))
    failed = read.run(8)
    assert isinstance(failed[WHOLE_SOURCE], EngineError) and "reports are missing, or came twice" in str(failed)
    assert read.beside and read.taken == [] and source.confirmed == []
