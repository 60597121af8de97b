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
        assert recoveries.left_open() == {}
        recoveries.close_gap(closed, "2", 0, epoch)
        recoveries.move(closed, Step.DONE, epoch)
        assert recoveries.left_open() == {}
        failed = recoveries.open("shop", 0, "the slot is gone again", "2", epoch)
        recoveries.move(failed, Step.FAILED, epoch, error="no events table")
        assert recoveries.left_open() == {("shop", 0): (failed.id, "a gap could not be closed: no events table")}
        accepted = recoveries.open("shop", 0, "let it be", "2", epoch, Choice.SKIP)
        recoveries.close_gap(accepted, "3", 0, epoch)
        assert recoveries.left_open() == {("shop", 0): (accepted.id, "a gap was accepted: let it be")}
