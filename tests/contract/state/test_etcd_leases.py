"""The lease contract on a real etcd; and what is special there: State's fence, TLS, an etcd that is away."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.kinds import CheckpointConfig, open_checkpoints
from evermark.cluster.base import Holder, Lease, LeaseStore
from evermark.cluster.holding import Candidate, LeaseLimits
from evermark.cluster.kinds import LeaseConfig, open_leases
from evermark.cluster.postgres import PostgresLeases
from evermark.errors import ConfigError, FormatError, StaleError, UnreachableError
from evermark.etcd.settings import EtcdConfig
from evermark.log.head import Head, PostgresHeads
from evermark.observe.logging import get_logger
from evermark.runtime import Threads
from evermark.state.connection import Connection, State
from evermark.state.identity import identity_of
from evermark.testing.contracts import LeaseContract
from evermark.testing.contracts.leases import TTL_S, holder
from evermark.testing.etcds import Certificates, Etcd, etcd_server
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state
from evermark.testing.tcp_proxy import TcpProxy
from evermark.testing.until import until

pytest.importorskip("etcd3gw", reason="no etcd3gw: leases in etcd are not tested. pip install '.[etcd]'")

from evermark.cluster import etcd as etcd_leases
from evermark.etcd.claim import Claim
from evermark.etcd.client import EtcdClient

_numbers = itertools.count()


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


@pytest.fixture
def prefix() -> str:
    return f"/test-{next(_numbers)}/"


@pytest.fixture
def gone() -> set[Holder]:
    return set()


@pytest.fixture
def leases(etcd: Etcd, state: State, gone: set[Holder], prefix: str) -> LeaseStore:
    return opened(etcd.url, state, gone, prefix)


def opened(url: str, state: State, gone: set[Holder], prefix: str, **more: str) -> LeaseStore:
    settings = EtcdConfig.model_validate({"endpoints": url, **more})
    return etcd_leases.EtcdLeases(
        EtcdClient(settings, "cluster.leases.etcd", 1.0), prefix, state, is_gone=gone.__contains__
    )


@pytest.fixture
def let_expire(leases: LeaseStore, etcd: Etcd, prefix: str) -> Callable[[str], None]:
    """As when its time is over: etcd ends the lease of its own, and removes what was put under it."""

    def run_out(name: str) -> None:
        found = json.loads(etcd.control("get", f"{prefix}held/{name}", "-w", "json")).get("kvs", ())
        for each in found:
            etcd.control("lease", "revoke", f"{each['lease']:x}")

    return run_out


class TestEtcdLeases(LeaseContract):
    @pytest.fixture
    def gone(self, gone: set[Holder]) -> set[Holder]:
        return gone

    @pytest.fixture
    def leases(self, leases: LeaseStore) -> LeaseStore:
        return leases

    @pytest.fixture
    def let_expire(self, let_expire: Callable[[str], None]) -> Callable[[str], None]:
        return let_expire


def test_epochs_go_on_above_those_of_state(leases: LeaseStore, state: State, etcd: Etcd, prefix: str) -> None:
    """GIVEN leases that were in State so far, or an etcd that lost everything WHEN they are taken in etcd THEN no epoch
    is given out again, and what the former owner writes is refused."""
    before, heads = PostgresLeases(state, is_gone=lambda _: True), PostgresHeads(state)
    for instance in "abc":
        old = before.acquire("source:shop", holder(instance), TTL_S)
    assert old is not None
    heads.move("shop", 0, Head(1, old.epoch, "1", 1))
    new = leases.acquire("source:shop", holder("d"), TTL_S)
    assert new is not None and new.epoch > old.epoch
    with pytest.raises(StaleError):
        heads.move("shop", 0, Head(2, old.epoch, "2", 2))
    heads.move("shop", 0, Head(2, new.epoch, "2", 2))
    etcd.control("del", "--prefix", prefix)
    (newest,) = leases.acquire_all(["source:shop"], holder("e"), TTL_S)
    assert newest.epoch > new.epoch
    with pytest.raises(StaleError):
        heads.move("shop", 0, Head(3, new.epoch, "3", 3))


def test_who_sleeps_between_etcd_and_state_has_nothing(
    leases: LeaseStore, let_expire: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a process that won the lease in etcd, and sleeps until another has it WHEN it wakes and tells State THEN it
    has no lease, and the other keeps its own."""
    note, others = etcd_leases.note_holder, list[Lease | None]()

    def sleepy(conn: Connection, lease: Lease, whose: Holder, ttl_s: float) -> bool:
        if whose == holder("a"):
            let_expire(lease.name)
            others.append(leases.acquire(lease.name, holder("b"), TTL_S))
        return note(conn, lease, whose, ttl_s)

    monkeypatch.setattr(etcd_leases, "note_holder", sleepy)
    assert leases.acquire("deliver", holder("a"), TTL_S) is None
    assert others[0] is not None
    leases.require(others[0])
    leases.renew([others[0]], TTL_S)


def test_who_has_the_same_epoch_by_chance_does_not_end_the_lease_of_another(
    leases: LeaseStore, etcd: Etcd, state: State, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an etcd that loses everything while a process has the lease there, but not yet in State WHEN another gets
    it, under the same epoch THEN the first has nothing, and leaves the other its own."""
    note, theirs = etcd_leases.note_holder, opened(etcd.url, state, set(), prefix)
    others = list[Lease | None]()

    def sleepy(conn: Connection, lease: Lease, whose: Holder, ttl_s: float) -> bool:
        if whose == holder("a"):
            etcd.control("del", "--prefix", prefix)
            others.append(theirs.acquire(lease.name, holder("b"), TTL_S))
            assert others == [lease], "they are told apart by their holders alone"
        return note(conn, lease, whose, ttl_s)

    monkeypatch.setattr(etcd_leases, "note_holder", sleepy)
    assert leases.acquire("deliver", holder("a"), TTL_S) is None
    assert leases.free(["deliver"], holder("c")) == []
    assert others[0] is not None
    theirs.renew([others[0]], TTL_S)
    theirs.release(others[0])
    assert leases.free(["deliver"], holder("c")) == ["deliver"]


def test_a_state_that_is_away_costs_no_lease_in_etcd(leases: LeaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a State that does not take the new epoch THEN the lease is not held, and another need not wait for it."""

    def away(*_: object) -> bool:
        raise UnreachableError("State does not answer")

    with monkeypatch.context() as without:
        without.setattr(etcd_leases, "note_holder", away)
        with pytest.raises(UnreachableError):
            leases.acquire("deliver", holder("a"), TTL_S)
    assert leases.acquire("deliver", holder("b"), TTL_S) is not None


def test_an_owner_that_state_is_away_for_renews_nothing(
    leases: LeaseStore, etcd: Etcd, pg_server: PostgresServer, state: State, prefix: str
) -> None:
    """GIVEN an owner that reaches etcd, and State no longer WHEN it renews THEN its lease goes on running out."""
    mine = State(pg_server.socket_dsn, state.schema)
    lease = opened(etcd.url, mine, set(), prefix).acquire("deliver", holder("a"), 2.0)
    assert lease is not None
    mine.close()
    cut_off = opened(etcd.url, mine, set(), prefix)

    def taken() -> Lease | None:
        with pytest.raises(UnreachableError):
            cut_off.renew([lease], 2.0)
        return leases.acquire("deliver", holder("b"), TTL_S)

    assert until(taken, "another has it", timeout_s=60).epoch > lease.epoch


def test_more_leases_than_one_transaction_takes(leases: LeaseStore) -> None:
    """GIVEN a source of many partitions THEN they are taken under one epoch, renewed, and let go of."""
    names = [f"source:shop:{number}" for number in range(130)]
    mine = leases.acquire_all(names, holder("a"), TTL_S)
    assert [lease.name for lease in mine] == names and len({lease.epoch for lease in mine}) == 1
    leases.renew(mine, TTL_S)
    assert leases.free(names, holder("b")) == []
    leases.release(*mine)
    assert leases.free(names, holder("b")) == names


@pytest.mark.parametrize("how", ["hang", "cut"])
def test_an_owner_that_etcd_is_away_for_steps_down_before_its_lease_is_over(
    etcd: Etcd, state: State, prefix: str, how: str
) -> None:
    """GIVEN the owner of a lease WHEN etcd hangs for it, or is cut off THEN it is told that the lease is lost while no
    other can have it by etcd's clock; another has it afterwards, and when etcd is back, so can the first."""
    with TcpProxy("127.0.0.1", etcd.port) as proxy:
        limits = LeaseLimits(ttl_s=4.0, standby_poll_s=0.05)
        settings = LeaseConfig.model_validate(
            {"backend": "etcd", "ttl": "4s", "etcd": {"endpoints": f"http://127.0.0.1:{proxy.port}", "prefix": prefix}}
        )
        mine, others = open_leases(settings, state), opened(etcd.url, state, set(), prefix)
        candidate = Candidate(mine, holder("a"), Threads(), get_logger(), limits)
        held = candidate.acquire("deliver", Threads().wake(), lambda: None)
        assert held is not None
        getattr(proxy, how)()
        until(held.lost.is_set, "the owner is told", timeout_s=30)
        assert others.free(["deliver"], holder("b")) == [], "its lease was over before it was told"
        taken = until(lambda: others.acquire("deliver", holder("b"), 60.0), "another has it", timeout_s=60)
        assert taken.epoch > held.lease.epoch
        proxy.restore()
        others.release(taken)
        again = candidate.acquire("deliver", Threads().wake(), lambda: None)
        assert again is not None and again.lease.epoch > taken.epoch
        for each in (held, again):
            each.close()


def test_etcd_is_spoken_to_by_tls_and_shown_a_certificate(
    etcd_program: None, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an etcd with certificates of an authority of its own WHEN the file names them THEN leases and checkpoints
    are kept there; who does not know the authority, or shows no certificate, is told that there is no connection."""
    tls = Certificates.made(tmp_path / "tls")
    files = {name: str(path) for name, path in vars(tls).items()}
    with etcd_server(tmp_path / "etcd", tls) as server:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tls.key))  # as many images name their own; it is not asked
        mine = opened(server.url, state, set(), "/tls/", **files)
        lease = mine.acquire("deliver", holder("a"), TTL_S)
        assert lease is not None
        mine.renew([lease], TTL_S)
        given = {"backend": "etcd", "etcd": {"endpoints": server.url, **files}}
        checkpoints = open_checkpoints(CheckpointConfig.model_validate(given), state)
        checkpoints.save("shop", 0, Checkpoint("0001", 1, 1))
        assert checkpoints.load("shop", 0).batch == 1
        for known in ({}, {"ca": files["ca"]}):
            with pytest.raises(UnreachableError, match="https://127"):
                opened(server.url, state, set(), "/tls/", **known).free(["deliver"], holder("b"))


@pytest.fixture
def other_state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


def test_leases_of_another_state_are_refused_and_not_stood_by_for(
    etcd: Etcd, state: State, other_state: State, prefix: str
) -> None:
    """GIVEN two deployments with the same prefix in one etcd, and a State each WHEN the second asks for leases THEN it
    is told so, and what to do, instead of waiting for the first, which goes on; an etcd whose keys are from before
    prefixes were claimed is the first's who asks."""
    given = {"backend": "etcd", "etcd": {"endpoints": etcd.url, "prefix": prefix}}
    settings = LeaseConfig.model_validate(given)
    mine = open_leases(settings, state)
    before = mine.acquire("deliver", holder("a"), TTL_S)
    assert before is not None
    etcd.control("del", f"{prefix}state")  # as a program left it that knew of no claims
    lease = open_leases(settings, state).acquire("deliver", holder("a"), TTL_S)
    assert lease == before
    others = open_leases(settings, other_state)
    for ask in (lambda: others.acquire("deliver", holder("b"), TTL_S), others.rows):
        with pytest.raises(ConfigError, match=f"cluster.leases.etcd.prefix: .*{prefix}.* another State") as refused:
            ask()
        assert f"etcdctl del {prefix}state" in refused.value.hint
    mine.renew([lease], TTL_S)
    etcd.control("del", "--prefix", prefix)
    assert others.acquire("deliver", holder("b"), TTL_S) is not None
    with pytest.raises(ConfigError):
        open_leases(settings, state).free(["deliver"], holder("a"))


def test_checkpoints_of_another_state_are_neither_read_nor_written(
    etcd: Etcd, state: State, other_state: State, prefix: str
) -> None:
    """GIVEN checkpoints of one State in etcd, from before prefixes were claimed WHEN a deployment with another State
    has the same prefix THEN the first finds its own, and the other is refused whatever it asks."""
    given = {"backend": "etcd", "etcd": {"endpoints": etcd.url, "prefix": prefix}}
    settings = CheckpointConfig.model_validate(given)
    first, others = (open_checkpoints(settings, each) for each in (state, other_state))
    first.save("state", 0, Checkpoint("0001", 1, 1))
    etcd.control("del", f"{prefix}state")
    again = open_checkpoints(settings, state)
    assert again.list("state") == {0: Checkpoint("0001", 1, 1)}
    for ask in (
        lambda: others.list("state"),
        lambda: others.load("state", 0),
        lambda: others.save("state", 0, Checkpoint("0009", 9, 9)),
        lambda: others.delete("state", 0),
    ):
        with pytest.raises(ConfigError, match="another State"):
            ask()
    assert first.load("state", 0) == Checkpoint("0001", 1, 1)


def test_of_many_who_claim_a_prefix_at_once_one_state_has_it(
    etcd: Etcd, state: State, other_state: State, prefix: str
) -> None:
    """GIVEN a prefix that is nobody's WHEN processes of two States ask at once THEN those of one State have it."""
    client = EtcdClient(EtcdConfig.model_validate({"endpoints": etcd.url}), "cluster.leases.etcd", 5.0)

    def is_had_by(each: State) -> bool:
        try:
            Claim(client, prefix, lambda: identity_of(each)).require()
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        had = list(pool.map(is_had_by, [state, other_state] * 8))
    assert {tuple(had[::2]), tuple(had[1::2])} == {(True,) * 8, (False,) * 8}


def test_a_value_that_is_no_lease_is_said(leases: LeaseStore, etcd: Etcd, prefix: str) -> None:
    """GIVEN a key that something else wrote THEN the error names the lease and the prefix."""
    etcd.control("put", f"{prefix}epochs/deliver", "not json")
    with pytest.raises(FormatError, match="deliver"):
        leases.acquire("deliver", holder("a"), TTL_S)
