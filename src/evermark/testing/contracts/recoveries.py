"""What every `RecoveryStore` promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evermark.errors import BusyError, StaleError
from evermark.ingest.repair.base import TEXT_MAX, Choice, RecoveryStore, Step
from evermark.testing.contracts.scene import TakeOver


class RecoveryContract:
    @pytest.fixture
    def recoveries(self) -> RecoveryStore:
        raise NotImplementedError("override this fixture with a store that is empty")

    @pytest.fixture
    def take_over(self) -> TakeOver:
        raise NotImplementedError("override this fixture: a new owner of source `shop`; returns its epoch")

    @pytest.fixture
    def epoch(self, take_over: TakeOver) -> int:
        return take_over()

    def test_one_recovery_of_a_partition_is_open_at_a_time(self, recoveries: RecoveryStore, epoch: int) -> None:
        """Found twice it is the same; another partition has its own; after its end there may be another."""
        first = recoveries.open("shop", 0, "lost", "5", epoch)
        assert recoveries.open("shop", 0, "lost again", "6", epoch) == first
        other = recoveries.open("shop", 1, "lost", "5", epoch)
        assert (recoveries.current("shop", 0), recoveries.current("shop", 1)) == (first, other)
        recoveries.move(first, Step.DONE, epoch)
        assert recoveries.current("shop", 0) is None
        second = recoveries.open("shop", 0, "lost again", "6", epoch)
        assert [r.id for r in recoveries.past("shop")] == [second.id, other.id, first.id]
        assert recoveries.past("bank") == []

    def test_steps_and_tries_are_kept(self, recoveries: RecoveryStore, epoch: int) -> None:
        """Where it goes on and what it took stay through later steps; the last error is that of the last move."""
        begun = recoveries.open("shop", 0, "lost" * TEXT_MAX, "5", epoch)
        assert (begun.step, begun.position, begun.tries, len(begun.reason)) == (Step.OPENED, None, 0, TEXT_MAX)
        recoveries.move(begun, Step.OPENED, epoch, error="busy")
        recoveries.move(begun, Step.OPENED, epoch, error="broken", tried=True)
        recoveries.taking(begun, 0, 3, epoch)
        recoveries.close_gap(begun, "9", epoch)
        recoveries.move(begun, Step.OPENED, epoch, error="lost too", tried=True)
        recoveries.taking(begun, 1, 4, epoch)
        recoveries.close_gap(begun, "12", epoch)
        recoveries.move(begun, Step.DONE, epoch)
        (found,) = recoveries.past("shop")
        assert (found.step, found.position, found.taken, found.tries, found.error) == (Step.DONE, "12", 7, 2, "")

    @pytest.mark.parametrize(("is_logged", "taken"), [(True, 5 + 7 + 2), (False, 5 + 2)])
    def test_what_a_try_took_is_counted_though_it_ended_before_it_could_say_so(
        self, recoveries: RecoveryStore, epoch: int, is_logged: bool, taken: int
    ) -> None:
        """A batch that is in the log when the next try begins was taken, and one that is not was never."""
        begun = recoveries.open("shop", 0, "lost", "5", epoch)
        recoveries.taking(begun, 3, 0, epoch)
        recoveries.taking(begun, 3, 5, epoch)
        recoveries.taking(begun, 4, 7, epoch)
        assert (current := recoveries.current("shop", 0)) is not None and current.taken == 5
        logged = 5 if is_logged else 4
        recoveries.taking(begun, logged, 0, epoch)
        recoveries.taking(begun, logged, 2, epoch)
        recoveries.close_gap(begun, "9", epoch)
        recoveries.close_gap(begun, "9", epoch)
        assert recoveries.past("shop")[0].taken == taken

    def test_what_is_finished_moves_no_more(self, recoveries: RecoveryStore, epoch: int) -> None:
        """Whoever is late changes nothing, and cannot close it."""
        begun = recoveries.open("shop", 0, "lost", "5", epoch)
        recoveries.move(begun, Step.FAILED, epoch, error="given up", tried=True)
        recoveries.move(begun, Step.CLOSED, epoch)
        with pytest.raises(BusyError):
            recoveries.close_gap(begun, "9", epoch)
        recoveries.taking(begun, 0, 2, epoch)
        recoveries.taking(begun, 1, 2, epoch)
        (found,) = recoveries.past("shop")
        assert (found.step, found.position, found.taken, found.error) == (Step.FAILED, None, 0, "given up")

    def test_a_persons_word_replaces_what_was_chosen_until_it_is_closed(
        self, recoveries: RecoveryStore, epoch: int
    ) -> None:
        """It counts anew, and what was done by the former choice does not close the gap."""
        before = recoveries.open("shop", 0, "lost", "5", epoch)
        recoveries.move(before, Step.OPENED, epoch, error="broken", tried=True)
        chosen = recoveries.open("shop", 0, "skip it", "5", epoch, Choice.SKIP)
        assert (chosen.id, chosen.choice, chosen.by_person, chosen.tries) == (before.id, Choice.SKIP, True, 0)
        with pytest.raises(BusyError, match="changed"):
            recoveries.close_gap(before, "9", epoch)
        recoveries.close_gap(chosen, "9", epoch)
        late = recoveries.open("shop", 0, "after all", "5", epoch, Choice.REPAIR)
        assert (late.id, late.choice, late.step) == (before.id, Choice.SKIP, Step.CLOSED)

    def test_stale_owners_write_nothing(self, recoveries: RecoveryStore, take_over: TakeOver) -> None:
        """Every call that writes is refused with an old epoch, and leaves everything as it was."""
        old = take_over()
        begun = recoveries.open("shop", 0, "lost", "5", old)
        take_over()
        writes: list[Callable[[], object]] = [
            lambda: recoveries.open("shop", 1, "lost", "5", old),
            lambda: recoveries.open("shop", 0, "skip it", "5", old, Choice.SKIP),
            lambda: recoveries.move(begun, Step.DONE, old),
            lambda: recoveries.taking(begun, 0, 1, old),
            lambda: recoveries.close_gap(begun, "9", old),
        ]
        for write in writes:
            with pytest.raises(StaleError):
                write()
        assert recoveries.past("shop") == [begun]
