"""For how long events wait: when a source is asked, what is made of its answer, and of none."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from evermark.app.source_lag import (
    FRESH_S,
    OVERDUE_S,
    WAIT_S,
    Askers,
    LagOf,
    Look,
    SeenTogether,
    SourceLook,
    group_lag_s,
    read_to,
)
from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.delivery.model import Cursor, SourcePartition
from evermark.errors import EvermarkError, UnreachableError
from evermark.log.head import NO_VERSION, Head, MemoryHeads
from evermark.observe.health import HealthBoard, PartitionHealth
from evermark.sources.base import Limit, Source, Untaken
from evermark.sources.marks import MARKS_MAX, Marks
from evermark.testing.until import until

START = f"{0:020d}"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Counted(Source):
    """A source that says only how far it goes, and fails where it is told to."""

    def __init__(self, partitions: int = 1) -> None:
        self.ends = dict.fromkeys(range(partitions), 0)
        self.errors: dict[int, Exception] = {}
        self.asked: list[Limit] = []

    def __getstate__(self) -> Any:
        raise TypeError("this one stays here")

    def partitions(self) -> list[int]:
        return list(self.ends)

    def earliest(self, partition: int) -> str:
        return START

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        self.asked.append(limit)
        for partition in after:
            if partition in self.errors:
                raise self.errors[partition]
        return {partition: max(f"{self.ends[partition]:020d}", text) for partition, text in after.items()}

    def slices(self, partition: int, start: str, end: str) -> Any: ...
    def read(self, piece: Any) -> Any: ...


def taken(checkpoints: MemoryCheckpoints, to: int, partition: int = 0) -> None:
    checkpoints.save("shop", partition, Checkpoint(f"{to:020d}", to, 1))


class Scene:
    def __init__(self, clock: Clock, partitions: int = 1) -> None:
        self.source = Counted(partitions)
        self.checkpoints = MemoryCheckpoints()
        self.board = HealthBoard(clock)
        self.look = SourceLook("shop", self.source, self.checkpoints, self.board, clock)

    def found(self, partition: int = 0) -> tuple[PartitionHealth, float]:
        self.look.ask()
        report = self.board.partitions()[f"shop/{partition}"]
        return report.state, report.lag_s


def test_a_source_that_only_says_how_far_it_goes_is_behind_since_that_was_seen(clock: Clock) -> None:
    """GIVEN the default of the port WHEN events come, are taken bit by bit, and all THEN lag is that of the oldest."""
    scene = Scene(clock)
    scene.board.put("shop", 0, PartitionHealth.HEALTHY)
    assert scene.found() == (PartitionHealth.HEALTHY, 0.0)
    scene.source.ends[0] = 10
    assert scene.found() == (PartitionHealth.HEALTHY, 0.0)
    clock.now += 20
    scene.source.ends[0] = 20
    assert scene.found() == (PartitionHealth.HEALTHY, 20.0)
    clock.now += 11
    assert scene.found() == (PartitionHealth.LAGGING, 31.0)
    taken(scene.checkpoints, 10)
    assert scene.found() == (PartitionHealth.HEALTHY, 11.0), "what came after 20 s has waited for 11 s"
    taken(scene.checkpoints, 20)
    assert scene.found() == (PartitionHealth.HEALTHY, 0.0)
    assert all(limit.wait_s == 0.0 for limit in scene.source.asked), "whoever looks does not wait for news"


class Away(MemoryCheckpoints):
    """A store of checkpoints that does not answer when it is told not to."""

    away = False
    asked = 0

    def list(self, source: str) -> dict[int, Checkpoint]:
        self.asked += 1
        if self.away:
            raise UnreachableError("etcd does not answer")
        return super().list(source)


def test_a_store_of_checkpoints_that_is_away_makes_no_source_unwell(clock: Clock) -> None:
    """GIVEN checkpoints elsewhere, some of which wait to be saved WHEN the store is away THEN lag counts from where the
    log ends, the store is not asked for every answer; a source of which nothing is known is stale, and says why."""
    scene, heads = Scene(clock), MemoryHeads()
    store = Away()
    scene.look = SourceLook("shop", scene.source, store, scene.board, clock, heads)
    scene.board.put("shop", 0, PartitionHealth.HEALTHY)
    store.away = True
    assert scene.found()[0] is PartitionHealth.STALE
    assert scene.found()[0] is PartitionHealth.STALE, "also while the store is not asked"
    clock.now += 31
    store.away = False
    taken(store, 10)
    scene.source.ends[0] = 10
    assert scene.found() == (PartitionHealth.HEALTHY, 0.0)

    store.away = True
    for batch in range(1, 21):
        heads.move("shop", 0, Head(batch, 1, f"{batch:020d}", batch))
    scene.source.ends[0] = 20
    asked = store.asked
    for _ in range(6):
        clock.now += 5
        assert scene.found() == (PartitionHealth.HEALTHY, 0.0)
    assert store.asked - asked == 1


def test_up_to_where_a_partition_is_in_the_log() -> None:
    """GIVEN a head and a checkpoint THEN the later batch counts; of one batch the checkpoint, which moves without
    events."""
    head, marks = Head(3, 1, "h3", 3), {batch: Checkpoint(f"c{batch}", batch, 1) for batch in (2, 3)}
    assert read_to(head, marks[2]) == "h3"
    assert read_to(head, marks[3]) == "c3"
    assert (read_to(head, None), read_to(None, marks[2]), read_to(None, None)) == ("h3", "c2", None)
    assert read_to(replace(head, passed="p3", passed_batch=3), None) == "p3"
    assert read_to(Head(0, 1, "h0", NO_VERSION), None) == "h0"


def test_a_reader_that_moves_and_never_catches_up_is_lagging(clock: Clock) -> None:
    """GIVEN ten events a second and a reader that takes nine WHEN minutes go by THEN its lag grows, though it moves."""
    scene = Scene(clock)
    scene.board.put("shop", 0, PartitionHealth.HEALTHY)
    for second in range(600):
        scene.source.ends[0] = 10 * second
        taken(scene.checkpoints, 9 * second)
        state, lag_s = scene.found()
        clock.now += 1
    assert state is PartitionHealth.LAGGING
    assert lag_s == pytest.approx(60, abs=3)


def test_a_source_that_cannot_be_asked_is_stale_and_only_the_partition_it_is_about(clock: Clock) -> None:
    """GIVEN two partitions WHEN one fails, then the whole source THEN the reason stands where it belongs."""
    scene = Scene(clock, partitions=2)
    for partition in (0, 1):
        scene.board.put("shop", partition, PartitionHealth.HEALTHY)
    blamed = UnreachableError("slot 1 is away", hint="look")
    blamed.partition = 1
    scene.source.errors = {1: blamed}
    scene.source.ends[0] = 5
    scene.look.ask()
    found = scene.board.partitions()
    assert found["shop/0"].state is PartitionHealth.HEALTHY
    assert (found["shop/1"].state, found["shop/1"].reason, found["shop/1"].hint) == (
        PartitionHealth.STALE,
        "slot 1 is away",
        "look",
    )
    scene.source.errors = {0: RuntimeError("postgresql://me:secret@host/db broke")}
    scene.look.ask()
    for report in scene.board.partitions().values():
        assert report.state is PartitionHealth.STALE
        assert "RuntimeError" in report.reason and "secret" not in report.reason


def test_partitions_that_nobody_reads_yet_are_there(clock: Clock) -> None:
    """GIVEN an instance that is starting WHEN its sources were asked THEN health names their partitions."""
    scene = Scene(clock, partitions=2)
    scene.look.ask()
    assert {name: r.state for name, r in scene.board.partitions().items()} == {
        "shop/0": PartitionHealth.STARTING,
        "shop/1": PartitionHealth.STARTING,
    }


def test_a_source_that_knows_for_how_long_events_wait_is_believed() -> None:
    """GIVEN an age from the source itself WHEN lag is asked for THEN it is that age, from the first time on."""
    lags = LagOf()
    assert lags.seconds({0: "1"}, {0: Untaken("2", 500.0)}, 0.0) == {0: 500.0}
    assert lags.seconds({0: "1"}, {}, 1.0) == {}


def test_marks_are_few_and_know_when_it_was_level() -> None:
    """GIVEN very many looks WHEN nothing is taken THEN the oldest is kept, memory is not; and being level is known."""
    marks = Marks()
    for second in range(10 * MARKS_MAX):
        marks.note(f"{second:020d}", float(second))
    assert len(marks.seen) <= MARKS_MAX
    now = 10.0 * MARKS_MAX
    assert marks.behind_s("", now) == now
    end = f"{10 * MARKS_MAX:020d}"
    assert (marks.behind_s(end, now), marks.level_s(end, now)) == (0.0, 1.0)
    marks.note(f"{10 * MARKS_MAX + 1:020d}", now)
    assert (marks.behind_s(end, now + 5), marks.level_s(end, now + 5)) == (5.0, 6.0)
    marks.note("0", now + 6)  # another history begins
    assert (marks.level_s(end, now + 6), len(marks.seen)) == (0.0, 1)


def test_a_live_group_that_stands_still_is_behind_since_the_log_went_on() -> None:
    """GIVEN places of the log WHEN the group has passed all but one THEN the lag is that one's, and 0 when it has."""
    first, second = SourcePartition("shop", 0), SourcePartition("shop", 1)
    marks: dict[SourcePartition, Marks] = {}
    assert group_lag_s(marks, {first: 7, second: 3}, [{first: Cursor(7), second: Cursor(3)}], 0.0) == 0.0
    assert group_lag_s(marks, {first: 8, second: 4}, [{first: Cursor(8), second: Cursor(3)}], 10.0) == 0.0
    assert group_lag_s(marks, {first: 9, second: 9}, [{first: Cursor(9), second: Cursor(3)}], 50.0) == 40.0
    assert group_lag_s(marks, {first: 9, second: 9}, [{first: Cursor(9), second: Cursor(4)}], 60.0) == 10.0
    assert group_lag_s(marks, {first: 9, second: 9}, [{first: Cursor(9), second: Cursor(9)}], 61.0) == 0.0
    assert group_lag_s({}, {first: 1}, [{}], 0.0) == 0.0


class Asked:
    """Something to be asked that answers when it is let."""

    def __init__(self) -> None:
        self.count = 0
        self.late: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def __call__(self) -> None:
        self.count += 1
        self.entered.release()
        assert self.gate.wait(30)


def test_answers_are_fresh_and_shared(clock: Clock) -> None:
    """GIVEN many who ask at once WHEN it answers THEN it was asked once; a second later it is asked again."""
    asked = Asked()
    look = Look("shop", asked, asked.late.append, clock)
    for _ in range(3):
        look.begin()
        until(lambda: look._answered == clock.now, "it answered")
        look.wait(clock.now)
    assert asked.count == 1
    clock.now += FRESH_S
    look.begin()
    until(lambda: look._answered == clock.now, "it answered again")
    assert (asked.count, asked.late) == (2, [])


def test_a_source_that_hangs_is_said_to_and_threads_do_not_pile_up(clock: Clock) -> None:
    """GIVEN a source that answered once WHEN it hangs THEN nobody waits, it is said after a while, few threads hang."""
    asked = Asked()
    look = Look("shop", asked, asked.late.append, clock)
    look.begin()
    until(lambda: look._answered == clock.now, "it answered")
    asked.gate.clear()
    clock.now += FRESH_S
    look.begin()
    until(lambda: look._asked == clock.now, "it is asked")
    for _ in range(20):
        clock.now += OVERDUE_S / 2
        look.begin()
        look.wait(clock.now)
    assert asked.late[0] == OVERDUE_S and asked.late[-1] == 10 * OVERDUE_S
    hung = [thread for thread in threading.enumerate() if thread.name == "look shop"]
    assert 1 <= len(hung) <= 4
    asked.gate.set()
    for thread in hung:
        thread.join(30)
    asked.late.clear()
    look.wait(clock.now)
    assert asked.late == []


def test_a_source_that_has_never_answered_is_said_to_after_the_first_wait(clock: Clock) -> None:
    """GIVEN a source that hangs from the start WHEN health is asked for THEN it does not look healthy for long."""
    asked = Asked()
    asked.gate.clear()
    board = HealthBoard(clock)
    look = SourceLook("shop", Counted(), MemoryCheckpoints(), board, clock)
    board.put("shop", 0, PartitionHealth.HEALTHY)
    waiting = Look("shop", asked, look.late, clock)
    waiting.begin()
    until(lambda: asked.count == 1, "it is asked")
    clock.now += 3.0
    waiting.wait(clock.now)
    found = board.partitions()["shop/0"]
    assert found.state is PartitionHealth.STALE and "has not answered" in found.reason
    asked.gate.set()


def test_an_error_of_ours_keeps_its_hint() -> None:
    """GIVEN an error with a hint WHEN the source is asked THEN both are shown."""
    clock = Clock()
    scene = Scene(clock)
    scene.source.errors = {0: EvermarkError("wal_level is replica", hint="set it to logical")}
    scene.look.ask()
    found = scene.board.partitions()["shop/0"]
    assert (found.reason, found.hint) == ("wal_level is replica", "set it to logical")


def test_of_many_sources_few_are_asked_at_once_and_one_that_hangs_is_not_waited_for(clock: Clock) -> None:
    """GIVEN more sources than are asked at once, one of which hangs WHEN all are asked THEN few threads do it, and all
    others answer."""
    askers, hanging = Askers(clock, at_once=2), Asked()
    hanging.gate.clear()
    asked = [hanging, *(Asked() for _ in range(50))]
    looks = [Look(f"many {n}", each, each.late.append, clock, askers) for n, each in enumerate(asked)]
    for look in looks:
        look.begin()
    until(lambda: all(each.count == 1 for each in asked), "all were asked")
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("look many")]) <= 2
    hanging.gate.set()
    until(lambda: not askers._since, "all have ended")


def test_behind_many_that_hang_a_healthy_source_is_asked_and_not_said_to_be_silent(clock: Clock) -> None:
    """GIVEN as many sources that hang as are asked at once, and one behind them WHEN health is asked for once more, a
    second later THEN it has been asked; and it was never said to be silent, which it was not."""
    askers, hanging, well = Askers(clock, at_once=3), [Asked() for _ in range(3)], Asked()
    for each in hanging:
        each.gate.clear()
    looks = [Look("", each, each.late.append, clock, askers) for each in (*hanging, well)]
    for look in looks:
        look.begin()
    until(lambda: all(each.count for each in hanging), "they hang")
    clock.now += WAIT_S + 1
    looks[-1].wait(clock.now + 0.001)
    until(lambda: well.count == 1, "it is asked")
    until(lambda: looks[-1]._answered == clock.now, "it answered")
    for look in looks:
        look.wait(clock.now)
    assert well.late == [] and all(each.late for each in hanging)
    for each in hanging:
        each.gate.set()


def test_rows_of_all_sources_are_looked_up_together_and_kept_for_a_moment(clock: Clock) -> None:
    """GIVEN rows of a thousand sources WHEN each is looked up THEN State is asked once, and again a second later."""
    calls: list[float] = []

    def load_all() -> dict[tuple[str, int], int]:
        calls.append(clock.now)
        return {(f"s{n}", 0): n for n in range(1_000)}

    seen = SeenTogether(load_all, clock)
    assert [seen.load(f"s{n}")[0] for n in range(1_000)] == list(range(1_000))
    assert seen.list("unknown") == {}
    assert len(calls) == 1
    clock.now += FRESH_S
    assert seen.load("s1") == {0: 1}
    assert len(calls) == 2
