"""The loop of a copy over memory: rounds, what was read, what was lost, what is given up (X6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.errors import (
    BusyError,
    DeniedError,
    EngineError,
    EvermarkError,
    Kind,
    SetupError,
    StaleError,
    UnreachableError,
)
from evermark.ingest.copying.memory import MemoryCopies
from evermark.ingest.copying.requests import CopyRequests
from evermark.ingest.copying.steps import READY_MAX, Copier, gives_up
from evermark.ingest.repair.base import Step
from evermark.ingest.repair.memory import MemoryRecoveries
from evermark.observe.logging import get_logger
from evermark.runtime import Threads
from evermark.sources import copies
from evermark.sources.copies import AskedBy, Bounds, ChunkState, ChunkWork, Copy, CopyState, Mark
from evermark.testing.states import owners
from evermark.testing.until import until


@dataclass
class Copying(copies.Copying):
    """A stream of ten keys, a chunk each. Positions are numbers; `2:` is another history."""

    folder: Path
    streams: Sequence[str] = ("t",)
    wanted: Sequence[str] = ("t",)
    partitions: Sequence[int] = (0,)
    may_place: bool = True
    watched: list[int | None] = field(default_factory=list)

    def watch(self, epoch: int | None) -> bool:
        self.watched.append(epoch)
        return self.may_place

    def firsts(self, chunk: copies.Chunk) -> Mapping[int, str]:
        return {partition: f"{chunk.position}" for partition in self.partitions if partition not in chunk.told}

    def stream(self, text: str) -> str:
        return text

    def plan(self, stream: str) -> list[Bounds]:
        return [((str(n),), (str(n + 1),)) for n in range(10)]

    def write(self, works: Sequence[ChunkWork], epoch: int, until_s: float) -> Iterator[ChunkWork]:
        raise NotImplementedError

    def compare(self, position: str, checkpoint: str) -> bool | None:
        return checkpoint > position if checkpoint[:2] == position[:2] else None


@dataclass
class Tools:
    copies: MemoryCopies
    recoveries: MemoryRecoveries
    folder: Path
    at: str | None = "1:00"
    logged: set[str] = field(default_factory=set)
    rounds: list[list[int]] = field(default_factory=list)
    report: Callable[[ChunkWork], EvermarkError | None] = lambda work: None
    behind: dict[int, str] = field(default_factory=dict)  # partitions that are not as far
    lost_in: Sequence[int] = ()
    told: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def checkpoint(self, partition: int) -> str | None:
        return self.behind.get(partition, self.at)

    def holds(self, partition: int, position: str) -> bool:
        return position in self.logged and partition not in self.lost_in

    def write_chunks(
        self, copying: Any, works: Sequence[Sequence[ChunkWork]], epoch: int, until_s: float
    ) -> list[dict[str, Any]]:
        reports = []
        self.rounds.append(sorted(work.number for task in works for work in task))
        for task in works:
            found: dict[str, Any] = {"copies": [work.copy for work in task]}
            for work in task:
                mark = Mark(work.copy, work.number, self.copies.begin(work.copy, work.number, epoch))
                self.told[work.number] = work.told
                error = self.report(work)
                if error is not None:
                    found["error"] = {"kind": error.kind, "message": error.message, "hint": error.hint}
                    break
                (self.folder / mark.file).write_text("rows")
                self.copies.ready(mark, f"1:{10 + work.number}", 7, epoch)
            reports.append(found)
        return reports


class Observer:
    def __init__(self) -> None:
        self.told: list[str] = []

    def copy_began(self, copy: Copy, chunks: int) -> None:
        self.told.append(f"began {chunks}")

    def copy_went_on(self, source: str, rows: int, chunks_left: int) -> None:
        self.told.append(f"{rows} rows, {chunks_left} left")

    def copy_ended(self, copy: Copy, error: EvermarkError | None) -> None:
        self.told.append(f"ended {error.message if error else copy.rows}")

    def copy_failed(self, copy: Copy, error: EvermarkError) -> None:
        self.told.append(f"failed {error.message}")


@dataclass
class Scene:
    tools: Tools
    observer: Observer
    copying: Copying
    take_over: Callable[[], int]
    busy: bool = False

    def owner(self, look_every_s: float = 0.01) -> Copier:
        return Copier(
            "shop", self.take_over(), self.copying, self.tools, self.observer, Threads(), get_logger(), look_every_s,
            lambda: self.busy, lambda: None,
        )  # fmt: skip

    def copy(self) -> Copy:
        return self.tools.copies.listed("shop")[0]

    def states(self) -> set[ChunkState]:
        return {chunk.state for chunk in self.tools.copies.chunks(self.copy().id, list(ChunkState))}

    def files(self) -> int:
        return len(list(self.copying.folder.iterdir()))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    leases = MemoryLeases(is_gone=lambda holder: True)
    take = owners(leases)
    tools = Tools(MemoryCopies(leases), MemoryRecoveries(leases), tmp_path)
    return Scene(tools, Observer(), Copying(tmp_path), lambda: take(source_lease("shop")))


def test_a_copy_from_its_plan_to_its_end(scene: Scene) -> None:
    """GIVEN a wanted stream WHEN reading passes its marks THEN chunks are done, files gone, and all is told."""
    owner = scene.owner()
    assert owner.look()
    assert scene.states() == {ChunkState.READY} and scene.files() == 10
    assert not owner.look() and scene.files() == 10  # nothing was read yet
    scene.tools.at = "1:15"
    owner.look()
    assert scene.files() == 5
    scene.tools.at = "1:99"
    owner.look()
    assert (scene.copy().state, scene.copy().rows, scene.files()) == (CopyState.DONE, 70, 0)
    assert scene.observer.told == ["began 10", "0 rows, 10 left", "35 rows, 5 left", "35 rows, 0 left", "ended 70"]
    owner.look()
    scene.owner().look()
    assert len(scene.tools.rounds) == 1  # once is enough, for every owner


def _are_done(copies: MemoryCopies, wanted: int) -> bool:
    return sum(copy.state is CopyState.DONE for copy in copies.listed()) == wanted


def test_a_copy_begins_when_it_is_asked_for(scene: Scene) -> None:
    """GIVEN a copier that looks once a minute, and State that cannot be heard for a moment WHEN a person asks for a
    copy THEN it begins at once, also a second one."""
    scene.copying.wanted = ()
    owner, failing = scene.owner(look_every_s=60.0), [UnreachableError("away")]

    class Copies(MemoryCopies):
        @contextmanager
        def requests(self) -> Iterator[Any]:
            if failing:
                raise failing.pop()
            with super().requests() as heard:
                yield heard

    scene.tools.copies.__class__ = Copies
    requests = CopyRequests(scene.tools.copies, Threads(), get_logger())
    requests.again_s = 0.01
    requests.watch("shop", owner.asked)
    copier = Threads().spawn("copier", owner.run)
    copies = scene.tools.copies
    for number, stream in enumerate(("t", "u"), start=1):
        scene.copying.streams = (*scene.copying.streams, stream)
        copies.request("shop", stream, "")
        scene.tools.at = "1:99"
        done = partial(_are_done, copies, number)
        until(done, "the copy is done", timeout_s=20.0)
    requests.stopped.set()
    owner.stopped.set()
    assert copier.join(10.0)


def test_the_next_owner_goes_on(scene: Scene) -> None:
    """GIVEN chunks ready, begun and open, and files of nobody WHEN another owner begins THEN it writes what is missing,
    and keeps what is ready."""
    scene.tools.report = lambda work: BusyError("wait") if work.number >= 4 else None
    first = scene.owner()
    first.look()
    ready = {chunk.file for chunk in scene.tools.copies.chunks(scene.copy().id, [ChunkState.READY])}
    (scene.copying.folder / "x.draft").write_text("nobody's")
    scene.tools.report = lambda work: None
    scene.owner().look()
    assert scene.states() == {ChunkState.READY}
    assert not set(scene.tools.rounds[1]) & {int(name.split("-")[1]) for name in ready}
    assert scene.files() == 10
    scene.tools.at = "1:99"
    with pytest.raises(StaleError):
        first.look()
    assert scene.files() == 10  # an owner that is stale removes none


def test_marks_that_were_lost_with_the_slot_are_made_again(scene: Scene) -> None:
    """GIVEN a gap that was closed after chunks were ready WHEN reading is behind it THEN those that the log has are
    done, the others are written again."""
    owner = scene.owner()
    owner.look()
    recovery = scene.tools.recoveries.open("shop", 0, "lost", "1:15", owner.epoch)
    scene.tools.at = "1:99"
    assert not owner.look() and scene.states() == {ChunkState.READY}  # not while it is open
    scene.tools.recoveries.move(recovery, Step.DONE, owner.epoch)
    scene.tools.logged = {f"1:{10 + n}" for n in range(5)}
    scene.busy = True
    owner.look()
    assert len(scene.tools.copies.chunks(scene.copy().id, [ChunkState.DONE])) == 5
    assert len(scene.tools.copies.chunks(scene.copy().id, [ChunkState.OPEN])) == 5
    scene.busy = False
    owner.look()
    assert scene.tools.rounds[1] == [5, 6, 7, 8, 9]


def test_chunks_of_a_term_before_are_looked_for_in_the_log(scene: Scene) -> None:
    """GIVEN chunks that are ready WHEN reading begins behind them in the next term, as after `checkpoint reset`, THEN
    those that the log lacks are written again; what was made ready and read in one term is not looked for."""
    scene.owner().look()
    scene.tools.at, scene.tools.logged = "1:99", {"1:10"}
    owner = scene.owner()
    scene.busy = True
    owner.look()
    assert len(scene.tools.copies.chunks(scene.copy().id, [ChunkState.DONE])) == 1
    assert len(scene.tools.copies.chunks(scene.copy().id, [ChunkState.OPEN])) == 9
    scene.tools.at, scene.busy = "1:00", False
    owner.look()
    assert scene.tools.rounds[1] == list(range(1, 10))
    scene.tools.at = "1:99"
    owner.look()
    assert (scene.copy().state, scene.files()) == (CopyState.DONE, 0)


def test_a_chunk_is_done_when_every_partition_has_passed_it(scene: Scene) -> None:
    """GIVEN a source of three partitions WHEN one is behind, or was repaired THEN chunks wait for it; rows that it lost
    are written again, and those that the others have are not."""
    scene.copying.partitions = (0, 1, 2)
    owner = scene.owner()
    owner.look()
    scene.tools.at, scene.tools.behind = "1:99", {1: "1:13"}
    owner.look()
    assert len(scene.tools.copies.chunks(scene.copy().id, [ChunkState.DONE])) == 3
    scene.tools.behind = {}
    recovery = scene.tools.recoveries.open("shop", 1, "lost", "1:13", owner.epoch)
    assert not owner.look()  # of one partition, and all wait
    scene.tools.recoveries.move(recovery, Step.DONE, owner.epoch)
    scene.tools.logged, scene.tools.lost_in = {f"1:{10 + n}" for n in range(9)}, (1,)
    owner.look()
    assert scene.tools.rounds[1] == list(range(3, 10))
    assert scene.tools.told[3] == (0, 2) and scene.tools.told[9] == ()
    scene.tools.lost_in = ()
    owner.look()
    assert len(scene.tools.copies.chunks(scene.copy().id, [ChunkState.DONE])) == 9


def test_reading_is_watched_for_as_long_as_there_are_copies(scene: Scene) -> None:
    """GIVEN a stream without marks WHEN chunks cannot be placed yet THEN none is begun; it is watched until the last
    chunk was read, that of a copy which was cancelled, too."""
    scene.copying.may_place, scene.copying.wanted = False, ()
    owner = scene.owner()
    owner.look()
    assert scene.copying.watched == [None]
    asked = scene.tools.copies.request("shop", "t", "")
    assert not owner.look() and scene.tools.rounds == []
    scene.copying.may_place = True
    owner.look()
    assert scene.copying.watched[1:] == [owner.epoch] * 2 and scene.states() == {ChunkState.READY}
    scene.tools.copies.cancel(asked.id)
    owner.look()
    assert scene.copying.watched[-1] == owner.epoch
    scene.tools.at = "1:99"
    owner.look()
    assert scene.copying.watched[-1] is None


def test_another_history_of_the_place(scene: Scene) -> None:
    """GIVEN marks of a history that reading has left WHEN the log does not have their rows THEN they are made again."""
    owner = scene.owner()
    owner.look()
    scene.tools.at, scene.tools.logged, scene.busy = "2:00", {"1:10"}, True
    owner.look()
    assert len(scene.tools.copies.chunks(scene.copy().id, [ChunkState.DONE])) == 1
    assert len(scene.tools.copies.chunks(scene.copy().id, [ChunkState.OPEN])) == 9


def test_nothing_is_begun_while_a_gap_is_open_or_nothing_is_read(scene: Scene) -> None:
    """GIVEN an open gap, or no checkpoint WHEN looked THEN no chunk is written."""
    scene.busy = True
    owner = scene.owner()
    assert not owner.look()
    scene.busy, scene.tools.at = False, None
    assert not owner.look()
    assert scene.tools.rounds == [] and READY_MAX > 10


def test_errors_are_told_and_tried_again(scene: Scene) -> None:
    """GIVEN a copy that fails WHEN its cause is gone THEN it goes on; one that a person asked for may be given up."""
    scene.tools.report = lambda work: DeniedError("may not read", hint="grant select")
    owner = scene.owner()
    owner.look()
    assert scene.copy().state is CopyState.RUNNING and "grant select" in scene.copy().error
    assert scene.observer.told[-1] == "failed may not read"
    owner._again_at.clear()
    scene.tools.report = lambda work: None
    owner.look()
    assert scene.copy().error == "" and scene.states() == {ChunkState.READY}
    scene.tools.copies.request("shop", "gone", "")
    owner.look()
    assert scene.copy().state is CopyState.FAILED and "does not stand in the file" in scene.copy().error


def test_a_source_that_is_away_spends_no_try_and_is_asked_less_and_less_often(scene: Scene) -> None:
    """GIVEN a copy that a person asked for WHEN the source is away for many tries, and then one task of the copy's own
    dies THEN it is tried again: that was its first failure."""
    scene.copying.wanted = ()
    asked = scene.tools.copies.request("shop", "t", "")
    scene.tools.report = lambda work: UnreachableError("connection refused")
    owner = scene.owner()
    waits = []
    for _ in range(12):
        owner._again_at.clear()
        owner.look()
        waits.append(owner._again_at[asked.id] - owner.runtime.monotonic())
    assert waits[0] < 1.0 and waits[-1] > 30.0 and scene.copy().error == "connection refused"
    scene.tools.report = lambda work: EvermarkError("a worker was killed")
    owner._again_at.clear()
    owner.look()
    assert (scene.copy().state, scene.copy().tries) == (CopyState.RUNNING, 1)


def test_what_fails_for_all_copies_before_a_chunk_is_begun_is_said_of_each(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN Spark that runs no task, or a folder that cannot be looked through WHEN copies are under way THEN each says
    why it does not begin, and one that is over does not; WHEN the cause is gone THEN none does, though it has nothing
    left to write, and nobody read it yet."""
    scene.copying.streams = ("t", "u")
    asked = scene.tools.copies.request("shop", "u", "")
    over = scene.tools.copies.request("shop", "v", "")
    scene.tools.copies.cancel(over.id)
    why: list[EvermarkError] = [EngineError("no task can be run", hint="see spark.log")]

    def fails(*_: object) -> list[dict[str, Any]]:
        raise why[0]

    def errors() -> dict[str, str]:
        return {copy.stream: copy.error for copy in scene.tools.copies.listed("shop") if copy.id != over.id}

    write = scene.tools.write_chunks
    monkeypatch.setattr(scene.tools, "write_chunks", fails)
    owner = scene.owner()
    copier = Threads().spawn("copier", owner.run)
    until(lambda: set(errors().values()) == {"no task can be run (see spark.log)"}, "both say so", timeout_s=20.0)
    assert errors().keys() == {"t", "u"}
    assert {copy.tries for copy in scene.tools.copies.listed("shop")} == {0}, "it is no try of theirs"
    why[0] = UnreachableError("the bucket does not answer")
    until(lambda: set(errors().values()) == {"the bucket does not answer"}, "both say what it is now", timeout_s=20.0)
    scene.busy = True
    until(lambda: set(errors().values()) == {""}, "nothing fails while nothing is tried", timeout_s=20.0)
    monkeypatch.setattr(scene.tools, "write_chunks", write)
    scene.busy = False
    until(
        lambda: set(errors().values()) == {""} and scene.states() == {ChunkState.READY}, "all is well", timeout_s=20.0
    )
    # AND what an owner said that died is over when the next one has nothing to write
    owner.stopped.set()
    assert copier.join(10.0)
    scene.tools.copies.trouble(asked.id, "no task can be run", owner.epoch)
    scene.owner().look()
    assert set(errors().values()) == {""}


def test_a_table_that_was_taken_out_of_the_file_holds_up_no_other(scene: Scene) -> None:
    """GIVEN two copies under way WHEN one table leaves the file THEN its copy ends, the other goes on; WHEN it is back
    THEN it goes on, too."""
    scene.copying.streams = scene.copying.wanted = ("t", "u")
    scene.tools.report = lambda work: BusyError("wait")
    scene.owner().look()
    scene.tools.report = lambda work: None
    scene.copying.streams = scene.copying.wanted = ("t",)
    scene.owner().look()
    states = {copy.stream: copy.state for copy in scene.tools.copies.listed("shop")}
    assert states == {"t": CopyState.RUNNING, "u": CopyState.FAILED}
    assert scene.tools.rounds[-1] == list(range(10))
    scene.copying.streams = scene.copying.wanted = ("t", "u")
    scene.owner().look()
    assert scene.tools.rounds[-1] == list(range(10))
    assert {copy.state for copy in scene.tools.copies.listed("shop")} == {CopyState.RUNNING}


def test_what_is_given_up() -> None:
    """GIVEN kinds of errors WHEN a copy meets them THEN the file's copies go on; a person's end where none helps."""
    now = datetime.now(UTC) - timedelta(seconds=1)
    asked = Copy("a", "s", "t", "", AskedBy.PERSON, CopyState.RUNNING, 1, 1, 0, 0, "", now, now)
    wanted = replace(asked, asked_by=AskedBy.START)
    for error, ends in (
        (BusyError("x"), False),
        (SetupError("no key"), True),
        (DeniedError("x"), True),
        (EvermarkError("x"), False),
    ):
        assert gives_up(asked, error) is ends
        assert not gives_up(wanted, error)
    assert gives_up(replace(asked, tries=9), EvermarkError("bad SQL"))
    assert EvermarkError("x").kind is Kind.UNKNOWN
