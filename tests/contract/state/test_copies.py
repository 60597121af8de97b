"""The contract of copies over its backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.postgres import PostgresLeases
from evermark.ingest.copying.memory import MemoryCopies
from evermark.ingest.copying.postgres import StateCopies
from evermark.sources.copies import CopyStore
from evermark.state.connection import State
from evermark.testing.contracts import CopyContract
from evermark.testing.contracts.scene import TakeOver
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


class TestMemoryCopies(CopyContract):
    @pytest.fixture
    def leases(self) -> MemoryLeases:
        return MemoryLeases(is_gone=lambda holder: True)

    @pytest.fixture
    def copies(self, leases: MemoryLeases) -> CopyStore:
        return MemoryCopies(leases)

    @pytest.fixture
    def take_over(self, leases: MemoryLeases) -> TakeOver:
        take = owners(leases)
        return lambda: take(source_lease("shop"))


class TestStateCopies(CopyContract):
    @pytest.fixture
    def copies(self, state: State) -> CopyStore:
        return StateCopies(state)

    @pytest.fixture
    def take_over(self, state: State) -> TakeOver:
        take = owners(PostgresLeases(state, is_gone=lambda holder: True))
        return lambda: take(source_lease("shop"))
