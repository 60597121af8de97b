"""Many sources in one process: those that have nothing cost no thread and ever fewer questions, and wake promptly."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.ingest.batch_taker import BatchTaker, WrittenBatch
from evermark.ingest.pieces import ReadFrom
from evermark.ingest.reading import PACE_S_MAX, SEATS, ReadPlan, Seats, SourceReading, pace_s
from evermark.ingest.repair.steps import Repairer
from evermark.ingest.repair.watch import RecoveryWatch
from evermark.log.head import MemoryHeads
from evermark.log.memory import MemoryLog
from evermark.runtime import Threads, Wake
from evermark.sources.base import Limit
from evermark.testing.number_files import NumberFiles
from evermark.testing.until import until

MANY = 300


class Files(NumberFiles):
    """Counts how often it is asked, and for how long it may wait."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(str(folder), 1)
        self.waits: list[float] = []
        self.gate: threading.Event | None = None

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        self.waits.append(limit.wait_s)
        if self.gate is not None:
            self.gate.wait(60)
        return super().latest(after, limit)


class Crowd:
    def __init__(self, folder: Path, count: int) -> None:
        self.runtime, self.seats = Threads(), Seats(count)
        self.over = self.runtime.wake()
        self.sources = [Files(folder / str(n)) for n in range(count)]
        self.taken: list[WrittenBatch] = []

    def begin(self) -> None:
        self._tasks = [self.runtime.loop(f"source {n}", self._reading(n)) for n in range(len(self.sources))]

    def _reading(self, number: int) -> Any:
        source, logged = self.sources[number], SimpleNamespace(position_max=lambda _: None)
        log, heads = MemoryLog(), MemoryHeads()
        taker = BatchTaker(f"s{number}", 1, source, log, logged, heads, MemoryCheckpoints())
        limit = Limit(wait_s=5.0)
        of = ReadFrom(f"s{number}", source, str(source.folder))
        reading = SourceReading(of, limit, self.runtime, seats=self.seats)
        plan = ReadPlan({0: source.earliest(0)}, {0: 0}, {0: None})
        return reading.steps(plan, taker, self.taken.append, [self.over])

    def end(self) -> None:
        self.over.set()
        assert all(task.join(60) for task in self._tasks)


def test_many_idle_sources_share_a_few_threads_and_one_that_wakes_is_read(tmp_path: Path) -> None:
    """GIVEN hundreds of sources without events WHEN they are read THEN threads are few, and an event in one of them is
    taken within the pace of those that are asked."""
    crowd = Crowd(tmp_path, MANY)
    before = threading.active_count()
    crowd.begin()
    until(lambda: all(source.waits for source in crowd.sources), "each was asked", timeout_s=60)
    # Of those that wait in a thread there are as many as seats; the rest is the few that ask.
    until(lambda: threading.active_count() - before < 4 * SEATS, "threads are few", timeout_s=60)
    crowd.sources[-1].add(0)
    began = time.monotonic()
    until(lambda: crowd.taken, "it is taken", timeout_s=60)
    assert crowd.taken[0].rows == 1
    assert time.monotonic() - began < 10 * PACE_S_MAX
    crowd.end()


def test_a_source_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    """GIVEN more sources that do not answer than there are threads at first WHEN another has an event THEN it is taken
    while they hang."""
    crowd = Crowd(tmp_path, 40)
    gate = threading.Event()
    for source in crowd.sources[:10]:
        source.gate = gate
    crowd.begin()
    crowd.sources[-1].add(0)
    until(lambda: crowd.taken, "it is taken", timeout_s=60)
    assert not gate.is_set()
    gate.set()
    crowd.end()


def test_few_sources_wait_for_something_new_as_long_as_ever(tmp_path: Path) -> None:
    """GIVEN as many sources as seats WHEN they are idle THEN each waits in `latest`, however long nothing came: a small
    deployment is as quick as before."""
    seats = Seats(SEATS)
    assert all(seats.taken(3600.0) for _ in range(SEATS))
    seats.left()
    assert seats.taken(0.0)


@pytest.mark.parametrize(("idle_s", "seat"), [(0.0, True), (3600.0, False)])
def test_of_many_only_those_with_recent_news_wait(idle_s: float, seat: bool) -> None:
    """GIVEN more sources than seats THEN one that had something new a moment ago may wait, as far as there are seats;
    others are asked."""
    seats = Seats(SEATS + 1)
    assert seats.taken(idle_s) is seat
    taken = sum(seats.taken(0.0) for _ in range(2 * SEATS))
    assert taken + seat == SEATS


def test_the_pace_decays_with_the_time_that_nothing_came() -> None:
    """GIVEN a source that was idle for longer and longer THEN it is asked ever less often, and never too seldom."""
    paces = [pace_s(idle_s) for idle_s in (0.0, 1.0, 5.0, 20.0, 3600.0, 1e6)]
    assert paces == sorted(paces) and paces[0] == 0.1 and paces[-1] == PACE_S_MAX
    assert all(pace <= max(0.1, 0.1 * idle_s) for pace, idle_s in zip(paces, (0, 1, 5, 20, 3600, 1e6), strict=True))


class Recoveries:
    """Counts what State is asked."""

    def __init__(self) -> None:
        self.known: dict[str, bool] = {}
        self.asked = 0

    def current(self, source: str, partition: int) -> None:
        self.asked += 1

    def past(self, source: str) -> list[Any]:
        self.asked += 1
        return []


def test_gaps_of_many_sources_are_looked_up_once_for_all_and_their_owners_woken() -> None:
    """GIVEN a hundred sources without a gap WHEN time passes THEN State is asked for all of them together; when one has
    a recovery its owner looks at it at once, and no other does."""
    runtime, recoveries, looks = Threads(), Recoveries(), []
    quiet: Any = SimpleNamespace(**dict.fromkeys(("debug", "info", "warning", "error"), lambda *_, **__: None))

    def known() -> dict[str, bool]:
        looks.append(time.monotonic())
        return recoveries.known

    watch = RecoveryWatch(known, runtime, quiet, 0.01)
    source: Any = SimpleNamespace(partitions=lambda: [0], repair=lambda _: None)
    tools: Any = SimpleNamespace(recoveries=recoveries)
    watching = runtime.loop("recoveries", watch.steps())
    until(lambda: looks, "it has looked")
    made = [_repairer(f"s{n}", source, tools, runtime, quiet, watch) for n in range(100)]
    tasks = [runtime.loop(each.name, each.steps()) for each in made]
    until(lambda: len(watch._watching) == 100, "all are watched")
    asked = recoveries.asked  # once at the beginning of each
    seen = len(looks)
    until(lambda: len(looks) > seen + 3, "it looks again")
    assert recoveries.asked == asked
    recoveries.known = {"s42": True}
    until(lambda: recoveries.asked > asked, "its owner looks")
    watch.stopped.set()
    for each in made:
        each.stopped.set()
    assert all(task.join(60) for task in (*tasks, watching))


def _repairer(name: str, source: Any, tools: Any, runtime: Threads, log: Any, watch: RecoveryWatch) -> Repairer:
    def nothing(*_: object) -> None: ...

    def step_down() -> None: ...

    return Repairer(name, 1, source, tools, log, runtime, log, 0.01, nothing, nothing, step_down, lambda _: True, watch)


def test_a_share_that_is_not_ours_is_not_asked_for(tmp_path: Path) -> None:
    """GIVEN a source that another instance is to read WHEN its owner stands by THEN the store of leases is not asked,
    and when the share changes it is at once."""
    from evermark.cluster.base import Holder
    from evermark.cluster.holding import Candidate, Share
    from evermark.cluster.memory import MemoryLeases

    class Counted(MemoryLeases):
        asked = 0

        def acquire_all(self, names: Sequence[str], holder: Holder, ttl_s: float) -> Any:
            Counted.asked += 1
            return super().acquire_all(names, holder, ttl_s)

    runtime, quiet = Threads(), lambda *_, **__: None
    log: Any = SimpleNamespace(debug=quiet, info=quiet, warning=quiet, error=quiet)
    candidate = Candidate(Counted(), Holder("me", "h", "b", 1, "1"), runtime, log, share=Share([]))
    found: list[Any] = []
    standing_by, stopping = runtime.wake(), runtime.wake()

    def steps(stop: Wake) -> Any:
        found.append((yield from candidate.acquiring("source:shop", stop, standing_by.set)))

    task = runtime.loop("source shop", steps(stopping))
    assert runtime.wait(60, standing_by)
    assert Counted.asked == 0
    candidate.share.set(["source:shop"])
    assert task.join(20)
    assert Counted.asked == 1
    found[0].close()
