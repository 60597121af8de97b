"""Lanes: renewed while events flow, stopped past their lease and continued, left by their driver."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from evermark.delivery.decide.shards import shard_of
from evermark.testing.chaos_engine import resumed_s, spark_processes
from evermark.testing.pipeline import PATIENCE_S, Scene, Writer
from evermark.testing.until import until
from tests.faults.conftest import OwnSourceStage


class ShortLanes(Scene):
    sections = "spark: {lane: 2s}\n"


def test_lanes_are_renewed_while_events_flow(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN lanes of two seconds WHEN events flow over several of them THEN each is taken and delivered once."""
    with ShortLanes(tmp_path, pg_dsn, {"one": None}) as scene:
        instance = scene.up()
        writer = Writer(pg_dsn, pause_s=0.05)
        writer.start()
        try:
            scene.wait_delivered(20)
            until(lambda: instance.log.read_text().count('"event": "source owned"') >= 5, "five lanes had the source")
        finally:
            writer.finish()
        scene.check_complete()
        assert not instance.said("a lane ended")
        assert instance.terminate() == 0


class ShortLanesAndEnds(OwnSourceStage):
    sections = """\
spark: {lane: 2s}
reliability: {shutdown: {flush_timeout: 1s, checkpoint_timeout: 1s}}
"""


def test_a_batch_that_takes_longer_than_a_lane_lives_is_read_once(tmp_path: Path) -> None:
    """GIVEN lanes of two seconds WHEN a batch takes longer to read than a lane lives THEN the lane goes on until it is
    taken; the batch is read once, and each event is delivered."""
    with ShortLanesAndEnds(tmp_path, "Lasting") as stage:
        instance = stage.up()
        until(lambda: instance.said("the lane goes on until the batches under way are taken"), "a lane waits")
        (tmp_path / "go_on").touch()
        ledger = stage.check_complete()
        assert ledger.delivered == stage.count
        assert (tmp_path / "reads").read_text() == f"{0:06d} {stage.count:06d}\n"
        until(lambda: instance.text().count('"event": "delivering"') >= 2, "the next lane follows")
        assert not instance.said("not ended in time")
        assert instance.terminate() == 0


def test_a_repair_that_takes_longer_than_a_lane_lives_is_begun_once(tmp_path: Path) -> None:
    """GIVEN lanes of two seconds WHEN closing a gap takes longer than a lane lives THEN the lane goes on until it is
    closed; the repair is begun once, and each event is delivered."""
    with ShortLanesAndEnds(tmp_path, "Mending") as stage:
        instance = stage.up()
        until(lambda: instance.said("the lane goes on until gaps are closed"), "a lane waits")
        (tmp_path / "go_on").touch()
        assert stage.check_complete().delivered == stage.count
        assert (tmp_path / "repairs").read_text() == "begun\n"
        until(lambda: instance.text().count('"event": "delivering"') >= 2, "the next lane follows")
        assert instance.terminate() == 0


class TwoLanes(Scene):
    sections = "spark: {lane: 4s, lanes: 2}\n"


def test_two_lanes_share_the_subscriptions_and_one_takes_all_back(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN two lanes, renewed on the way, WHEN one dies, and WHEN there is to be one lane only, THEN every receiver
    gets each event once.
    """
    names = [f"s{number}" for number in range(6)]
    assert {shard_of(name, 2) for name in names} == {0, 1}
    with TwoLanes(tmp_path, pg_dsn, dict.fromkeys(names)) as scene:
        instance = scene.up()
        writer = Writer(pg_dsn, pause_s=0.1)  # 45 orders a second for six receivers
        writer.start()
        try:
            scene.wait_delivered(20)
            until(lambda: instance.log.read_text().count('"event": "delivering"') >= 4, "each shard had two lanes")
            os.kill(max(p.pid for p in spark_processes(instance)["worker"] if _is_lane(p)), signal.SIGKILL)
            for name in names:
                resumed_s(scene, name, within_s=PATIENCE_S)
            assert instance.terminate() == 0
            scene.config.write_text(scene.config.read_text().replace(", lanes: 2", ""))
            instance = scene.up()
            for name in names:
                resumed_s(scene, name, within_s=PATIENCE_S)
        finally:
            writer.finish()
        scene.check_complete()
        assert instance.terminate() == 0


def test_a_lane_that_was_stopped_past_its_lease_lands_nothing(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a lane stopped (SIGSTOP) WHEN another has taken over and it goes on THEN nothing of it lands."""
    with Scene(tmp_path, pg_dsn, {"one": None}) as scene:
        instance = scene.up()
        writer = Writer(pg_dsn, pause_s=0.05)
        writer.start()
        try:
            scene.wait_delivered(20)
            stopped = [process for process in spark_processes(instance)["worker"] if _is_lane(process)]
            assert stopped
            for process in stopped:
                process.suspend()
            resumed_s(scene, within_s=PATIENCE_S)
            for process in stopped:
                if process.is_running():
                    process.resume()
            resumed_s(scene, within_s=PATIENCE_S)
        finally:
            writer.finish()
        scene.check_complete()
        assert instance.said("has said nothing for")
        assert instance.terminate() == 0


def test_a_lane_ends_with_its_driver(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a driver that was killed WHEN five seconds have passed THEN no lane of it is left."""
    with Scene(tmp_path, pg_dsn, {"one": None}) as scene:
        instance = scene.up()
        until(lambda: instance.said("reading"), "the lane reads")
        left = psutil.Process(instance.process.pid).children(recursive=True)
        lanes = [process for process in left if _is_lane(process)]
        assert lanes
        os.kill(instance.process.pid, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: not any(map(_lives, lanes)), "the lanes are gone", timeout_s=5)
        assert time.monotonic() - began < 5


def _is_lane(process: psutil.Process) -> bool:
    """Whether a worker listens to its driver: a connection of the channel is open."""
    return any(connection.status == "ESTABLISHED" for connection in process.net_connections("tcp"))


def _lives(process: psutil.Process) -> bool:
    """A process that has ended may wait for its parent to notice."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
