"""Lanes on a real standalone Spark cluster: what one executor lacks, and executors, workers and drivers that die."""

from __future__ import annotations

from pathlib import Path

from evermark.testing.chaos_cluster import (
    KEY_NAME,
    all_killed,
    cluster_scene,
    driver_killed,
    executor_killed,
    lane_executor,
    worker_killed,
)
from evermark.testing.commands import REAL
from evermark.testing.objects import ACCESS_KEY, SECRET_KEY, S3Server
from evermark.testing.pipeline import Writer
from evermark.testing.servers import PostgresServer
from evermark.testing.until import until


def test_on_a_cluster_any_machine_may_die(tmp_path: Path, pg_server: PostgresServer, s3: S3Server) -> None:
    """GIVEN two workers without the driver's files, one of them without the key, WHEN the executor of a lane is killed,
    then a worker, then all workers, then the driver THEN each time events flow again; health was never `healthy` while
    nobody ran; each event is in the log and at each receiver once; and no secret is in an environment or a file."""
    tmp_path.chmod(0o711)
    with cluster_scene(tmp_path, pg_server, s3) as scene:
        unfit, fit = scene.cluster.workers
        unfit.start(without=[KEY_NAME])
        writer = Writer(scene.dsn, pause_s=0.2)
        writer.start()
        try:
            instance = scene.up(commands=REAL)
            until(lambda: instance.said(f"{KEY_NAME} is not set"), "the executor says what it lacks", timeout_s=120)
            assert '"status": "healthy"' not in instance.ask("/health")[1]
            fit.start()
            scene.wait_delivered(20)
            executor = lane_executor(scene)
            assert executor in fit.processes
            environment = "".join(executor.environ().values())
            assert not any(secret in environment for secret in (ACCESS_KEY, SECRET_KEY, pg_server.embedded.password()))
            unfit.kill()
            unfit.start()
            executor_killed(scene)
            worker_killed(scene)
            all_killed(scene, instance)
            instance, _ = driver_killed(scene, instance)
        finally:
            writer.finish()
        ledger = scene.check_complete()
        assert ledger.lost == ledger.doubled == 0 < ledger.produced
        assert instance.terminate() == 0, instance.text()[-2000:]
        texts = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if _is_text(path)]
        assert not any(secret in text for secret in (ACCESS_KEY, SECRET_KEY) for text in texts)


def _is_text(path: Path) -> bool:
    return path.is_file() and (path.suffix == ".log" or path.name in ("stderr", "stdout"))
