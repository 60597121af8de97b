"""Spark has died: what is shown, who notices, and when the process gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from evermark.app.run import Pipeline, StuckError
from evermark.cluster.base import Lease
from evermark.cluster.holding import HeldLease, LeaseLimits
from evermark.cluster.memory import MemoryLeases
from evermark.config import Config
from evermark.observe.health import ENGINE_LOST_MAX_S, HealthBoard, PartitionHealth
from evermark.observe.logging import get_logger
from evermark.runtime import Threads
from evermark.testing.until import until


class Thread:
    """A part of the pipeline: a thread that goes on, ends by itself, or cannot be ended."""

    def __init__(self, *, ended: bool = False, ends: bool = True, stuck: str | None = None) -> None:
        self.ended = ended
        self._ends = ends
        self._stuck = stuck
        self.on_look: Callable[[], None] = lambda: None

    def stop(self) -> None:
        self.ended = self.ended or self._ends

    def join(self, timeout_s: float) -> bool:
        return self.ended

    def any_ended(self) -> bool:
        return self.ended

    def stalled(self) -> dict[str, str]:
        self.on_look()
        return {}

    def stuck(self) -> str | None:
        return self._stuck


class Spark:
    def __init__(self, trouble: str | None = None, *, on_cluster: bool = False) -> None:
        self._trouble, self.on_cluster = trouble, on_cluster

    def trouble(self) -> str | None:
        return self._trouble

    def idle(self) -> bool:
        return False


def pipeline() -> Pipeline:
    return Pipeline(Config.model_validate({"version": 1, "name": "shop"}))


def watched(found: Pipeline, spark: Spark, lanes: Thread) -> str | None:
    return found._watch(cast("Any", spark), cast("Any", lanes))


def test_a_dead_jvm_is_noticed_and_counted() -> None:
    """GIVEN threads that are well WHEN the JVM is gone THEN the watch says so, and the restart is counted."""
    found = pipeline()
    assert watched(found, Spark("Spark's JVM ended (signal 9)"), Thread()) == "Spark's JVM ended (signal 9)"
    assert found.metrics.registry.get_sample_value("evermark_engine_restarts_total") == 1


def test_a_thread_of_the_lanes_that_ended_is_noticed() -> None:
    """GIVEN Spark that is well WHEN the thread that keeps the lanes has ended THEN the watch says so."""
    assert watched(pipeline(), Spark(), Thread(ended=True)) == "the thread of a lane ended"


def test_a_spark_that_begins_nothing_is_noticed_on_one_machine() -> None:
    """GIVEN Spark that answers, and begins no lane THEN the watch says so; a cluster may be full for long."""
    assert watched(pipeline(), Spark(), Thread(stuck="no lane")) == "no lane"
    found, lanes = pipeline(), Thread(stuck="no lane")
    lanes.on_look = found.stop
    assert watched(found, Spark(on_cluster=True), lanes) is None


def test_being_told_to_stop_is_no_trouble() -> None:
    """GIVEN a pipeline that is well WHEN it is told to stop THEN the watch ends without a reason."""
    found = pipeline()
    found.stop()
    assert watched(found, Spark(), Thread()) is None


def test_a_thread_that_cannot_be_ended_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a thread that holds its lease WHEN Spark is gone THEN the process is not started again beside it."""
    monkeypatch.setattr("evermark.app.run._LET_GO_S", 0.01)
    with pytest.raises(StuckError, match="the lanes did not end"):
        pipeline()._let_go(cast("Any", Thread(ends=False)), "Spark's JVM ended")


def test_livez_waits_for_a_restart_and_then_says_that_the_process_is_lost() -> None:
    """GIVEN Spark lost WHEN it does not come back for long THEN the process is given up; once it runs, it is not."""
    now = [0.0]
    board = HealthBoard(lambda: now[0])
    board.put("shop", 0, PartitionHealth.HEALTHY)
    board.engine_lost("Spark's JVM ended")
    assert board.partitions()["shop/0"].state is PartitionHealth.STALE
    now[0] = ENGINE_LOST_MAX_S - 1
    board.engine_lost("Java does not start")  # another try that failed is no new beginning
    assert board.given_up() is None
    now[0] = ENGINE_LOST_MAX_S
    assert "Java does not start" in (board.given_up() or "")
    board.engine_runs()
    assert board.given_up() is None


def test_a_lease_whose_renewal_fails_in_an_unforeseen_way_is_lost_in_time() -> None:
    """GIVEN a held lease WHEN renewing raises what nobody thought of THEN it counts as lost: the work must stop."""

    class Failing(MemoryLeases):
        def renew(self, lease: Lease, ttl_s: float) -> None:
            raise RuntimeError("unforeseen")

    held = HeldLease(Failing(), Lease("shop", 1), Threads(), get_logger(), LeaseLimits(ttl_s=0.004))
    until(held.lost.is_set, "the owner is told")
