"""A deployment on a real Spark cluster whose executors, workers and driver die under load.

The fault test goes through each fault once; `make chaos ARGS=--cluster` goes through them again and again.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from evermark.storage import access, place_of
from evermark.testing.chaos_engine import resumed_s
from evermark.testing.commands import REAL
from evermark.testing.listener import Listener
from evermark.testing.lost_slot import write_many
from evermark.testing.objects import ACCESS_KEY, SECRET_KEY, S3Server, s3_server
from evermark.testing.pipeline import PATIENCE_S, Instance, Ledger, Writer
from evermark.testing.replays import ReplayScene
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server
from evermark.testing.spark_clusters import (
    SparkCluster,
    executor_of_a_lane,
    executors_at,
    kill_with_children,
    spark_cluster,
)
from evermark.testing.until import until

KEY_NAME = "SCENE_KEY"
_PART_EVENTS = 6_000
_SLOW_S = 0.05
_SECTIONS = """\
log: {{path: '{log}'}}
state: {{dsn: '${{STATE_DSN}}'}}
secrets: {{key: '${{{key}}}'}}
storage: {{endpoint: '{endpoint}', region: us-east-1, access_key: '${{S3_ACCESS}}', secret_key: '${{S3_SECRET}}'}}
spark: {{master: '{master}'{more}}}
"""


class ClusterScene(ReplayScene):
    """A shop whose lanes run on a cluster: the log in a bucket, State in a Postgres, the key in a variable."""

    commands = REAL  # executors have no part in what tests fork instead

    def __init__(
        self, folder: Path, dsn: str, state: str, s3: S3Server, cluster: SparkCluster, key: str, more: str = ""
    ) -> None:
        super().__init__(folder, dsn, {"one": None, "picky": None}, picky="where: 'data.total > 0 and key is not null'")
        self.cluster = cluster
        bucket = f"s3://{s3.bucket()}"
        self.log_root = place_of(f"{bucket}/logs")
        access.remember(bucket, s3.access())
        self.sections = _SECTIONS.format(
            log=self.log_root, key=KEY_NAME, endpoint=s3.endpoint, master=cluster.url, more=more
        )
        self.env.pop(access.VARIABLE, None)
        self.env |= {KEY_NAME: key, "STATE_DSN": state, "S3_ACCESS": ACCESS_KEY, "S3_SECRET": SECRET_KEY}


@contextmanager
def cluster_scene(root: Path, server: PostgresServer, s3: S3Server, more: str = "") -> Iterator[ClusterScene]:
    """Workers are there, and not started. Where we may, the folders of driver and databases are not theirs."""
    folder, key = root / "scene", secrets.token_urlsafe(32)
    for each in (folder, root / "cluster"):
        each.mkdir(mode=0o711)
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    env |= {"HOME": str(root / "cluster"), KEY_NAME: key}
    hidden = [folder, server.embedded.folder]
    with (
        fresh_database(server) as shop,
        fresh_database(server) as state,
        spark_cluster(root / "cluster", env=env, hidden=hidden) as cluster,
        ClusterScene(folder, _inline(server, shop), _inline(server, state), s3, cluster, key, more) as scene,
    ):
        yield scene


def _inline(server: PostgresServer, dsn: str) -> str:
    """With the password in it: its file is not on other machines."""
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if name != "passfile"}
    return make_conninfo(**{**given, "password": server.embedded.password()})


def lane_executor(scene: ClusterScene) -> psutil.Process:
    found = until(lambda: executor_of_a_lane(scene.cluster), "a lane is at work", timeout_s=PATIENCE_S)
    assert found is not None
    return found


def executor_killed(scene: ClusterScene) -> float:
    """Kill -9 the executor in which a lane is at work; how long until an event arrives again."""
    kill_with_children(lane_executor(scene))
    return resumed_s(scene, within_s=PATIENCE_S)


def worker_killed(scene: ClusterScene) -> float:
    """Kill -9 the worker with the lane's executor, as its machine would die; the other one goes on."""
    executor = lane_executor(scene)
    worker = next(worker for worker in scene.cluster.workers if executor in worker.processes)
    worker.kill()
    took_s = resumed_s(scene, within_s=PATIENCE_S)
    worker.start()
    return took_s


def driver_killed(scene: ClusterScene, instance: Instance) -> tuple[Instance, float]:
    """Kill -9 the driver and start it again."""
    instance.kill()
    instance = scene.up()
    return instance, resumed_s(scene, within_s=PATIENCE_S)


def all_killed(scene: ClusterScene, instance: Instance, place: str = "shop/0") -> float:
    """Kill every worker: health says so. Then they come back, and nobody restarts anything else."""
    for worker in scene.cluster.workers:
        worker.kill()
    until(lambda: instance.health(place).get("status") == "stale", "health sees it", timeout_s=PATIENCE_S)
    for worker in scene.cluster.workers:
        worker.start()
    took_s = resumed_s(scene, within_s=PATIENCE_S)
    until(lambda: instance.health(place).get("status") == "healthy", "health sees that, too", timeout_s=PATIENCE_S)
    return took_s


@contextmanager
def _slow(scene: ClusterScene) -> Iterator[Listener]:
    """The receiver takes its time, so that an executor can be killed while it posts."""
    receiver = scene.receivers["one"]
    receiver.slow_s = _SLOW_S
    try:
        yield receiver
    finally:
        receiver.slow_s = 0.0


def _poster_killed(scene: ClusterScene, receiver: Listener) -> None:
    """Kill -9 one of the executors that post, as soon as two do: each has a part of the events."""

    def posting() -> list[psutil.Process]:
        found = executors_at(scene.cluster, urlsplit(receiver.url).port or 0)
        return found if len(found) > 1 else []

    kill_with_children(until(posting, "two executors post", timeout_s=PATIENCE_S)[-1])


def part_killed(scene: ClusterScene) -> float:
    """Many events at once, which executors share by key; one of these is killed. How long until all have arrived."""
    with _slow(scene) as receiver:
        began = time.monotonic()
        write_many(scene.dsn, _PART_EVENTS)
        written = set(scene.committed())
        _poster_killed(scene, receiver)
        until(lambda: not scene.missing(written), "all that was written has arrived", timeout_s=PATIENCE_S)
    return time.monotonic() - began


def _now(dsn: str) -> str:
    with psycopg.connect(dsn) as conn:
        (now,) = conn.execute("select clock_timestamp()::text").fetchone() or ("",)
    return str(now)


def replay_part_killed(scene: ClusterScene) -> float:
    """Many events are replayed by several executors, one of which is killed. Each handler sees each event once more."""
    since = _now(scene.dsn)
    write_many(scene.dsn, _PART_EVENTS)
    to = _now(scene.dsn)
    wanted = Counter(scene.events_between(since, to))
    until(lambda: not scene.missing(set(wanted)), "all that is replayed has arrived once", timeout_s=PATIENCE_S)
    with _slow(scene) as receiver:
        began = time.monotonic()
        scene.ask_by_sql(since, to)
        _poster_killed(scene, receiver)
        scene.wait_cleared()
    replay = scene.replays()[0]
    for name in scene.handled:
        assert scene.replayed[name][replay["id"]] == wanted, f"a replay did not reach {name} as it should: {replay}"
    return time.monotonic() - began


def cluster_killed(root: Path, rounds: int) -> tuple[Ledger, dict[str, float]]:
    """Every fault in each round while a writer goes on; what was counted, and the longest silence of each kind."""
    with (
        postgres_server(root / "postgres") as server,
        s3_server(root / "s3") as s3,
        cluster_scene(root, server, s3) as scene,
    ):
        for worker in scene.cluster.workers:
            worker.start()
        instance = scene.up()
        writer = Writer(scene.dsn, pause_s=0.02)
        writer.start()
        longest: dict[str, float] = {}
        try:
            scene.wait_delivered(20)
            for number in range(rounds):
                took = {"executor": executor_killed(scene), "worker": worker_killed(scene)}
                took["all_workers"] = all_killed(scene, instance)
                took |= {"part": part_killed(scene), "replay_part": replay_part_killed(scene)}
                instance, took["driver"] = driver_killed(scene, instance)
                longest = {f"{name}_s": max(longest.get(f"{name}_s", 0), took_s) for name, took_s in took.items()}
                sys.stderr.write(f"round {number + 1}: {took}\n")
        finally:
            writer.finish()
        ledger = scene.check_complete()
        assert instance.terminate() == 0, instance.text()[-2000:]
        return ledger, longest
