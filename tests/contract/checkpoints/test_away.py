"""An owner whose store of checkpoints is taken away, for real, and given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from evermark.breaker import Breaker, BreakerLimits, BreakerState
from evermark.checkpoints.kinds import CheckpointConfig, open_checkpoints
from evermark.cluster.base import Holder
from evermark.cluster.fence import source_lease
from evermark.errors import UnreachableError
from evermark.ingest.batch_taker import BatchTaker, take_each
from evermark.ingest.checkpoint_saver import SavePolicy
from evermark.state.connection import State
from evermark.testing.etcds import Etcd, etcd_server
from evermark.testing.mongods import mongo_replica_set
from evermark.testing.tcp_proxy import TcpProxy
from evermark.testing.until import until
from tests.unit.ingest.ingest_world import World, position

NOWHERE = State(lambda: "host=127.0.0.1 port=1", "evermark_shop")
LIMITS = BreakerLimits(threshold=2, timeout_s=0.2)


class Store(Protocol):
    settings: dict[str, Any]

    def kill(self) -> None: ...

    def start(self) -> None: ...


class EtcdStore:
    def __init__(self, server: Etcd) -> None:
        self.settings = {"backend": "etcd", "etcd": {"endpoints": server.url}}
        self.kill, self.start = server.kill, server.start


class MongoStore:
    def __init__(self, servers: Any) -> None:
        url = f"{servers.url}&serverSelectionTimeoutMS=300"
        self.settings = {"backend": "mongo", "mongo": {"url": url}}
        self.kill, self._servers = servers.members[0].kill, servers

    def start(self) -> None:
        self._servers.members[0].start()
        self._servers.primary()


class HangingStore:
    """A store whose network loses everything: nobody hears that it is away."""

    def __init__(self, proxy: TcpProxy, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.kill, self.start = proxy.hang, proxy.restore


@pytest.fixture(params=["etcd", "mongo", "etcd hangs", "mongo hangs"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store of this test's own: it is killed, or nothing passes between it and the owner."""
    backend, _, hangs = request.param.partition(" ")
    if hangs:
        monkeypatch.setattr("evermark.etcd.client.TIMEOUT_S", 0.5)
    if backend == "etcd":
        request.getfixturevalue("etcd_program")  # skips where there is none
        with etcd_server(tmp_path / "etcd") as server:
            if not hangs:
                yield EtcdStore(server)
                return
            with TcpProxy("127.0.0.1", server.port) as proxy:
                url = f"http://127.0.0.1:{proxy.port}"
                yield HangingStore(proxy, {"backend": "etcd", "etcd": {"endpoints": url}})
    else:
        request.getfixturevalue("mongod")
        with mongo_replica_set(tmp_path / "mongo") as servers:
            if not hangs:
                yield MongoStore(servers)
                return
            with TcpProxy("127.0.0.1", servers.members[0].port) as proxy:
                waits = "serverSelectionTimeoutMS=300&connectTimeoutMS=500&socketTimeoutMS=500"
                url = f"mongodb://127.0.0.1:{proxy.port}/?directConnection=true&{waits}"
                yield HangingStore(proxy, {"backend": "mongo", "mongo": {"url": url}})


class Owner:
    """Takes batches of one event of a world, one after another."""

    def __init__(self, world: World, settings: dict[str, Any], number: int) -> None:
        self.world, self.checkpoints = world, open_checkpoints(CheckpointConfig.model_validate(settings), NOWHERE)
        lease = world.leases.acquire(source_lease("shop"), Holder("i", "h", "b", number, str(number)), 600)
        assert lease is not None
        self.breaker = Breaker(LIMITS)
        self.taker = BatchTaker(
            "shop", lease.epoch, world.source, world.log, world, world.heads, self.checkpoints,
            policy=SavePolicy(), breaker=self.breaker,
        )  # fmt: skip

    def begin(self) -> None:
        resumed = self.taker.begin(0)
        self.at, self.batch, self.repeats_to = int(resumed.position or "0"), resumed.batch, resumed.repeats_to

    def take(self, count: int) -> None:
        for _ in range(count):
            start, end = position(self.at), position(self.at + 1)
            taken = self.world._read(start, end, self.batch + 1, self.taker.epoch, self.repeats_to)
            assert take_each(self.taker, [taken], lambda _: None) == {}
            self.at, self.batch = self.at + 1, self.batch + bool(taken.files)

    @property
    def state(self) -> BreakerState:
        return self.breaker.state(self.taker.clock())

    def saved(self) -> int:
        try:
            return int(self.checkpoints.load("shop", 0).position)
        except UnreachableError:
            return -1


def test_s13_a_store_that_is_lost_and_comes_back_costs_nothing(store: Store) -> None:
    """GIVEN an owner WHEN its store is killed, or hangs, THEN batches go into the log, the source is not confirmed, the
    breaker opens; another owner begins meanwhile where the log ends; when the store is back its checkpoint is saved by
    itself, the source is confirmed, and each event is in the log once."""
    world = World(count=60)
    first = Owner(world, store.settings, 1)
    first.begin()
    first.take(5)
    assert (first.saved(), world.source.forgotten) == (5, 5)

    store.kill()
    first.take(5)
    assert (len(world.log.commits), world.source.forgotten) == (10, 5)
    assert first.state is not BreakerState.CLOSED

    second = Owner(world, store.settings, 2)
    second.begin()
    assert second.at == 10
    second.take(5)
    assert world.source.forgotten == 5

    store.start()

    def is_saved() -> bool:
        second.taker.save_due([0])
        return second.saved() == 15

    until(is_saved, "the checkpoint is saved", timeout_s=60)
    assert world.source.forgotten == 15
    assert second.state is BreakerState.CLOSED
    second.take(45)
    assert second.saved() == world.source.forgotten == 60
    assert world.logged() == Counter({f"event-{n}": 1 for n in range(60)})

    def read_by_first() -> int | None:
        try:
            return first.checkpoints.load("shop", 0).epoch
        except UnreachableError:
            return None  # its client has not asked the store since that was killed: it has to find it first

    assert until(read_by_first, "the first owner reaches the store", timeout_s=60) == second.taker.epoch
