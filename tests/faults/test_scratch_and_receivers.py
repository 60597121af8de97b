"""Things that vanish while the pipeline runs: Spark's scratch folder, a receiver, the source's connections."""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg

from evermark.app.scratch import scratch_root
from evermark.testing.listener import Failing
from evermark.testing.pipeline import Scene, Writer
from evermark.testing.until import until


def test_scratch_folder_receiver_and_connections_may_vanish(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a running pipeline WHEN scratch, a receiver and the connections go away THEN everything still arrives."""
    flaky = Failing.parse("503:0%")
    with Scene(tmp_path, pg_dsn, {"one": None, "flaky": flaky}) as scene:
        writer = Writer(pg_dsn)
        writer.start()
        try:
            instance = scene.up()
            scene.wait_delivered(50)

            # WHEN the scratch folder is deleted under Spark's feet
            (scratch,) = scratch_root().glob(f"evermark-scene-{instance.process.pid}")
            shutil.rmtree(scratch)
            scene.wait_delivered(scene.delivered("one") + 50)

            # WHEN one receiver fails for a while, the other must not notice
            scene.receivers["flaky"].failing = Failing.parse("503:100%")
            until(lambda: instance.said("subscription fell behind"), "flaky fell behind", timeout_s=30)
            scene.wait_delivered(scene.delivered("one") + 100)
            scene.receivers["flaky"].failing = None

            # WHEN the database cuts every connection
            with psycopg.connect(pg_dsn, autocommit=True) as conn:
                conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and pid <> pg_backend_pid()"
                    " and application_name like 'evermark%'"
                )
            scene.wait_delivered(scene.delivered("one") + 50)
        finally:
            writer.finish()
        scene.check_complete()
        assert instance.terminate() == 0
