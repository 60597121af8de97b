"""What every `HeadStore` promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from evermark.errors import ConflictError, StaleError
from evermark.log.head import NO_VERSION, Head, HeadStore

TakeOver = Callable[[str], int]


def head(batch: int, epoch: int) -> Head:
    return Head(batch=batch, epoch=epoch, position=f"{batch:06}", delta_version=batch * 10)


class HeadContract:
    @pytest.fixture
    def heads(self) -> HeadStore:
        raise NotImplementedError("override this fixture with a store that is empty")

    @pytest.fixture
    def take_over(self) -> TakeOver:
        raise NotImplementedError("override this fixture: make somebody else the owner and return the new epoch")

    def test_a_head_moves_batch_by_batch(self, heads: HeadStore, take_over: TakeOver) -> None:
        """From nothing to batch 1, 2, 3; each partition on its own; a repeated move succeeds."""
        epoch = take_over("shop")
        assert heads.load("shop") == {}
        for batch in (1, 2, 2, 3):
            heads.move("shop", 0, head(batch, epoch))
        heads.move("shop", 1, head(1, epoch))
        assert heads.load("shop") == {0: head(3, epoch), 1: head(1, epoch)}
        assert heads.load("other") == {}
        assert heads.load_all() == {("shop", 0): head(3, epoch), ("shop", 1): head(1, epoch)}

    @pytest.mark.parametrize("batch", [1, 4])
    def test_a_head_neither_jumps_nor_goes_back(self, heads: HeadStore, take_over: TakeOver, batch: int) -> None:
        """Anything but the next batch is refused and changes nothing."""
        epoch = take_over("shop")
        heads.move("shop", 0, head(1, epoch))
        heads.move("shop", 0, head(2, epoch))
        with pytest.raises(ConflictError):
            heads.move("shop", 0, head(batch, epoch))
        assert heads.load("shop") == {0: head(2, epoch)}

    def test_the_first_batch_is_one(self, heads: HeadStore, take_over: TakeOver) -> None:
        """A head that begins in the middle of a log says so by being recovered."""
        epoch = take_over("shop")
        with pytest.raises(ConflictError):
            heads.move("shop", 0, head(7, epoch))
        heads.move("shop", 0, head(7, epoch), recovered=True)
        assert heads.load("shop") == {0: head(7, epoch)}

    def test_before_the_first_batch_a_head_is_where_its_partition_began(
        self, heads: HeadStore, take_over: TakeOver
    ) -> None:
        """It is noted once, and never moved; what was passed since is noted in it, and batch 1 follows."""
        epoch = take_over("shop")
        begun = Head(0, epoch, "000005", NO_VERSION)
        for head_of_0 in (begun, begun, replace(begun, passed="000007")):
            heads.move("shop", 0, head_of_0)
            assert heads.load("shop") == {0: head_of_0}
        with pytest.raises(ConflictError):
            heads.move("shop", 0, replace(begun, position="000006"))
        later = take_over("shop")
        for late in (replace(begun, passed="000009"), head(1, epoch)):
            with pytest.raises(StaleError):
                heads.move("shop", 0, late)
        with pytest.raises(StaleError):
            heads.move("shop", 1, begun)
        assert heads.load("shop")[0].passed_to == "000007"
        heads.move("shop", 0, head(1, later))
        with pytest.raises(ConflictError):
            heads.move("shop", 0, replace(begun, epoch=later))
        assert heads.load("shop") == {0: head(1, later)}

    def test_a_recovered_head_passes_several_batches_but_never_goes_back(
        self, heads: HeadStore, take_over: TakeOver
    ) -> None:
        """Batches found in the log are caught up with in one move; back is refused even then."""
        heads.move("shop", 0, head(1, take_over("shop")))
        epoch = take_over("shop")
        heads.move("shop", 0, head(5, epoch), recovered=True)
        heads.move("shop", 0, head(5, epoch), recovered=True)
        with pytest.raises(ConflictError):
            heads.move("shop", 0, head(4, epoch), recovered=True)
        assert heads.load("shop") == {0: head(5, epoch)}

    def test_a_later_batch_may_end_at_a_lower_position(self, heads: HeadStore, take_over: TakeOver) -> None:
        """Two histories of a source have no common order: the batch decides."""
        epoch = take_over("shop")
        heads.move("shop", 0, head(1, epoch))
        heads.move("shop", 0, Head(2, epoch, "000000", 20))
        assert heads.load("shop")[0].position == "000000"

    def test_one_batch_has_one_end(self, heads: HeadStore, take_over: TakeOver) -> None:
        """The same batch with another end, or a later batch in an earlier version, is refused."""
        epoch = take_over("shop")
        heads.move("shop", 0, head(1, epoch))
        heads.move("shop", 0, head(2, epoch))
        for wrong in (Head(2, epoch, "000003", 20), Head(3, epoch, "000003", 19)):
            with pytest.raises(ConflictError):
                heads.move("shop", 0, wrong)
        assert heads.load("shop") == {0: head(2, epoch)}

    def test_a_stale_owner_cannot_move_a_head(self, heads: HeadStore, take_over: TakeOver) -> None:
        """From the moment of the take-over, before the new owner wrote anything."""
        old = take_over("shop")
        heads.move("shop", 0, head(1, old))
        heads.move("shop", 0, head(2, old))
        new = take_over("shop")
        with pytest.raises(StaleError):
            heads.move("shop", 0, head(3, old))
        assert heads.load("shop") == {0: head(2, old)}
        heads.move("shop", 0, head(2, new), recovered=True)
        heads.move("shop", 0, head(3, new))
        assert heads.load("shop") == {0: head(3, new)}
