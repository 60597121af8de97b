"""S13: the process that takes and delivers runs out of memory, then its successor out of descriptors."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from evermark.testing.chaos_engine import resumed_s, spark_processes
from evermark.testing.pipeline import PATIENCE_S, Instance, Scene, Writer
from evermark.testing.until import until


def _lanes(instance: Instance) -> list[psutil.Process]:
    """The processes that hold leases: they talk to State all the time."""
    return [worker for worker in spark_processes(instance)["worker"] if worker.net_connections("unix")]


def test_s13_neither_memory_nor_descriptors_that_run_out_lose_an_event(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a running instance WHEN its lane may have no more memory, and WHEN a lane may open no more descriptors for
    a while, THEN events arrive again after each, and none is lost or handled twice.
    """
    with Scene(tmp_path, pg_dsn, {"one": None}) as scene:
        instance = scene.up()
        writer = Writer(pg_dsn)
        writer.start()
        try:
            scene.wait_delivered(20)
            starved = _lanes(instance)
            assert starved
            for lane in starved:
                # Not a byte more than it has: the first thing that needs a page fails.
                resource.prlimit(lane.pid, resource.RLIMIT_AS, (lane.memory_info().vms, resource.RLIM_INFINITY))
            resumed_s(scene, within_s=PATIENCE_S)

            until(lambda: _lanes(instance), "there is a lane", timeout_s=PATIENCE_S)
            lanes, before = _lanes(instance), scene.delivered("one")
            limits = {lane.pid: resource.prlimit(lane.pid, resource.RLIMIT_NOFILE) for lane in lanes}
            for lane in lanes:
                resource.prlimit(lane.pid, resource.RLIMIT_NOFILE, (lane.num_fds(), limits[lane.pid][1]))
            until(lambda: len(scene.committed()) > before + 200, "the shop goes on selling", timeout_s=PATIENCE_S)
            for lane in lanes:
                if lane.is_running():
                    resource.prlimit(lane.pid, resource.RLIMIT_NOFILE, limits[lane.pid])
            resumed_s(scene, within_s=PATIENCE_S)
        finally:
            writer.finish()
        assert scene.check_complete().has_each_once
        assert instance.terminate() == 0
