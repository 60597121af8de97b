"""The contract of recoveries over its backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.postgres import PostgresLeases
from evermark.ingest.repair.base import Choice, RecoveryStore, Step
from evermark.ingest.repair.memory import MemoryRecoveries
from evermark.ingest.repair.postgres import Recoveries
from evermark.log.head import Head, PostgresHeads
from evermark.state.connection import State
from evermark.testing.contracts import RecoveryContract
from evermark.testing.contracts.scene import TakeOver
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


class TestMemoryRecoveries(RecoveryContract):
    @pytest.fixture
    def leases(self) -> MemoryLeases:
        return MemoryLeases(is_gone=lambda holder: True)

    @pytest.fixture
    def recoveries(self, leases: MemoryLeases) -> RecoveryStore:
        return MemoryRecoveries(leases)

    @pytest.fixture
    def take_over(self, leases: MemoryLeases) -> TakeOver:
        take = owners(leases)
        return lambda: take(source_lease("shop"))


class TestPostgresRecoveries(RecoveryContract):
    @pytest.fixture
    def recoveries(self, state: State) -> RecoveryStore:
        return Recoveries(state)

    @pytest.fixture
    def take_over(self, state: State) -> TakeOver:
        take = owners(PostgresLeases(state, is_gone=lambda holder: True))
        return lambda: take(source_lease("shop"))

    def test_s4_gaps_that_left_events_out_are_told_and_others_are_not(
        self, recoveries: Recoveries, take_over: TakeOver
    ) -> None:
        """GIVEN a gap that is open, then closed; one that failed; one that a person let be WHEN asked THEN the last of
        those that left events out, by its number and why: for clients of the live tail (S4).
        """
        epoch = take_over()
        closed = recoveries.open("shop", 0, "the slot is gone", "1", epoch)
        assert recoveries.to_tell() == {}
        recoveries.close_gap(closed, "2", epoch)
        recoveries.move(closed, Step.DONE, epoch)
        assert recoveries.to_tell() == {}
        failed = recoveries.open("shop", 0, "the slot is gone again", "2", epoch)
        recoveries.move(failed, Step.FAILED, epoch, error="no events table")
        assert recoveries.to_tell() == {("shop", 0): (failed.id, "a gap could not be closed: no events table")}
        accepted = recoveries.open("shop", 0, "let it be", "2", epoch, Choice.SKIP)
        recoveries.close_gap(accepted, "3", epoch)
        assert recoveries.to_tell() == {("shop", 0): (accepted.id, "a gap was accepted: let it be")}

    def test_s4_what_was_given_up_is_told_as_a_gap_is_and_hides_none(
        self, state: State, recoveries: Recoveries, take_over: TakeOver
    ) -> None:
        """GIVEN a gap that is open WHEN files of the log are given up, and the gap cannot be closed, and files are
        given up again THEN each is told, by a higher number than the one before; partitions that the files are not of,
        or that were never begun, are told nothing (S4).
        """
        epoch = take_over()
        for partition in (0, 1, 9):
            PostgresHeads(state).move("shop", partition, Head(1, epoch, "1", partition))
        gap = recoveries.open("shop", 0, "the slot is gone", "1", epoch)
        recoveries.give_up("shop", [(0, 0), (1, 5), (0, 3)], "2 files with 7 events")
        told = recoveries.to_tell()
        assert told == {("shop", n): (1, "2 files with 7 events") for n in (0, 1)}
        recoveries.move(gap, Step.FAILED, epoch, error="no events table")
        told = recoveries.to_tell()
        assert told["shop", 0] == (gap.id + 1, "a gap could not be closed: no events table")
        recoveries.give_up("shop", [(0, 0)], "1 file")
        told = recoveries.to_tell()
        assert told == {("shop", 0): (gap.id + 2, "1 file"), ("shop", 1): (1, "2 files with 7 events")}

    def test_s4_a_large_gap_is_told_once_it_is_closed_and_as_a_failure_if_it_is_not(
        self, recoveries: Recoveries, take_over: TakeOver
    ) -> None:
        """GIVEN gaps that are large WHEN one is closed, and another given up THEN clients of the live tail are told of
        each when that is known, and of neither before: by its number they are told once.
        """
        epoch = take_over()
        gap = recoveries.open("shop", 0, "the slot is gone", "1", epoch)
        assert [recoveries.set_large(gap), recoveries.set_large(gap)] == [True, False]
        said = "a gap was so large that what you keep should be fetched anew: the slot is gone"
        assert recoveries.to_tell() == {}
        recoveries.close_gap(gap, "2", epoch)
        assert recoveries.to_tell() == {("shop", 0): (gap.id, said)}
        recoveries.move(gap, Step.DONE, epoch)
        other = recoveries.open("shop", 0, "the slot is gone again", "2", epoch)
        recoveries.set_large(other)
        assert recoveries.to_tell() == {("shop", 0): (gap.id, said)}
        recoveries.move(other, Step.FAILED, epoch, error="no events table")
        assert recoveries.to_tell() == {("shop", 0): (other.id, "a gap could not be closed: no events table")}
