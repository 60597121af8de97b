"""How a partition stands: what repairs itself, what needs a person, and what is said of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from evermark.app.inspect import PartitionStatus, check_at, judged, newest, statuses
from evermark.checkpoints.base import Checkpoint
from evermark.errors import EvermarkError, FormatError, GapError, IdentityError, SetupError
from evermark.event import taken_batch
from evermark.ingest.repair.base import TRIES_MAX, TRIES_WITHIN, Choice, Recovery, Step
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.head import Head
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.observe.finding import Grade

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
DONE = Recovery(1, "shop", 0, Choice.REPAIR, False, "slot was lost", "p", Step.DONE, "q", 1, 5, "", NOW, NOW)
EVENT = {"event_id": ["e"], "position": ["1"], "stream": ["public.orders"], "op": ["insert"], "payload": ["{}"]}
WELL = PartitionStatus(0, Checkpoint("p", 3, 1), None, True, ())


def past(count: int, **changes: object) -> tuple[Recovery, ...]:
    """So many recoveries just before now, the newest first."""
    return tuple(replace(DONE, id=number, **changes) for number in range(count, 0, -1))  # type: ignore[arg-type]


def test_a_last_file_that_is_missing_is_a_trouble_of_its_partition(tmp_path: Path) -> None:
    """GIVEN two partitions WHEN the file of the second one's last batch is missing THEN the error says whose it is, so
    that the first is read on."""
    log = DeltaLog(tmp_path / "shop")
    for partition in (0, 1):
        rows = taken_batch(EVENT, 1)
        file = BatchWriter(tmp_path / "shop", "shop", partition, 1).write_all([rows])
        assert file is not None
        log.commit(Append(partition, 1, 1, "0", "1", (file,)))
    next((tmp_path / "shop").glob("p1-*.parquet")).unlink()
    with pytest.raises(FormatError, match="is missing") as found:
        newest(LogReader(tmp_path / "shop"), [0, 1], ())
    assert found.value.partition == 1
    assert list(newest(LogReader(tmp_path / "shop"), [0], ())) == [0]


@pytest.mark.parametrize(
    ("trouble", "repairable", "before", "needed"),
    [
        (None, True, (), False),
        (GapError("lost"), True, (), False),
        (GapError("lost"), False, (), True),
        (IdentityError("another"), True, (), True),
        (SetupError("not installed"), True, (), True),
        (GapError("lost"), True, past(TRIES_MAX, step=Step.FAILED), True),
        (GapError("lost"), True, past(TRIES_MAX, changed_at=NOW - 2 * TRIES_WITHIN), False),
        (GapError("lost"), True, past(TRIES_MAX, by_person=True), False),
        (IdentityError("another"), True, past(1, step=Step.OPENED, by_person=True), False),
    ],
)
def test_a_person_is_needed_when_nothing_gets_better_by_itself(
    trouble: EvermarkError | None, repairable: bool, before: tuple[Recovery, ...], needed: bool
) -> None:
    """A lost slot repairs itself, until it did so too often; another server never does."""
    standing = replace(WELL, trouble=trouble, repairable=repairable, past=before)
    assert standing.needs_person(NOW + timedelta(seconds=1)) is needed


def test_a_partition_that_is_well_is_said_to_be() -> None:
    """GIVEN a checkpoint or none, and no trouble WHEN judged THEN all is ok."""
    assert {f.grade for f in judged(WELL, None)} == {Grade.OK}
    assert {f.grade for f in judged(replace(WELL, checkpoint=None), None)} == {Grade.OK}


def test_trouble_is_wrong_and_says_who_acts() -> None:
    """GIVEN a gap or another server WHEN judged THEN the one repairs itself, the other's own hint is shown."""
    (gap,) = judged(replace(WELL, trouble=GapError("lost", hint="see")), None)
    (other,) = judged(replace(WELL, trouble=IdentityError("another", hint="choose")), None)
    assert (gap.grade, other.grade) == (Grade.WRONG, Grade.WRONG)
    assert "by itself" in gap.mend and other.mend == "choose"


def test_what_is_under_way_and_what_was_last_are_told() -> None:
    """GIVEN recoveries WHEN judged THEN an open one is a warning with its last error, a past one is mentioned."""
    under_way = replace(DONE, step=Step.OPENED, error="no room", tries=2)
    (said,) = [f for f in judged(replace(WELL, past=(under_way,)), "host:1") if f.check == "recovery"]
    assert said.grade is Grade.WARNING and "2 tries" in said.found and "no room" in said.found
    (said,) = [f for f in judged(replace(WELL, past=(DONE,)), None) if f.check == "recovery"]
    assert said.grade is Grade.OK and "5 events" in said.found


class Quiet:
    """A source with nothing to say, and no recoveries."""

    def partitions(self) -> list[int]:
        return [0]

    def check(self, resume: Mapping[int, str], newest: object = None) -> None:
        self.checked = dict(resume)

    def repair(self, partition: int) -> None: ...

    def past(self, name: str) -> tuple[Recovery, ...]:
        return ()


def log_of(folder: Path, batches: int) -> None:
    for batch in range(1, batches + 1):
        log = DeltaLog(folder)
        written = BatchWriter(folder, "shop", 0, batch).write_all([taken_batch(EVENT, 1)])
        assert written is not None
        log.commit(Append(0, batch, 1, f"{batch}", f"{batch + 1}", [written]))


@pytest.mark.parametrize(("taken", "logged", "is_whole"), [(2, 2, True), (1, 2, True), (3, 2, False), (1, 0, False)])
def test_a_log_that_lacks_what_was_taken_is_trouble(tmp_path: Path, taken: int, logged: int, is_whole: bool) -> None:
    """GIVEN a log that ends before, at or behind the checkpoint's batch, or none WHEN looked at THEN what an owner
    would refuse is trouble that needs a person, and nothing else is."""
    log_of(tmp_path / "shop", logged)
    quiet: Any = Quiet()
    checkpoints = {0: Checkpoint("p", taken, 1)}
    (found,) = statuses(quiet, "shop", lambda: checkpoints, dict, quiet, tmp_path / "shop")
    assert (found.trouble is None) is is_whole
    assert found.needs_person(NOW) is not is_whole
    if found.trouble is not None:
        said = f"ends at batch {logged}, but batch {taken} was taken" if logged else f"is gone: batch {taken} was in it"
        assert said in found.trouble.message


@pytest.mark.parametrize(
    ("head", "position", "said"),
    [
        (Head(2, 1, "e", 3), "e", "from where the log ends, batch 2"),
        (Head(2, 1, "e", 3, passed="f", passed_batch=2), "f", "from where the log ends, batch 2"),
        (Head(0, 1, "b", -1), "b", "from where it began"),
        (Head(3, 1, "e", 4), "e", "ends at batch 2, but batch 3 was taken"),
    ],
)
def test_a_lost_checkpoint_is_told_from_one_that_never_was(
    tmp_path: Path, head: Head, position: str, said: str
) -> None:
    """GIVEN a partition that was begun, and a store of checkpoints that lost its own WHEN looked at THEN it is checked
    at the place where an owner reads on, and that place is said; what an owner would refuse is."""
    log_of(tmp_path / "shop", 2)
    quiet: Any = Quiet()
    (found,) = statuses(quiet, "shop", dict, lambda: {0: head}, quiet, tmp_path / "shop")
    assert quiet.checked == {0: position} and found.position == position
    (finding,) = judged(found, None)
    assert said in finding.found and "yet" not in finding.found
    (never,) = statuses(quiet, "shop", dict, dict, quiet, tmp_path / "shop")
    assert quiet.checked == {} and "no checkpoint yet" in judged(never, None)[0].found


class Slot:
    """A source that an instance moves: the checkpoint first, then the slot. `meanwhile` happens between two looks."""

    def __init__(self) -> None:
        self.checkpoint, self.slot = 5, 5
        self.meanwhile: list[Callable[[], None]] = []
        self.looks = 0

    def load(self) -> dict[int, str]:
        return {0: f"{self.checkpoint:020d}"}

    def take(self) -> None:
        self.checkpoint += 1
        self.slot = self.checkpoint

    def check(self, resume: Mapping[int, str], newest: Any = None) -> None:
        self.looks += 1
        if self.meanwhile:
            self.meanwhile.pop(0)()
        if f"{self.slot:020d}" > resume[0]:
            raise GapError("the slot was moved past us")


def looked_at(slot: Slot) -> None:
    source: Any = slot
    check_at(source, slot.load)


def test_a_slot_that_is_moved_by_the_instance_that_reads_it_was_not_moved_past_us() -> None:
    """GIVEN batches taken between reading the checkpoint and looking at the slot THEN nothing is said to be wrong."""
    once = Slot()
    once.meanwhile = [once.take]
    looked_at(once)
    assert once.looks == 2
    busy = Slot()
    busy.meanwhile = [busy.take] * 1000
    looked_at(busy)
    assert 2 < busy.looks < 100


def test_a_slot_that_somebody_else_moved_is_said_to_be() -> None:
    """GIVEN a slot past the checkpoint, and a checkpoint that stays WHEN looked at THEN it is a gap."""
    moved = Slot()
    moved.slot = 9
    with pytest.raises(GapError, match="moved past us"):
        looked_at(moved)
    assert moved.looks == 1
    meanwhile = Slot()
    meanwhile.meanwhile = [meanwhile.take, lambda: setattr(meanwhile, "slot", 99)]
    with pytest.raises(GapError, match="moved past us"):
        looked_at(meanwhile)
