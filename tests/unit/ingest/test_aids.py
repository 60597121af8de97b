"""Aids beside the rules of reading: ids that were logged of late, and jumps in the times of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.errors import EvermarkError, GapError, UnreachableError
from evermark.event import Seen, taken_batch
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.dedup import RecentIds, RecentLimits
from evermark.ingest.gaps import GapLimits
from evermark.ingest.pieces import ReadFrom
from evermark.ingest.reading import ReadPlan, SourceReading
from evermark.log.head import MemoryHeads
from evermark.log.memory import MemoryLog
from evermark.runtime import Threads
from evermark.sources.base import Fed, Feed, Limit, Slice, Source

EVENING = datetime(2026, 11, 16, 20, 0, tzinfo=UTC)
Sent = tuple[str, datetime]  # an event's id and time


def position(n: int) -> str:
    return f"{n:06}"


class Script(Source):
    """Sends one event after another, as it is told, each with a position of its own: it says that none comes twice."""

    def __init__(self, *events: Sent) -> None:
        self.events = events
        self.sends = True
        self.checked: list[str] = []
        self.missing: EvermarkError | None = None

    def partitions(self) -> Sequence[int]:
        return [0]

    def earliest(self, partition: int) -> str:
        return position(0)

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        return {p: position(min(int(at) + 1, len(self.events))) for p, at in after.items()}

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        return [Slice(partition, start, end)]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return _Feed(self, int(piece.start)).batches()

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        self.checked += resume.values()
        if self.missing is not None:
            raise self.missing

    def follow(self, partition: int, position: str, wake: Callable[[], None]) -> Feed | None:
        return _Feed(self, int(position)) if self.sends else None


class _Feed:
    def __init__(self, source: Script, at: int) -> None:
        self.source, self.at = source, at

    def next(self) -> Fed | None:
        return self if self.at < len(self.source.events) else None

    def batches(self) -> Iterator[pa.RecordBatch]:
        name, at = self.source.events[self.at]
        columns: dict[str, object] = {
            "event_id": [name], "position": [position(self.at)], "stream": ["s"], "op": ["insert"], "event_time": [at],
        }  # fmt: skip
        self.at += 1
        yield taken_batch(columns, 1)

    def end(self) -> str:
        return position(self.at)

    def confirm(self, end: str) -> None: ...

    def close(self) -> None: ...


class Scene:
    """One source read to its end, or to its first failure."""

    def __init__(self, folder: Path, source: Script, recent: RecentIds | None = None, **gaps: float | bool) -> None:
        self.folder, self.source = folder, source
        self.log, self.runtime = MemoryLog(), Threads()
        self.jumps: list[float] = []
        self.gaps = GapLimits(**gaps)  # type: ignore[arg-type]
        self.recent = recent
        self.taker = BatchTaker("s", 1, source, self.log, self, MemoryHeads(), MemoryCheckpoints())
        self.batches: list[WrittenBatch] = []

    def position_max(self, partition: int) -> str | None:
        return None

    def read(self) -> Mapping[int, EvermarkError]:
        done, resumed = self.runtime.wake(), self.taker.begin(0)
        reading = SourceReading(
            ReadFrom("s", self.source, str(self.folder)), Limit(wait_s=0.0), self.runtime, recent=self.recent,
            gaps=self.gaps, on_jump=lambda _, jump_s: self.jumps.append(jump_s),
        )  # fmt: skip

        def taken(batch: WrittenBatch) -> None:
            self.batches.append(batch)
            if batch.end == position(len(self.source.events)):
                done.set()

        plan = ReadPlan({0: resumed.position or ""}, {0: resumed.batch}, {0: resumed.repeats_to})
        return reading.run(plan, self.taker, taken, [done])

    def ids(self) -> list[str]:
        files = [file.path for each in self.log.commits for file in each.files]
        return [name for path in files for name in pq.read_table(self.folder / path)["event_id"].to_pylist()]


def cache(now: list[float], size: int = 100, ttl_s: float = 180.0) -> RecentIds:
    """A cache on a clock that moves by a minute each time something is logged."""

    class Ticking(RecentIds):
        def logged(self, partition: int) -> None:
            super().logged(partition)
            now[0] += 60.0

    return Ticking(RecentLimits(size, ttl_s), lambda: now[0])


def repeating() -> Script:
    return Script(*((name, EVENING) for name in ("a", "b", "a", "c")))


@pytest.mark.parametrize("sends", [True, False])
def test_s5_an_event_that_comes_again_against_the_sources_word_is_dropped_and_counted(
    tmp_path: Path, sends: bool
) -> None:
    """GIVEN a source that says it never repeats, and does WHEN it sends, or is asked THEN the log has each id once."""
    scene = Scene(tmp_path, repeating(), cache([0.0]))
    scene.source.sends = sends
    assert scene.read() == {}
    assert scene.ids() == ["a", "b", "c"]
    assert sum(batch.duplicates for batch in scene.batches) == 1


@pytest.mark.parametrize("rows", [10, 5000])
def test_s5_a_large_batch_is_looked_through_as_a_small_one_is(rows: int) -> None:
    """GIVEN ids that were logged, some too long ago WHEN a batch of few or many rows comes THEN those alone that were
    logged of late are left out, and of the batch the last ids are kept."""
    now = [0.0]
    recent = RecentIds(RecentLimits(5, 100.0), lambda: now[0])
    recent.read(0, pa.array(["e1", "e2"]))
    recent.logged(0)
    now[0] = 99.0
    recent.read(0, pa.array(["e3"]))
    recent.logged(0)
    now[0] = 101.0
    columns: dict[str, object] = {"event_id": [f"e{n}" for n in range(rows)]}
    left = recent.left_of(0, taken_batch(columns, rows)).column("event_id").to_pylist()
    assert left == [f"e{n}" for n in range(rows) if n != 3]
    recent.read(1, pa.array(left))
    recent.logged(1)
    assert len(recent) == 5
    again = recent.left_of(1, taken_batch(columns, rows)).column("event_id").to_pylist()
    assert (f"e{rows - 1}" in again, "e3" in again) == (False, True)


@pytest.mark.parametrize("rows", [10, 5000])
def test_s5_an_id_of_another_partition_is_another_event(rows: int) -> None:
    """GIVEN a source whose partitions count their events alike WHEN one has logged them THEN the other's are kept."""
    recent = RecentIds(RecentLimits(10_000, 100.0), lambda: 0.0)
    batch = taken_batch({"event_id": [f"e{n}" for n in range(rows)]}, rows)
    recent.read(0, batch.column("event_id"))
    recent.logged(0)
    assert recent.left_of(1, batch).num_rows == rows
    assert recent.left_of(0, batch).num_rows == 0


@pytest.mark.parametrize(
    ("size", "ttl_s"),
    [(1, 180.0), (100, 100.0)],
    ids=["no more ids than cache_size", "none for longer than ttl"],
)
def test_s5_the_cache_is_bounded_in_number_and_time(tmp_path: Path, size: int, ttl_s: float) -> None:
    """GIVEN a cache of one id, or one whose ids live shorter than the repeat takes THEN it has forgotten the id."""
    scene = Scene(tmp_path, repeating(), cache([0.0], size, ttl_s))
    scene.read()
    assert scene.ids() == ["a", "b", "a", "c"]


def test_s5_without_the_cache_only_the_rule_of_the_log_holds(tmp_path: Path) -> None:
    """GIVEN `dedup.enabled: false` THEN a source that breaks its word is believed."""
    scene = Scene(tmp_path, repeating())
    scene.read()
    assert scene.ids() == ["a", "b", "a", "c"]


def test_s5_an_id_counts_as_seen_once_it_is_logged_and_not_before(tmp_path: Path) -> None:
    """GIVEN a batch that could not be committed WHEN it is read again THEN its event is not taken for a repeat."""
    recent = cache([0.0])
    scene = Scene(tmp_path, Script(("a", EVENING)), recent)
    commit = scene.log.commit

    def fails(_: object) -> None:
        raise UnreachableError("the disk is away")

    scene.log.commit = fails  # type: ignore[assignment, method-assign]
    assert isinstance(scene.read()[0], UnreachableError)
    assert len(recent) == 0
    scene.log.commit = commit  # type: ignore[method-assign]
    assert scene.read() == {}
    assert scene.ids() == ["a"]


def night(hours: float = 10.0) -> Script:
    return Script(
        ("last", EVENING), ("first", EVENING + timedelta(hours=hours)), ("next", EVENING + timedelta(hours=10))
    )


def test_s4_an_idle_night_is_no_gap(tmp_path: Path) -> None:
    """GIVEN ten hours without an event WHEN the next comes THEN the source is asked once, says that nothing is missing,
    and everything is taken."""
    scene = Scene(tmp_path, night())
    assert scene.read() == {}
    assert scene.ids() == ["last", "first", "next"]
    assert (scene.jumps, scene.source.checked) == ([36_000.0], [position(1)])


def test_s4_a_piece_that_is_missing_behind_a_jump_is_found_before_what_follows_is_taken(tmp_path: Path) -> None:
    """GIVEN a jump WHEN the source says that something is missing there THEN it is one gap of that partition, nothing
    behind it is taken; and when it was closed reading goes on, and no gap is found again."""
    scene = Scene(tmp_path, night())
    scene.source.missing = GapError("the slot was moved on by somebody else")
    failed = scene.read()
    assert [type(error) for error in failed.values()] == [GapError]
    assert scene.ids() == ["last"]
    scene.source.missing = None
    assert scene.read() == {}
    assert scene.ids() == ["last", "first", "next"]


def test_s4_a_source_that_cannot_be_asked_is_believed(tmp_path: Path) -> None:
    """GIVEN a jump WHEN the source does not answer THEN that is no evidence: the batch is taken."""
    scene = Scene(tmp_path, night())
    scene.source.missing = UnreachableError("no answer")
    assert scene.read() == {}
    assert scene.ids() == ["last", "first", "next"]


@pytest.mark.parametrize(
    ("hours", "settings"),
    [(10.0, {"enabled": False}), (10.0, {"max_gap_s": 11 * 3600.0}), (0.05, {})],
    ids=["enabled: false", "a longer max_gap", "a jump of three minutes"],
)
def test_s4_no_jump_no_question(tmp_path: Path, hours: float, settings: dict[str, float | bool]) -> None:
    """GIVEN the detection turned off, or a jump that is not longer than `max_gap` THEN the source is not asked."""
    source = Script(("last", EVENING), ("first", EVENING + timedelta(hours=hours)))
    source.missing = GapError("never asked for")
    scene = Scene(tmp_path, source, **settings)
    assert scene.read() == {}
    assert source.checked == []


def test_s4_beyond_small_gap_those_who_follow_are_told_to_take_their_state_anew() -> None:
    """GIVEN a last event THEN a gap is large when more than `small_gap` has passed since; without events it is not."""
    limits = GapLimits(small_gap_s=3600.0)
    assert not limits.is_large(EVENING, EVENING + timedelta(hours=1))
    assert limits.is_large(EVENING, EVENING + timedelta(hours=1, seconds=1))
    assert not limits.is_large(None, EVENING)
