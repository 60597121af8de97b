"""What every `CheckpointStore` promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from evermark.checkpoints.base import Checkpoint, CheckpointStore
from evermark.errors import ConflictError, NotFoundError, StaleError

TakeOver = Callable[[str], int]


class CheckpointContract:
    @pytest.fixture
    def store(self) -> CheckpointStore:
        raise NotImplementedError("override this fixture with a store that is empty")

    @pytest.fixture
    def take_over(self) -> TakeOver:
        """Make somebody else the owner of a source and return the new epoch. Override where leases are checked."""
        epochs = itertools.count(1)
        return lambda source: next(epochs)

    def test_what_was_saved_is_loaded(self, store: CheckpointStore, take_over: TakeOver) -> None:
        """A checkpoint comes back exactly, per source and partition."""
        epoch = take_over("shop")
        saved = {0: Checkpoint("00:0000:01", 7, epoch), 1: Checkpoint("00:0000:02 ü'\"", 2**40, epoch)}
        for partition, checkpoint in saved.items():
            store.save("shop", partition, checkpoint)
        assert {p: store.load("shop", p) for p in saved} == saved
        assert store.list("shop") == saved

    def test_load_of_nothing_is_its_own_error(self, store: CheckpointStore) -> None:
        """Never saved is not the same as unreachable: it has its own error."""
        with pytest.raises(NotFoundError):
            store.load("shop", 0)
        assert store.list("shop") == {}

    def test_sources_do_not_mix(self, store: CheckpointStore, take_over: TakeOver) -> None:
        """Two sources with the same partition number keep their own checkpoints."""
        store.save("shop", 0, Checkpoint("a", 1, take_over("shop")))
        store.save("shop2", 0, Checkpoint("b", 1, take_over("shop2")))
        assert store.load("shop", 0).position == "a"
        assert store.list("shop2")[0].position == "b"

    def test_saves_go_forward(self, store: CheckpointStore, take_over: TakeOver) -> None:
        """Later batches replace earlier ones, and a repeated save succeeds."""
        epoch = take_over("shop")
        for batch in (1, 2, 2, 5):
            store.save("shop", 0, Checkpoint(f"{batch:04}", batch, epoch))
        assert store.load("shop", 0) == Checkpoint("0005", 5, epoch)

    def test_a_repaired_save_may_go_to_another_history(self, store: CheckpointStore, take_over: TakeOver) -> None:
        """GIVEN a gap closed on another server WHEN its position is lower THEN it is kept; a lower batch is not."""
        epoch = take_over("shop")
        store.save("shop", 0, Checkpoint("0009", 5, epoch))
        store.save("shop", 0, Checkpoint("0001", 5, epoch), repaired=True)
        assert store.load("shop", 0).position == "0001"
        store.save("shop", 0, Checkpoint("0002", 5, epoch))
        with pytest.raises(ConflictError):
            store.save("shop", 0, Checkpoint("0003", 4, epoch), repaired=True)

    @pytest.mark.parametrize("back", [Checkpoint("0009", 4, 0), Checkpoint("0004", 5, 0)])
    def test_a_save_that_goes_back_is_refused(
        self, store: CheckpointStore, take_over: TakeOver, back: Checkpoint
    ) -> None:
        """A lower batch, or a lower position of the same batch, changes nothing."""
        epoch = take_over("shop")
        stored = Checkpoint("0005", 5, epoch)
        store.save("shop", 0, Checkpoint("0004", 4, epoch))
        store.save("shop", 0, stored)
        with pytest.raises(ConflictError):
            store.save("shop", 0, Checkpoint(back.position, back.batch, epoch))
        assert store.load("shop", 0) == stored

    def test_a_stale_owner_cannot_save(self, store: CheckpointStore, take_over: TakeOver) -> None:
        """After a take-over with a save the old owner is refused, however far it is."""
        old = take_over("shop")
        store.save("shop", 0, Checkpoint("0001", 1, old))
        new = take_over("shop")
        store.save("shop", 0, Checkpoint("0001", 1, new))
        with pytest.raises(StaleError):
            store.save("shop", 0, Checkpoint("0002", 2, old))
        assert store.load("shop", 0) == Checkpoint("0001", 1, new)

    def test_a_new_owner_may_begin_before_the_old_ones_last_batch(
        self, store: CheckpointStore, take_over: TakeOver
    ) -> None:
        """Within a higher epoch the log decides where to go on, even a little back."""
        store.save("shop", 0, Checkpoint("0005", 5, take_over("shop")))
        again = Checkpoint("0004", 4, take_over("shop"))
        store.save("shop", 0, again)
        assert store.load("shop", 0) == again

    def test_positions_order_byte_by_byte(self, store: CheckpointStore, take_over: TakeOver) -> None:
        """The order of positions is plain string order, not that of a language."""
        epoch = take_over("shop")
        store.save("shop", 0, Checkpoint("B", 1, epoch))
        store.save("shop", 0, Checkpoint("a", 1, epoch))
        with pytest.raises(ConflictError):
            store.save("shop", 0, Checkpoint("B", 1, epoch))

    def test_delete_forgets(self, store: CheckpointStore, take_over: TakeOver) -> None:
        """After a delete the next save begins anew; deleting nothing is harmless."""
        epoch = take_over("shop")
        store.save("shop", 0, Checkpoint("0005", 5, epoch))
        store.delete("shop", 0)
        store.delete("shop", 0)
        with pytest.raises(NotFoundError):
            store.load("shop", 0)
        store.save("shop", 0, Checkpoint("0001", 1, epoch))
        assert store.load("shop", 0).batch == 1
