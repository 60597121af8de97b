"""The contract of the log head over its backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.postgres import PostgresLeases
from evermark.errors import ConflictError
from evermark.log.head import HeadStore, MemoryHeads, PostgresHeads
from evermark.state.connection import State
from evermark.testing.contracts import HeadContract
from evermark.testing.contracts.heads import TakeOver, head
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners


class TestMemoryHeads(HeadContract):
    @pytest.fixture
    def leases(self) -> MemoryLeases:
        return MemoryLeases(is_gone=lambda holder: True)

    @pytest.fixture
    def heads(self, leases: MemoryLeases) -> HeadStore:
        return MemoryHeads(leases)

    @pytest.fixture
    def take_over(self, leases: MemoryLeases) -> TakeOver:
        take = owners(leases)
        return lambda source: take(source_lease(source))


class TestPostgresHeads(HeadContract):
    @pytest.fixture
    def state(self, pg_server: PostgresServer) -> Iterator[State]:
        with fresh_state(pg_server.socket_dsn()) as state:
            yield state

    @pytest.fixture
    def heads(self, state: State) -> HeadStore:
        return PostgresHeads(state)

    @pytest.fixture
    def take_over(self, state: State) -> TakeOver:
        take = owners(PostgresLeases(state, is_gone=lambda holder: True))
        return lambda source: take(source_lease(source))

    def test_two_stores_agree(self, state: State, heads: HeadStore, take_over: TakeOver) -> None:
        """What one store remembers of its last move never overrides what another one moved since."""
        other = PostgresHeads(state)
        epoch = take_over("shop")
        heads.move("shop", 0, head(1, epoch))
        other.move("shop", 0, head(2, epoch))
        other.move("shop", 0, head(3, epoch))
        with pytest.raises(ConflictError):
            heads.move("shop", 0, head(2, epoch))
        heads.move("shop", 0, head(4, epoch))
        assert other.load("shop") == {0: head(4, epoch)}
