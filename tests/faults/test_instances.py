"""Three instances share twelve partitions: one is killed, one sleeps past its lease, one is drained."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evermark.cluster.holding import LIMITS
from evermark.testing.etcds import etcd_server
from evermark.testing.instances import InstancesStage, killed_whole
from evermark.testing.pipeline import Instance
from evermark.testing.tcp_proxy import TcpProxy
from evermark.testing.until import until


def test_instances_share_the_partitions_and_take_over_from_each_other(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN three instances under load WHEN one is killed, one sleeps past its lease and wakes, and one is drained THEN
    every event is once in the log and at the receiver, no stale owner has committed, and its refusals were counted.
    """
    with InstancesStage(tmp_path, pg_dsn) as stage:
        first, second, third = stage.up(), stage.up(), stage.up()
        print(f"shared after {stage.wait_shared(first, second, third):.1f} s")
        stage.wait_delivered(200)

        killed_whole(first)
        print(f"taken over from the dead after {stage.wait_shared(second, third):.1f} s")

        second.pause()
        slept_s = stage.wait_shared(third)
        print(f"taken over from the sleeping after {slept_s:.1f} s; the lease is good for {LIMITS.ttl_s:g} s")
        second.wake()
        until(lambda: stage.refusals(second), "what it wrote with an old epoch was refused, and counted")
        stage.wait_shared(second, third)

        began = time.time()
        drained = stage.run("instance", "drain", stage.name_of(third))
        assert stage.name_of(third) in drained.stderr
        stage.wait_shared(second, timeout_s=60)
        print(f"the longest pause of a partition while one was drained: {stage.pauses_s(began)[-1]:.1f} s")
        stage.finish()
        stage.check_complete()
        stage.check_epochs()
        assert third.terminate() == 0 and second.terminate() == 0


@pytest.mark.usefixtures("etcd_program")
def test_instances_with_leases_in_etcd_step_down_without_it_and_come_back(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN two instances with leases in etcd WHEN one is cut off from it THEN the other takes over, and the one says
    so; WHEN etcd itself is gone THEN both say so; and when it is back, they share again, every event once."""
    with (
        etcd_server(tmp_path / "etcd") as server,
        TcpProxy("127.0.0.1", server.port) as proxy,
        InstancesStage(tmp_path, pg_dsn, ttl_s=5.0, etcd_url=server.url) as stage,
    ):
        first = stage.up()
        stage.env["ETCD_URL"] = f"http://127.0.0.1:{proxy.port}"
        second = stage.up()
        stage.wait_shared(first, second)
        stage.wait_delivered(100)

        proxy.cut()
        print(f"taken over from the one without etcd after {stage.wait_shared(first):.1f} s")
        health = until(lambda: without_etcd(second), "the one without etcd says so")
        assert '"healthy"' not in health.partition(",")[0], health
        proxy.restore()
        print(f"shared again after {stage.wait_shared(first, second):.1f} s")

        server.kill()
        for each in (first, second):
            until(lambda each=each: without_etcd(each), "an instance says that etcd is away")
        server.start()
        print(f"shared again after {stage.wait_shared(first, second):.1f} s")
        stage.finish()
        stage.check_complete()
        stage.check_epochs()
        assert first.terminate() == 0 and second.terminate() == 0


def without_etcd(instance: Instance) -> str | None:
    """What /health answers, if it names etcd as the trouble."""
    text = instance.ask("/health")[1]
    return text if "in etcd at" in text else None
