"""The status of a subscription as a stream has it, in SQL: over a real state and a real log."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from evermark.app.build import Deployment
from evermark.app.failovers import Failovers
from evermark.cluster.base import Lease
from evermark.cluster.fence import DELIVER_LEASE
from evermark.delivery.decide.shards import shard_of
from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, SourcePartition
from evermark.delivery.replay.plan import AskedBy, Request
from evermark.delivery.store.stream_status import PostgresStatus, StreamStatus
from evermark.errors import StaleError
from evermark.log.read import LogReader
from evermark.testing.contracts.scene import spec
from tests.contract.cli.test_commands import deployment, file, invoke, log_batches, told

__all__ = ["deployment", "file"]

PLACE = SourcePartition("shop", 0)
NOW = datetime(2026, 11, 15, tzinfo=UTC)


def owned(deployment: Deployment) -> int:
    """The file's subscription is live, and this process delivers; the log has four batches."""
    log_batches(deployment.log_folder("shop"), 1, 1, 4)
    lease = deployment.leases.acquire(DELIVER_LEASE, deployment.holder, 60.0)
    assert lease is not None
    deployment.delivery.open_partition(PLACE, 0, lease.epoch)
    deployment.delivery.register(deployment.specs, MadeBy.FILE, {}, lease.epoch)
    return lease.epoch


def settled(deployment: Deployment, epoch: int, batch: int, fate: Fate) -> None:
    group = deployment.delivery.group()
    work = GroupWork(PLACE, Cursor(batch - 1), Cursor(batch), group.members)
    deployment.delivery.settle_group(work, [Outcome("billing", fate, reason="no answer")], NOW, epoch)


def test_p5_a_failover_names_the_first_event_that_was_not_delivered(file: Path, deployment: Deployment) -> None:
    """GIVEN a receiver that took batch 1 and fails with batch 2 WHEN looked at, now and when more has come THEN its
    status is failover from the event of batch 2, in SQL and on the command line, and stays there; WHEN it is back
    THEN healthy (P5).
    """
    epoch, status = owned(deployment), PostgresStatus(deployment.state)
    failovers = Failovers(deployment, lambda source: LogReader(deployment.log_folder(source)))
    settled(deployment, epoch, 1, Fate.DONE)
    failovers.look({PLACE: 1})
    assert status.all() == [StreamStatus("billing", "healthy")]
    settled(deployment, epoch, 2, Fate.ENDPOINT_FAILED)
    assert status.one("billing").status == "failover", "at once, though its event is not looked up yet"
    for head in (2, 4):
        failovers.look({PLACE: head})
        found = status.one("billing")
        assert (found.status, found.checkpoint_event_id) == ("failover", "e2")
        Failovers(deployment, lambda source: LogReader(deployment.log_folder(source))).look({PLACE: head})
        assert status.one("billing") == found, "the next owner finds the same"
    with deployment.state.connection() as conn:
        row = conn.execute("select status, checkpoint_event_id from stream_status").fetchone()
    assert row == ("failover", "e2")
    assert told("status", "-c", file)["streams"][0]["checkpoint_event_id"] == "e2"
    assert "failover from e2" in invoke("status", "-c", file).stdout
    deployment.delivery.settle_subscription(
        "billing", PLACE, Cursor(1), Cursor(2), Outcome("billing", Fate.DONE, accepted=1), NOW, epoch
    )
    failovers.look({PLACE: 4})
    assert status.all() == [StreamStatus("billing", "healthy")] and status.failovers() == {}


def test_p5_each_of_many_that_fail_has_its_event_in_every_shard_and_keeps_it_when_disabled(
    deployment: Deployment,
) -> None:
    """GIVEN sixty that fail, in two shards WHEN looked at twice THEN each names its first event; WHEN two of them are
    disabled THEN they still name it, since when they failed (P5).
    """
    epoch, status, store = owned(deployment), PostgresStatus(deployment.state), deployment.delivery
    store.spread(2, epoch)
    names = [f"s{n:02}" for n in range(60)]
    for name in names:
        store.add(spec(name), {PLACE: Cursor(0)}, epoch)
        failing = Outcome(name, Fate.ENDPOINT_FAILED, reason="no answer")
        store.settle_subscription(name, PLACE, Cursor(0), Cursor(1), failing, NOW, epoch)
    failovers = Failovers(deployment, lambda source: LogReader(deployment.log_folder(source)))
    for _ in range(2):
        failovers.look({PLACE: 1})
    found = {one.subscription: one for one in status.all()}
    assert {name for name in names if found[name].checkpoint_event_id != "e1"} == set()
    shards = [next(name for name in names if shard_of(name, 2) == shard) for shard in (0, 1)]
    for name in shards:
        store.disable(name, "410", epoch)
    failovers.look({PLACE: 1})
    assert [status.one(name) for name in shards] == [found[name] for name in shards]


def test_p5_a_replay_is_shown_with_its_window_and_only_while_it_lasts(deployment: Deployment) -> None:
    """GIVEN replays for others and for it WHEN looked at THEN it is replayed while its own one is open (P5)."""
    epoch, status = owned(deployment), PostgresStatus(deployment.state)
    deployment.replays.request(Request(AskedBy.API, "shop", NOW, NOW, subscription="another"), epoch)
    assert status.one("billing").status == "healthy"
    made = deployment.replays.request(Request(AskedBy.API, "shop", NOW, NOW), epoch)
    assert status.one("billing") == StreamStatus("billing", "replay", replay_from=NOW, replay_to=NOW)
    deployment.replays.cancel(made, epoch)
    assert status.one("billing").status == "healthy"


def test_an_owner_that_lost_its_lease_writes_no_status(deployment: Deployment) -> None:
    """GIVEN an epoch that is over WHEN a failover is saved THEN it is refused."""
    with pytest.raises(StaleError):
        PostgresStatus(deployment.state).save([], ["billing"], owned(deployment) - 1)


def test_what_was_looked_up_without_the_lease_is_looked_up_again_with_it(deployment: Deployment) -> None:
    """GIVEN a failing receiver and a lease that is away WHEN looked at THEN nothing is kept; WHEN the lease is back
    and the cursor where it was THEN its first event is found.
    """
    epoch, status = owned(deployment), PostgresStatus(deployment.state)
    failovers = Failovers(deployment, lambda source: LogReader(deployment.log_folder(source)))
    settled(deployment, epoch, 1, Fate.ENDPOINT_FAILED)
    deployment.leases.release(Lease(DELIVER_LEASE, epoch))
    failovers.look({PLACE: 1})
    assert status.failovers() == {}
    assert deployment.leases.acquire(DELIVER_LEASE, deployment.holder, 60.0) is not None
    failovers.look({PLACE: 1})
    assert status.one("billing").checkpoint_event_id == "e1"
