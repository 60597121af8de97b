"""Three instances share twelve partitions: one is killed, one sleeps past its lease, one is drained."""

from __future__ import annotations

import time
from pathlib import Path

from evermark.cluster.holding import LIMITS
from evermark.testing.instances import InstancesStage, killed_whole
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
        drained = stage.run("instance", "drain", "--instance", stage.name_of(third))
        assert stage.name_of(third) in drained.stderr
        stage.wait_shared(second, timeout_s=60)
        print(f"the longest pause of a partition while one was drained: {stage.pauses_s(began)[-1]:.1f} s")
        stage.finish()
        stage.check_complete()
        stage.check_epochs()
        assert third.terminate() == 0 and second.terminate() == 0
