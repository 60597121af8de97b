"""The replay contract over its backends, each beside the delivery store it shares parked rows with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evermark.cluster.fence import DELIVER_LEASE, source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.replay.base import ReplayStore
from evermark.delivery.replay.memory import MemoryReplays
from evermark.delivery.replay.postgres import PostgresReplays
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.state.connection import State
from evermark.testing.contracts.replays import ReplayContract
from evermark.testing.contracts.scene import TakeOver
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


class TestMemoryReplays(ReplayContract):
    @pytest.fixture
    def leases(self) -> MemoryLeases:
        return MemoryLeases(is_gone=lambda holder: True)

    @pytest.fixture
    def delivery(self, leases: MemoryLeases) -> MemoryDelivery:
        return MemoryDelivery(leases)

    @pytest.fixture
    def replays(self, delivery: MemoryDelivery) -> ReplayStore:
        return MemoryReplays(delivery)

    @pytest.fixture
    def take_over(self, leases: MemoryLeases) -> TakeOver:
        take = owners(leases)
        return lambda: take(DELIVER_LEASE)

    @pytest.fixture
    def source_epoch(self, leases: MemoryLeases) -> int:
        return owners(leases)(source_lease("shop"))


class TestPostgresReplays(ReplayContract):
    @pytest.fixture
    def replays(self, state: State) -> ReplayStore:
        return PostgresReplays(state)

    @pytest.fixture
    def delivery(self, state: State) -> DeliveryStore:
        return PostgresDelivery(state)

    @pytest.fixture
    def take_over(self, state: State) -> TakeOver:
        take = owners(PostgresLeases(state, is_gone=lambda holder: True))
        return lambda: take(DELIVER_LEASE)

    @pytest.fixture
    def source_epoch(self, state: State) -> int:
        return owners(PostgresLeases(state, is_gone=lambda holder: True))(source_lease("shop"))
