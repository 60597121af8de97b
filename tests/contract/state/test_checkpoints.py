"""The checkpoint contract over its backends, and what only a real server can show."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from evermark.checkpoints.base import Checkpoint, CheckpointStore
from evermark.checkpoints.stores import MemoryCheckpoints, PostgresCheckpoints
from evermark.cluster.base import Holder
from evermark.cluster.fence import fence, source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.postgres import PostgresLeases
from evermark.errors import ConflictError, StaleError
from evermark.log.head import Head, PostgresHeads
from evermark.state.connection import State
from evermark.testing.contracts import CheckpointContract
from evermark.testing.contracts.checkpoints import TakeOver
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


class TestMemoryCheckpoints(CheckpointContract):
    @pytest.fixture
    def leases(self) -> MemoryLeases:
        return MemoryLeases(is_gone=lambda holder: True)

    @pytest.fixture
    def store(self, leases: MemoryLeases) -> CheckpointStore:
        return MemoryCheckpoints(leases)

    @pytest.fixture
    def take_over(self, leases: MemoryLeases) -> TakeOver:
        take = owners(leases)
        return lambda source: take(source_lease(source))


class TestPostgresCheckpoints(CheckpointContract):
    @pytest.fixture
    def store(self, state: State) -> CheckpointStore:
        return PostgresCheckpoints(state)

    @pytest.fixture
    def take_over(self, state: State) -> TakeOver:
        take = owners(PostgresLeases(state, is_gone=lambda holder: True))
        return lambda source: take(source_lease(source))

    def test_a_stale_owner_is_refused_before_the_new_one_wrote(
        self, store: CheckpointStore, take_over: TakeOver
    ) -> None:
        """The lease alone fences, on the fast way and on the first save."""
        old = take_over("shop")
        store.save("shop", 0, Checkpoint("0001", 1, old))
        take_over("shop")
        for partition in (0, 1):
            with pytest.raises(StaleError):
                store.save("shop", partition, Checkpoint("0002", 2, old))
        assert store.list("shop") == {0: Checkpoint("0001", 1, old)}

    def test_two_stores_agree(self, state: State, store: CheckpointStore, take_over: TakeOver) -> None:
        """What one store remembers of its last save never overrides what another one saved since."""
        other = PostgresCheckpoints(state)
        epoch = take_over("shop")
        store.save("shop", 0, Checkpoint("0001", 1, epoch))
        other.save("shop", 0, Checkpoint("0005", 5, epoch))
        with pytest.raises(ConflictError):
            store.save("shop", 0, Checkpoint("0003", 3, epoch))
        store.save("shop", 0, Checkpoint("0006", 6, epoch))
        other.save("shop", 0, Checkpoint("0007", 7, epoch))
        assert store.load("shop", 0) == Checkpoint("0007", 7, epoch)


def test_a_take_over_waits_for_the_fenced_transaction(state: State) -> None:
    """GIVEN a fenced transaction under way WHEN another instance takes over THEN it gets the lease afterwards."""
    leases = PostgresLeases(state, is_gone=lambda holder: True)
    first = leases.acquire("deliver", Holder("a", "h", "b", 1, "1"), 60)
    assert first is not None
    begun, taken = threading.Event(), threading.Event()

    def take_over() -> None:
        begun.set()
        leases.acquire("deliver", Holder("b", "h", "b", 2, "1"), 60)
        taken.set()

    thread = threading.Thread(target=take_over)
    with state.transaction() as conn:
        fence(conn, "deliver", first.epoch)
        thread.start()
        assert begun.wait(5)
        leases.renew([first], 60)  # a renewal waits for nobody
        assert not taken.wait(0.2)
    assert taken.wait(5)
    thread.join()
    with pytest.raises(StaleError), state.transaction() as conn:
        fence(conn, "deliver", first.epoch)


def test_head_and_checkpoint_are_saved_in_one_transaction(state: State) -> None:
    """GIVEN both in State WHEN a batch is taken THEN one transaction moves both, or neither."""
    take = owners(PostgresLeases(state, is_gone=lambda holder: True))
    heads, checkpoints = PostgresHeads(state), PostgresCheckpoints(state)
    epoch = take(source_lease("shop"))

    def move(batch: int) -> bool:
        also = checkpoints.beside("shop", 0, Checkpoint(f"{batch:04}", batch, epoch))
        return heads.move("shop", 0, Head(batch, epoch, f"{batch:04}", batch), also=also)

    assert not move(1), "there is no row yet: the first is saved by itself"
    checkpoints.save("shop", 0, Checkpoint("0001", 1, epoch))
    assert move(2)
    with state.connection() as conn:
        written = conn.execute("select h.xmin, c.xmin from log_head h, checkpoints c").fetchone()
    assert written is not None and written[0] == written[1]
    assert (heads.load("shop")[0].batch, checkpoints.load("shop", 0)) == (2, Checkpoint("0002", 2, epoch))
    # Another program has moved the checkpoint: our move of the head holds, and the checkpoint is left to its own rule.
    PostgresCheckpoints(state).save("shop", 0, Checkpoint("0009", 9, epoch))
    assert not move(3)
    assert (heads.load("shop")[0].batch, checkpoints.load("shop", 0).batch) == (3, 9)
    take(source_lease("shop"))
    with pytest.raises(StaleError):
        move(4)
    assert (heads.load("shop")[0].batch, checkpoints.load("shop", 0).batch) == (3, 9)
