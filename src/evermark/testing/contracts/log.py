"""What every `AppendLog` promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from evermark.errors import ConflictError, StaleError
from evermark.log.base import Append, AppendLog, LogFile, Tail

# (partition, batch) → a file of that batch that is in the log's folder and not committed; another one at each call.
MakeFile = Callable[[int, int], LogFile]


def append(files: Sequence[LogFile], batch: int, epoch: int = 1, partition: int = 0) -> Append:
    return Append(partition, batch, epoch, f"{batch - 1:06}", f"{batch:06}", tuple(files))


class LogContract:
    @pytest.fixture
    def open_log(self) -> Callable[[], AppendLog]:
        raise NotImplementedError("override this fixture: another owner's view of one log, empty at the first call")

    @pytest.fixture
    def make_file(self) -> MakeFile:
        raise NotImplementedError("override this fixture: a file as a task leaves it")

    @pytest.fixture
    def rows(self) -> Callable[[], list[tuple[int, int]]]:
        raise NotImplementedError("override this fixture: (partition, batch) of every row a reader sees, sorted")

    @pytest.fixture
    def log(self, open_log: Callable[[], AppendLog]) -> AppendLog:
        return open_log()

    def test_a_log_begins_empty(self, log: AppendLog) -> None:
        """Nothing committed: batch 0, epoch 0, no end."""
        assert log.tail(0) == Tail(0, 0, None)

    def test_batches_follow_each_other_in_each_partition(
        self, log: AppendLog, make_file: MakeFile, rows: Callable[[], list[tuple[int, int]]]
    ) -> None:
        """The tail is the last commit of its partition, and readers see every row once."""
        for partition, batch in [(0, 1), (0, 2), (1, 1), (0, 3)]:
            log.commit(append([make_file(partition, batch)], batch, partition=partition))
        assert log.tail(0) == Tail(3, 1, "000003")
        assert log.tail(1) == Tail(1, 1, "000001")
        assert [log.tail(p).rows for p in (0, 1, 2)] == [1, 1, None]
        assert rows() == [(0, 1), (0, 2), (0, 3), (1, 1)]

    def test_a_batch_may_have_several_files(
        self, log: AppendLog, make_file: MakeFile, rows: Callable[[], list[tuple[int, int]]]
    ) -> None:
        """Slices of one batch are committed together."""
        log.commit(append([make_file(0, 1), make_file(0, 1)], 1))
        assert rows() == [(0, 1), (0, 1)]

    @pytest.mark.parametrize("batch", [1, 2, 4])
    def test_only_the_next_batch_is_accepted(
        self, log: AppendLog, make_file: MakeFile, rows: Callable[[], list[tuple[int, int]]], batch: int
    ) -> None:
        """Anything but tail + 1 is refused and changes nothing."""
        for each in (1, 2):
            log.commit(append([make_file(0, each)], each))
        with pytest.raises(ConflictError):
            log.commit(append([make_file(0, batch)], batch))
        assert log.tail(0).batch == 2
        assert rows() == [(0, 1), (0, 2)]

    def test_a_commit_that_went_through_may_be_tried_again(
        self, log: AppendLog, make_file: MakeFile, rows: Callable[[], list[tuple[int, int]]]
    ) -> None:
        """An owner that never got the answer repeats itself, and the batch is in the log once."""
        mine = append([make_file(0, 1)], 1)
        log.commit(mine)
        log.commit(mine)
        assert rows() == [(0, 1)]

    def test_two_owners_of_one_epoch_cannot_commit_one_batch(
        self,
        open_log: Callable[[], AppendLog],
        make_file: MakeFile,
        rows: Callable[[], list[tuple[int, int]]],
    ) -> None:
        """The second is told so, though its epoch is good."""
        one, other = open_log(), open_log()
        one.commit(append([make_file(0, 1)], 1))
        with pytest.raises(ConflictError):
            other.commit(append([make_file(0, 1)], 1))
        assert rows() == [(0, 1)]

    def test_a_fence_shuts_older_epochs_out(
        self,
        open_log: Callable[[], AppendLog],
        make_file: MakeFile,
        rows: Callable[[], list[tuple[int, int]]],
    ) -> None:
        """After the fence neither a commit nor a fence of an older epoch succeeds; the new owner goes on."""
        old, new = open_log(), open_log()
        old.fence(0, 1)
        old.commit(append([make_file(0, 1)], 1))
        assert new.fence(0, 5) == Tail(1, 5, "000001")
        with pytest.raises(StaleError):
            old.commit(append([make_file(0, 2)], 2))
        with pytest.raises(StaleError):
            old.fence(0, 4)
        new.commit(append([make_file(0, 2)], 2, epoch=5))
        assert new.fence(0, 5) == Tail(2, 5, "000002")
        assert rows() == [(0, 1), (0, 2)]

    def test_a_fence_is_of_one_partition(self, open_log: Callable[[], AppendLog], make_file: MakeFile) -> None:
        """Other partitions keep their owners."""
        open_log().fence(0, 9)
        log = open_log()
        log.commit(append([make_file(1, 1)], 1, partition=1))
        assert log.tail(1) == Tail(1, 1, "000001")

    def test_partitions_are_fenced_together(self, open_log: Callable[[], AppendLog], make_file: MakeFile) -> None:
        """GIVEN owners of three partitions WHEN another fences two of them THEN those two are shut out, their tails
        are told, and the third goes on; one that is stale already refuses."""
        old, new = open_log(), open_log()
        for partition in (0, 1, 2):
            old.commit(append([make_file(partition, 1)], 1, partition=partition))
        assert new.fence_all([0, 2], 5) == {0: Tail(1, 5, "000001"), 2: Tail(1, 5, "000001")}
        for partition in (0, 2):
            with pytest.raises(StaleError):
                old.commit(append([make_file(partition, 2)], 2, partition=partition))
        old.commit(append([make_file(1, 2)], 2, partition=1))
        assert open_log().fence_all([0, 1, 2], 5)[1] == Tail(2, 5, "000002")
        with pytest.raises(StaleError):
            open_log().fence_all([2, 1], 4)

    def test_a_commit_of_a_newer_epoch_fences_too(self, open_log: Callable[[], AppendLog], make_file: MakeFile) -> None:
        """Whoever wrote last with a higher epoch is the owner."""
        old, new = open_log(), open_log()
        old.commit(append([make_file(0, 1)], 1))
        new.commit(append([make_file(0, 2)], 2, epoch=2))
        with pytest.raises(StaleError):
            old.commit(append([make_file(0, 3)], 3))

    def test_durable_versions_go_up(self, log: AppendLog, make_file: MakeFile) -> None:
        """Each commit makes the durable version a later one; syncing again does not take it back."""
        versions = []
        for batch in (1, 2, 3):
            log.commit(append([make_file(0, batch)], batch))
            versions += [log.sync(), log.sync()]
        assert versions == sorted(versions)
        assert len(set(versions)) == 3
